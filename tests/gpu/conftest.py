"""Tests of generated kernels on a GPU. Each starts with no routes, no counts and default switches.

``DROPIN_DEVICE=cpu`` runs the same code on CPU tensors (Triton's interpreter if
``TRITON_INTERPRET=1``, else torch's kernels), to try the tests themselves where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import transconv
from tests.gpu import cases as c
from tests.torch_ops import conftest as ops_conftest  # noqa: F401  (what torch's tables import)
from transconv.calls import route_cache, stats
from transconv.support import knobs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords and c.DEVICE == "cuda" and not torch.cuda.is_available():
            item.add_marker(skip)


def _defaults() -> None:
    transconv.config.fallback = "silent"
    transconv.config.compile, transconv.config.sizes = "now", "exact"  # each call has its own kernel
    transconv.config.steady = False
    transconv.config.cpu = "interpret" if c.DEVICE == "cpu" and knobs.interpret() else "fallback"
    torch.use_deterministic_algorithms(False)
    c.set_precision("ieee")
    torch._C._set_cublas_allow_tf32(False)  # which benchmarks switch on in their process


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    _defaults()
    stats.forget_warnings()
    transconv.stats(reset=True)
    torch.manual_seed(0)
    yield
    _defaults()
    route_cache.forget()
    torch._dynamo.reset()


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[c.Cases]:
    """Counts what the test tries; every case is tried, and the test fails if one of them did."""
    seen = c.Cases()
    yield seen
    request.node.user_properties.append(("cases", seen.summary()))
