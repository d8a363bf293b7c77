"""A process reads the choices of an earlier one; records that cannot be right are ranked anew."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from transconv.compute import Alone, parse
from transconv.conv import ConvWorkload, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.schedule.schedule import Schedule
from transconv.selection import candidates, choice, tuning_db
from transconv.selection.candidates import DRAWER, Listed
from transconv.selection.proposals import heuristics
from transconv.selection.transfer import relatives
from transconv.selection.tuning_db import TuningRecord, unnamed
from transconv.support import triton_version
from transconv.target.records import TARGETS

pytestmark = pytest.mark.usefixtures("nothing_known")
SM90 = TARGETS["sm_90"]
DENSE = ConvProblem.parse("mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc")
TUNED = "mb:4 oh:4 ow:4 oc:128 ic:64 | mma | a=box b=box | c=box swap=1 programs=132 stages=4 warps=4"


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The computations that were ranked, not read."""
    found: list[str] = []
    real = choice.ranked

    def watched(compute, *rest, **named):  # type: ignore[no-untyped-def]
        found.append(compute.name)
        return real(compute, *rest, **named)

    monkeypatch.setattr(choice, "ranked", watched)
    return found


def listed(prop: Prop = Prop.FWD, count: int = 8, target: str = "sm_90") -> list[Listed]:
    compute = computes(DENSE, prop)[0]
    candidates.forget()  # as a new process begins
    return candidates.shortlist(count, compute, TARGETS[target], ConvWorkload(DENSE, prop))


def record() -> Path:
    (found,) = Path(os.environ["TRANSCONV_CACHE"], DRAWER.name).glob("*.json")
    return found


def test_a_plan_made_again_ranks_nothing(ranked: list[str]) -> None:
    once = compiler.plan(DENSE, Prop.FWD, SM90)
    assert ranked[0] == "fwd"
    ranked.clear()
    compiler.forget()  # as a new process begins
    again = compiler.plan(DENSE, Prop.FWD, SM90)
    assert not ranked
    assert (again.schedule, again.why) == (once.schedule, once.why)
    assert [s.source for s in again.steps] == [s.source for s in once.steps]


def test_what_is_read_is_what_was_ranked(ranked: list[str]) -> None:
    made = listed()
    assert made == listed() and ranked == ["fwd"]
    assert made == [
        Listed(c.schedule, c.why, False)
        for c in choice.ranked(
            computes(DENSE, Prop.FWD)[0], SM90, ConvWorkload(DENSE, Prop.FWD), enough=8
        )[:8]
    ]


@pytest.mark.parametrize("prop", list(Prop))
def test_not_all_are_of_one_kind(prop: Prop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of a compiler may rule out all explicit kernels, or all that copy boxes; the best
    estimates stay the first ones."""
    made = [k.schedule for k in listed(prop)]
    assert len(made) == 8 and {s.via for s in made} == {"gluon", "tl"}
    assert any("box" not in (s.a, s.b, s.c) for s in made)
    monkeypatch.setattr(heuristics, "KINDS", ())
    assert made[:6] == [k.schedule for k in candidates.estimated(8, computes(DENSE, prop)[0], SM90)][:6]


def test_everything_that_has_a_say_is_in_the_key(
    ranked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed()
    assert len(ranked) == 1
    assert listed(count=1) == listed()[:1] and len(ranked) == 1
    listed(count=9)
    listed(target="sm_80")
    listed(Prop.BWD_D)
    assert len(ranked) == 4
    tuning_db.remember(
        [
            TuningRecord(
                ConvWorkload(DENSE, Prop.FWD).text,
                "fwd",
                "",
                "sm_90x132",
                TUNED,
                12.5,
                16,
                tuning_db.LOWERING,
                triton_version(),
            )
        ]
    )
    found = listed()
    assert len(ranked) == 5 and found[0].schedule == Schedule.parse(TUNED) and found[0].tuned
    monkeypatch.setenv("TRANSCONV_TUNED", "0")
    assert not listed()[0].tuned  # this one was known already
    assert len(ranked) == 5
    monkeypatch.setattr(candidates, "files_digest", lambda: "other files")
    listed()
    assert len(ranked) == 6


def test_a_stamp_tells_what_the_users_rows_say_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    work = ConvWorkload(DENSE, Prop.FWD)
    like = ConvWorkload(ConvProblem.parse(str(DENSE).replace("mb32", "mb36")), Prop.FWD)
    rows = [tuning_db.make(w, SM90, TUNED, 12.5, 16) for w in (work, like)]

    def stamp(found: list[TuningRecord] | None) -> str:
        monkeypatch.setattr(tuning_db, "users_rows", lambda name: found)
        return candidates.stamp(work, SM90)

    assert stamp(rows) == stamp(rows[::-1])
    others = [
        None,
        [],
        rows[:1],
        rows[1:],
        rows,
        [replace(rows[0], us=13.0), rows[1]],
        [rows[0], replace(rows[1], schedule=TUNED.replace("warps=4", "warps=8"))],
    ]
    assert len({stamp(each) for each in others}) == len(others)


NORM = """compute norm
    tensor X f32 [64, 1000]
    tensor Y f32 [64, 1000]
    axes   m=64 | k=1000
    read   x = X[m, k]
    let    most = max(x; k)
    store  Y[m, k] = exp(x - most)"""


def test_equal_computations_are_ranked_once(ranked: list[str]) -> None:
    renamed = NORM.replace("norm", "other").replace("X", "A").replace("Y", "B").replace("most", "y")
    found = [candidates.shortlist(8, c, SM90, Alone(c)) for c in map(parse, (NORM, renamed))]
    assert found[0] == found[1] and ranked == ["norm"]
    for old, new in (("exp(", "sin("), ("1000", "1001"), ("f32", "bf16"), ("Y[m, k]", "Y[m, 999 - k]")):
        other = parse(NORM.replace(old, new))
        candidates.shortlist(8, other, SM90, Alone(other))
    assert len(ranked) == 5


def test_names_of_dims_have_no_say() -> None:
    text = "compute p\n tensor X f16 [n=8]\n tensor Y f16 [n=8]\n axes n=8\nread x = X[n]\nstore Y[n] = x"
    assert unnamed(parse(text)) == unnamed(parse(text.replace("[n=8]", "[8]")))
    assert unnamed(parse(text)) != unnamed(parse(text.replace("n=8", "n=9")))


def test_fractions_that_values_are_computed_with_have_no_say() -> None:
    """But 0 and 1, which may stand for nothing to compute, what is read outside of a tensor, and what
    places are computed with."""

    def told(line: str, outside: str = "", place: str = "n") -> str:
        return unnamed(
            parse(
                f"compute p\n tensor X f16 [8]\n tensor Y f16 [8]\n axes n=8\n"
                f"let p = i32({place})\n read x = X[p + 1]{outside}\n let y = {line}\n"
                "store Y[n] = y"
            )
        )

    assert told("x / 0.81") == told("x / 0.815") == told("x / 1e-05") != told("x / 1.0")
    assert told("x * 0.5") != told("x / 0.5") != told("x + 0.0")
    assert told("x * 0.5", " else 2.5") != told("x * 0.5", " else 1.5")
    assert told("x", place="n*0.5") != told("x", place="n*0.25")


def test_the_best_estimate_for_a_neighbour_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    there = computes(DENSE, Prop.FWD)[0]
    once = choice._best(there, SM90, ())
    choice._best.cache_clear()  # as a new process begins
    with monkeypatch.context() as patched:
        patched.setattr(heuristics, "default", None)
        assert choice._best(there, SM90, ()) == once > 0
    choice._best.cache_clear()
    for path in Path(os.environ["TRANSCONV_CACHE"], choice.DRAWER.name).glob("*.json"):
        choice.DRAWER.put(path.stem, {"us": "nan"})
    assert choice._best(there, SM90, ()) == once


@pytest.mark.parametrize("prop", list(Prop))
def test_a_neighbours_winner_stands_for_one_schedule(prop: Prop) -> None:
    """That of its relatives with the best estimate: the others have their places by their estimates."""
    like = ConvProblem.parse(str(DENSE).replace("mb32", "mb36"))
    work, there = ConvWorkload(DENSE, prop), ConvWorkload(like, prop)
    winner = choice.ranked(computes(like, prop)[0], SM90)[0].schedule
    compute = computes(DENSE, prop)[0]
    alone = choice.ranked(compute, SM90)
    tuning_db.remember([tuning_db.make(there, SM90, str(winner), 12.5, 16)])
    found = choice.ranked(compute, SM90, work)
    near = [c for c in found if c.row]
    related = relatives(winner, [c.schedule for c in alone], compute, SM90)
    assert len(related) > 1 and [c.schedule for c in near] == [
        min(related, key=lambda s: next(i for i, c in enumerate(alone) if c.schedule == s))
    ]
    assert near == found[:1] and {c.schedule for c in found} == {c.schedule for c in alone}


def test_a_given_schedule_is_not_kept(ranked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_SCHEDULE", TUNED)
    assert [k.schedule for k in listed()] == [Schedule.parse(TUNED)]
    monkeypatch.delenv("TRANSCONV_SCHEDULE")
    assert len(listed()) == 8 and len(ranked) == 2


@pytest.mark.parametrize(
    "schedules",
    [
        [],
        "none",
        [{"schedule": "mb:4"}],
        [{"schedule": 7, "why": "", "tuned": False}],
        [7],
        [{"schedule": "no schedule", "why": "", "tuned": False}],
        [{"schedule": "mb.oh.ow:128 oc:4096 ic:64 | mma | stages=3", "why": "", "tuned": True}],
        [{"schedule": f"{TUNED} stages=800".replace("stages=4 ", ""), "why": "", "tuned": True}],
        [{"schedule": "od:4 oc:64 ic:64 | mma", "why": "", "tuned": True}],
    ],
)
def test_what_makes_no_sense_is_ranked_anew(ranked: list[str], schedules: object) -> None:
    right = listed()
    key = record().stem
    DRAWER.put(key, {"schedules": schedules})
    assert listed() == right
    assert len(ranked) == 2
    content = json.loads(record().read_text())["content"]
    assert [c["schedule"] for c in content["schedules"]] == [str(k.schedule) for k in right]
