"""Gradients of pools and pads, which gather, for given sizes and for any; of slices and of what indices
take; those of activations, which are within the bounds of the table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.bounds import bound_of, excess, points
from tests.graph.meant import by_meaning, compare
from transconv.compute import OPS
from transconv.graph import KernelRow, backend, report
from transconv.ir import DType, bf16, f16, f32, f64

Tensor = torch.Tensor

CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # whether sizes are names
    "max pool": (lambda x: F.max_pool2d(x.sin(), 3, 2, 1), True),
    "max pool with gaps": (lambda x: F.max_pool2d(x, 2, 1, 0, 2), False),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1).sin(), False),
    "average pool 3d": (lambda x: F.avg_pool3d(x[:, None], (1, 2, 2)).sin(), True),
    "replicate": (lambda x: F.pad(x, (1, 2, 2, 0), mode="replicate").exp(), True),
    "replicate 3d": (lambda x: F.pad(x[:, None], (0, 2, 1, 1, 2, 0), mode="replicate").exp(), False),
    "reflect": (lambda x: F.pad(x, (1, 2, 2, 0), mode="reflect").exp(), False),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    f, named = CASES[name]
    run = torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=named)
    with by_meaning():
        for shape in ((2, 3, 7, 8), (3, 2, 9, 5)) if named else ((2, 3, 7, 8),):
            compare(f, run, [torch.randn(shape, dtype=torch.float64, requires_grad=True)], 1e-9)
    rows = [row for graph in report(run).graphs for row in graph.rows]
    assert len(rows) >= 2 and all(isinstance(row, KernelRow) and not row.numbers for row in rows)


def attention(x: Tensor) -> Tensor:
    q, k, v = x[0], x[1], x[-1]
    return (q.sin() @ k.transpose(-1, -2).cos()) @ v


SLICES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # whether they share no element
    "attention": (attention, True),
    "halves": (lambda x: x[..., :4].sin() * x[..., 4:].cos(), True),
    "a gap, an end": (lambda x: x[:, :1].sin() * x[:, 2:3].cos() * x[:, 4:5].exp(), True),
    "from the end": (lambda x: x[:, -1:].sin() * x[:, :-1].cos(), True),
    "an element and a slice": (lambda x: x[:, 2:3].sin() + x[:, 0].cos()[:, None], True),
    "all of it, too": (lambda x: x[..., :4].sin() * x[..., 4:].cos() + x.sum(), False),
    "shared": (lambda x: x[..., :6].sin() * x[..., 2:].cos(), False),
    "every other": (lambda x: x[..., ::2].sin() * x[..., 1::2].cos(), False),
    "many": (lambda x: sum(x.flatten()[i].sin() for i in range(40)), False),
    "of two dims": (lambda x: x[:, :1].sin() * x[..., :1].cos(), False),
}


@pytest.mark.parametrize("name", SLICES)
def test_gradients_of_slices(name: str) -> None:
    """Those that share no element are a concatenation; no sum is left."""
    f, apart = SLICES[name]
    run = torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=False)
    with by_meaning():
        for shape in ((3, 5, 6, 8), (3, 5, 1, 8)):
            compare(f, run, [torch.randn(shape, dtype=torch.float64, requires_grad=True)], 1e-12)
    found = [op for graph in report(run).graphs for row in graph.kernels for op in row.operations]
    assert any("scatter" in op for op in found) is not apart, found
    assert ("cat" in found) is apart


TAKEN: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "rows": (lambda x, i: x[i].sin(), (7, 5), ((40,),)),
    "rows by a matrix": (lambda x, i: x[i].sin(), (7, 5), ((4, 9),)),
    "embedding": (lambda x, i: F.embedding(i, x, padding_idx=2).sin(), (7, 5), ((3, 11),)),
    "a middle dim": (lambda x, i: x[:, i].sin(), (3, 7, 2), ((25,),)),
    "two dims": (lambda x, i, j: x[:, i, j].sin(), (3, 7, 4, 2), ((25,), (25,))),
    "two dims by rows and columns": (lambda x, i, j: x[i, j].sin(), (7, 4, 2), ((6, 1), (5,))),
    "numbers": (lambda x, i: x[i].sin(), (7,), ((30,),)),
}


PUT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one number": lambda x, i: torch.zeros(5, 3).index_put((i,), x[0, 0], accumulate=True),
    "a row": lambda x, i: torch.zeros(5, 4).index_put((i,), x[:1], accumulate=True),
    "rows by columns": lambda x, i: torch.zeros(5, 5).index_put((i, i[:, None]), x[:1], accumulate=True),
    "known places": lambda x, i: torch.zeros(5).index_put((torch.tensor([0, 2, 2]),), x[0, :1], True),
}


@pytest.mark.parametrize("name", PUT)
def test_what_is_put_may_stand_for_all_places(name: str) -> None:
    run = torch.compile(PUT[name], backend=backend, options={"rest": "eager"}, dynamic=False)
    with by_meaning():
        compare(PUT[name], run, [torch.randn(4, 4, requires_grad=True), torch.tensor([0, 3, 3, 1])], 1e-5)


def places(name: str) -> list[Tensor]:
    """Drawn indices of a case, also from the end where torch takes such; none is the last place's."""
    _, shape, indices = TAKEN[name]
    dims = [n for n in shape if n in (7, 4)]
    first = [0 if name == "embedding" else -n for n in dims]
    return [torch.randint(a, n - 1, own) for a, n, own in zip(first, dims, indices, strict=False)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_gradients_of_elements_that_indices_take(name: str, dtype: torch.dtype) -> None:
    """A place sums all that were taken of it, also by indices from the end, and is 0 where none was."""
    f, shape, _ = TAKEN[name]
    run = torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=False)
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    with by_meaning():
        compare(f, run, [x, *places(name)], 1e-12 if dtype is torch.float64 else 2e-2)
    rows = [row for graph in report(run).graphs for row in graph.rows]
    assert all(isinstance(row, KernelRow) for row in rows)
    assert any("put" in row.operations for row in rows if isinstance(row, KernelRow))


def test_a_large_table_is_torchs() -> None:
    """To compare every row with every index takes longer than to sort the indices."""
    run = torch.compile(F.embedding, backend=backend, options={"rest": "eager"}, dynamic=False)
    x = torch.randn(50_000, 4, requires_grad=True)
    with by_meaning():
        compare(F.embedding, run, [torch.randint(0, 50_000, (4, 1024)), x], 1e-6)
    assert "where values say" in str(report(run))


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_largest_is(dtype: torch.dtype) -> None:
    """What is compared with the stored largest value is rounded as it was: evaluated again in another
    kernel it would equal none, and the gradient be divided by no places."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + x * 2.1
        return y.amax((1, 3)), y.logsumexp(0).sum(0).reshape(-1).roll(1)

    torch.manual_seed(0)
    x = torch.randn(4, 4, 6, 4, dtype=dtype, requires_grad=True)

    def gradient(run: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        return torch.autograd.grad([made.float().sum() for made in run(x)], x)[0].float()

    with by_meaning():
        got = gradient(torch.compile(f, backend=backend, options={"rest": "eager"}))
    assert (got - gradient(f)).abs().max() <= (1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.every(4)
@pytest.mark.parametrize("dtype", [f32, bf16, f64, f16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "hardswish", "elu"])
def test_activations_of_every_exponent(name: str, dtype: DType) -> None:
    """Neither a tail nor a number whose square overflows is lost, in the type that torch gives or f32."""
    bound, held = bound_of(f"{name}'", dtype), getattr(torch, dtype.torch)
    x = points(bound, dtype)
    given = torch.from_numpy(x).to(held).requires_grad_()
    run = torch.compile(OPS[name].function(), backend=backend, options={"rest": "eager"})
    with by_meaning():
        (found,) = torch.autograd.grad(run(given).sum(), given)
    assert all(isinstance(row, KernelRow) for graph in report(run).graphs for row in graph.rows)
    off = excess(bound, x, found.to(torch.float64 if dtype is f64 else torch.float32).numpy(), dtype)
    at = int(np.argmax(off))
    assert off[at] <= 1, f"the gradient of {name} at {x[at]!r} in {dtype}: {off[at]} times its bound"
