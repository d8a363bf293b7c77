"""Every test starts with no routes, no counts, no warnings given, and the default switches."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator

import pytest
import torch

import transconv
from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv.calls import route_cache, stats

torch.set_num_threads(1)  # tiny problems: threads would only wait for each other

if "expecttest" not in sys.modules:
    try:
        import expecttest  # noqa: F401
    except ImportError:  # torch's test data imports it and needs nothing of it
        stub = types.ModuleType("expecttest")
        stub.TestCase = __import__("unittest").TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub


@pytest.fixture(scope="session", autouse=True)
def untimed_guards() -> Iterator[None]:
    """Dynamo times each set of guards for its logs, and empties the processor's caches before. Of the
    functions that it inlines it knows the last 128. A tracer makes tensors for random numbers that none
    draws."""
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker
    from torch._dynamo import bytecode_transformation as transformed
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
        every = functools.lru_cache(maxsize=None)(transformed._cached_cleaned_instructions.__wrapped__)
        patch.setattr(transformed, "_cached_cleaned_instructions", every)
        patch.setattr(PhiloxStateTracker, "reset", lambda: None)
        yield


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    transconv.config.fallback = "silent"
    transconv.config.cpu = "fallback"
    stats.forget_warnings()
    transconv.stats(reset=True)
    torch.manual_seed(0)
    yield
    route_cache.forget()
    torch._dynamo.reset()
