"""Gradients on a GPU: of texts, each kind of step and view in f32 and bf16, drawn ones; of slices and of
elements that indices take, in compiled graphs."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

import transconv
from tests.functional.gradients import TEXTS, operands
from tests.gpu import cases as c
from tests.gpu.operands import on_gpu
from tests.graph.test_gradients import SLICES, TAKEN, places
from transconv.compute import differentiate, parse
from transconv.errors import ComputeError
from transconv.functional.computation import Computation
from transconv.runtime import build_compute
from transconv.target import detect
from transconv.verify.computation import ComputationCase, wide
from transconv.verify.fuzz import compute_texts

pytestmark = pytest.mark.gpu

NARROW = ("softmax", "layer_norm", "linear", "convolution", "max_pool", "gather", "scatter", "upsample")


def gradients(f: Computation, given: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor | None]:
    """Of all operands that need one, from random gradients of the results."""
    made = f(*given)
    made = [t for t in (made if isinstance(made, tuple) else (made,)) if t.requires_grad]
    draw = torch.Generator().manual_seed(seed)
    g = [torch.randint(-2, 3, t.shape, generator=draw).to(t) for t in made]
    return list(torch.autograd.grad(made, [t for t in given if t.requires_grad], g, allow_unused=True))


def compared(text: str, given: list[torch.Tensor], near: float) -> None:
    """Kernels' gradients and those of the texts' meaning in f64, up to a share of the largest element."""
    f, exact = transconv.computation(text), transconv.computation(wide(parse(text)))
    got = gradients(f, given)
    assert not transconv.stats(reset=True).fallback
    leaves = [
        t.detach().cpu().double().requires_grad_() if t.is_floating_point() else t.cpu() for t in given
    ]
    cpu, transconv.config.cpu = transconv.config.cpu, "fallback"
    want = gradients(exact, leaves)
    transconv.config.cpu = cpu
    transconv.stats(reset=True)
    floats = [t for t in given if t.is_floating_point()]
    for a, b, t in zip(got, want, floats, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            assert a.dtype is t.dtype and a.shape == t.shape
            apart = (a.cpu().double() - b).abs().max()
            assert apart <= near * max(1.0, float(b.abs().max())), f"{apart} of {b.abs().max()}"


@pytest.mark.parametrize("name", TEXTS)
def test_gradients(name: str) -> None:
    text = f"compute {name} ;; {TEXTS[name]}"
    given = operands(transconv.computation(text), c.DEVICE)
    for _ in range(2):  # the first call is checked, the second is launched
        compared(text, given, 2.0**-7)  # products of tf32


@pytest.mark.parametrize("name", NARROW)
def test_of_bf16(name: str) -> None:
    text = str(parse(f"compute {name} ;; {TEXTS[name]}")).replace(" f32 ", " bf16 ")
    compared(text, operands(transconv.computation(text), c.DEVICE), 2.0**-5)


@pytest.mark.parametrize("number", range(40))
def test_drawn(number: int) -> None:
    """The kernels of all gradients of a drawn text, against the meaning of their texts."""
    try:
        found = differentiate(parse(compute_texts.text(Random(f"gradients on a GPU {number}")))).computes
    except ComputeError as error:
        pytest.skip(str(error))
    for compute in found:
        plan = build_compute(compute, detect())
        for data in ("exact", "float"):
            problem = ComputationCase(compute, data).launched(plan, c.DEVICE).problem
            assert not problem, f"{problem}\n{compute}"


@on_gpu
def test_compiled() -> None:
    f = transconv.computation(f"compute softmax ;; {TEXTS['softmax']}")
    x = torch.randn(4, 5, device=c.DEVICE, requires_grad=True)
    g = torch.randn(4, 5, device=c.DEVICE)
    want = torch.autograd.grad(torch.softmax(x * 2, 1).sin(), x, g)
    compiled = torch.compile(lambda x: f(x * 2).sin(), fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x, g), want)


def in_a_graph(f: Any, x: torch.Tensor, *more: torch.Tensor) -> None:
    """The gradient of a function as a compiled graph has it, beside torch's in f64."""
    leaf = x.double().requires_grad_()
    (want,) = torch.autograd.grad(f(leaf, *more).sum(), leaf)
    run = torch.compile(f, backend="transconv", dynamic=False)
    for _ in range(2):
        given = x.clone().requires_grad_()
        (got,) = torch.autograd.grad(run(given, *more).sum(), given)
        near = 0.03 if x.dtype is torch.bfloat16 else 2e-3
        assert (got.double() - want).abs().max() <= near * max(1.0, float(want.abs().max()))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SLICES)
def test_slices(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    for shape in ((3, 12, 49, 8), (3, 5, 6, 8)):
        in_a_graph(SLICES[name][0], torch.randn(shape, device=c.DEVICE).to(dtype))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_elements_that_indices_take(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    f, shape, _ = TAKEN[name]
    given = (torch.randn(shape, device=c.DEVICE).to(dtype), *(i.to(c.DEVICE) for i in places(name)))
    in_a_graph(f, *given)
