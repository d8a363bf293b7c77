"""The table of operations: for each of aten's overloads, how a call of it becomes pieces.

A rule takes a ``NodeCall`` and returns a piece, or a tuple of them; it raises ``NotOurs`` for what it does
not translate, with the reason. The rows are in lowerings/elementwise.py, lowerings/fills.py,
lowerings/views.py, lowerings/concatenations.py, lowerings/reductions.py, lowerings/pools.py,
lowerings/products.py, lowerings/convolutions.py, lowerings/gradients.py, lowerings/quantization.py and
lowerings/quantized_convolutions.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transconv.calls.settings import settings
from transconv.graph.fusion.index_ir import TYPES, ConstantValue, Mapped, MovedView, Piece
from transconv.graph.lowerings import view_indexing
from transconv.graph.sizes import Fraction, Length, SymbolicSize, same
from transconv.support import StageError, TransconvError


class NotOurs(Exception):
    """torch computes this operation; the reason in words."""


def is_bug(error: Exception) -> bool:
    """Whether an error is one that nobody raises on purpose, for which a program need not stop: torch
    computes the operations. Where ``transconv.config.fallback`` is "error" it shall be seen."""
    told = isinstance(error, (TransconvError, IndexError, RuntimeError, MemoryError)) and not isinstance(
        error, StageError)
    return not told and settings.fallback != "error"


class ResultSpec(NamedTuple):
    """A tensor without values."""

    shape: tuple[Length, ...]
    dtype: torch.dtype
    strides: tuple[Length, ...]


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A node of a graph: its arguments with pieces for tensors, and its results without values."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[ResultSpec | None, ...]

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or name."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    @property
    def shape(self) -> tuple[Length, ...]:
        """Of the first result."""
        return self.result.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the first result."""
        return self.result.dtype

    @property
    def result(self) -> ResultSpec:
        """The first result."""
        found = self.results[0]
        assert found is not None
        return found


Rule = Callable[[NodeCall], "Piece | tuple[Piece | None, ...]"]
ROWS: dict[Any, Rule] = {}


def row(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for overloads of aten, such as ``add.Tensor``, those that this torch has."""
    def enter(rule: Rule) -> Rule:
        for name in names:
            library, _, path = name.rpartition("::")
            packet, _, overload = path.partition(".")
            found = getattr(getattr(torch.ops, library or "aten"), packet, None)
            found = getattr(found, overload or "default", None)
            if found is not None:
                ROWS[found] = rule
        return rule
    return enter


# Why operations have no row, by what is common to their names.
NEVER = (
    (re.compile(r"^_?(log)?cum(sum|prod|max|min|sumexp)"), "a scan: each element needs all before it"),
    (re.compile(r"^(sort|argsort|topk|kthvalue|median|nanmedian|mode|msort|searchsorted|bucketize|_?unique|"
                r"isin)"), "the order of the values decides"),
    (re.compile(r"scatter|^index_(add|copy|fill|reduce)|^(masked_scatter|bincount|histc|embedding_dense|"
                r"embedding_bag|_embedding_bag|_index_put_impl)"), "elements are put where values say"),
    (re.compile(r"^(nonzero|masked_select|repeat_interleave|_local_scalar_dense|item)"),
     "values decide the size of its result"),
    (re.compile(r"^(_scaled_dot_product|_flash_attention|_efficient_attention)"),
     "torch has one kernel for attention"),
    (re.compile(r"^(div\.(Tensor|Scalar)_mode|floor_divide|remainder|fmod)"), "a quotient is rounded"),
    (re.compile(r"^(_?linalg|_?fft|stft|istft|lu_|cholesky|qr|svd|geqrf|ormqr|triangular)"),
     "linear algebra and transforms are libraries'"),
)


def why_no_row(target: Any) -> str:
    """Why torch computes an operation that no row has."""
    if str(target).startswith("transconv."):
        return "it has a kernel of its own"
    name = str(target).partition(".")[2] if str(target).startswith(("aten.", "prims.")) else ""
    drawn = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return next((why for pattern, why in NEVER if name and pattern.search(name)),
                "torch draws random numbers" if drawn else "no row of the table has this operation")


# -- what rules are made of ------------------------------------------------------------------------


def kind(dtype: torch.dtype) -> str:
    """float, int or bool."""
    return "float" if dtype.is_floating_point else "bool" if dtype is torch.bool else "int"


def is_small(dtype: torch.dtype) -> bool:
    """Whether these are numbers of 8 bits, which are made others before anything is computed of them."""
    return dtype is not torch.bool and TYPES[dtype].bits == 8


def computed(dtype: torch.dtype) -> None:
    """Raises NotOurs for an element type that kernels do not compute with."""
    if dtype not in TYPES or is_small(dtype):
        raise NotOurs(f"{str(dtype).removeprefix('torch.')} is not computed with")


def expanded(x: Piece, shape: Sequence[Length]) -> Piece:
    """The piece in a larger shape."""
    if same(x.shape, shape):
        return x
    if isinstance(x, ConstantValue):
        return ConstantValue(shape=tuple(shape), dtype=x.dtype, value=x.value)
    return MovedView(
        shape=tuple(shape), dtype=x.dtype, of=x, move=view_indexing.expand(x.shape, shape), label="expand"
    )


def reshaped(x: Piece, shape: Sequence[Length]) -> Piece:
    """The piece with its elements counted in another shape."""
    if same(x.shape, shape):
        return x
    return MovedView(shape=tuple(shape), dtype=x.dtype, of=x, move=view_indexing.reshape(x.shape, shape),
                back=view_indexing.reshape(shape, x.shape), label="reshape")


def mapped(write: Callable[..., str], *inputs: Piece, dtype: torch.dtype, label: str = "",
           work: float = 1.0) -> Mapped:
    """Arithmetic on pieces of one shape."""
    return Mapped(shape=inputs[0].shape, dtype=dtype, inputs=inputs, write=write, label=label, work=work)


def number(value: Any) -> str:
    """A number as a text has it. Raises NotOurs."""
    if isinstance(value, (SymbolicSize, Fraction)):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotOurs(f"an argument is {value!r}")
    if value != value:
        raise NotOurs("an argument is no number")
    return repr(value)
