"""What a graph computes or moves more often than it has to: equal operations, casts there and back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.graph.meant import by_meaning, compare, results
from transconv.graph import KernelRow, backend, report
from transconv.graph.regions.aot_graphs import once

Tensor = torch.Tensor


def rows(f: Callable[..., Any], *inputs: Tensor) -> list[KernelRow]:
    """The kernels of an inference, whose results are those of torch."""
    torch._dynamo.reset()
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        compare(f, run, list(inputs), 1e-2, gradients=False)
    return [r for r in report(run).graphs[0].rows if isinstance(r, KernelRow)]


def test_what_is_upsampled_in_a_wider_type_is_a_view() -> None:
    """torch moves elements of bf16 in f32; without the casts nothing is computed but the sum."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return F.interpolate(x, size=(7, 5), mode="nearest") + y

    (kernel,) = rows(f, torch.randn(1, 4, 3, 5).bfloat16(), torch.randn(1, 4, 7, 5).bfloat16())
    assert "cast" not in kernel.operations and kernel.operations[-1] == "add", kernel.operations
    assert "f32(" not in kernel.text, kernel.text


def test_a_cast_there_and_back_is_memory_of_its_own() -> None:
    x = torch.randn(4, 6).bfloat16()
    run = torch.compile(
        lambda x: (x.float().bfloat16(), x.float().t().bfloat16()),
        backend=backend,
        options={"rest": "eager"},
    )
    with by_meaning(), torch.no_grad():
        found = results(run(x))
    assert torch.equal(found[0], x) and torch.equal(found[1], x.t())
    assert len({t.untyped_storage().data_ptr() for t in (x, *found)}) == 3


def test_a_narrower_type_on_the_way_rounds() -> None:
    (kernel,) = rows(lambda x: x.bfloat16().float() + 1, torch.randn(4, 6))
    assert "bf16(" in kernel.text


def test_equal_operations_are_computed_once() -> None:
    """Also where a convolution needs what they make in memory; results that are handed out stay apart."""

    def f(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (F.conv2d(x.softmax(1), v), F.conv2d(x.softmax(1), w), x.exp(), x.exp())

    weights = torch.randn(8, 4, 1, 1), torch.randn(8, 4, 1, 1)
    found = rows(f, torch.randn(1, 4, 5, 5), *weights)
    assert sum("exp" in r.operations and "sum" in r.operations for r in found) == 1
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        made = results(run(torch.randn(1, 4, 5, 5), *weights))
    assert made[2].data_ptr() != made[3].data_ptr()


def graph_of(f: Callable[..., Any], *inputs: Tensor) -> torch.fx.Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(f, tracing_mode="fake")(*inputs).graph


def test_random_numbers_and_what_writes_stay() -> None:
    x = torch.randn(3, 4)
    drawn = graph_of(lambda x: (x + torch.rand_like(x)) * torch.rand_like(x), x)
    once(drawn)
    assert sum("rand" in str(n.target) for n in drawn.nodes) == 2

    def writes(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        return y + x * 2

    kept = graph_of(writes, x)
    before = len(kept.nodes)
    once(kept)
    assert len(kept.nodes) == before
    twice = graph_of(lambda x: (x * 2).sum(0) + (x * 2).sum(1).sum() + torch.max(x, 0)[0], x)
    once(twice)
    targets = [n.target for n in twice.nodes if n.op == "call_function"]
    assert targets.count(torch.ops.aten.mul.Tensor) == 1 and operator.getitem in targets
