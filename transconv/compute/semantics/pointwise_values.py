"""The value of a function of elements in torch, and how far one that rounds may be off."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from transconv.compute.analysis.pointwise import CONDITIONS, Pointwise, Ref
from transconv.compute.elementwise import OPS

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]


def in_torch(function: Pointwise, given: Tensors) -> torch.Tensor:
    """The value in torch, whose rules say the types of results."""
    known: list[torch.Tensor] = []
    for step in function.steps:
        found = OPS[step.op].function(*step.numbers)
        known.append(found(*(_tensor(a, given, known) for a in step.values)))
    return _tensor(function.result, given, known)


def _tensor(ref: Ref, given: Tensors, known: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(ref, str):
        return given[ref]
    return known[ref] if isinstance(ref, int) else next(iter(given.values())).new_tensor(ref)


def with_error(function: Pointwise, given: Tensors, errors: Tensors, eps: float,
               rounds: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The value in f64, and how far one that is computed with the relative precision ``eps`` may be off,
    from what the given values are off. A step makes of its arguments' errors what it makes of arguments
    that are all moved by them: the square of what is 0 to within e is 0 to within e*e. ``rounds``: whether
    steps that are exact for whole numbers round."""
    known: list[torch.Tensor] = []
    off: list[torch.Tensor] = []
    zero = next(iter(given.values())).new_zeros(())
    for step in function.steps:
        row = OPS[step.op]
        found = row.function(*step.numbers)
        args = [_tensor(a, given, known) for a in step.values]
        value = found(*args)
        total = zero
        if value.dtype.is_floating_point and (rounds or not row.exact):
            total = 4 * eps * value.abs() if row.exact else 32 * eps * (1 + value.abs())
        own = [errors.get(ref, zero) if isinstance(ref, str) else
               off[ref] if isinstance(ref, int) else zero for ref in step.values]
        if step.op in CONDITIONS:  # not sure where the sides are as close as they are off
            known.append(value)
            off.append((((args[0] - args[1]).abs() <= own[0] + own[1]) & (own[0] + own[1] > 0)).double())
            continue
        for i, error in enumerate(own):
            if not args[i].dtype.is_floating_point and bool((error != 0).any()):
                other = found(~args[i], *args[1:])  # either value may be chosen if a condition is not sure
                total = total + _apart(other, value).where(error != 0, zero)
        known.append(value)
        off.append(total + _moved(found, step.values, args, own, value))
    ref = function.result
    return _tensor(ref, given, known), off[ref] if isinstance(ref, int) else errors.get(str(ref), zero)


def _moved(found: Callable[..., torch.Tensor], refs: Sequence[Ref], args: Sequence[torch.Tensor],
           own: Sequence[torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """How far a step's value is off if each of its numbers is as much too large or too small as it may be,
    or 0 where it may be that: a divisor is at its worst there. A number that it takes twice is moved
    once."""
    loose = dict.fromkeys(ref for ref, arg, e in zip(refs, args, own, strict=True)
                          if arg.dtype.is_floating_point and bool((e != 0).any()))
    nearest = [a - a.clamp(-e, e) if ref in loose else a
               for ref, a, e in zip(refs, args, own, strict=True)]
    total = _apart(found(*nearest), value) if loose else value.new_zeros(())
    for ways in itertools.product((1.0, -1.0), repeat=len(loose)):
        way = dict(zip(loose, ways, strict=True))
        given = [a + way[ref] * e if ref in way else a for ref, a, e in zip(refs, args, own, strict=True)]
        total = _apart(found(*given), value).maximum(total)
    return total


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The distance of two values; 0 where they are one, infinity where one alone is no number."""
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().nan_to_num(nan=float("inf")).where(~same, one.new_zeros(()))
