"""The table of operations: for each of aten's overloads, how a call of it becomes pieces.

A rule takes a ``NodeCall`` and returns a piece, or a tuple of them; it raises ``NotOurs`` for what it does
not translate, with the reason. The other files of this folder enter the rows; what rules are made of is
here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from transconv.calls.settings import settings
from transconv.graph.fusion.index_ir import (
    TYPES,
    ConstantValue,
    Indexed,
    Mapped,
    MovedView,
    Piece,
    PiecewiseIndex,
    PiecewisePart,
    Reduced,
)
from transconv.graph.lowerings import view_indexing
from transconv.graph.sizes import Fraction, Length, Move, SymbolicSize, Where, same
from transconv.ir import held_constant, is_near
from transconv.support import StageError, TransconvError


class NotOurs(Exception):
    """torch computes this operation; the reason in words."""


def is_bug(error: Exception) -> bool:
    """Whether an error is one that nobody raises on purpose, for which a program need not stop: torch
    computes the operations. Where ``transconv.config.fallback`` is "error" it shall be seen."""
    told = isinstance(error, (TransconvError, IndexError, RuntimeError, MemoryError)) and not isinstance(
        error, StageError
    )
    return not told and settings.policy != "error"


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


TESTS = ("lt", "le", "gt", "ge", "eq", "ne", "isnan")  # whose results are truths already
Rule = Callable[[NodeCall], "Piece | tuple[Piece | None, ...]"]
ROWS: dict[Any, Rule] = {}


def row(*names: Any) -> Callable[[Rule], Rule]:
    """Enter a rule for overloads of aten, such as ``add.Tensor``, those that this torch has, or for given
    overloads."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            if not isinstance(name, str):
                ROWS[name] = rule
                continue
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
    (
        re.compile(
            r"^(sort|argsort|topk|kthvalue|median|nanmedian|mode|msort|searchsorted|bucketize|_?unique|"
            r"isin)"
        ),
        "the order of the values decides",
    ),
    (
        re.compile(
            r"scatter|^index_(add|copy|fill|reduce)|^(masked_scatter|bincount|histc|embedding_dense|"
            r"embedding_bag|_embedding_bag|_index_put_impl)"
        ),
        "elements are put where values say",
    ),
    (
        re.compile(r"^(nonzero|masked_select|repeat_interleave|_local_scalar_dense|item)"),
        "values decide the size of its result",
    ),
    (
        re.compile(r"^(_scaled_dot_product|_flash_attention|_efficient_attention)"),
        "torch has one kernel for attention",
    ),
    (re.compile(r"^(div\.(Tensor|Scalar)_mode|floor_divide|remainder|fmod)"), "a quotient is rounded"),
    (
        re.compile(r"^(_?linalg|_?fft|stft|istft|lu_|cholesky|qr|svd|geqrf|ormqr|triangular)"),
        "linear algebra and transforms are libraries'",
    ),
)


def why_no_row(target: Any) -> str:
    """Why torch computes an operation that no row has."""
    if str(target).startswith("transconv."):
        return "it has a kernel of its own"
    name = str(target).partition(".")[2] if str(target).startswith(("aten.", "prims.")) else ""
    drawn = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return next(
        (why for pattern, why in NEVER if name and pattern.search(name)),
        "torch draws random numbers" if drawn else "no row of the table has this operation",
    )


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


def piecewise(
    x: Piece, shape: Sequence[Length], move: Move, where: Where, beyond: Piece | float, label: str = ""
) -> PiecewiseIndex:
    """The piece at moved positions where a condition holds, else another one, or a number."""
    if not isinstance(beyond, Piece):
        beyond = ConstantValue(shape=tuple(shape), dtype=x.dtype, value=beyond)
    return PiecewiseIndex(
        shape=tuple(shape),
        dtype=x.dtype,
        label=label,
        parts=(PiecewisePart(x, move, where), PiecewisePart(beyond, tuple)),
    )


def reshaped(x: Piece, shape: Sequence[Length]) -> Piece:
    """The piece with its elements counted in another shape."""
    if same(x.shape, shape):
        return x
    return MovedView(
        shape=tuple(shape),
        dtype=x.dtype,
        of=x,
        move=view_indexing.reshape(x.shape, shape),
        back=view_indexing.reshape(shape, x.shape),
        label="reshape",
    )


def mapped(
    write: Callable[..., str], *inputs: Piece, dtype: torch.dtype, label: str = "", work: float = 1.0
) -> Mapped:
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


def cast(x: Piece, dtype: torch.dtype) -> Piece:
    """The piece in another type. Raises NotOurs for floats as integers, and as floats of 8 bits,
    unless they are clamped to what that type holds: how others are converted differs between machines."""
    if {dtype, x.dtype} - TYPES.keys():
        computed(dtype)
        computed(x.dtype)
    bounded = kind(x.dtype) == "float" and (kind(dtype) == "int" or is_small(dtype))
    if bounded and not _within(x, TYPES[dtype].range):
        raise NotOurs(
            "a float is cast to a whole number"
            if kind(dtype) == "int"
            else f"a float that is not clamped is cast to {TYPES[dtype].name}"
        )
    if is_small(dtype) and not bounded:
        raise NotOurs(f"{str(x.dtype).removeprefix('torch.')} is cast to {TYPES[dtype].name}")
    name = TYPES[dtype].name
    if (
        bounded
        and is_small(dtype)
        and isinstance(x, Mapped)
        and x.nearest is not None
        and (x.range is not None and all(float(n).is_integer() for n in x.range))
    ):
        return _bytes(x.range, *x.nearest, dtype)
    if kind(dtype) == "bool":
        return mapped("{} != 0".format, x, dtype=dtype, label="cast") if kind(x.dtype) != "bool" else x
    made = mapped(f"{name}({{}})".format, x, dtype=dtype, label="cast")
    made.widened = kind(x.dtype) == kind(dtype) == "float" and x.dtype.itemsize < dtype.itemsize
    return made


def _bytes(range_: tuple[float, float], of: Piece, added: Piece | None, dtype: torch.dtype) -> Mapped:
    """The nearest integers of values, and an integer, between two integers, as integers of 8
    bits: of operations of integers behind one addition, which takes less time than conversions."""
    low, high = (number(float(n)) for n in range_)
    text = f"nearest_small(min(max({{}}, {low}), {high}))"
    given = (of,) if added is None else (of, added)
    if added is not None:
        text = f"nearest_small(min(max({{0}}, {low} - f32({{1}})), {high} - f32({{1}}))) + {{1}}"
    return mapped(f"{TYPES[dtype].name}({text})".format, *given, dtype=dtype, label="quantize", work=4)


def _within(x: Piece, most: tuple[float, float]) -> bool:
    """Whether a value is known to be between two numbers."""
    return (
        isinstance(x, Mapped) and x.range is not None and (most[0] <= x.range[0] <= x.range[1] <= most[1])
    )


def from_before(x: Piece, dtype: torch.dtype) -> Piece | None:
    """What was cast to a wider type, if the piece is that or a view of it, and ``dtype`` is the type from
    before: torch's upsampling casts an image, moves its elements, and casts them back."""
    if isinstance(x, Mapped) and x.widened and x.inputs[0].dtype is dtype:
        return x.inputs[0]
    if isinstance(x, (MovedView, Indexed)) and (found := from_before(x.of, dtype)) is not None:
        return anew(x, found)
    return None


def anew(view: MovedView | Indexed, of: Piece) -> Piece:
    """The view of another piece, or of the same one as a result of its own, of which torch tells how it
    lies."""
    made = replace(view, of=of, dtype=of.dtype, strides=None, values=None)
    if isinstance(made, MovedView):
        made.alias = False
    return made


def piece_of(value: Any, like: torch.dtype) -> Piece:
    """An operand: a piece, or a number as one."""
    if isinstance(value, Piece):
        return value
    number(value)  # what no text has is refused
    broken = isinstance(value, (float, Fraction))
    held = like if kind(like) == "float" else torch.float32 if broken else torch.int64
    most = torch.finfo(torch.float64 if held is torch.float64 else torch.float32).max
    if isinstance(value, float) and most < abs(value) < float("inf"):
        raise NotOurs(f"{value} is infinite in its type")
    return ConstantValue(shape=(), dtype=held, value=value)


def common_type(*values: Any) -> torch.dtype:
    """The type in which torch compares operands: numbers give way to tensors, those without dims to
    others."""
    given = [
        torch.empty((0,) * bool(v.shape), dtype=v.dtype, device="meta")
        if isinstance(v, Piece)
        else 1.0
        if isinstance(v, (float, Fraction))
        else 1
        for v in values
    ]
    return torch.result_type(given[0], given[-1])


def converted(value: Any, dtype: torch.dtype) -> Any:
    """A number as torch converts it to the type of the tensor beside it. Raises NotOurs for one beyond the
    type, of which machines make others."""
    if isinstance(value, (SymbolicSize, Fraction)):
        return value
    number(value)
    computed(dtype)
    if not is_near(value, TYPES[dtype]):
        raise NotOurs(f"{value} is no number of {TYPES[dtype].name}")
    return held_constant(float(value) if kind(dtype) == "float" else int(value), TYPES[dtype])


def together(call: NodeCall, *values: Any) -> tuple[Piece, ...]:
    """Operands in the shape of the result."""
    return tuple(expanded(piece_of(v, call.dtype), call.shape) for v in values)


def arithmetic(
    call: NodeCall,
    write: Callable[..., str],
    *values: Any,
    label: str,
    work: float = 1.0,
    whole: bool = False,
) -> Mapped:
    """A value of operands. ``whole``: operands and results may be integers; truths become numbers."""
    computed(call.dtype)
    shared = call.dtype
    if kind(shared) == "bool":
        shared = common_type(*values)
        values = tuple(v if isinstance(v, Piece) else converted(v, shared) for v in values)
    inputs = together(call, *values)
    for x in inputs:
        computed(x.dtype)
    if not whole and kind(call.dtype) == "int":
        raise NotOurs("whole numbers")
    if kind(shared) == "float" and (not whole or shared.itemsize < 4):  # others the text converts
        inputs = tuple(
            cast(x, shared) if kind(x.dtype) == "int" and not isinstance(x, ConstantValue) else x
            for x in inputs
        )
    held = torch.int64 if all(kind(x.dtype) != "float" for x in inputs) else torch.float32
    inputs = tuple(cast(x, held) if kind(x.dtype) == "bool" else x for x in inputs)
    counted = kind(shared) == "bool" and label not in TESTS  # truths are added up as numbers
    made = mapped(write, *inputs, dtype=held if counted else call.dtype, label=label, work=work)
    return mapped("{} != 0".format, made, dtype=call.dtype, label=label) if counted else made


def copied(x: Piece) -> Piece:
    """The piece in memory of its own, if it is stored."""
    return MovedView(shape=x.shape, dtype=x.dtype, of=x, move=tuple, back=tuple, label="copy")


def filled(value: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor of a type has it. Raises NotOurs."""
    if isinstance(value, Fraction) and kind(dtype) != "float":
        raise NotOurs("a broken number made of sizes is cast to a whole one")
    if isinstance(value, float) and abs(value) == float("inf") and kind(dtype) != "float":
        raise NotOurs(f"{value} is cast to a whole number")
    found = (
        value
        if isinstance(value, (SymbolicSize, Fraction))
        else (held_constant(float(value), TYPES[dtype]) if kind(dtype) == "float" else int(value))
    )
    number(found)
    return found


def reduced(
    op: str, dims: Sequence[int], *inputs: Piece, dtype: torch.dtype, label: str = "", write: Any = str
) -> Piece:
    """A reduction, with the reduced dims gone."""
    alone = [d for d in dims if inputs[0].shape[d] == 1]
    if alone:
        kept = [n for d, n in enumerate(inputs[0].shape) if d not in alone]
        inputs = tuple(reshaped(x, kept) for x in inputs)
        dims = [d - sum(a < d for a in alone) for d in dims if d not in alone]
    computed(dtype)
    x = inputs[0]
    if not dims:
        if op.startswith("arg"):
            return ConstantValue(shape=x.shape, dtype=dtype, value=0)
        return mapped(write, *inputs, dtype=dtype, label=label or op)
    shape = tuple(n for d, n in enumerate(x.shape) if d not in dims)
    return Reduced(
        shape=shape, dtype=dtype, inputs=inputs, op=op, dims=tuple(dims), label=label or op, write=write
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in."""
    return torch.float32 if dtype.itemsize < 4 else dtype
