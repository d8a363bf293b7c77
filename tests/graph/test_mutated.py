"""Inputs that a graph writes to: one call writes all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from tests.graph.meant import by_meaning
from tests.graph.networks import Residual
from transconv.graph import backend, report
from transconv.graph.graph_report import KernelRow
from transconv.graph.regions import aot_graphs

Tensor = torch.Tensor


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs each call wrote."""
    found: list[int] = []
    write = aot_graphs.write

    def counted(inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        found.append(len(inputs))
        write(inputs, values)

    monkeypatch.setattr(aot_graphs, "write", counted)
    return found


@pytest.mark.slow
def test_statistics_of_a_training_step(written: list[int]) -> None:
    one = Residual()
    other = copy.deepcopy(one)
    run = torch.compile(other, backend=backend, options={"rest": "eager"})
    with by_meaning():
        for _ in range(2):
            x = torch.randn(2, 8, 4, 4)
            (want,) = torch.autograd.grad(one(x).sum(), [one.one.weight])
            (got,) = torch.autograd.grad(run(x).sum(), [other.one.weight])
            assert torch.allclose(got, want, atol=1e-4)
    for (name, a), b in zip(one.named_buffers(), other.buffers(), strict=True):
        assert a.dtype is b.dtype and torch.allclose(a, b, atol=1e-5), name
    assert written == [6, 6], "two norms: mean, variance and count of each"
    assert all(isinstance(row, KernelRow) for g in report(run).graphs for row in g.rows)


def test_inputs_made_of_each_other(written: list[int]) -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        y.copy_(x.t())
        x.mul_(2)
        z.add_(y)
        return x + y

    given = [torch.randn(3, 3) for _ in range(3)]
    others = [x.clone() for x in given]
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with torch.no_grad(), by_meaning():
        for _ in range(2):
            got, want = run(*given), f(*others)
            for a, b in zip((got, *given), (want, *others), strict=True):
                assert torch.allclose(a, b)
    assert written == [3, 3]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_lie_as_torchs_do_however_many_inputs_are_written(count: int) -> None:
    def f(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        for other in others:
            other.add_(1)
        return x.t() * 2, x + 1, (x * 3).t()

    given, same = ([torch.arange(12.0).reshape(3, 4) + i for i in range(count + 1)] for _ in "ab")
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with torch.no_grad(), by_meaning() as texts:
        for _ in range(2):
            for a, b in zip((*run(*given), *given), (*f(*same), *same), strict=True):
                assert torch.equal(a, b) and a.stride() == b.stride()
    assert texts


def test_a_weight_that_needs_a_gradient(written: list[int]) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            w.mul_(0.5)
        return x.sin()

    x, w = torch.randn(3), torch.ones(3, requires_grad=True)
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning():
        assert torch.allclose(run(x, w), x.sin()) and torch.equal(w, torch.full((3,), 0.5))
    assert written == [1]


@pytest.mark.parametrize("made", [None, torch.ops.aten.t.default, torch.ops.aten.neg.default])
def test_a_view_of_another_input_stays(made: Callable[..., Tensor] | None) -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    value = b if made is None else graph.call_function(made, (b,))
    graph.call_function(torch.ops.aten.copy_.default, (a, value))
    graph.output((b,))
    for node in (a, b, value):
        node.meta["val"] = torch.empty(3, 3, device="meta")
    assert aot_graphs.taken(graph) == ([0] if made is torch.ops.aten.neg.default else [])
    assert len(graph.output_node().args[0]) == (2 if made is torch.ops.aten.neg.default else 1)
