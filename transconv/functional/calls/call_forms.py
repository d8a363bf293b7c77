"""Forms of calls: what is bound once for all sizes of a kind of call, or for any number of samples.

A call that was bound is bound again with traced sizes, without torch: the shapes of results follow by
arithmetic (Function.shapes). That gives a function of sizes to a Bound, and the conditions under which it
holds: which dims have size 1, in which order they lie, which of them are one axis, and what the function
itself asked. A size that meets none of the forms of its kind is bound on the slow path.

Traced sizes are integers that remember how they were computed from the sizes of a call:

    trace = SymbolicTrace()
    n, k = trace.numbers("n", (3, 4)), ...
    n * 2 + k      is 10, and knows "(n*2) + k"
    n > 1          is True, and is noted as a condition of the trace

What Python code makes of such numbers is thus known for all sizes that meet the conditions: ``function``
writes it out. A number in a text becomes a condition that it is that number; ``int(n)`` is the number
alone. Other arithmetic than + - * // % raises Untraced.

In invariant mode a form is for any number of samples, which lie along the first dims of operands. A
formula is bound twice, with other numbers of samples, and each of its texts is written with that number as
a name (compute/batch.py). The two have to be the same: then no number of the text hides how many samples
there are, and all batches have one kernel.

    linear(x[5, 64], w[32, 64])  ->  x[8, 64], x[24, 64]  ->  sizes BATCH=4096, at BATCH=5

Which operands hold samples is tried: those whose first dim is as long as the first operand's, those of
them with as many dims, the first alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from transconv.calls.settings import settings
from transconv.compute import BATCH, batch_axis, of_any_batch, samples, with_reference
from transconv.functional.calls.compiled_launch import TensorMemory, program
from transconv.functional.calls.symbolic_bind import (
    BoundCall,
    Numbers,
    PublicFunction,
    bind,
    bound_of,
    lying,
    strided,
)
from transconv.support import Cache, ComputeError, Unsupported, defined


class Untraced(TypeError):
    """An operation whose result would not be known for other sizes."""


class SymbolicTrace:
    """Conditions under which the same is computed of other numbers."""

    def __init__(self) -> None:
        self.conditions: dict[str, None] = {}

    def numbers(self, name: str, values: Iterable[int]) -> tuple[Traced, ...]:
        """Numbers that a function is given, as the tuple ``name``."""
        return tuple(self.said(value, f"{name}{at}") for at, value in enumerate(values))

    def said(self, value: int, said: str) -> Traced:
        """A number with its expression."""
        made = Traced(value)
        made.text, made.trace = said, self
        return made

    def function(self, given: dict[str, int], made: Any) -> Callable[..., Any]:
        """A function of tuples, ``given`` by their names and lengths, to ``made`` for their numbers, or to
        None where a condition does not hold."""
        known: dict[str, Any] = {}
        told = _spelled(made, known)
        names = ", ".join(f"{name}_" for name in given)
        lines = [
            f"def at({names}):",
            *(
                f"    {''.join(f'{name}{i}, ' for i in range(n))} = {name}_"
                for name, n in given.items()
                if n
            ),
            f"    if {' and '.join(self.conditions) or 'True'}:",
            f"        return {told}",
            "    return None",
        ]
        found: Callable[..., Any] = defined("\n".join(lines), "at", known)
        return found


class Traced(int):
    """An integer with its expression ``text`` and its trace."""

    text: str
    trace: SymbolicTrace
    __hash__ = None  # type: ignore[assignment]  # a look-up by a number would not be noted

    def __int__(self) -> int:
        return int.__add__(self, 0)

    def __bool__(self) -> bool:
        return self != 0

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        self.trace.conditions[f"({self.text} == {int(self)})"] = None
        return format(int(self), spec)

    def __neg__(self) -> Traced:
        return self.trace.said(-int(self), f"(-{self.text})")


def _term(of: Any) -> str | None:
    """A number in an expression; None for what is no number."""
    if isinstance(of, Traced):
        return of.text
    return repr(of) if isinstance(of, (int, float)) and abs(of) < 1e300 else None


def _plain(of: Any) -> Any:
    return int(of) if isinstance(of, Traced) else of


def _arithmetic(name: str, sign: str) -> None:
    def forward(self: Traced, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return self.trace.said(
            getattr(int(self), name)(_plain(other)), f"({self.text} {sign} {_term(other)})"
        )

    def behind(self: Traced, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return self.trace.said(
            getattr(_plain(other), name)(int(self)), f"({_term(other)} {sign} {self.text})"
        )

    setattr(Traced, name, forward)
    setattr(Traced, name.replace("__", "__r", 1), behind)


def _comparison(name: str, sign: str) -> None:
    def compare(self: Traced, other: Any) -> Any:
        if (term := _term(other)) is None:
            return NotImplemented
        holds: bool = getattr(int(self), name)(_plain(other))
        if isinstance(other, float):
            holds = getattr(float(int(self)), name)(other)
        if term != self.text:
            self.trace.conditions[f"{'' if holds else 'not '}({self.text} {sign} {term})"] = None
        return holds

    setattr(Traced, name, compare)


def _refused(name: str) -> None:
    def refuse(self: Traced, *others: Any) -> Any:
        raise Untraced(f"{name} of a size")

    setattr(Traced, name, refuse)


for _name, _sign in {
    "__add__": "+",
    "__sub__": "-",
    "__mul__": "*",
    "__floordiv__": "//",
    "__mod__": "%",
}.items():
    _arithmetic(_name, _sign)
for _name, _sign in {
    "__eq__": "==",
    "__ne__": "!=",
    "__lt__": "<",
    "__le__": "<=",
    "__gt__": ">",
    "__ge__": ">=",
}.items():
    _comparison(_name, _sign)
for _name in (
    "truediv rtruediv divmod rdivmod pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift "
    "invert abs round float".split()
):
    _refused(f"__{_name}__")


def _spelled(made: Any, known: dict[str, Any]) -> str:
    """An expression of a value: tuples, dicts and dataclasses that hold traced numbers are made anew, all
    else is ``known`` under a name."""
    if isinstance(made, Traced):
        return made.text
    if _holds(made):
        if isinstance(made, dict):
            return f"{{{', '.join(f'{_kept(k, known)}: {_spelled(v, known)}' for k, v in made.items())}}}"
        parts = [*made] if isinstance(made, tuple) else [getattr(made, f.name) for f in fields(made)]
        inside = "".join(f"{_spelled(part, known)}, " for part in parts)
        return f"({inside})" if type(made) is tuple else f"{_kept(type(made), known)}({inside})"
    return _kept(made, known)


def _kept(value: Any, known: dict[str, Any]) -> str:
    name = f"kept_{len(known)}"
    known[name] = value
    return name


def _holds(made: Any) -> bool:
    """Whether there are traced numbers in a value."""
    if isinstance(made, Traced):
        return True
    if isinstance(made, dict):
        return any(map(_holds, made.values()))
    if isinstance(made, tuple):
        return any(map(_holds, made))
    return (
        is_dataclass(made)
        and not isinstance(made, type)
        and any(_holds(getattr(made, f.name)) for f in fields(made))
    )


Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]

log = logging.getLogger("transconv.functional")

FORMS = 8  # of calls of one kind
KINDS = 1024  # beyond it all are dropped

_forms: Cache[Hashable, list[Callable[..., BoundCall | None]]] = Cache("forms of calls", KINDS)
settings.on_change(_forms.forget)


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
    if len(_forms.get(kind, ())) >= FORMS:
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
    _forms.keep(kind, []).append(form)


def told(
    f: PublicFunction, tensors: Tensors, numbers: Numbers, wanted: tuple[bool, ...]
) -> tuple[Hashable, list[tuple[int, ...]]]:
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


def _form(
    bound: BoundCall, tensors: Tensors, numbers: Numbers, wanted: tuple[bool, ...]
) -> Callable[..., BoundCall | None]:
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
    results = [
        _like(tuple(shape), bound.forward.stored[name], traced)
        for shape, name in zip(shapes, bound.results, strict=True)
    ]
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
    return replace(
        bound,
        forward=replace(bound.forward, text=""),
        backward=tuple(replace(s, text="") for s in bound.backward),
    )


COUNTS = (8, 24)
"""Numbers of samples that a call is bound with."""


class BatchForm(NamedTuple):
    """A text in which the number of samples is a name, and the sizes of a call."""

    text: str
    sizes: dict[str, int]


def batch_forms(bound: BoundCall) -> list[BatchForm]:
    """The forms of a call's texts for any number of samples, the forward one first. Raises Unsupported,
    with a reason, where a text has no form, or samples are not told from features."""
    why: Unsupported | None = None
    for held in holding(bound):
        try:
            return _forms_of_samples(bound, held)
        except Unsupported as error:
            why = why or error
        except (RuntimeError, IndexError, ValueError):  # torch's, of sizes that do not fit
            continue
    raise why or Unsupported("invariant:samples", f"{bound.function.name}: no operand holds samples")


def holding(bound: BoundCall) -> Iterator[tuple[str, ...]]:
    """Operands that may hold samples, in the order in which they are tried."""
    memory = bound.memory
    shapes = {name: memory[name].shape for name in bound.operands}
    first = bound.operands[0]
    if not shapes[first]:
        return
    alike = [n for n, shape in shapes.items() if shape[:1] == shapes[first][:1]]
    ranked = [n for n in alike if len(shapes[n]) == len(shapes[first])]
    yield from dict.fromkeys((tuple(alike), tuple(ranked), (first,)))
    compute = program(bound.exact().forward.text).compute
    axis = batch_axis(compute)
    along = {v.tensor.name for v in compute.views() if str(v.dims[0].coord) == axis}
    yield tuple(n for n in bound.operands if n in along)


def _forms_of_samples(bound: BoundCall, held: Sequence[str]) -> list[BatchForm]:
    """The forms, where these operands hold samples."""
    count = bound.memory[held[0]].shape[0]
    rebound = [_with_samples(bound, held, n) for n in COUNTS]
    found = []
    for one, other in zip(*map(_texts, rebound), strict=True):
        made, again = (program(text).compute for text in (one, other))
        form = of_any_batch(made)
        if form != of_any_batch(again):
            raise Unsupported(
                "invariant:form", f"{bound.function.name}: its text has numbers of the batch: {form.name}"
            )
        told = samples(made).get(BATCH, 0), samples(again).get(BATCH, 0)
        if told[0] * COUNTS[1] != told[1] * COUNTS[0] or told[0] % COUNTS[0]:
            raise Unsupported(
                "invariant:form", f"{bound.function.name}: samples are no axis of {form.name}"
            )
        sizes = {BATCH: told[0] // COUNTS[0] * count} if told[0] else {}
        form = with_reference(form, BATCH, sizes.get(BATCH, 1))
        found.append(BatchForm(str(form), sizes))
    return found


def _texts(bound: BoundCall) -> list[str]:
    return [step.text for step in (bound.forward, *bound.backward)]


def _with_samples(bound: BoundCall, held: Sequence[str], count: int) -> BoundCall:
    """The call with so many samples in these operands."""
    given = [
        torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta")
        for m in (
            resized(name, bound.memory[name], count) if name in held else bound.memory[name]
            for name in bound.operands
        )
    ]
    return bind(bound.function, bound.spread(given), bound.numbers, bound.wanted, any_size=True)


def resized(name: str, memory: TensorMemory, count: int) -> TensorMemory:
    """A dense tensor of so many samples, with its dims in the order in memory; of one sample with samples
    outermost. Raises Unsupported for one with gaps."""
    shape, strides = memory.shape, memory.strides
    alone = shape[0] == 1  # torch says any stride of a dim of one
    order = sorted(range(len(shape)), key=lambda d: (alone and d != 0, -strides[d], -shape[d], d))

    def dense(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(prod(sizes[d] for d in order[order.index(at) + 1 :]) for at in range(len(sizes)))

    if any(n > 1 and own != of for n, own, of in zip(shape, strides, dense(shape), strict=True)):
        raise Unsupported(
            "invariant:layout", f"{name} has gaps between its elements; expected a dense tensor"
        )
    more = (count, *shape[1:])
    return TensorMemory(more, dense(more), memory.dtype)
