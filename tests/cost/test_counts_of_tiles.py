"""Counts of a tile: the same for all schedules with its words, and made once for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from transconv.compute import Compute
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.conv.relation import computes
from transconv.cost import issue, work
from transconv.ir import View
from transconv.schedule import Schedule, Scheduled
from transconv.selection.proposals import heuristics
from transconv.target import TARGETS, Target

SM90 = TARGETS["sm_90"]
CASES = {
    "packed": ("mb8ic64ih28oc128oh28kh3ph1 dt=bf16", Prop.FWD, "res"),
    "dense": ("mb8ic64ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc", Prop.FWD, "bias+relu"),
    "image gradient": ("mb8ic64ih28oc96oh28kh3ph1 dt=bf16 tag=nhwc", Prop.BWD_D, ""),
    "weight gradient": ("mb8ic64ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc", Prop.BWD_W, ""),
    "f32": ("mb8ic64ih14oc64oh14kh3ph1 dt=f32 tag=nhwc", Prop.FWD, ""),
    "bytes": ("mb8ic64ih14oc64oh14kh3ph1 dt=s8:s8:s32 tag=nhwc", Prop.FWD, ""),
    "groups": ("g8mb8ic128ih14oc128oh14kh3ph1 dt=bf16 tag=nhwc", Prop.FWD, ""),
    "depthwise": ("g96mb8ic96ih28oc96oh28kh7ph3 dt=bf16 tag=nhwc", Prop.FWD, ""),
    "depthwise weight gradient": ("g96mb8ic96ih28oc96oh28kh7ph3 dt=bf16 tag=nhwc", Prop.BWD_W, ""),
}


def made_of(name: str) -> Compute:
    problem, prop, epilogue = CASES[name]
    return computes(ConvProblem.parse(problem), prop, Epilogue.parse(epilogue))[0]


def of_tile(schedule: Schedule) -> Schedule:
    """The schedule with the words that a tile's counts depend on, the others at their defaults."""
    return Schedule(schedule.blocks, **{word: schedule.word(word) for word in work.OF_TILE})


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_other_words_make_no_difference(name: str) -> None:
    compute = made_of(name)
    found = {*heuristics.proposals(compute, SM90)}
    others = sorted((s for s in found if not (s.regs or s.late) and of_tile(s) != s), key=str)
    assert len(others) > 20
    for s in others[:: max(1, len(others) // 20)]:
        main = Scheduled(compute, s, SM90).main
        assert work.count_tile(s, main, SM90) == work.count_tile(of_tile(s), main, SM90), s


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_a_ranking_counts_each_tile_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the counts of tiles nor those of threads that keep sums in registers are made twice."""
    made = Counter[tuple[object, ...]]()
    tile, operand = work.count_tile, issue._operand

    def counted_tile(schedule: Schedule, compute: Compute, target: Target) -> work.Work:
        made[compute, of_tile(schedule)] += 1
        return tile(schedule, compute, target)

    def counted_operand(view: View, schedule: Schedule, *others: Any) -> Any:
        made[view, schedule, others[0]] += 1
        return operand(view, schedule, *others)

    monkeypatch.setattr(work, "count_tile", counted_tile)
    monkeypatch.setattr(issue, "_operand", counted_operand)
    _, ranked = heuristics._ranked.__wrapped__(replace(made_of(name), name="ranked_once"), SM90, ())
    assert set(made.values()) == {1}
    assert len(made) < 0.8 * len(ranked) * (2 if "depthwise" in name else 1)  # two operands
