"""Counts of a tile: the same for all schedules with its words, and made once for them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from transconv.compute import Compute, Read, Write, parse, touched
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.conv.relation import computes
from transconv.cost import AtSizes, count, estimate, issue, work
from transconv.ir import View, value_at
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


PRODUCT = """compute product
    tensor X bf16 [m=4096, k=512]
    tensor S f32 [m=4096, k=512]
    tensor T f32 [k=512]
    tensor W bf16 [n=1024, k=512]
    axes   m=4096 n=1024 | k=512
    read   x = X[m, k]
    read   s = S[m, k]
    read   t = T[k]
    read   w = W[n, k]
    store  Y[m, n] = {value}"""
TILES = tuple(
    Schedule.parse(f"m:{m} n:{n} k:32 | mma | a=gather b=gather | stages=3 warps=4")
    for m, n in ((128, 128), (128, 64), (64, 128))
)


def product(value: str) -> Compute:
    """Of the tensors that are mentioned."""
    lines = PRODUCT.format(value=value).splitlines()
    used = re.findall(r"\b[xstw]\b", value)
    return parse("\n".join(line for line in lines if "read " not in line or line.split()[1] in used))


@pytest.mark.parametrize(
    "value", ["sum(x*w; k)", "sum(bf16(x*s)*w; k)", "sum(bf16(x*s + t)*bf16(w*t); k)", "sum(x*w; k)*2 + 1"]
)
def test_what_a_product_reads_is_traffic(value: str) -> None:
    """Every tensor that operands are made of, not only that of the most axes."""
    made = product(value)
    for s in TILES:
        found = count(s, made, SM90)
        moved = [step.view for step in made.steps if isinstance(step, Read | Write)]
        assert found.traffic == sum(touched(view, made) for view in moved)
        assert found.traffic == value_at(AtSizes(s, made, SM90).counts[2], {})
        assert len(found.fetched) == len(moved) - 1


def test_each_operation_of_an_operand_takes_time() -> None:
    """Of each element of each step, so that it is the dearer the more tiles make the element anew; what is
    done with the sums is not an operation of an operand."""
    values = ["x", "bf16(x*t)", "bf16(tanh(x*t))", "bf16(tanh(tanh(x*t)))"]
    for schedule in TILES:
        slots = [count(schedule, product(f"sum({x}*w; k)"), SM90).prepared for x in values]
        assert slots[0] == 0 and slots == sorted({*slots}), slots
        times = [estimate(schedule, product(f"sum({x}*w; k)"), SM90) for x in values]
        assert times == sorted({*times}), times
        behind = count(schedule, product(f"tanh(sum({values[1]}*w; k))*2"), SM90).prepared
        assert behind == slots[1] == count(schedule, product(f"sum(w*{values[1]}; k)"), SM90).prepared
    wide, narrow, _ = (
        estimate(s, product(f"sum({values[3]}*w; k)"), SM90) - estimate(s, product("sum(x*w; k)"), SM90)
        for s in TILES
    )
    assert narrow > 1.5 * wide, (narrow, wide)
