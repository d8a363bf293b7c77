"""Kernels that a call's gradients will need: processes compile them while the forward pass goes on.

With ``config.compile = "now"`` a call waits for its kernel. Those of the gradients are known at the
forward call already, but for the strides of the result's gradient, which are taken to be the result's.
The backward pass waits for what a process has begun and compiles the rest; it chooses as it would alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from transconv.conv import Prop
from transconv.errors import TransconvError
from transconv.runtime import ahead, helpers, is_collecting
from transconv.torch_ops import execute, shapes
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.settings import settings

if TYPE_CHECKING:
    from transconv.runtime import Question


def gradients(params: Params, x: torch.Tensor, w: torch.Tensor, flags: execute.Flags, aligned: bool,
              mode: str) -> None:
    """Have processes compile the gradients of a checked, batched call of which no route is known, where its
    input or weight requires them. Does nothing in other modes than ``now``, for kernels of any size, for
    calls that torch computes, while a CUDA graph is captured, and where processes would gain nothing
    (``runtime.helpers``)."""
    wanted = x.requires_grad, w.requires_grad
    if (mode != "now" or settings.sizes == "any" or not any(wanted) or not torch.is_grad_enabled()
            or is_collecting() or execute.reasons(x, w) or execute.capturing(x.device)):
        return
    workers = helpers()
    if not workers:
        return
    from transconv.conv import Compiled

    try:
        ahead(_questions(params, x, w, wanted, flags, aligned), Compiled, workers)
    except (TransconvError, OSError) as error:  # the backward pass meets it, if it is one
        execute.log.debug("nothing is compiled ahead: %s", error)


def _questions(params: Params, x: torch.Tensor, w: torch.Tensor, wanted: Sequence[bool],
               flags: execute.Flags, aligned: bool) -> Iterator[Question]:
    last = shapes.channels_last_result(x, w)
    near, weight = ((tuple(t.shape), t.stride()) for t in (x, w))
    far, of_near, of_weight = (
        (shape, shapes.result_strides(shape, last))
        for shape in (shapes.output_shape(x.shape, w.shape, params), tuple(x.shape), tuple(w.shape)))
    data = Prop.FWD if params.transposed else Prop.BWD_D
    for on, direction, tensors in ((wanted[0], data, (of_near, weight, far)),
                                   (wanted[1], Prop.BWD_W, (near, of_weight, far))):
        if on and all(far[0]):
            problem = execute.describe(x.dtype, *tensors, params, flags.math)
            yield execute.question(problem, direction, x.device, "", aligned, flags.deterministic)
