"""On a GPU: rows at odd addresses, in every form that is proposed for them."""

from __future__ import annotations

import pytest

from bench import short_rows
from transconv.compute import kernels, parse
from transconv.runtime import build_compute
from transconv.target import detect
from transconv.verify.computation import ComputationCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("length", [5, 49, 50, 77, 100, 197])
def test_every_form_is_right(length: int) -> None:
    """Of a few thousand elements, forward and backward."""
    for case in short_rows.cases((length,), 2048 * length):
        if case.name.startswith("windows") and length != 49:
            continue
        for made in (k for text in case.texts for k in kernels(parse(text))):
            judge = ComputationCase(made, "float")
            for _, schedule in short_rows.forms(made, detect()):
                judged = judge.launched(build_compute(made, detect(), schedule), "cuda")
                assert not judged.problem, f"{made}\n{schedule}: {judged.problem}"
