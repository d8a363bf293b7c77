"""The function that a region is written out as: other inputs than before, and when memory goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import Meant, by_meaning, traced
from transconv.functional.calls.compiled_launch import TensorMemory
from transconv.graph.regions import graph_parts, region_calls
from transconv.runtime import Spaces

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
def test_inputs_that_lie_otherwise(
    otherwise: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    arranged = []
    arrange = region_calls.RegionLaunches.arrange

    def counted(self: region_calls.RegionLaunches, *given: object) -> None:
        arranged.append(1)
        arrange(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(region_calls.RegionLaunches, "arrange", counted)

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


def test_launches_share_memory_for_workspaces() -> None:
    """They take them behind their tensors; memory is as large as any needs it, and goes with the last."""
    big = region_calls.SHARED // 4 + 1
    needs: list[Spaces] = [
        (((8,), torch.float32),),
        (),
        (((6,), torch.bfloat16), ((90,), torch.float32)),
        (((big,), torch.float32), ((4,), torch.float32), ((3,), torch.float32)),
        (((5,), torch.bfloat16),),
    ]
    made: list[weakref.ref[Tensor]] = []
    seen: list[list[tuple[torch.dtype, int]]] = []
    alive: list[int] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        found = torch.empty_strided(shape, strides, dtype=dtype)
        made.append(weakref.ref(found))
        return found

    def start(x: Tensor, y: Tensor, *spaces: Tensor) -> None:
        seen.append([(s.dtype, s.numel()) for s in spaces])
        alive.append(sum(r() is not None for r in made) - 2)  # those without the operand and the result

    pieces: list[Any] = [object() for _ in range(len(needs) + 1)]
    lines = [
        region_calls.LaunchLine(
            SimpleNamespace(given=[x], stored=[y]),
            start,  # type: ignore[arg-type]
            [TensorMemory((2,), (1,), torch.float32)],
            {},
            [x],
            spaces,
        )
        for x, y, spaces in zip(pieces, pieces[1:], needs, strict=False)
    ]
    run = region_calls.RegionWriter(pieces[:1], lines, [(pieces[-1], None)], empty).run()
    run([empty((2,), (1,), torch.float32)])
    f, h = torch.float32, torch.bfloat16
    assert seen == [[(f, 90)], [], [(h, 6), (f, 90)], [(f, big), (f, 4), (f, 3)], [(h, 6)]]
    assert alive == [1, 1, 2, 4, 1], "the large one and both of f32 go behind the fourth"


def test_a_graph_of_one_region_needs_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are results, results twice, and values that are known."""
    wired = []
    found = graph_parts.Parts.wired

    def noted(self: graph_parts.Parts) -> graph_parts.Wired | None:
        wired.append(found(self))
        return wired[-1]

    monkeypatch.setattr(graph_parts.Parts, "wired", noted)

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z = x.exp() + y
        return y, z, z, x.sin()

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    run = traced(f, [x, y])
    with torch.no_grad(), by_meaning():
        for _ in range(2):
            for a, b in zip(run(x, y), f(x, y), strict=True):
                assert torch.allclose(a, b, atol=1e-5)
    assert wired and wired[0] is not None

    def several(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp().sort().values
        return y.sin(), x

    run = traced(several, [x])
    with torch.no_grad(), by_meaning():
        for a, b in zip(run(x), several(x), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    assert wired[-1] is None, "a sort is torch's"
