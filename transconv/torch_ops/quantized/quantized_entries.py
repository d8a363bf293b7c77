"""Entries of repeated quantised calls: found by their weight, checked by one guard (calls/guard.py).

An entry is for one kind of call: the caller's numbers and quantities that are no tensors by identity, the
properties of all tensors by torch's guard. Calls whose input is quantised first have entries of their own,
which start both kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transconv.calls.call_cache import CallCache
from transconv.calls.guard import CallGuard, Part, StartableKernel, check_of, written
from transconv.runtime import torch_internals
from transconv.torch_ops.calls.call_entries import NUMBERS, only_on, switches
from transconv.torch_ops.conversion import prepacked_weights
from transconv.torch_ops.quantized.zero_point_sums import are_known

if TYPE_CHECKING:
    from transconv.torch_ops.calls.lower_call import Flags
    from transconv.torch_ops.calls.route import ConvCall

Tensor = torch.Tensor
Call = Callable[..., Tensor]


class Real(NamedTuple):
    """An input that is quantised first, and what starts the kernel that does it: a function of the input,
    its scale, its zero point if it has one, and the result."""

    input: Tensor
    begin: Callable[..., None] | None


CALLS, OF_REALS = CallCache(), CallCache()  # the latter: whose inputs are quantised first
find, find_real = CALLS.find, OF_REALS.find
prepacked_weights.on_change(CALLS.drop)
prepacked_weights.on_change(OF_REALS.drop)


def note(function: Any, general: Call, x: Tensor, weight: Tensor, bias: Tensor | None,
         numbers: tuple[Any, ...], given: dict[str, Any], route: ConvCall, flags: Flags,
         aligned: bool, real: Real | None) -> None:
    """A call with a known route went the general way: after a few, make an entry for its kind. ``x``: its
    input, quantised from ``real``, if that is given. A route that waits for a kernel is asked at each
    call."""
    if route.over is not None or any(isinstance(n, list) for n in numbers):
        return  # lists can change under their identity
    calls = CALLS if real is None else OF_REALS
    place = calls.due(id(weight))
    first = x if real is None else real.input
    tensors = [t for t in (first, weight, *given.values(), bias) if isinstance(t, Tensor)]
    if not place or any(t.requires_grad for t in tensors):
        return
    if real is not None and (real.begin is None or route.start is None or not aligned):
        return
    check = check_of(*tensors)
    if check is not None:
        found = CallGuard(check, switches(flags, x.dtype, route), aligned, only_on(route))
        calls.keep(id(weight), entry(found, calls.others(id(weight), place, general), function, numbers, x,
                                     bias is not None, given, route, real))


def entry(found: CallGuard, others: Call, function: Any, numbers: tuple[Any, ...], x: Tensor, biased: bool,
          given: dict[str, Any], route: ConvCall, real: Real | None) -> Call:
    """The entry of calls like one, with quantities ``given`` by name."""
    names = {"input": "x", "weight": "w", "bias": "b", **{n: f"v{at}" for at, n in enumerate(given)}}
    order = ["input", "weight", *(n for n, v in given.items() if isinstance(v, Tensor)),
             *["bias"] * biased]
    assert route.epilogue is not None
    start, picked = route.start, route.epilogue.picks
    fixed = {names[n]: v for n, v in given.items() if not isinstance(v, Tensor)}
    tests = [*found.tests([names[n] for n in order]), *(f"{v} is same_{v}" for v in fixed)]
    known = {f"same_{n}": function if at < 0 else numbers[at] for n, at in NUMBERS.items()} | {
        f"same_{v}": value for v, value in fixed.items()}
    if picked is not None and any(n == "input_zero_sums" for n, _ in picked):
        tests.append(f"are_known(w, {names['input_zero_point']}, {names['input_zero_sums']})")
    first, lines = "x", list[Part]()
    if real is not None and real.begin is not None:
        read = [names[n] for n in ("input_scale", "input_zero_point") if n in given]
        quantises = StartableKernel(real.begin, ("x", *read), ("y",),
                                    ((tuple(x.shape), x.stride(), x.dtype),))
        first, lines = "y", [*quantises.lines(0)]
        known |= {"empty": torch_internals.quickest(), **quantises.known(0)}
    if start is None or picked is None:
        picked = ()
        lines.append(f"return run({first}, w, b, q)")
    else:
        operands = [names[n] if t is None else f"number{at}" for at, (n, t) in enumerate(picked)]
        lines.append(f"return start({', '.join([first, 'w', *operands])})")
    return written(
        "call(f, x, w, b, s, p, o, d, g, q)",
        [[*(f"{n} is same_{n}" for n in NUMBERS), f"b is {'not ' * biased}None", "tuple(q) == names"],
         f"[{', '.join(names[n] for n in given)}] = q.values()", tests, *lines],
        "return others(f, x, w, b, s, p, o, d, g, q)",
        {**known, **found.known(), "others": others, "names": tuple(given), "start": start,
         "run": route.forward, "are_known": are_known,
         **{f"number{at}": t for at, (_, t) in enumerate(picked) if t is not None}})
