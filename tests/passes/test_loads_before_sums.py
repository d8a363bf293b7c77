"""Loads of an epilogue that need not wait for it: once for all tiles, or before the sum of each, as far as
registers allow; the answer stays after every pass."""

from __future__ import annotations

import pytest

from tests.passes.test_operands_behind_sums import layer
from tests.stages import SM90
from transconv import ir
from transconv.compute import parse
from transconv.passes import pipeline
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.verify.computation import after_every_pass

GLUON = "mma | a=box b=box via=gluon behind=box c=box"
BEHIND = (
    "    read   r = R[n, o, h, w]\n    read   q = Q[]\n    read   b = B[o]\n    let    i = 1.0 / q\n"
    "    let    y = (s + f32(r) + f32(b))*i\n"
)
FOLLOWS = BEHIND.replace("read   b", "let    z = s*q\n    read   b").replace("*i", "*i + z")


def text(behind: str = BEHIND, o: int = 64) -> str:
    return layer(3, 16, o, 9, 9, behind, kernel=1).replace("    axes", "    tensor Q f32 []\n    axes")


def consumer(behind: str, schedule: str, o: int = 64) -> list[str]:
    """The lines of the first consumer."""
    made = pipeline.lower(parse(text(behind, o)), Schedule.parse(schedule), SM90, "conv", "ieee")[-1][1]
    role = next(r for roles in ir.find(made, ir.Roles) for r in roles.roles)
    return [line.strip() for line in str(role).splitlines()]


def before(lines: list[str], one: str, other: str) -> bool:
    first, second = (next(i for i, x in enumerate(lines) if x.startswith(s)) for s in (one, other))
    return first < second


@pytest.mark.every(2)
@pytest.mark.parametrize("words", ["programs=3 consumers=2", "programs=4 swap=1", ""])
@pytest.mark.parametrize("behind", [BEHIND, FOLLOWS])
def test_every_pass_gives_the_answer(words: str, behind: str) -> None:
    compute = parse(text(behind))
    plan = build_compute(compute, SM90, Schedule.parse(f"h:8 w:8 o:64 c:16 | {GLUON} {words}"))
    found = after_every_pass(compute, plan)
    assert not [(stage, judged.problem) for stage, judged in found if judged.problem]
    assert found[-1][0] == "roles"


def test_scalars_are_loaded_once() -> None:
    """And what follows from them alone, such as a reciprocal."""
    lines = consumer(BEHIND, f"h:8 w:8 o:16 c:16 | {GLUON} programs=3")
    assert before(lines, "let q", "for pid") and before(lines, "let i", "for pid")
    assert before(consumer(FOLLOWS, f"h:8 w:8 o:16 c:16 | {GLUON} programs=3"), "dot_wait", "let z")


def test_vectors_are_loaded_before_the_sum_as_far_as_registers_go() -> None:
    """Of 256 columns a thread holds 64 of each vector, beside 128 sums; of rows a few."""
    lines = consumer(BEHIND, f"h:8 w:8 o:16 c:16 | {GLUON} programs=3")
    assert before(lines, "for pid", "let b") and before(lines, "let b", "wait(landed")
    wide = consumer(BEHIND, f"h:8 w:16 o:256 c:16 | {GLUON} programs=3 warps=8", 256)
    assert before(wide, "dot_wait(0)", "let b") and before(wide, "let q", "for pid")
    rows = consumer(BEHIND, f"h:8 w:16 o:256 c:16 | {GLUON} programs=3 warps=8 swap=1", 256)
    assert before(rows, "let b", "wait(landed")
