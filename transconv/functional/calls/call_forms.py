"""Forms of calls: what is bound once for all sizes of a kind of call.

A call that was bound is bound again with traced sizes (calls/symbolic_int.py), without torch: the shapes
of results follow by arithmetic (Function.shapes). That gives a function of sizes to a Bound, and the
conditions under which it holds: which dims have size 1, in which order they lie, which of them are one
axis, and what the function itself asked. A size that meets none of the forms of its kind is bound in the
general way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from transconv.calls.settings import settings
from transconv.functional.calls.compiled_launch import TensorMemory
from transconv.functional.calls.symbolic_bind import (
    BoundCall,
    Numbers,
    PublicFunction,
    bound_of,
    lying,
    strided,
)
from transconv.functional.calls.symbolic_int import SymbolicTrace, Untraced
from transconv.support import ComputeError, Unsupported

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]

log = logging.getLogger("transconv.functional")

FORMS = 8  # of calls of one kind
KINDS = 1024  # beyond it all are dropped

_forms: dict[Hashable, list[Callable[..., BoundCall | None]]] = {}


def find(
    f: PublicFunction, tensors: Tensors, numbers: Numbers, wanted: tuple[bool, ...]
) -> BoundCall | None:
    """What a call is bound to for any size, if it is of a known form; without texts for its sizes."""
    if f.shapes is None:
        return None
    kind, sizes = told(f, tensors, numbers, wanted)
    for form in _forms.get(kind, ()):
        if (found := form(*sizes)) is not None:
            return found
    return None


def note(bound: BoundCall, tensors: Tensors, numbers: Numbers, wanted: tuple[bool, ...]) -> None:
    """Keep the form of a call, unless it cannot be traced or is not the same when it is."""
    f = bound.function
    if f.shapes is None or bound.forward.named is None:
        return
    kind, sizes = told(f, tensors, numbers, wanted)
    if len(kept := _forms.get(kind, [])) >= FORMS:
        return
    try:
        form = _form(bound, tensors, numbers, wanted)
    except (Untraced, Unsupported, ComputeError, ValueError) as error:
        log.debug("no form of %s: %s", f.name, error)
        return
    found, own = form(*sizes), _without_texts(bound)
    if found is None or any(getattr(found, x.name) != getattr(own, x.name) for x in fields(own)):
        log.warning("the form of %s is not that of its call; each size of it is bound anew", f.name)
        return
    if len(_forms) >= KINDS:
        _forms.clear()
    _forms[kind] = [*kept, form]


def told(f: PublicFunction, tensors: Tensors, numbers: Numbers,
          wanted: tuple[bool, ...]) -> tuple[Hashable, list[tuple[int, ...]]]:
    """The kind of a call, and its sizes: shape and strides of each tensor, a shape among the numbers."""
    looks: list[Hashable] = []
    sizes: list[tuple[int, ...]] = []
    for t in tensors:
        if t is None:
            looks.append(None)
            continue
        shape = t.shape
        looks += (len(shape), t.dtype, t.device)
        sizes += (shape, t.stride())
    if f.shaped:
        sizes.append(numbers[0])
        numbers = (len(numbers[0]), *numbers[1:])
    return (f, numbers, *map(type, numbers), wanted, *looks), sizes


def _form(bound: BoundCall, tensors: Tensors, numbers: Numbers,
          wanted: tuple[bool, ...]) -> Callable[..., BoundCall | None]:
    """Bind with traced sizes. Raises Untraced and what ``bound_of`` raises."""
    f, trace = bound.function, SymbolicTrace()
    given: dict[str, int] = {}
    traced: list[TensorMemory | None] = []
    for at, t in enumerate(tensors):
        traced.append(None if t is None else _traced(trace, f"t{at}_", lying(t)))
        if t is not None:
            given |= {f"t{at}_": t.dim(), f"t{at}_s": t.dim()}
    if f.shaped:
        given["n"] = len(numbers[0])
        numbers = (trace.numbers("n", numbers[0]), *numbers[1:])
    assert f.shapes is not None
    shapes = f.shapes([t and strided(t) for t in traced], numbers)
    results = [_like(tuple(shape), bound.forward.stored[name], traced)
               for shape, name in zip(shapes, bound.results, strict=True)]
    made = bound_of(f, traced, results, numbers, wanted, any_size=True)
    if any(s.named is None for s in (made.forward, *made.backward)):
        raise Untraced("a text without names for its sizes")
    return trace.function(given, _without_texts(made))


def _traced(trace: SymbolicTrace, name: str, m: TensorMemory) -> TensorMemory:
    """A dense tensor of traced sizes, from which its strides follow. Raises Untraced for gaps."""
    shape, strides = trace.numbers(name, m.shape), trace.numbers(f"{name}s", m.strides)
    inner: Any = 1
    for d in sorted(range(len(shape)), key=lambda d: (m.strides[d], m.shape[d] != 1)):
        if strides[d] != inner:
            raise Untraced("a tensor with gaps")
        inner = inner * shape[d]
    if not all([n > 1 or n == 1 for n in shape]):
        raise Untraced("an empty tensor")
    return TensorMemory(shape, _dense(shape, m.strides, m.shape), m.dtype)


def _dense(shape: Sequence[Any], strides: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """The strides of a tensor without gaps whose dims lie in the order of ``strides``, of ``sizes``."""
    found: dict[int, Any] = {}
    inner: Any = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], sizes[d] != 1)):
        found[d] = inner
        inner = inner * shape[d]
    return tuple(found[d] for d in range(len(shape)))


def _like(
    shape: tuple[Any, ...], made: TensorMemory, given: Sequence[TensorMemory | None]
) -> TensorMemory:
    """A result of traced sizes, which lies as torch's did: dense, its dims in the same order."""
    if tuple(map(int, shape)) != made.shape:
        raise Untraced(f"a result of shape {made.shape}, not {tuple(map(int, shape))}")
    if not all([n > 1 or n == 1 for n in shape]):
        raise Untraced("an empty result")
    strides = _dense(shape, made.strides, made.shape)
    if tuple(map(int, strides)) != made.strides:
        raise Untraced("a result with gaps")
    return TensorMemory(shape, strides, made.dtype)


def _without_texts(bound: BoundCall) -> BoundCall:
    return replace(bound, forward=replace(bound.forward, text=""),
                   backward=tuple(replace(s, text="") for s in bound.backward))


settings.on_change(_forms.clear)
