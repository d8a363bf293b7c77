"""The kernels that ``python -m bench kernels`` times: both programs are right at small sizes."""

from __future__ import annotations

import os

import pytest

from bench.kernels.cases import cases, drawing
from bench.kernels.measures import WRONG, answer_of, error_of
from bench.kernels.sides import BY_HAND, EXAMPLES, by_hand, example, lines, masks, recorded


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("ours", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_both_programs_are_right(case, ours) -> None:  # type: ignore[no-untyped-def]
    given = case.data(drawing("cpu", 1), *case.small)
    module = (example if ours else by_hand)(case.kernel)
    with recorded(module) as launched:
        found = getattr(module, case.kernel)(*given)
    assert error_of(case, found, answer_of(case, given)) < WRONG
    assert bool(launched) == ours


def test_nobody_writes_masks_in_the_api() -> None:
    files = sorted(BY_HAND.glob("[!_]*.py"))
    assert {f.stem for f in files} == {c.kernel for c in cases()}
    for file in files:
        assert masks(file) > 0 == masks(EXAMPLES / file.name), file.name
    assert sum(lines(EXAMPLES / f.name) for f in files) < 0.5 * sum(lines(f) for f in files)
