"""The schedule word ``back``: programs are numbered from the last one. Results stay the same."""

from __future__ import annotations

import pytest

import transconv
from transconv.compute import parse
from transconv.conv import ConvProblem, Prop, any_size, computes, marked
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase

SM90 = Target.parse("sm_90")
ROWS = """compute centred
    axes   n=11 | k=20
    read   x = X[n, k]
    let    m = sum(x; k) / 20
    store  Y[n, k] = x - m"""
LAYER = "mb1ic16ih5oc48oh5kh3ph1 dt=f16 tag=nhwc"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROWS, "n:4 k:32 | fma | back=1 row=held"),
        (ROWS, "n:2 k:8 | fma | back=1 row=again"),
        (ROWS.replace("n=11", "a=3 n=4").replace("[n", "[a, n"), "n:2 k:32 | fma | back=1"),
        (LAYER, "mb.oh.ow:16 oc:16 ic:16 | mma | back=1 group_m=2"),
        (LAYER, "oh:4 ow:4 oc:16 ic:16 | mma | back=1 c=box b=box a=gather"),
        (LAYER, "mb.oh.ow:16 oc:16 ic:16 | mma | back=1 split_k=3"),
        ("mb2?ic16ih5?oc32oh5kh1 dt=f16 tag=nhwc", "mb.oh.ow:16 oc:16 ic:16 | mma | back=1"),
    ],
)
def test_every_program_has_its_blocks(text: str, words: str) -> None:
    plain, names = marked(text) if text.startswith("mb") else (text, frozenset())
    made = (
        (parse(text),)
        if text is plain and text.startswith("compute")
        else (
            any_size(ConvProblem.parse(plain), Prop.FWD, names)
            if names
            else computes(ConvProblem.parse(plain), Prop.FWD)
        )
    )
    for compute in made:
        schedule = Schedule.parse(words)
        if schedule.split_k > 1:
            assert why_not(schedule, compute, SM90) is None
            told = [
                str(transconv.lower(compute, w, "sm_90")[-1][1])
                for w in (words, words.replace("back=1 ", ""))
            ]
            assert ["from_last" in text for text in told] == [True, False]
            continue
        kernel = build_compute(compute, SM90, schedule).steps[0].kernel
        assert "from_last" in str(kernel) or "- (pid" in str(kernel)
        for drawn in sizes.drawn(compute, 3) if names else [{}]:
            judged = ComputationCase(compute.at(**drawn) if drawn else compute).interpreted(
                kernel.at(drawn) if drawn else kernel
            )
            assert not judged.problem, judged.problem


def test_persistent_programs_are_refused() -> None:
    (compute,) = computes(ConvProblem.parse(LAYER), Prop.FWD)
    reason = why_not(Schedule.parse("mb.oh.ow:16 oc:16 ic:16 | mma | back=1 programs=4"), compute, SM90)
    assert reason == "back=1 numbers programs of one tile each: it needs via=tl programs=0"
