"""Masks of attention that torch's own kernels take: rows that are one element, expanded, get rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from transconv.graph.regions import function_graphs

Tensor = torch.Tensor
Masks = Callable[[Tensor], Tensor]


def mask_of(shape: Sequence[int]) -> Masks:
    """A mask of one element a row at most, expanded."""

    def made(q: Tensor) -> Tensor:
        held = torch.arange(shape[-2] if len(shape) > 1 else 1, device=q.device)[:, None] > 1
        return held.expand(*shape)

    return made


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("mask", "moved", "elements"),
    [
        (lambda q: torch.ones((), dtype=torch.bool).expand(2, 1, 7, 7), True, 7),
        (mask_of((2, 3, 7, 7)), True, 49),
        (mask_of((7, 7)), True, 49),
        (lambda q: torch.full((), -0.5).expand(7, 7), True, 7),
        (lambda q: q.new_zeros(7, 1).expand(7, 7), True, 49),
        (lambda q: (q.new_zeros(7, 7) - torch.eye(7)).mT, True, 49),
        (lambda q: (q.new_zeros(7, 7) - torch.eye(7)).expand(2, 1, 7, 7), False, 49),
        (lambda q: None, False, 0),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_masks_have_rows(mask: Any, moved: bool, elements: int, named: bool) -> None:
    seen: list[Tensor | None] = []

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if named:
            return F.scaled_dot_product_attention(value=v, query=q, key=k, attn_mask=mask(q))
        return F.scaled_dot_product_attention(q, k, v, mask(q))

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        function_graphs.attended(gm)
        gm.graph.lint()
        for node in gm.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                given = node.kwargs.get("attn_mask") or (node.args[3] if len(node.args) > 3 else None)
                seen.append(None if given is None else given.meta["example_value"])
        names = [getattr(n.target, "__name__", "") for n in gm.graph.nodes]
        assert ("_with_rows" in names) is moved
        return gm

    torch.manual_seed(0)
    given = [torch.randn(2, 3, 7, 5).requires_grad_() for _ in range(3)]
    want, got = f(*given), torch.compile(f, backend=backend)(*given)
    torch.testing.assert_close(got, want, equal_nan=True)
    for one, other in zip(
        torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given), strict=True
    ):
        torch.testing.assert_close(one, other, equal_nan=True)
    (held,) = seen
    if held is not None:
        assert held.stride(-1) == 1 and held.shape[-1] == 7
        assert 1 + sum((n - 1) * s for n, s in zip(held.shape, held.stride(), strict=True)) == elements


def test_each_element_of_a_mask_has_its_own_gradient() -> None:
    """Of a leaf that lies expanded no other element's gradient is a part."""

    def f(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        function_graphs.attended(gm)
        return gm

    torch.manual_seed(0)
    q, mask = torch.randn(2, 3, 7, 5), torch.zeros(1).expand(2, 1, 7, 7).detach().requires_grad_()
    (want,) = torch.autograd.grad(f(q, mask).square().sum(), mask)
    (got,) = torch.autograd.grad(torch.compile(f, backend=backend)(q, mask).square().sum(), mask)
    assert want.unique().numel() > 1
    torch.testing.assert_close(got, want)
