"""Sums in the matrix unit are limited in length, so that its truncation errors stay below the rounding
of operands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from transconv.compute import Alone, Compute, parse
from transconv.conv import ConvProblem, Prop, computes
from transconv.runtime import Plan, plan
from transconv.schedule import Schedule, chain, why_not
from transconv.selection import tuning_db
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.tile_shapes import LONGEST, fewest_parts, too_long
from transconv.target import TARGETS
from transconv.verify.computation import after_every_pass

SM90 = TARGETS["sm_90"]
LONG = computes(ConvProblem.parse("mb8ic192id128oc64od128kd3pd1 tag=ndhwc"), Prop.BWD_W)[0]


def lost(additions: int, cut: bool) -> float:
    """The share of random sums that additions to an f32 take from them, 8 products at a time."""
    draw = np.random.default_rng(0)
    kept, whole = np.zeros(400, np.float32), np.zeros(400)
    for _ in range(additions):
        term = (draw.standard_normal((8, 400)) * draw.standard_normal((8, 400))).sum(0)
        whole += term
        exact = kept + term
        kept = exact.astype(np.float32)
        if cut:
            over = np.abs(kept.astype(np.float64)) > np.abs(exact)
            kept = np.where(over, np.nextafter(kept, np.float32(0)), kept)
    return float(1 - (kept @ whole) / (whole @ whole))


def test_what_is_cut_off_grows_with_the_chain() -> None:
    """Between n * 2^-26 and n * 2^-25; to the nearest a thousandth of it is lost."""
    n = 4000
    assert n * 2.0**-26 < lost(n, cut=True) < n * 2.0**-25
    assert abs(lost(n, cut=False)) < n * 2.0**-32


@pytest.mark.parametrize(
    ("words", "math", "found"),
    [
        ("oh:4 ow:8 | mma", "tf32", 2**24 // 8),
        ("oh:4 ow:8 | mma | split_k=64", "tf32", 2**18 // 8),
        ("oh:4 ow:8 | mma | split_k=64", "tf32x3", 2**18 // 8),
        ("oh:4 ow:8 | mma", "ieee", 0),
        ("oh:4 ow:8 | fma", "tf32", 0),
    ],
)
def test_chains_are_counted(words: str, math: str, found: int) -> None:
    schedule = Schedule.parse(f"kd.kh.kw.ic:256 oc:64 {words}")
    assert chain(schedule, replace(LONG, math=math)) == found


def test_parts() -> None:
    schedule = Schedule.parse("kd.kh.kw.ic:256 oc:64 oh:4 ow:8 | mma")
    parts = fewest_parts(schedule, LONG, SM90)
    assert parts == 2**21 // LONGEST and too_long(replace(schedule, split_k=parts - 1), LONG, SM90)
    assert not too_long(replace(schedule, split_k=parts), LONG, SM90)
    assert fewest_parts(schedule, LONG, TARGETS["gfx942"]) == 1


def best(compute: Compute) -> Schedule:
    return next(heuristics._legal(compute, SM90))


def test_long_sums_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < chain(best(LONG), LONG) <= LONGEST
    heuristics._ranked.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(heuristics, "too_long", lambda *given: False)
        assert chain(best(LONG), LONG) > LONGEST
    heuristics._ranked.cache_clear()


def test_no_tuned_row_is_too_long() -> None:
    """The limit changes no measured choice."""
    chains = []
    tuning_db.forget()
    for row in (r for rows in tuning_db._of_file("", False).values() for r in rows):
        compute = computes(ConvProblem.parse(row.problem), Prop(row.direction))[0]
        chains.append(chain(Schedule.parse(row.schedule), compute))
    assert LONGEST / 4 < max(chains) <= LONGEST


@pytest.mark.parametrize("fill", ["inf", "-inf", "1.5"])
def test_beyond_the_end_nothing_is_multiplied_by_infinity(fill: str) -> None:
    """There the matrix unit multiplies what stands outside of one factor by the 0 of the other one."""
    compute = parse(f"""compute product
    tensor A f16 [m=32, k=40]
    tensor B f16 [k=40, n=32]
    axes   m=32 n=32 | k=40
    read   a = A[m, k - 1] else {fill}
    read   b = B[k, n]
    store  C[m, n] = sum(a * b; k)""")
    told = why_not(Schedule.parse("m:16 n:16 k:16 | mma"), compute, SM90)
    assert told is None if fill == "1.5" else told is not None and "0 times infinity" in told
    given = plan(Alone(compute), SM90, Schedule.parse("m:16 n:16 k:16 | fma"), False, Plan)
    assert not [judged.problem for _, judged in after_every_pass(compute, given) if judged.problem]
