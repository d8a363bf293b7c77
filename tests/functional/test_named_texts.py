"""Each text of the library with names for its sizes means, at the sizes of a call, what the text with
these numbers means that is made from scratch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.functional.test_forms import CASES
from transconv import functional as ours
from transconv.compute import Compute, execute
from transconv.functional.calls import dispatch, symbolic_bind
from transconv.functional.calls.compiled_launch import program
from transconv.functional.calls.route import FunctionCall

MORE: dict[str, Callable[..., Any]] = {
    "std": lambda x, c: ours.std(x, (0, 2), correction=2),
    "var of all": lambda x, c: ours.var(x, correction=0.5),
    "prod": lambda x, c: ours.prod(x, 2),
    "amax": lambda x, c: ours.amax(x, (1, 3)),
    "any": lambda x, c: ours.any(x.detach(), 1),
    "softmax of a middle dim": lambda x, c: ours.softmax(x, 1),
    "max_pool of some": lambda x, c: ours.max_pool2d(x, (2, 3), (1, 2), (0, 1), return_indices=True),
    "avg_pool of all": lambda x, c: ours.avg_pool2d(x, 3, 2, 1),
}


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that calls are bound to. torch computes."""
    found: list[Any] = []

    def made(f: Any, tensors: Any, numbers: Any, wanted: Any) -> FunctionCall:
        whole = symbolic_bind.bind(f, tensors, numbers, wanted, True)
        found.extend((whole.forward, *whole.backward))
        return FunctionCall(None, "test", f.name)

    monkeypatch.setattr(dispatch, "_made", made)
    return found


def drawn(compute: Compute, seed: int) -> dict[str, np.ndarray]:
    """Small whole numbers, so that sums are exact; indices are within all dims."""
    random = np.random.default_rng(seed)
    least = min((n for t in compute.tensors for n in t.shape), default=1)
    return {
        t.name: random.integers(0, max(1, least), t.shape)
        if t.dtype.kind == "int"
        else random.integers(-3, 4, t.shape).astype(float)
        for t in compute.tensors
    }


@pytest.mark.every(8)
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_the_text_with_names_means_the_text_with_numbers(name: str, met: list[Any]) -> None:
    for shape in ((2, 4, 5, 6), (3, 2, 7, 5), (5, 6, 4, 9)):
        x = torch.randn(shape, requires_grad=True)
        (CASES | MORE)[name](x, torch.randn(shape[1], requires_grad=True))
    checked = 0
    for seed, step in enumerate(met):
        if step.named is None:
            continue
        exact = program(step.text).compute
        for text in symbolic_bind.texts(step.named):
            compute = program(text).compute
            if compute.named is None or compute.named.why_not(step.named.sizes):
                continue
            given, checked = drawn(exact, seed), checked + 1
            one, other = (execute(c, given) for c in (compute.at(**step.named.sizes), exact))
            assert one.keys() == other.keys()
            for tensor, found in other.items():
                np.testing.assert_allclose(one[tensor].value, found.value, 1e-12, 1e-12, True, tensor)
    assert checked
