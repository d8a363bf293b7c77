"""Results that are views: of an input, and of a value that is another result. torch makes them anew of the
memory and strides that a graph hands out, so a copy of the elements would be another tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.graph.meant import by_meaning, compare
from transconv.graph import backend, report

Tensor = torch.Tensor

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[:, :, 1:3],
    "step": lambda x: x[:, ::2],
    "from the end": lambda x: x[..., -2:],
    "narrow": lambda x: x.narrow(2, 1, x.shape[2] - 2),
    "select": lambda x: x[1],
    "last": lambda x: x[:, :, -1],
    "split": lambda x: x.split(3, 2)[0],
    "split in two": lambda x: x.split((x.shape[2] + 1) // 2, 2)[1],
    "split with sizes": lambda x: x.split([2, x.shape[2] - 2], 2)[1],
    "chunk": lambda x: x.chunk(2, 2)[1],
    "unbind": lambda x: x.unbind(1)[1],
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 2),
    "view": lambda x: x.view(-1, x.shape[2]),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1, -1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "detach": lambda x: x.detach(),
    "permuted slice": lambda x: x.permute(2, 0, 1)[1:, :, ::2],
    "split of a permutation": lambda x: x.transpose(1, 2).split(2, 1)[0].flatten(1),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
}


def _of_a_value(view: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        y = x.sin()
        return y, view(y), view(y) * 2
    return function


QUICK = ("split in two",)  # the others are for `make check-all`


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow)
                                  for n in VIEWS])
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_views_that_are_results(name: str, dynamic: bool) -> None:
    for f in (VIEWS[name], _of_a_value(VIEWS[name]), lambda x: VIEWS[name](x.sin()) + 1):
        torch._dynamo.reset()
        run = torch.compile(f, backend=backend, dynamic=dynamic, options={"rest": "eager"})
        with by_meaning():
            for shape in ((3, 4, 6), (2, 4, 5)):
                x = torch.randn(shape, dtype=torch.float64)
                others = (x[..., ::2], x.transpose(0, 2)) if name not in ("view", "as_strided") else ()
                for of in (x, *others):
                    compare(f, run, [of], 1e-12, gradients=False)
    assert any(g.kernels for g in report(run).graphs)


def test_a_view_of_a_result_shares_its_memory() -> None:
    run: Any = torch.compile(lambda x: (y := x.sin(), y.split(2, 1)[1]), backend=backend, dynamic=True,
                             options={"rest": "eager"})
    with by_meaning():
        whole, part = run(torch.randn(3, 6))
    part.zero_()
    assert not whole[:, 2:4].any() and whole[:, :2].all()
