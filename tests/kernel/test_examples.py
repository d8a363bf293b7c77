"""examples/kernels beside torch, in Triton's interpreter and in the simulator; kernels are short."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from transconv.kernel import KernelFunction

FOLDER = Path(__file__).parents[2] / "examples" / "kernels"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def convolved(src: torch.Tensor, wei: torch.Tensor, step: int) -> torch.Tensor:
    made = functional.conv2d(src.permute(0, 3, 1, 2), wei.permute(3, 2, 0, 1), stride=step)
    return made.permute(0, 2, 3, 1)


# The example, its arguments, and the same in torch.
EXAMPLES: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "softmax": ((drawn(3, 50),), lambda x: x.softmax(1)),
    "layer_norm": ((drawn(3, 50), drawn(50), drawn(50)),
                   lambda x, a, b: functional.layer_norm(x, (50,), a, b)),
    "gemm": ((drawn(21, 45), drawn(45, 37)), torch.matmul),
    "convolution": ((drawn(2, 7, 20, 5), drawn(3, 2, 5, 18), 2), convolved),
    "pairwise_distance": ((drawn(9, 3), drawn(20, 3)),
                          lambda a, b: torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")),
    "histogram": ((torch.arange(300, dtype=torch.int32)**2 % 23, 21),
                  lambda x, bins: torch.bincount(x, minlength=bins)[:bins].int()),
    "scan": ((drawn(2, 75),), lambda x: x.cumsum(1)),
    "top_k": ((drawn(6, 20), 3), lambda x, k: torch.topk(x, k)),
    "attention": ((drawn(20, 24), drawn(45, 24), drawn(45, 20)), functional.scaled_dot_product_attention),
}


def example(name: str) -> Callable[..., Any]:
    """The function of an example that launches its kernel."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def check(name: str) -> None:
    arguments, meaning = EXAMPLES[name]
    got, wanted = (f(*arguments) for f in (example(name), meaning))
    for a, b in zip(*((x,) if torch.is_tensor(x) else x for x in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", EXAMPLES)
def test_in_tritons_interpreter(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_in_the_simulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelFunction, "__call__", KernelFunction.simulate)
    check(name)


def test_examples_are_short() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert [f.stem for f in files] == sorted(EXAMPLES)
    for file in files:
        text = file.read_text("utf-8")
        kernel = text[text.index("@kernel"):].split("\n\n\n")[0]
        assert len(kernel.splitlines()) <= 25, file.name
