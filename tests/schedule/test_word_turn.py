"""The schedule word ``turn``: sweeps over a row in alternating directions. Results stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

import transconv
from transconv.compute import Compute, parse
from transconv.cost import estimate
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.selection.proposals import heuristics
from transconv.target import TARGETS, Target
from transconv.verify import any_size
from transconv.verify.computation import ComputationCase

SM90 = Target.parse("sm_90")
H200 = replace(TARGETS["sm_90"], bandwidth_gbs=4800.0, l2_bytes=60 << 20)
SOFTMAX = """compute softmax
    axes   n=6 | k=130
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total"""
SIZED = SOFTMAX.replace("    axes", "    sizes N=6 in 1..64, K=130 in 1..512\n    axes", 1).replace(
    "n=6 | k=130", "n=N | k=K"
)
EXTREME = """compute extreme
    axes   n=5 | k=40
    read   x = X[n, k]
    store  I[n] = argmax(x; k)"""
CENTRED = """compute centred
    axes   n=11 | h=3 w=7
    read   x = X[n, h, w]
    let    m = sum(x; h w) / 21
    store  Y[n, h, w] = x - m"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SOFTMAX, "k:32 | fma | turn=1 late=1"),
        (SOFTMAX, "n:4 k:16 | fma | turn=1 late=1"),
        (SOFTMAX, "k:64 | fma | turn=1 unroll=1"),
        (SOFTMAX, "n:2 k:64 | fma | turn=1 late=1 programs=2 stages=1"),
        (EXTREME, "n:2 k:16 | fma | turn=1 late=1"),
        (CENTRED, "n:4 | fma | turn=1"),
        (CENTRED, "w:4 | fma | turn=1 order=w.h"),
        (SIZED, "n:2 k:32 | fma | turn=1 late=1"),
    ],
)
def test_every_element_is_in_each_sweep(text: str, words: str) -> None:
    compute = parse(text)
    made = build_compute(compute, SM90, Schedule.parse(words)).steps[0].kernel
    for drawn in any_size.drawn(compute, 3) if text is SIZED else [{}]:
        judged = ComputationCase(compute.at(**drawn) if drawn else compute).interpreted(
            made.at(drawn) if drawn else made
        )
        assert not judged.problem, judged.problem


def test_every_other_sweep_begins_at_the_last_step() -> None:
    texts = [
        transconv.compile(SOFTMAX, target="sm_90", schedule=f"k:32 | fma | late=1{word}").source
        for word in ("", " turn=1")
    ]
    assert ["- step_2 * 32" in text for text in texts] == [False, True]
    assert all("+ step * 32" in text and "+ step_3 * 32" in text for text in texts)


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [
        (SOFTMAX, "k:256 | fma | turn=1", "turn=1: the tile covers the row, which is loaded once"),
        (
            "compute rows\n axes n=6 | k=512\n read x = X[n, k]\n store Y[n] = sum(x; k)",
            "k:64 | fma | turn=1",
            "turn=1: rows needs every element of a row in one sweep alone",
        ),
        (
            "compute product\n axes m=32 n=32 | k=32\n read x = X[m, k]\n read w = W[n, k]\n"
            " store Y[m, n] = sum(x*w; k)",
            "m:16 n:16 k:16 | turn=1",
            "turn=1: product needs every element of a row in one sweep alone",
        ),
    ],
)
def test_one_sweep_has_nothing_to_turn(text: str, words: str, reason: str) -> None:
    said = why_not(Schedule.parse(words), parse(text), SM90)
    assert said == f"{reason}; expected several sweeps over rows longer than the tile (row=again)"


def test_rows_beyond_a_cache_are_cheaper_turned() -> None:
    """A row of 64 KB stays in the L1 cache either way; of one of 256 KB, only what was read last does."""

    def long(k: int) -> Compute:
        tensors = "".join(f"    tensor {t} bf16 [n=4096, k={k}]\n" for t in "XY")
        text = SOFTMAX.replace("n=6 | k=130", f"n=4096 | k={k}")
        return parse(text.replace("    axes", f"{tensors}    axes"))

    plain = Schedule.parse("k:8192 | fma | late=1 stages=1 warps=16")
    turned = replace(plain, turn=1)
    shares = [estimate(turned, c, H200) / estimate(plain, c, H200) for c in (long(32768), long(131072))]
    assert shares[0] == 1 and shares[1] < 0.9
    assert any(s.turn for s in heuristics.candidates(long(131072), H200))
