"""Which schedules are tried: bounded, legal, the best estimates first, then around the best found."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.tuning.workers import time_of
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.selection import transfer
from transconv.selection.proposals import heuristics
from transconv.target.records import TARGETS
from transconv.tuning import search
from transconv.tuning.search import ScheduleTrial, Search

SM90 = TARGETS["sm_90"]
PROBLEM = ConvProblem.parse("mb32ic64ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc")
STRIDED = ConvProblem.parse("mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc")


def made(
    problem: ConvProblem = PROBLEM, prop: Prop = Prop.FWD, trials: int = 16, **more: object
) -> Search:
    return Search(computes(problem, prop), SM90, trials, **more)  # type: ignore[arg-type]


def run(s: Search, us: object = time_of) -> list[ScheduleTrial]:
    """Answer everything that is asked; all trials in order."""
    told = []
    while batch := s.next():
        for trial in batch:
            assert s.next() == [], "nothing more is asked while something is under way"
            s.tell(trial.schedule, us(str(trial.schedule)))  # type: ignore[operator]
            told.append(trial)
    return told


@pytest.mark.parametrize("prop", list(Prop))
def test_trials_are_bounded_different_and_legal_in_every_phase(prop: Prop) -> None:
    s = made(STRIDED, prop)
    told = run(s)
    assert len(told) == 16 == len({t.schedule for t in told})
    for t in told:
        for a in s.phases:
            assert why_not(transfer.fitted(t.schedule, a, SM90), a, SM90) is None


def test_the_first_trials_are_the_ranking() -> None:
    told = run(made())
    best = heuristics.candidates(computes(PROBLEM, Prop.FWD)[0], SM90)
    assert [t.schedule for t in told[:10]] == best[:10]
    assert [t.rank for t in told[:10]] == list(range(10))
    assert {t.origin for t in told[:10]} == {"ranking"}
    assert {t.origin for t in told[10:]} == {"neighbour"}
    guesses = [t.estimate for t in told[:10]]
    assert guesses == sorted(guesses)


def test_the_last_trials_are_one_change_away_from_the_best_so_far() -> None:
    s = made()
    compute = s.phases[0]
    told: list[tuple[Schedule, float]] = []
    while batch := s.next():
        best = min(told, key=lambda x: x[1])[0] if told else None
        for t in batch:
            if t.origin == "neighbour":
                assert best is not None
                words = [
                    f.name
                    for f in fields(Schedule)
                    if f.name != "blocks" and getattr(t.schedule, f.name) != getattr(best, f.name)
                ]
                kinds = {
                    kind
                    for kind in "BMNK"
                    if {b for b in t.schedule.blocks if compute.kind(b.axes[0]) == kind}
                    != {b for b in best.blocks if compute.kind(b.axes[0]) == kind}
                }
                assert len(words) + len(kinds) == 1, f"{best} -> {t.schedule}"
        for t in batch:
            told.append((t.schedule, time_of(str(t.schedule))))
            s.tell(*told[-1])
    assert s.best == min(told, key=lambda x: x[1])[0]


def test_exploring_finds_what_the_estimate_does_not_rank_high() -> None:
    """Small groups are best in this made-up world, and no proposal has any."""
    s = made(trials=24)
    assert all(c.group_m >= 8 for c in s.ranking)
    run(s, lambda schedule: 10.0 + Schedule.parse(schedule).group_m)
    assert s.best is not None and s.best.group_m <= 4 and s.best not in s.ranks


def test_seeds_come_first_unless_they_are_illegal() -> None:
    seed = heuristics.candidates(computes(PROBLEM, Prop.FWD)[0], SM90)[40]
    bad = Schedule.parse("oc:3 | mma")
    told = run(made(trials=5, seeds=[bad, seed]))
    assert (told[0].schedule, told[0].origin, told[0].rank) == (seed, "database", 40)
    assert all(t.schedule != bad for t in told)
    assert len({t.schedule for t in run(made(trials=16, seeds=[seed]))}) == 16


def test_what_is_wrong_is_never_the_best() -> None:
    s = made(trials=4)
    told = run(s, lambda schedule: None)
    assert s.best is None and len(told) == 4


def test_what_was_told_before_counts() -> None:
    s = made(trials=6)
    for c in s.ranking[:5]:
        s.tell(c, 5.0)
    assert len(run(s)) == 1
    assert s.next() == []


def test_spread_trials_cover_the_ranking() -> None:
    told = run(made(explore="spread"))
    ranks = [t.rank for t in told]
    assert ranks[:10] == list(range(10)) and ranks == sorted(ranks) and ranks[-1] > 40
    assert {t.origin for t in told[10:]} == {"spread"}


def test_few_candidates_end_early() -> None:
    tiny = ConvProblem.parse("g16mb1ic16ih4oc16oh4kh1ph0 dt=f32")
    s = made(tiny, trials=1000, explore="spread")
    told = run(s)
    assert len(told) <= len(s.ranking) and s.next() == []


def test_a_new_word_takes_part_without_being_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of any word are read off the proposals: here of ``order``."""
    s = made()
    other = Schedule(
        **{f.name: getattr(s.ranking[3], f.name) for f in fields(Schedule) if f.name != "order"},
        order="kw.kh.ic",
    )
    s.ranking.append(other)
    near = search.neighbours(s.ranking[0], s)
    assert any(c.order == "kw.kh.ic" for c in near) == (
        why_not(
            Schedule(
                **{f.name: getattr(s.ranking[0], f.name) for f in fields(Schedule) if f.name != "order"},
                order="kw.kh.ic",
            ),
            s.phases[0],
            SM90,
        )
        is None
    )
