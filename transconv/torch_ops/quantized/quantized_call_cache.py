"""Repeated quantised calls: found by their weight and checked by one guard, as calls/call_cache.py finds
others.

An entry is for one kind of call: the caller's numbers and quantities that are no tensors by identity, the
properties of all tensors by torch's guard. A call that differs goes the general way. Calls whose input is
quantised first have entries of their own, which start both kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transconv.ir import defined
from transconv.runtime import allocator
from transconv.torch_ops.calls import call_cache
from transconv.torch_ops.calls.call_guards import Switches, only_on
from transconv.torch_ops.calls.route import ALIGNMENT, current_device
from transconv.torch_ops.conversion import prepacked_weights
from transconv.torch_ops.quantized.zero_point_sums import are_known

if TYPE_CHECKING:
    from transconv.torch_ops.calls.lower_call import Flags
    from transconv.torch_ops.quantized.quantized_route import QuantizedRoute

Tensor = torch.Tensor
Call = Callable[..., Tensor]


class Real(NamedTuple):
    """An input that is quantised first, and what starts the kernel that does it: a function of the input,
    its scale, its zero point if it has one, and the result."""

    input: Tensor
    begin: Callable[..., None] | None


_entries: dict[int, Call] = {}
_of_reals: dict[int, Call] = {}  # whose inputs are quantised first

find, find_real = _entries.get, _of_reals.get
for _each in (_entries, _of_reals):
    call_cache.on_forget(_each.clear)
    prepacked_weights.on_change(lambda weight, entries=_each: entries.pop(weight, None) and None)  # type: ignore[misc]


def note(function: Any, general: Call, x: Tensor, weight: Tensor, bias: Tensor | None,
         numbers: tuple[Any, ...], given: dict[str, Any], route: QuantizedRoute, flags: Flags,
         aligned: bool, real: Real | None) -> None:
    """A call with a known route went the general way: after a few, make an entry for its kind. ``x``: its
    input, quantised from ``real``, if that is given."""
    if any(isinstance(n, list) for n in numbers):
        return  # lists can change under their identity
    entries = _entries if real is None else _of_reals
    place = call_cache.due((real is None, "quantized", id(weight)), call_cache.CHAIN)
    first = x if real is None else real.input
    tensors = [t for t in (first, weight, *given.values(), bias) if isinstance(t, Tensor)]
    if not place or any(t.requires_grad for t in tensors):
        return
    if real is not None and (real.begin is None or route.start is None or not aligned):
        return
    check = call_cache.guard(*tensors)
    if check is not None:
        others = entries.get(id(weight), general) if place > 1 else general
        entries[id(weight)] = _entry(others, check, function, bias is not None, numbers, given, route,
                                     Switches(flags, x.dtype, route), aligned, x, real)


def _entry(others: Call, check: Callable[..., bool], function: Any, biased: bool, numbers: tuple[Any, ...],
           given: dict[str, Any], route: QuantizedRoute, switches: Switches, aligned: bool, x: Tensor,
           real: Real | None) -> Call:
    tensors = tuple([isinstance(v, Tensor) for v in given.values()])
    order = ["input", "weight", *(n for n, is_tensor in zip(given, tensors, strict=True) if is_tensor),
             *["bias"] * biased]
    start, read = route.bound_to(order)
    place = tuple(given).index
    summed = (place("input_zero_point"), place("input_zero_sums")) if route.knows else None
    names = {"input": "x", "weight": "w", "bias": "b", **{n: f"v{at}" for at, n in enumerate(given)}}
    operands = tuple([f"r{at}" if t is not None else names[order[i]] for at, (i, t) in enumerate(read)])
    first = [] if real is None else ["x", *(names[n] for n in ("input_scale", "input_zero_point")
                                            if n in given)]
    made = _spelled(tensors, biased, None if start is None else operands, tuple(first), summed)
    begin, memory = (None, ()) if real is None else (real.begin, (tuple(x.shape), x.stride(), x.dtype))
    return made(others, check, function, *numbers, tuple(given), switches.same, only_on(route),
                current_device, are_known, aligned, ALIGNMENT, route, start, begin, allocator.quickest(),
                memory, *[None if isinstance(v, Tensor) else v for v in given.values()],
                *[t for _, t in read])


@lru_cache(maxsize=256)
def _spelled(tensors: tuple[bool, ...], biased: bool, operands: tuple[str, ...] | None,
             first: tuple[str, ...], summed: tuple[int, int] | None) -> Callable[..., Call]:
    """What makes an entry, written out for quantities some of which are ``tensors``. ``operands``: of the
    kernel, behind input and weight; None where there is more to do; ``first``: of the kernel that
    quantises the input, if one does; ``summed``: where the zero point and its sums are, if these are
    read."""
    values = [f"v{at}" for at in range(len(tensors))]
    fixed = "".join(f" and {v} is c{v}" for v, is_tensor in zip(values, tensors, strict=True)
                    if not is_tensor)
    if summed is not None:
        fixed += " and are_known(w, v{}, v{})".format(*summed)
    seen = ["x", "w", *(v for v, is_tensor in zip(values, tensors, strict=True) if is_tensor),
            *["b"] * biased]
    pointers = " | ".join(f"{t}.data_ptr()" for t in seen)
    run = ["return route.run(x, w, b, q)"] if operands is None else [
        f"return start({', '.join(('x', 'w', *operands))})"]
    if first:
        run = ["y = empty(*memory)", f"begin({', '.join((*first, 'y'))})", run[0].replace("(x, ", "(y, ")]
    lines = "\n                ".join(run)
    reads = ", ".join([f"c{v}" for v in values] + [f"r{at}" for at in range(len(operands or ()))])
    made: Callable[..., Call] = defined(f"""
def made(others, check, function, stride, padding, output_padding, dilation, groups, names, same, device,
         current, are_known, aligned, alignment, route, start, begin, empty, memory, {reads}):
    def call(f, x, w, b, s, p, o, d, g, q):
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and b is {'not ' * biased}None and tuple(q) == names and same()
                and (device is None or device == current())):
            [{', '.join(values)}] = q.values()
            if (check({', '.join(seen)}){fixed}
                    and (not ({pointers}) & alignment) is aligned):
                {lines}
        return others(f, x, w, b, s, p, o, d, g, q)
    return call
""", "made")
    return made
