"""The function that a region is written out as: other inputs than before, and when memory goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import Meant, by_meaning, traced
from transconv.graph import compiled

Tensor = torch.Tensor


def plain(x: Tensor) -> Tensor:
    return x.clone()


def across(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def behind(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)


def negative(x: Tensor) -> Tensor:
    return torch._neg_view(x.neg())


@pytest.mark.parametrize("otherwise", [across, behind, negative])
def test_inputs_that_lie_otherwise(otherwise: Callable[[Tensor], Tensor],
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    arranged = []
    arrange = compiled.Launches.arrange

    def counted(self: compiled.Launches, *given: object) -> None:
        arranged.append(1)
        arrange(self, *given)  # type: ignore[arg-type]
    monkeypatch.setattr(compiled.Launches, "arrange", counted)

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp() @ y, y.sin().t()
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    run = traced(f, [x, y])
    with by_meaning():
        for way in (plain, plain, plain, otherwise, plain, otherwise, otherwise):
            given = way(x), way(y)
            for a, b in zip(run(*given), f(*given), strict=True):
                assert torch.allclose(a, b, atol=1e-5), way.__name__
    assert len(arranged) in ((1,) if otherwise is behind else (4, 5)), "the plain calls compare once"


def test_memory_goes_behind_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []
    start = Meant.start

    def noted(self: Meant, tensors: Sequence[Tensor]) -> None:
        seen.extend(weakref.ref(t) for t in tensors if not any(r() is t for r in seen))
        alive.append(sum(r() is not None for r in seen))
        start(self, tensors)
    monkeypatch.setattr(Meant, "start", noted)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor]:
        for _ in range(4):
            x = F.conv2d(x, w, padding=1)
        return (x,)
    x, w = torch.randn(1, 4, 4, 4), torch.randn(4, 4, 3, 3)
    run = traced(f, [x, w])
    with torch.no_grad(), by_meaning():
        for _ in range(2):
            alive.clear()
            seen.clear()
            run(x, w)
    assert alive[0] == 3 and max(alive) == 4, "input, weight, an operand and a result"
