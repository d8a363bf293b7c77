"""Large values between operations of elements are computed part by part by the reference of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from transconv.graph.verification import fx_reference

Tensor = torch.Tensor


def norm_in_f32(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A convolution, a norm of its features that is computed in f32, and what two readers need."""
    y = torch.conv2d(x, w, padding=1)
    mean, scale = w.float().mean((1, 2, 3)), w.float().std((1, 2, 3))
    wide = (y - mean[:, None, None]) * (1 / scale)[:, None, None] + mean[:, None, None]
    low = wide.to(x.dtype)
    return low.relu(), low + y, torch.nn.functional.max_pool2d(low, 2)


def of_broadcasts(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Operands that are large together alone, comparisons, numbers, and a sum behind them."""
    row, column = x[:, :, :1], x[:, :, :, :1]
    grid = (row * column).float()
    chosen = torch.where(grid > 0.1, grid.exp(), 2 - grid)
    return chosen, (chosen * grid).sum((2, 3)), torch.nn.functional.gelu(grid)


def of_one_sample(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """One image, whose first dim cannot be cut, and a view between."""
    one = x[:1].float()
    return ((one * 2 + 1).sigmoid().flatten(1) - 0.5).tanh(), one.permute(0, 2, 3, 1) * 3 + 1


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("function", [norm_in_f32, of_broadcasts, of_one_sample])
@pytest.mark.parametrize("last", [False, True])
def test_parts_are_the_whole(
    function: Callable[..., Any], wide: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 11, 13, generator=generator).bfloat16()
    w = torch.randn(7, 5, 3, 3, generator=generator).bfloat16()
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    gm = make_fx(function)(x, w)
    reference = fx_reference.Reference(gm)
    calls_of: list[Any] = []
    called = fx_reference._called

    def watched(*args: Any) -> Any:
        calls_of.append(args[0])
        return called(*args)

    monkeypatch.setattr(fx_reference, "_called", watched)

    def results() -> tuple[list[Tensor], int]:
        calls_of.clear()
        found = []
        for name in reference.results:
            values = reference.values([x, w])
            assert name is not None
            found.append(values.evaluated(values.needed(name), [name], wide)[name])
        return found, len(calls_of)

    whole, calls = results()
    monkeypatch.setattr(fx_reference, "PART", 1000)
    monkeypatch.setattr(fx_reference, "FEW", 100)
    parts, more = results()
    assert more > calls + 4, "something was computed in parts"
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # a CPU's exp of the last few is another


def test_a_norm_in_f32_is_never_there_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, scale = torch.randn(2, 32, 1, 1)
    x = torch.randn(8, 32, 24, 24).bfloat16()
    gm = make_fx(lambda x: (((x - mean) * scale + mean).to(x.dtype).relu(),))(x)
    largest = 0
    called = fx_reference._called

    def watched(*args: Any) -> Any:
        nonlocal largest
        made = called(*args)
        largest = max(largest, made.nbytes if isinstance(made, Tensor) else 0)
        return made

    monkeypatch.setattr(fx_reference, "_called", watched)
    monkeypatch.setattr(fx_reference, "PART", 1 << 14)
    values = fx_reference.Reference(gm).values([x])
    assert values.of.results[0] is not None
    values.evaluated(values.needed(values.of.results[0]), [values.of.results[0]])
    assert largest <= x.nbytes, f"{largest} bytes of a value of {x.nbytes}"
