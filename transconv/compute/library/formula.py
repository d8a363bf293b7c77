"""Formula, the result of a library function: the text of a computation, the texts of its gradients, and
how torch's tensors map to the tensors in the texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transconv.compute.library.page import NamedSpace
from transconv.ir import DType, f32, f64


@dataclass(frozen=True, slots=True)
class Gradient:
    """A text that reads operands, results, ``G`` (the gradient of the first result) and tensors that
    earlier gradients store. ``of``: the stored tensors that are gradients, each with its operand."""

    text: str
    of: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LibraryFormula:
    """``page``: shapes, strides and types of all tensors by name. ``given``: the operands, in the order of
    a call. ``results``: the tensors that the caller gets; gradients read the others that the text
    stores. ``together``: all gradients by one text, where that reads what they share only once."""

    page: NamedSpace
    text: str
    given: tuple[str, ...]
    results: tuple[str, ...] = ("Y",)
    gradients: tuple[Gradient, ...] = field(default=())
    together: Gradient | None = None


def held(dtype: DType) -> DType:
    """The type of tensors stored for gradients: the type of arithmetic."""
    return dtype if dtype is f64 else f32


def lines(text: str) -> tuple[str, ...]:
    """The lines of a text, stripped."""
    return tuple(line.strip() for line in text.strip().splitlines())
