"""``transconv.computation(text)``: the text of a computation as a function of tensors.

The operator ``transconv::compute`` under autograd and torch's transforms: derivatives are texts too.

    gradients   the texts of ``transconv.compute.differentiate``
    tangents    the gradients of those texts: they are linear in the gradients of the results, and the
                transpose of what takes these to gradients of operands takes tangents to tangents
    examples    one text, with an axis more

Nothing of this is in a kernel's way: texts without derivatives are computed below autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from transconv.compute import (
    Compute,
    Derivative,
    Reduction,
    differentiate,
    of_examples,
    one_line,
    parse,
    reaches,
    why_not_all_stored,
    why_not_stored,
)
from transconv.functional.calls import torch_operators
from transconv.functional.calls.compiled_launch import Program, TensorMemory, program
from transconv.functional.calls.torch_operators import compute
from transconv.runtime import torch_internals
from transconv.support import ComputeError, TensorError
from transconv.torch_ops import transforms
from transconv.torch_ops.operators import differentiated, library

Tensor = torch.Tensor


class Computation:
    """A function of the tensors that a text reads, in the order of its reads or by their names; its result
    is the tensor that is stored, or a tuple of them in the order of the stores."""

    def __init__(self, text: str) -> None:
        self.text, self._line = text, one_line(text)
        self.program: Program = program(text)
        # Points may share places that they add to. Of several kernels, which reduce over axes of their
        # own, each is asked when it is made.
        adds = any(w.op for w in self.compute.writes)
        several = len({frozenset(s.axes) for s in self.compute.steps if isinstance(s, Reduction)}) > 1
        why = None if adds or several else why_not_stored(self.compute)
        if why := why or why_not_all_stored(self.compute):
            raise ComputeError(f"{self.compute.name}: {why}")

    @property
    def compute(self) -> Compute:
        """The parsed text."""
        return self.program.compute

    def __call__(self, /, *given: Tensor, **named: Any) -> Any:
        """``device``: where the result of a text that reads no tensor shall be, such as ``"cuda"``. Raises
        TensorError, one line, for a tensor that is missing or unlike the text's; TypeError for one that
        the text does not read. A tensor with other strides than the text's is copied."""
        known = self.program.given
        if not known:
            return _one_or_all(self._of_nothing(given, **named))
        if len(given) > len(known):
            raise TypeError(
                f"{self.compute.name} reads {len(known)} tensors ({', '.join(known)}), got {len(given)}"
            )
        found = dict(zip(known, given, strict=False))
        for name in named:
            if name not in known or name in found:
                why = "was given already" if name in found else f"is not read; expected {', '.join(known)}"
                raise TypeError(f"{self.compute.name}: {name} {why}")
        found |= named
        read = [self._checked(found, name, m) for name, m in known.items()]
        made = torch_operators.compute(self._line, read)
        return _one_or_all(made)

    def _of_nothing(self, given: tuple[Any, ...], device: Any = None, **named: Any) -> list[Tensor]:
        if given or named:
            raise TypeError(f"{self.compute.name} reads no tensor; expected device= alone")
        if device is None:
            raise TensorError(
                f"{self.compute.name} reads no tensor, and none says where its result shall "
                'be; expected device=, such as device="cuda"'
            )
        made: list[Tensor] = torch_operators.of_nothing(self.text, torch.device(device))
        return made

    def _checked(self, found: dict[str, Any], name: str, m: TensorMemory) -> Tensor:
        t = found.get(name)
        if not isinstance(t, Tensor):
            raise TensorError(f"{self.compute.name}: {name}: expected a tensor, got {type(t).__name__}")
        if t.layout is not torch.strided or t.is_nested:
            form = "a nested tensor" if t.is_nested else f"one of layout {t.layout}"
            raise TensorError(f"{self.compute.name}: {name}: expected a strided tensor, got {form}")
        if t.dtype is not m.dtype or tuple(t.shape) != m.shape:
            raise TensorError(
                f"{self.compute.name}: {name}: expected {m.dtype} of shape {m.shape}, "
                f"got {t.dtype} of shape {tuple(t.shape)}"
            )
        return t

    def __repr__(self) -> str:
        return (
            f"transconv.computation({self.compute.name}: {', '.join(self.program.given)} -> "
            f"{', '.join(self.program.stored)})"
        )


def _one_or_all(made: list[Tensor]) -> Any:
    return made[0] if len(made) == 1 else tuple(made)


def computation(text: str | Compute) -> Computation:
    """The function of a computation's text (docs/computations.md): takes torch tensors, allocates and
    returns what is stored. On a GPU a kernel computes it; on a CPU its meaning in NumPy, or Triton's
    interpreter where ``transconv.config.cpu`` says so. torch.compile holds it as one operator,
    ``transconv::compute``. Gradients of float tensors are texts too (``transconv.compute.differentiate``),
    and have gradients themselves; where an operation has none, asking for one is a RuntimeError that names
    its line. Raises ComputeError for a text that cannot be read, that does not store each element of its
    results once, or whose sizes are arguments: see ``transconv.compile``."""
    named = parse(text).named if isinstance(text, str) and "sizes" in text else None
    named = text.named if isinstance(text, Compute) else named
    if named is not None:
        raise ComputeError(
            f"sizes that are arguments ({named}): expected numbers; transconv.compile "
            "makes a plan for any size"
        )
    return Computation(text if isinstance(text, str) else str(text))


_below_autograd: Any = torch_internals.below_autograd
Tensors = tuple[Tensor, ...]


class DerivativeText(NamedTuple):
    """A text with the names that it reads and stores."""

    line: str
    given: tuple[str, ...]
    stored: tuple[str, ...]


@lru_cache(maxsize=1024)
def _derivative(
    text: str, of: tuple[str, ...], given: tuple[str, ...]
) -> tuple[Derivative, list[DerivativeText]]:
    """The gradients of a text, and each of their texts."""
    found = differentiate(program(text).compute, of, given)
    return found, [_named(one_line(str(c))) for c in found.computes]


def _named(line: str) -> DerivativeText:
    return DerivativeText(line, tuple(program(line).given), tuple(program(line).stored))


@lru_cache(maxsize=1024)
def _reached(text: str) -> dict[str, frozenset[str]]:
    """For each result the operands whose gradients it has."""
    return reaches(program(text).compute)


def _run(texts: Sequence[DerivativeText], values: dict[str, Tensor]) -> None:
    """Add what texts store to the values."""
    for text in texts:
        values |= zip(text.stored, compute(text.line, [values[name] for name in text.given]), strict=True)


# -- gradients -------------------------------------------------------------------------------------


def _keep(ctx: Any, given: Sequence[Any], output: Tensors, tangents: Sequence[bool] = ()) -> None:
    """Keep what gradients read; results that depend on no tensor that needs one, nor on one of the
    ``tangents``, have none."""
    text, *tensors = given
    found = program(text)
    wanted = [name for name, t in zip(found.given, tensors, strict=True) if t.requires_grad]
    moved = {name for name, on in zip(found.given, tangents, strict=False) if on}
    known = _reached(text)
    still = [
        t for name, t in zip(found.stored, output, strict=True) if not known[name] & {*wanted, *moved}
    ]
    ctx.mark_non_differentiable(*still)
    ctx.set_materialize_grads(False)
    moving = tuple(name for name in found.stored if known[name] & {*wanted})
    values = dict(zip((*found.given, *found.stored), (*tensors, *output), strict=True))
    try:
        read = {name for t in _derivative(text, tuple(wanted), moving)[1] for name in t.given}
    except ComputeError:  # raised when such a gradient is asked for
        read = {*values}
    ctx.text, ctx.names = text, [name for name in values if name in read]
    ctx.save_for_backward(*[values[name] for name in ctx.names])


def _gradients(ctx: Any, needed: Sequence[bool], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the text (none) and of what it reads, by the texts of its derivative."""
    found = program(ctx.text)
    wanted = tuple(n for n, on in zip(found.given, needed[1:], strict=True) if on)
    given = {name: g for name, g in zip(found.stored, grads, strict=True) if g is not None}
    if not given:
        return (None,) * len(needed)
    try:
        derivative, texts = _derivative(ctx.text, wanted, tuple(given))
    except ComputeError as error:
        raise RuntimeError(str(error)) from error
    values = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
    values |= {name: given[of] for of, name in derivative.given.items()}
    _run(texts, values)
    known = _reached(ctx.text)
    like = next(iter(given.values()))
    return None, *[
        None
        if name not in wanted
        else values[derivative.of[name]]
        if name in derivative.of
        else like.new_zeros(m.shape, dtype=m.dtype)
        if any(name in known[g] for g in given)
        else None
        for name, m in found.given.items()
    ]


# -- tangents --------------------------------------------------------------------------------------


class Transposed(NamedTuple):
    """A text of gradients, transposed: from the flows of its stores to those of the operands that it is
    linear in. ``given`` and ``of``: the name of each flow in ``texts``."""

    texts: list[DerivativeText]
    given: dict[str, str]
    of: dict[str, str]


@lru_cache(maxsize=1024)
def _transposed(
    text: str, of: tuple[str, ...], given: tuple[str, ...]
) -> tuple[Derivative, list[DerivativeText], list[Transposed], bool]:
    """The gradients of the results ``given``, and their transposes in the order in which they run; last,
    whether these read what the gradients' texts store."""
    derivative, texts = _derivative(text, of, given)
    linear = {*derivative.given.values()}
    for one in texts:
        if linear & {*one.given}:
            linear |= {*one.stored}
    reaching = {*derivative.of.values()}
    found, told = [], {*program(text).given, *program(text).stored}
    between = False
    for one in reversed(texts):
        read = tuple(n for n in one.given if n in linear)
        gone = tuple(n for n in one.stored if n in reaching)
        if not read or not gone:
            continue
        back, inner = _derivative(one.line, read, gone)
        made = {n for t in inner for n in t.stored}
        between |= bool({n for t in inner for n in t.given} - told - made - {*back.given.values()})
        found.append(Transposed(inner, back.given, back.of))
        reaching |= {*back.of}
    return derivative, texts, found, between


def _tangents_of(
    primals: Sequence[Any], moving: Sequence[Tensor | None], results: Tensors
) -> list[Tensor | None]:
    """The tangents of a text's results, None for those that depend on no tensor that has one."""
    text, *tensors = primals
    program_ = program(text)
    of = tuple(n for n, d in zip(program_.given, moving[1:], strict=True) if d is not None)
    known = _reached(text)
    given = tuple(n for n in program_.stored if known[n] & {*of})
    if not given:
        return [None] * len(results)
    try:
        derivative, texts, transposed, between = _transposed(text, of, given)
    except ComputeError as error:
        raise RuntimeError(str(error)) from error
    values = dict(zip((*program_.given, *program_.stored), (*tensors, *results), strict=True))
    memory = program_.given | program_.stored
    if between:  # what does not depend on gradients; those are zero
        zeros = {name: values[n].new_zeros(memory[n].shape) for n, name in derivative.given.items()}
        values |= zeros
        _run(texts, values)
    flows: dict[str, Tensor] = {}
    for name, d in zip(program_.given, moving[1:], strict=True):
        if d is not None and name in derivative.of:
            flows[derivative.of[name]] = d.to(memory[name].dtype)
    for one in transposed:
        inner = values | {own: flows[n] for n, own in one.given.items()}
        _run(one.texts, inner)
        for n, own in one.of.items():
            flows[n] = flows[n] + inner[own] if n in flows else inner[own]
    return [
        flows.get(derivative.given[n], results[i].new_zeros(memory[n].shape)) if n in given else None
        for i, n in enumerate(program_.stored)
    ]


# -- examples --------------------------------------------------------------------------------------


def _examples(size: int, on: Sequence[bool], given: Sequence[Any]) -> Sequence[Tensor]:
    """The stores of several examples, at their first dim."""
    text, *tensors = given
    if not size:
        return [tensors[0].new_empty((0, *m.shape), dtype=m.dtype) for m in program(text).stored.values()]
    return compute(_of_examples(text, size, tuple(on[1:])), tensors)


@lru_cache(maxsize=1024)
def _of_examples(text: str, size: int, on: tuple[bool, ...]) -> str:
    found = program(text)
    names = [n for n, there in zip(found.given, on, strict=True) if there]
    return one_line(str(of_examples(found.compute, size, names)))


# -- the operator ----------------------------------------------------------------------------------


def _call(text: str, *given: Tensor) -> Tensors:
    return tuple(compute(text, [*given]))


RULES = transforms.Rules("transconv::compute", _call, _keep, _gradients, _examples, _tangents_of)


class TextFunction(torch.autograd.Function):
    """The autograd function of a text, ``apply(text, tangents, *given)``; ``tangents``: which of them have
    one."""

    @staticmethod
    def forward(ctx: Any, text: str, tangents: tuple[bool, ...], *given: Tensor) -> Tensors:
        with _below_autograd():
            made = _call(text, *given)
        _keep(ctx, (text, *given), made, tangents)
        if tangents:
            ctx.save_for_forward(*given, *made)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = _gradients(ctx, ctx.needs_input_grad[1:], *grads)
        return found[0], None, *found[1:]

    @staticmethod
    def jvp(ctx: Any, _text: None, _tangents: None, *moving: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return tuple(_tangents_of((ctx.text, *kept[: len(moving)]), (None, *moving), kept[len(moving) :]))


# Function.apply would look for transforms, which have kernels of their own.
_apply: Callable[..., Tensors] = super(torch.autograd.Function, TextFunction).apply


def _with_derivatives(text: str, given: list[Tensor]) -> list[Tensor]:
    tangents = tuple(transforms.has_tangent([t]) for t in given) if forward_ad._current_level >= 0 else ()
    if True in tangents or differentiated(*given):
        return [*_apply(text, tangents if True in tangents else (), *given)]
    with _below_autograd():
        return compute(text, given)


def _transformed(text: str, given: list[Tensor]) -> list[Tensor]:
    return [*transforms.transformed(RULES, text, *given)]


def _over_legacy(text: str, given: list[Tensor]) -> list[Tensor]:
    return [*transforms.over_legacy(RULES, text, *given)]


library.impl("compute", _with_derivatives, "Autograd")
library.impl("compute", _transformed, transforms.FRONT)
library.impl("compute", _over_legacy, "Batched")
