"""Sending one call of a public function the right way.

Plain eager tensors are looked up by what they look like, and launched. Whatever wants to see the call is
given it: torch computes under functorch's transforms, forward derivatives and for subclasses; compilers
and modes see the operator ``transconv::function``."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from transconv.errors import Unsupported
from transconv.functional import operators, proof
from transconv.functional.bound import Bound, Function, Numbers, Values, as_tuple, bind
from transconv.functional.launches import aligned, deterministic, refused
from transconv.functional.routes import Route, made_of
from transconv.torch_ops import routes, stats
from transconv.torch_ops.dispatch import is_plain
from transconv.torch_ops.operators import library, register_fake

Tensor = torch.Tensor
Tensors = tuple[Tensor | None, ...]


def call(f: Function, tensors: Tensors, numbers: Numbers) -> Any:
    """A public function's result. Raises what torch raises for a wrong call."""
    if torch.compiler.is_compiling():
        return _traced(f, tensors, numbers)
    given = [t for t in tensors if t is not None]
    if reason := _unusual(given):
        stats.handed_over(reason, f.name)
        return f.by_torch(tensors, numbers)
    numbers = tuple(tuple(n) if isinstance(n, list) else n for n in numbers)
    if torch._C._is_any_autocast_enabled():
        tensors = _cast(f, tensors)
        given = [t for t in tensors if t is not None]
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return _traced(f, tensors, numbers)
    wanted = tuple(t.requires_grad for t in given) if torch.is_grad_enabled() else ()
    key = (f, numbers, *map(type, numbers), wanted, deterministic(), aligned(given),
           *((t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in tensors))
    route = routes.find(key)
    if route is None:
        route = routes.keep(key, _made(f, tensors, numbers, wanted), [])
    route.calls += 1
    if route.bound is None:
        return f.by_torch(tensors, numbers)
    results = apply(route, *given) if True in wanted else route.forward(given)[0]
    if f.finish is not None:
        return f.finish(tensors, numbers, as_tuple(results))
    return results if isinstance(results, Tensor) else results[0]


def _unusual(given: list[Any]) -> str:
    """Why a call is torch's before it is looked up; empty if it is not."""
    if torch._C._are_functorch_transforms_active():
        return "transform:functorch"
    if forward_ad._current_level >= 0:
        return "transform:forward_ad"
    for t in given:
        if not isinstance(t, Tensor):
            return f"form:{type(t).__name__}"
        if not is_plain(t):
            return f"subclass:{type(t).__name__}" if type(t) is not Tensor else "layout:sparse"
        if t.is_meta or t.is_neg() or t._is_zerotensor() or t.is_conj():
            return "layout:view" if not t.is_meta else "device:meta"
    return "" if given else "form:None"


def _cast(f: Function, tensors: Tensors) -> Tensors:
    """The casts that torch's autocast makes for this function on a GPU."""
    near = next(t for t in tensors if t is not None)
    device = near.device.type
    if not f.autocast or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.float32 if f.autocast == "f32" else torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype)
                 for t in tensors)


# -- making a route --------------------------------------------------------------------------------


def _made(f: Function, tensors: Tensors, numbers: Numbers, wanted: tuple[bool, ...]) -> Route:
    """Decide who computes calls of one kind."""
    given = [t for t in tensors if t is not None]
    why, message = _refused(f, tensors), ""
    if not why:
        try:
            bound = bind(f, tensors, numbers, wanted)
            route = made_of(bound, given[0].device, aligned(given))
            proof.agree(route, tensors)
            return route
        except Unsupported as error:
            why, message = error.reason, error.message
    stats.announce(why, message, f.name)
    return Route(None, why, f.name)


def _refused(f: Function, tensors: Tensors) -> str:
    given = [t for t in tensors if t is not None]
    whole = [f.whole[i] for i, t in enumerate(tensors) if t is not None and i < len(f.whole)]
    why = refused(given, whole)
    if not why and torch.is_autocast_enabled(given[0].device.type) and (
            f.autocast == "torch" or given[0].device.type == "cpu"):
        return "autocast"
    return why


# -- derivatives -----------------------------------------------------------------------------------


class _Apply(torch.autograd.Function):
    """``apply(how, *operands)``: how is a Route, or a Bound inside a graph."""

    @staticmethod
    def forward(ctx: Any, how: Any, *given: Tensor) -> Any:
        results, values = how.forward(given) if isinstance(how, Route) else _forward_in_graph(how, given)
        bound = _bound(how)
        ctx.how = how
        ctx.save_for_backward(*(values[name] for name in bound.saved))
        if len(results) > 1:
            ctx.mark_non_differentiable(*results[1:])
            return results
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        how = ctx.how
        bound = _bound(how)
        values = dict(zip(bound.saved, ctx.saved_tensors, strict=True))
        if torch.is_grad_enabled():
            return None, *_again(bound, values, grad)
        if isinstance(how, Route) and not _watched(grad):
            return None, *how.backward(values, grad)
        memory = bound.forward.stored[bound.results[0]]
        values["G"] = grad.expand(memory.shape)
        for step in bound.backward:
            operators.run(bound, step, values)
        return None, *(values.get(f"d{n}") if on else None
                       for n, on in zip(bound.operands, bound.wanted, strict=True))


def _bound(how: Any) -> Bound:
    return how.bound if isinstance(how, Route) else how  # type: ignore[return-value]


apply: Any = super(torch.autograd.Function, _Apply).apply
_apply_in_graph: Any = _Apply.apply


def _watched(grad: Tensor) -> bool:
    """Whether somebody wants to see the operations behind a gradient, or it is no plain tensor."""
    return bool(torch._C._len_torch_dispatch_stack() or torch.compiler.is_compiling()
                or torch._C._are_functorch_transforms_active() or not is_plain(grad))


def _again(bound: Bound, values: Values, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated themselves, in torch's operations."""
    f = bound.function
    if f.again is not None:
        return f.again(values, bound.numbers, grad)
    with torch.enable_grad():
        given = [values[name] if name in values else grad.new_zeros(()).expand(shape).requires_grad_()
                 for shape, name in zip(bound.shapes, bound.operands, strict=True)]
        made = as_tuple(f.torch(*bound.spread(given), *bound.numbers))[0]
        of = [t for t, on in zip(given, bound.wanted, strict=True) if on]
        found = iter(torch.autograd.grad(made, of, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if on else None for on in bound.wanted)


# -- in graphs -------------------------------------------------------------------------------------


def _traced(f: Function, tensors: Tensors, numbers: Numbers) -> Any:
    """Inside compilers, tracers and modes: the operator, whatever comes of it."""
    for t in tensors:
        if t is not None and not isinstance(t, Tensor):
            return f.by_torch(tensors, numbers)
    results = operators.function(operators.spelled(f, numbers), list(tensors))
    return results[0] if f.finish is None else f.finish(tensors, numbers, results)


def _forward_in_graph(bound: Bound, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Values]:
    values = dict(zip(bound.operands, given, strict=True))
    operators.run(bound, bound.forward, values)
    return tuple(values[name] for name in bound.results), values


def _function(call: str, tensors: list[Tensor | None]) -> list[Tensor]:
    """The operator ``function``, with derivatives where autograd is on."""
    f, numbers = operators.read(call)
    given = [t for t in tensors if t is not None]
    why = "transform:forward_ad" if forward_ad._current_level >= 0 else _refused(f, tuple(tensors))
    message = ""
    if not why:
        wanted = tuple(t.requires_grad for t in given) if torch.is_grad_enabled() else ()
        try:
            bound = bind(f, tensors, numbers, wanted)
            made = (as_tuple(_apply_in_graph(bound, *given)) if True in wanted
                    else _forward_in_graph(bound, tuple(given))[0])
            return list(made)
        except Unsupported as error:
            why, message = error.reason, error.message
    stats.announce(why, message, f.name)
    return list(as_tuple(f.torch(*tensors, *numbers)))


library.impl("function", _function, "Autograd")
for _key in ("CPU", "CUDA"):
    library.impl("function", _function, _key)
register_fake("transconv::function", _function, lib=library)
