"""Chains of any number of operations: cut into kernels, none of which is longer than a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.graph.meant import by_meaning, compare, traced
from transconv.graph import backend, report
from transconv.graph.fusion.planner import LONGEST

Tensor = torch.Tensor
WIDE = torch.float64


def chain(x: Tensor, count: int) -> Tensor:
    """So many operations, one of the other's result."""
    for i in range(count):
        x = (torch.sin, torch.neg, lambda x: x * 1.25, lambda x: x + 0.5)[i % 4](x)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, 600])
def test_a_chain_of_a_compiled_graph(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    run: Any = torch.compile(lambda x: chain(x, count), backend=backend, options={"rest": "eager"})
    x = torch.randn(4, 8)
    torch.testing.assert_close(run(x), chain(x, count))
    assert "Traceback" not in capfd.readouterr().err
    found = transconv.stats()
    assert not found.fallback and found.native["graph"] == -(-count // LONGEST)
    assert {*found.compared} == {"right"}
    (graph,) = report(run).graphs
    assert max(k.text.count("let ") for k in graph.kernels) <= LONGEST + 1


def alone(x: Tensor) -> tuple[Tensor, ...]:
    return (chain(x, 250),)


def beside_rows(x: Tensor) -> tuple[Tensor, ...]:
    y = chain(x.softmax(-1), 250)
    return (y * x + y.sum(-1, keepdim=True),)


def beside_a_product(x: Tensor) -> tuple[Tensor, ...]:
    y = chain(x @ x.mT, 250)
    return y.amax(0), chain(y, 30)


def of_norms(x: Tensor) -> tuple[Tensor, ...]:
    for _ in range(40):
        x = F.layer_norm(x.tanh() + x, x.shape[-1:]) * 0.5
    return (x,)


def of_views(x: Tensor) -> tuple[Tensor, ...]:
    for _ in range(120):
        x = (x.t() + 1).flip(0).clone()
    return (x,)


def of_joined(x: Tensor) -> tuple[Tensor, ...]:
    first = x
    for i in range(130):
        x = torch.where(x > i % 3, torch.cat([x[:1], first[1:]]), chain(x, 2))
    return (x + first,)


@pytest.mark.every(6)
@pytest.mark.parametrize(
    "f",
    [
        alone,
        beside_rows,
        beside_a_product,
        of_norms,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (of_views, of_joined)),
    ],
)
def test_chains_beside_other_operations(f: Callable[..., Any]) -> None:
    x = torch.randn(6, 6, dtype=WIDE)
    with by_meaning() as texts:
        compare(f, traced(f, [x]), [x], 1e-8)
    assert len(texts) > 1 and max(t.count("let ") for t in texts) < 6 * LONGEST


@pytest.mark.slow
def test_gradients_of_a_chain() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (chain(x, 210).tanh(),)

    x = torch.randn(3, 5, dtype=WIDE, requires_grad=True)
    with by_meaning() as texts:
        compare(f, traced(f, [x]), [x], 1e-8)
    assert len(texts) > 4
