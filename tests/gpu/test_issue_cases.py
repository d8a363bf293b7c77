"""Cases of public threads on a GPU, at small sizes: ours are right, timed, and made by kernels of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.issue_cases import CASES, IssueCase
from bench.issue_sides import measure

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """torch's own test tools, which other files import, freeze the switches that a measurement sets."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_small_case(case: IssueCase) -> None:
    found = measure(case.name, True, [f"ours.{layout}" for layout in case.layouts], 5.0)
    for side in found["sides"].values():
        assert side["verdict"] == "right", side["reason"]
        assert side["us"] >= 0 and side["peak_mb"] >= 0
        assert (side["reason"] == "computed by torch") == (
            case.dtype == "c64" or not case.bytes() or 0 in case.x
        )
