"""Kernels that a call's gradients will need: processes compile them while the forward pass goes on.

With ``config.compile = "now"`` a call waits for its kernel. Those of the gradients are known at the
forward call already, but for the strides of the result's gradient, which are taken to be the result's.
The backward pass waits for what a process has begun and compiles the rest; it chooses as it would alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from transconv.conv import Prop
from transconv.runtime import ahead, helpers, is_collecting
from transconv.torch_ops import execute, shapes
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.settings import settings

if TYPE_CHECKING:
    from transconv.runtime import Question
    from transconv.torch_ops.route import Route


def gradients(params: Params, x: torch.Tensor, w: torch.Tensor, flags: execute.Flags, aligned: bool,
              mode: str) -> None:
    """Have processes compile the gradients of a checked, batched call of which no route is known, for the
    tensors of input and weight that require one."""
    if workers := processes(x, w, mode):
        with quietly():
            compile_ahead(_questions(params, x, w, flags, aligned), workers)


def trained(route: Route, x: torch.Tensor, w: torch.Tensor, flags: execute.Flags, aligned: bool,
            mode: str) -> None:
    """``gradients`` of a forward route's first call in training, which may be a later one."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        route.trains = True
        gradients(route.params, x, w, flags, aligned, mode)


def processes(x: torch.Tensor, w: torch.Tensor, mode: str) -> int:
    """How many processes may compile ahead of a call in training. None in other modes than ``now``, for
    kernels of any size, for calls that torch computes, while a CUDA graph is captured, and where they
    would gain nothing (``runtime.helpers``)."""
    if (mode != "now" or settings.sizes == "any" or not (x.requires_grad or w.requires_grad)
            or not torch.is_grad_enabled() or is_collecting() or execute.reasons(x, w)
            or execute.capturing(x.device)):
        return 0
    return helpers()


@contextmanager
def quietly() -> Iterator[None]:
    """An error ends what is within ``with``, not the call: that, or the backward pass, meets it if it is
    about the kernel."""
    try:
        yield
    except Exception as error:
        execute.log.debug("not compiled ahead: %s", error, exc_info=True)


def compile_ahead(questions: Iterable[Question], workers: int) -> None:
    """Hand questions of convolutions to processes, once each."""
    from transconv.conv import Compiled

    ahead(questions, Compiled, workers)


def _questions(params: Params, x: torch.Tensor, w: torch.Tensor, flags: execute.Flags,
               aligned: bool) -> Iterator[Question]:
    last, shape = shapes.channels_last_result(x, w), shapes.output_shape(x.shape, w.shape, params)
    near, weight = ((tuple(t.shape), t.stride()) for t in (x, w))
    of_near, of_weight = ((tuple(t.shape), shapes.result_strides(t.shape, last)) for t in (x, w))
    # The gradient of one pixel is a sum, which torch leaves contiguous.
    far = shape, shapes.result_strides(shape, last and any(n != 1 for n in shape[2:]))
    data = Prop.FWD if params.transposed else Prop.BWD_D
    for on, direction, tensors in ((x.requires_grad, data, (of_near, weight, far)),
                                   (w.requires_grad, Prop.BWD_W, (near, of_weight, far))):
        if on and all(shape):
            problem = execute.describe(x.dtype, *tensors, params, flags.math)
            yield execute.question(problem, direction, x.device, "", aligned, flags.deterministic)
