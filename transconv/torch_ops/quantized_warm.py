"""Repeated quantised calls: found by their weight and checked by one guard, as warm.py finds others.

An entry is for one kind of call: the caller's numbers and quantities that are no tensors by identity, the
properties of all tensors by torch's guard. A call that differs goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from transconv.torch_ops import frozen, warm
from transconv.torch_ops.entries import Switches, only_on
from transconv.torch_ops.route import ALIGNMENT, current_device
from transconv.torch_ops.zero_sums import are_known

if TYPE_CHECKING:
    from transconv.torch_ops.execute import Flags
    from transconv.torch_ops.quantized_route import QuantizedRoute

Tensor = torch.Tensor
Call = Callable[..., Tensor]

_entries: dict[int, Call] = {}

find = _entries.get
warm.on_forget(_entries.clear)
frozen.on_change(lambda weight: _entries.pop(weight, None) and None)


def note(function: Any, general: Call, x: Tensor, weight: Tensor, bias: Tensor | None,
         numbers: tuple[Any, ...], given: dict[str, Any], route: QuantizedRoute, flags: Flags,
         aligned: bool) -> None:
    """A call with a known route went the general way: after a few, make an entry for its kind."""
    if any(isinstance(n, list) for n in numbers):
        return  # lists can change under their identity
    place = warm.due(("quantized", id(weight)), warm.CHAIN)
    tensors = [t for t in (x, weight, *given.values(), bias) if isinstance(t, Tensor)]
    if not place or any(t.requires_grad for t in tensors):
        return
    check = warm.guard(*tensors)
    if check is not None:
        others = _entries.get(id(weight), general) if place > 1 else general
        _entries[id(weight)] = _entry(others, check, function, bias is not None, numbers, given, route,
                                      Switches(flags, x.dtype, route), aligned)


def _entry(others: Call, check: Callable[..., bool], function: Any, biased: bool, numbers: tuple[Any, ...],
           given: dict[str, Any], route: QuantizedRoute, switches: Switches, aligned: bool) -> Call:
    stride, padding, output_padding, dilation, groups = numbers
    names, values = tuple(given), tuple(given.values())
    fixed = tuple((i, v) for i, v in enumerate(values) if not isinstance(v, Tensor))
    places = tuple(i for i, v in enumerate(values) if isinstance(v, Tensor))
    device, same = only_on(route), switches.same
    whole = ("input", "weight", *(names[i] for i in places), *["bias"] * biased)
    start, read = route.bound_to(whole)
    knows = route.knows
    zero, sums = (names.index(n) if knows else 0 for n in ("input_zero_point", "input_zero_sums"))

    def call(f: Any, x: Tensor, w: Tensor, b: Tensor | None, s: Any, p: Any, o: Any, d: Any, g: Any,
             q: dict[str, Any]) -> Tensor:
        if (p is padding and s is stride and g is groups and d is dilation and f is function
                and o is output_padding and (b is not None) is biased and tuple(q) == names
                and same() and (device is None or device == current_device())):
            said = [*q.values()]
            if knows and not are_known(w, said[zero], said[sums]):
                return others(f, x, w, b, s, p, o, d, g, q)
            tensors = [x, w, *(said[i] for i in places)]
            if b is not None:
                tensors.append(b)
            pointers = 0
            if check(*tensors):  # that all are tensors, too
                for t in tensors:
                    pointers |= t.data_ptr()
                if (not pointers & ALIGNMENT) is not aligned:
                    return others(f, x, w, b, s, p, o, d, g, q)
                for i, v in fixed:
                    if said[i] is not v:
                        break
                else:
                    if start is None:
                        return route.run(x, w, b, q)
                    return start(x, w, *[tensors[i] if t is None else t for i, t in read])
        return others(f, x, w, b, s, p, o, d, g, q)

    return call
