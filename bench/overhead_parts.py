"""Where the microseconds of one warm call go: its parts, each timed alone.

The parts are those of docs/drop_in.md, "What a call costs". A part that only a GPU has is left out
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import transconv
from transconv.calls import guard
from transconv.calls.guard import check_of
from transconv.torch_ops import functional
from transconv.torch_ops.calls import call_attributes, layer_keys, lower_call, route, select_impl

Call = Callable[[], object]


def parts(device: str) -> dict[str, Call]:
    """The parts of a float32 conv2d of (1, 16, 8, 8) with (16, 16, 3, 3), padding 1."""
    x = torch.randn(1, 16, 8, 8, device=device)
    w = torch.randn(16, 16, 3, 3, device=device)
    leaf = w.clone().requires_grad_()
    for _ in range(2 * guard.PATIENCE + 2):
        transconv.conv2d(x, w, padding=1)
        transconv.conv2d(x, leaf, padding=1)
    req = call_attributes.request("conv2d", 2, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    found: route.ConvCall = select_impl.forward_route(req, x, w, None, "now")
    check = check_of(x, w)
    assert check is not None, "this torch has no guard of tensors"
    made: dict[str, Call] = {
        "an empty `with torch.no_grad()`": _nothing,
        "guard: type, dtype, sizes, strides, keys": lambda: check(x, w),
        "numeric switches": lambda: lower_call.flags(torch.float32),
        "two addresses": lambda: x.data_ptr() | w.data_ptr(),
        "the general key": lambda: layer_keys.forward_key(req, x, w, None),
    }
    if found.start is not None and found.compiled is not None:
        start = found.start
        y = torch.empty_strided(found.shape, found.strides, device=device)
        begin = found.compiled.starter(found.device, found.aligned)
        assert begin is not None
        made |= {
            "an empty result": lambda: route._empty(found.shape, found.strides, torch.float32),
            "a launch": lambda: begin(x, w, y),
            "a result and a launch": lambda: start(x, w),
        }
    apply = functional.function_of(found, biased=False)
    made |= {
        "a whole call": lambda: transconv.conv2d(x, w, padding=1),
        "the same without a memory": lambda: functional.dispatch(
            functional.CONV2D, x, w, None, 1, 1, 0, 1, 1
        ),
        "an autograd function and its launch": lambda: apply(x, leaf),
        "a whole call with gradients": lambda: transconv.conv2d(x, leaf, padding=1),
    }
    return made | floors(x, leaf)


class Nothing(torch.autograd.Function):
    """The least that a function with derivatives in Python does: two tensors kept, two made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(w)


def floors(x: torch.Tensor, w: torch.Tensor) -> dict[str, Call]:
    """The cost of a call and its gradients without a kernel: in Python, and in torch's C++."""
    leaf, ones = x.clone().requires_grad_(), torch.ones_like(x)
    apply: Any = Nothing.apply

    def python() -> object:
        return torch.autograd.grad(apply(leaf, w), (leaf, w), ones)

    def native() -> object:
        return torch.autograd.grad(leaf * leaf, leaf, ones)

    return {"an empty autograd function and back": python, "x * x and back, by torch": native}


def _nothing() -> None:
    with torch.no_grad():
        pass
