"""Entries of repeated calls: found by the function, its numbers and the first tensor's sizes, checked by
one guard (calls/guard.py), which does not see whether gradients are on.

    launching   allocate the results, launch, and keep in autograd's context what gradients need
    gradients   the guard of the saved tensors and the result's gradient, then all launches
    note        the guard of a call, then one of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transconv.calls import guard
from transconv.calls.call_cache import CallCache
from transconv.calls.guard import (
    CallGuard,
    Check,
    StartableKernel,
    check_of,
    grad_enabled,
    listed,
    written,
)
from transconv.functional.calls.symbolic_bind import Numbers, PublicFunction
from transconv.runtime import torch_internals

Tensor = torch.Tensor
Tensors = tuple[Tensor | None, ...]
Call = Callable[[PublicFunction, Tensors, Numbers], Any]
Empty = Callable[[Sequence[int], Sequence[int], Any], Any]

_deterministic: Callable[[], bool] = torch_internals.deterministic

CALLS = CallCache(patience=1, chain=4)  # other strides and types, training and inference


def find(f: PublicFunction, tensors: Tensors, numbers: Numbers) -> Call | None:
    """The entries of calls of this kind. TypeError and AttributeError for what has no hash or no sizes."""
    return CALLS.find((f, numbers, len(tensors), tensors[0].shape))  # type: ignore[union-attr]


def note(f: PublicFunction, tensors: Tensors, numbers: Numbers, route: Any,
         runs: Callable[[], Callable[..., Any] | None], onward: Call) -> None:
    """Make an entry for a call that found its route in the general way, ``onward``. ``runs`` makes what
    computes it, None before its first launch."""
    first, given = tensors[0], [t for t in tensors if t is not None]
    if first is None:
        return
    key = (f, numbers, len(tensors), first.shape)
    place = CALLS.due(key)
    check = check_of(*given) if place else None
    if check is not None and (run := runs()) is not None:
        grads = grad_enabled() if any(t.requires_grad for t in given) else None
        CALLS.keep(key, entry(route, run, CALLS.others(key, place, onward), guard_of(route, check),
                              [t is not None for t in tensors], [*map(type, numbers)], grads, f.finish,
                              len(route.bound.results)))


def guard_of(route: Any, check: Check, back: bool = False) -> CallGuard:
    """What calls of a route are compared with; ``back``: those of its gradients."""
    seen = (guard.NO_GRADIENTS, guard.NO_MODES, guard.NO_DUALS) if back else (guard.NO_DUALS,)
    return CallGuard(check, (*seen, guard.deterministic(_deterministic(), cudnn=False)),
                 route.aligned, route.only_on)


def launching(empty: Empty, operands: Sequence[str], begun: StartableKernel, results: Sequence[str],
              saved: Sequence[str] | None) -> Callable[..., Any]:
    """A function of the operands, after autograd's context where ``saved`` says what to keep there, to the
    results; a single one alone."""
    lines = begun.lines(0)
    if saved is not None:
        lines.append(f"ctx.to_save = {listed(saved)}")  # as save_for_backward does
    if saved is not None and len(results) > 1:
        lines.append(f"ctx.non_differentiable = {listed(results[1:])}")
    return written(f"run({', '.join([*['ctx'] * (saved is not None), *operands])})", lines,
                   f"return {results[0] if len(results) == 1 else listed(results)}",
                   {"empty": empty, **begun.known(0)})


def gradients(route: Any, empty: Empty, found: CallGuard, saved: Sequence[str],
              begun: Sequence[StartableKernel],
              results: Sequence[str]) -> Callable[..., tuple[Any, ...] | None]:
    """A function of the result's gradient ``G`` and the saved tensors, to the operands' gradients
    ``results``; None for tensors of another kind than those of the guard."""
    known: dict[str, Any] = {"route": route, "empty": empty, **found.known()}
    lines = ["route.calls_back += 1"]
    for at, one in enumerate(begun):
        lines += one.lines(at)
        known |= one.known(at)
    names = ["G", *saved]
    return written(f"run({', '.join(names)})", [found.tests(names), *lines, f"return {listed(results)}"],
                   "return None", known)


def entry(route: Any, run: Callable[..., Any], others: Callable[..., Any], found: CallGuard,
          given: Sequence[bool], types: Sequence[type], grads: bool | None,
          finish: Callable[..., Any] | None, results: int) -> Call:
    """A function of a Function, its tensors (``given``: which are not None) and its numbers of ``types``:
    ``run`` where the call is of the same kind, else ``others``. ``grads``: whether gradients are on; None
    where it does not matter."""
    tensors = [f"t{i}" for i in range(len(given))]
    there = [t for t, on in zip(tensors, given, strict=True) if on]
    numbers = [f"n{i}" for i in range(len(types))]
    tests = [*found.tests(there), *(f"{t} is None" for t in tensors if t not in there),
             # Numbers are equal already; here True differs from 1.
             *(f"{n}.__class__ is c_{n}" for n in numbers),
             *[f"grad_enabled() is {grads}"] * (grads is not None)]
    made = f"run({', '.join(there)})"
    if finish is not None:
        made = f"finish(tensors, numbers, {made if results > 1 else f'({made},)'})"
    elif results > 1:
        made += "[0]"
    return written(
        "call(f, tensors, numbers)",
        [f"{listed(tensors)} = tensors", *[f"{listed(numbers)} = numbers"] * bool(numbers), tests,
         "route.calls += 1", f"return {made}"], "return others(f, tensors, numbers)",
        {"route": route, "run": run, "others": others, "finish": finish, "grad_enabled": grad_enabled,
         **found.known(), **{f"c_{n}": kind for n, kind in zip(numbers, types, strict=True)}})
