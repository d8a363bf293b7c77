"""Decides whether a kernel or torch computes a call: the checks, the compiler, the fallback policy.

In: a checked call. Out: a Route whose kernel gave one checked result, or that goes to torch for a
reason. Nothing here runs twice for the same kind of call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transconv.conv import Prop
from transconv.errors import Unsupported
from transconv.runtime import COMPILING, apart
from transconv.torch_ops import arguments, execute, shapes, stats
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.route import BackwardRoutes, Route

PASSING = ("capture:cold", COMPILING)  # reasons of this moment: the next call is decided anew


def compile_route(route: Route, near: torch.Tensor | None, weight: torch.Tensor | None,
                  far: torch.Tensor | None, epilogue: str, aligned: bool, flags: execute.Flags,
                  mode: str, **extra: torch.Tensor) -> None:
    """Give the route a kernel whose first result was checked; Unsupported if there is none, or none yet.
    Of the tensors, the one that the route makes is None; ``extra`` is what the epilogue reads."""
    some = near if near is not None else weight
    assert some is not None
    device, own = some.device, (route.shape, route.strides)
    if execute.capturing(device):
        raise Unsupported("capture:cold", "a kernel cannot be built while a CUDA graph is captured;"
                                          " call once before capturing")
    shapes_of = [own if t is None else like(t) for t in (near, weight, far)]
    problem = execute.describe(some.dtype, shapes_of[0], shapes_of[1], shapes_of[2], route.params,
                               flags.math)
    bias = extra.get("bia")
    compiled = execute.planned(problem, route.direction, device, epilogue, aligned,
                               flags.deterministic, None if bias is None else bias.dtype, mode)
    src, dst = (far, near) if route.params.transposed else (near, far)
    operands = {name: t for name, t in (("src", src), ("wei", weight), ("dst", dst))
                if t is not None}
    route.aligned = aligned
    route.compiled = execute.proven(compiled, aligned, lambda: some.new_empty_strided(*own),
                                    **operands, **extra)
    if route.direction is not Prop.BWD_W and far is None:
        route.halves = apart(route.compiled, "wei")


def settle(route: Route, why: list[str], message: str = "") -> None:
    """Send the route to torch, as far as the policy allows."""
    route.reason = why[0]
    for reason in why:
        stats.announce(reason, message)


def like(tensor: torch.Tensor) -> execute.Like:
    return tuple(tensor.shape), tensor.stride()


def make_forward(params: Params, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                 flags: execute.Flags, aligned: bool, mode: str) -> Route:
    """Decide who computes a checked forward call."""
    route = Route(Prop.BWD_D if params.transposed else Prop.FWD, params,
                  shapes.output_shape(x.shape, w.shape, params), shapes.channels_last_result(x, w))
    why = execute.reasons(x, w) or ([] if all(route.shape) else ["shape:empty"])
    if why:
        settle(route, why)
        return route
    route.copies_bias = b is not None and not b.is_contiguous()
    try:
        if b is not None:
            try:
                compile_route(route, x, w, None, "bias", aligned, flags, mode, bia=b.contiguous())
                return route
            except Unsupported as error:
                if error.reason in PASSING:
                    raise
                route.adds_bias = True
        compile_route(route, x, w, None, "", aligned, flags, mode)
    except Unsupported as error:
        settle(route, [error.reason], error.message)
    return route


def make_backward(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
                  mask: Sequence[bool], flags: execute.Flags, aligned: bool, mode: str) -> BackwardRoutes:
    """Decide who computes which gradient. RuntimeError where the tensors do not fit."""
    arguments.check_tensors(x, w, None)
    arguments.check_shapes(x.shape, w.shape, None, params)
    shapes.check_grad(grad, x, w, params)
    channels_last = shapes.channels_last_result(x, w)
    made: list[Route | None] = [None, None]
    why = execute.reasons(x, w) or ([] if grad.numel() else ["shape:empty"])
    data_direction = Prop.FWD if params.transposed else Prop.BWD_D
    for at, (direction, wanted) in enumerate(((data_direction, x), (Prop.BWD_W, w))):
        if not mask[at]:
            continue
        route = made[at] = Route(direction, params, tuple(wanted.shape), channels_last)
        if why:
            settle(route, why)
            continue
        near, weight = (None, w) if at == 0 else (x, None)
        try:
            compile_route(route, near, weight, grad, "", aligned, flags, mode)
        except Unsupported as error:
            settle(route, [error.reason], error.message)
    return BackwardRoutes(params, channels_last, made[0], made[1], mask[2], grad.dim())
