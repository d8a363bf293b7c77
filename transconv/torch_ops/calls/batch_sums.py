"""The gradient of a bias in invariant mode: sums over samples and positions by a kernel for any number of
samples, whose terms are grouped alike in every batch. Otherwise torch sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch

from transconv.calls.guard import at_multiple
from transconv.calls.settings import settings
from transconv.compute import BATCH, Alone, parse
from transconv.conv import TensorSpec, bias_sums
from transconv.ir import DType, Layout
from transconv.runtime import Launch, PlanRequest
from transconv.support import Unsupported
from transconv.target import Target
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Ints, Order, Params

LIKE = 8  # samples in the text, which stand for any number


def bias_gradient(
    grad: torch.Tensor,
    weight: torch.Tensor,
    p: Params,
    kinds: Mapping[torch.dtype, DType],
    target_of: Callable[..., Target],
) -> torch.Tensor:
    """The sum of a result's gradient at all positions of all samples. ``kinds``: of its elements, by
    torch's types; ``target_of``: a device's. Unsupported in invariant mode where no kernel computes it."""
    channels = weight.shape[1] * p.groups if p.transposed else weight.shape[0]
    if not settings.invariant or grad.shape[1] != channels:
        return arguments.bias_gradient(grad, weight, p)
    if grad.dtype not in kinds:
        raise Unsupported("invariant:torch", f"torch would add up the gradient of a bias of {grad.dtype}")
    order = arguments.order_of(grad.shape, grad.stride(), channels_last=False)
    if order is None:
        order, grad = tuple(range(grad.dim())), grad.contiguous()
    grad = at_multiple(grad)
    launch = _launch(tuple(grad.shape[1:]), order, kinds[grad.dtype], target_of(grad.device), grad.device)
    made = grad.new_empty(channels)
    launch.at({BATCH: grad.shape[0]}).start([grad, made])
    return made


@lru_cache(maxsize=1024)
def _launch(sizes: Ints, order: Order, kind: DType, target: Target, device: torch.device) -> Launch:
    """The kernel for samples of these sizes."""
    shape = (LIKE, *sizes)
    text = bias_sums(TensorSpec(kind, Layout.dense(kind, shape, order)), shape, kind)
    request = PlanRequest(Alone(parse(text)), target, True)
    return Launch.requested(request.of_any_batch(), device, settings.mode)
