"""Kernels that a call's gradients will need: processes compile them while the forward pass goes on.

With ``config.compile = "now"`` a call waits for its kernel. Those of the gradients are known at the
forward call already, but for the strides of the result's gradient, which are taken to be the result's.
The backward pass waits for what a process has begun and compiles the rest; it chooses as it would alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from transconv.calls.settings import settings
from transconv.conv import CompiledDirection, ConvProblem, Prop
from transconv.runtime import ahead, begin_processes, beside, helpers, is_collecting
from transconv.torch_ops import shapes
from transconv.torch_ops.arguments import Ints, Params
from transconv.torch_ops.calls import lower_call

if TYPE_CHECKING:
    from transconv.runtime import PlanRequest
    from transconv.torch_ops.calls.route import ConvCall


LIKE = "mb8ic64ih14oc64oh14kh3ph1 dt=bf16 tag=nhwc"  # a request that processes rehearse with


def gradients(params: Params, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags, aligned: bool,
              mode: str) -> None:
    """Have processes compile the gradients of a checked, batched call of which no route is known, for the
    tensors of input and weight that require one."""
    if workers := processes(x, w, mode):
        with quietly():
            asked = questions(params, Given.of(x), Given.of(w), x.requires_grad, w.requires_grad, flags,
                              aligned)
            compile_ahead(asked, workers)


def trained(route: ConvCall, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags, aligned: bool,
            mode: str) -> None:
    """``gradients`` of a forward route's first call in training, which may be a later one."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        route.trains = True
        gradients(route.params, x, w, flags, aligned, mode)


def meanwhile(params: Params, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags,
              aligned: bool) -> None:
    """The same for a call that torch computes while a process compiles its kernel: torch makes the
    gradients, too, which ask for nothing."""
    if (settings.sizes != "any" and torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
            and not is_collecting()):
        with quietly():
            asked = questions(params, Given.of(x), Given.of(w), x.requires_grad, w.requires_grad, flags,
                              aligned)
            compile_ahead(asked, beside(), hurried=False)


def processes(x: torch.Tensor, w: torch.Tensor, mode: str) -> int:
    """How many processes may compile ahead of a call in training. None in other modes than ``now``, for
    kernels of any size, for calls that torch computes, while a CUDA graph is captured, and where they
    would gain nothing (``runtime.helpers``)."""
    if (mode != "now" or settings.sizes == "any" or not (x.requires_grad or w.requires_grad)
            or not torch.is_grad_enabled() or is_collecting() or lower_call.reasons(x, w)
            or lower_call.capturing(x.device)):
        return 0
    return helpers()


def expect(model: torch.nn.Module) -> None:
    """A model was converted: where nothing is on disk, processes start before its first step has work for
    them. With ``now`` none for a model that does not train; none where kernels are not compiled."""
    mode, some = settings.mode, None
    for p in model.parameters():
        if not is_lazy(p) and (mode != "now" or p.requires_grad and model.training):
            some = p
            break
    if some is None or mode == "never" or lower_call.reasons(some, some):
        return
    if workers := processes(some, some, "now") if mode == "now" else beside():
        with quietly():
            like = ConvProblem.parse(LIKE)
            begin_processes(lower_call.question(like, Prop.FWD, some.device, "", True, False), workers)
    if mode == "background":
        lower_call.expect_checks(some.device, some.dtype)


@contextmanager
def quietly() -> Iterator[None]:
    """An error ends what is within ``with``, not the call: that, or the backward pass, meets it if it is
    about the kernel."""
    try:
        yield
    except Exception as error:
        lower_call.log.debug("not compiled ahead: %s", error, exc_info=True)


def compile_ahead(questions: Iterable[PlanRequest], workers: int, hurried: bool = True) -> None:
    """Hand questions of convolutions to processes, once each; ``hurried``: calls may wait for them."""
    ahead(questions, CompiledDirection, workers, hurried)


@dataclass(frozen=True, slots=True)
class Given:
    """What a tensor of a call is like."""

    shape: Ints
    strides: Ints
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Given:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def is_last(self) -> bool:
        """Whether torch takes it for channels_last."""
        return shapes.suggests_channels_last(self.shape, self.strides)

    def sized(self, shape: Ints, channels_last: bool) -> Given:
        """A tensor of its type that a call makes."""
        return replace(self, shape=shape, strides=shapes.result_strides(shape, channels_last))


def questions(params: Params, x: Given, w: Given, of_x: bool, of_w: bool, flags: lower_call.Flags,
              aligned: bool) -> Iterator[PlanRequest]:
    """What the gradients of a call will ask for: that of its input if ``of_x``, of its weight if
    ``of_w``."""
    last, shape = x.is_last or w.is_last, shapes.output_shape(x.shape, w.shape, params)
    near, weight = ((t.shape, t.strides) for t in (x, w))
    of_near, of_weight = ((t.shape, shapes.result_strides(t.shape, last)) for t in (x, w))
    # The gradient of one pixel is a sum, which torch leaves contiguous.
    far = shape, shapes.result_strides(shape, last and any(n != 1 for n in shape[2:]))
    data = Prop.FWD if params.transposed else Prop.BWD_D
    for on, direction, tensors in ((of_x, data, (of_near, weight, far)),
                                   (of_w, Prop.BWD_W, (near, of_weight, far))):
        if on and all(shape):
            problem = lower_call.describe(x.dtype, *tensors, params, flags.math)
            yield lower_call.question(problem, direction, x.device, "", aligned, flags.deterministic)
