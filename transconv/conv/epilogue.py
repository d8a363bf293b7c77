"""Epilogues: operations on the accumulated sum before it is stored, as one function of ``acc``.

The text form is the operations in order, joined by ``+``: ``bias+relu``, ``bias+res+silu``,
``mul:f32:per_oc+bias+sum:0.5+relu:0.1``. The words are those of post_ops.py. ``bias`` adds one value per
feature (dimension 1 of the result), ``res`` adds a tensor of the result's shape: a residual, or the old
result, which may be the result's own memory. All is computed in f32, in f64 for f64, and rounded once: to
nearest, or with the last word ``stochastic`` up or down at random, by the one element of ``seed`` (s32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from transconv.compute import IDENTITY, Pointwise, Read, Step, Write
from transconv.conv.post_ops import ALL, PostOpOperand, known, post_op, split
from transconv.conv.quantization.zero_points import ZeroPoints
from transconv.errors import LayoutError, ScheduleError
from transconv.ir import (
    SHORT,
    Cast,
    Const,
    DType,
    Expr,
    Layout,
    Tensor,
    View,
    ViewDim,
    at_random,
    f32,
    f64,
    i32,
    is_number,
    saturated,
)

if TYPE_CHECKING:
    import torch

MOST_OPERATIONS = 32
"""The most operations of an epilogue, as in oneDNN, beside a bias and scales."""
RANK = "abcdefgh"  # the letters of dimensions in tags
STOCHASTIC = "stochastic"
SEED = PostOpOperand("seed", i32, 0)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations, in order. An empty epilogue stores the sum itself. ``bia``: the bias type, if it is
    not that of the result; ``zeros``: the zero points of the operands, before all operations; ``random``:
    whether the result is rounded at random."""

    ops: tuple[str, ...] = ()
    bia: DType | None = None
    zeros: ZeroPoints = ZeroPoints()
    random: bool = False

    @staticmethod
    def parse(text: str, bia: DType | None = None) -> Epilogue:
        """Read ``bias+relu``; ``bia`` is the bias type (default: the type of the result). Raises
        ScheduleError for an unknown operation, wrong arguments, a second bias, or sums that read the old
        result as two types."""
        words: list[str] = []
        zeros, given = ZeroPoints.read(split(text.replace(" ", "")))
        random = given[-1:] == [STOCHASTIC]
        for word in given[:-1] if random else given:
            if word == STOCHASTIC:
                raise ScheduleError(f"epilogue '{text}' has '{word}' ahead of others; expected it last, "
                                    "because the result is rounded behind all")
            found = post_op(word)
            if found is None:
                raise ScheduleError(f"epilogue '{text}' has '{word.partition(':')[0]}', expected one of: "
                                    f"{', '.join(known())}")
            words += split(found.text)
        if len(words) > MOST_OPERATIONS + 4:
            raise ScheduleError(f"epilogue '{text}' has {len(words)} operations; expected at most "
                                f"{MOST_OPERATIONS}")
        if sum(w.partition(":")[0] == "bias" for w in words) > 1:
            raise ScheduleError(f"epilogue '{text}' uses 'bias' twice; it can be used once")
        for i, word in enumerate(words):
            if word.startswith("bias:"):
                bia, words[i] = _meaning((word,)).operands[0].dtype, "bias"
        made = Epilogue(tuple(words), bia if "bias" in words else None, zeros, random)
        if len({o.dtype for o in made.operands if o.name == "res"}) > 1:
            raise ScheduleError(f"epilogue '{text}' reads the old result as two types; expected one")
        return made

    def __str__(self) -> str:
        said = f"bias:{self.bia}" if self.bia else "bias"
        said_zeros = [str(self.zeros)] if self.zeros else []
        last = [STOCHASTIC] if self.random else []
        return "+".join([*said_zeros, *(said if op == "bias" else op for op in self.ops), *last])

    def __bool__(self) -> bool:
        return bool(self.ops) or bool(self.zeros) or self.random

    @property
    def function(self) -> Pointwise:
        """What is stored, of ``acc`` and the tensors that are read."""
        return _meaning(self.ops).function

    @property
    def operands(self) -> tuple[PostOpOperand, ...]:
        """What is read, in the order of the operations; the bias in its type."""
        read = (replace(o, dtype=self.bia) if o.name == "bia" else o for o in _meaning(self.ops).operands)
        return (*read, SEED) if self.random else tuple(read)

    @property
    def kind(self) -> str:
        """The class of epilogues for tuned rows: empty, ``res`` (reads a tensor of the result's shape), or
        ``point`` (all others)."""
        return "res" if any(o.mask == ALL for o in self.operands) else "point" if self else ""

    def tensors(self, result: Tensor) -> tuple[Tensor, ...]:
        """The tensors that the epilogue reads, each once. Raises ScheduleError for a mask or a tag of
        another rank than the result's, and for a result that is not rounded at random."""
        if self.random and result.dtype not in SHORT:
            raise ScheduleError(f"'{STOCHASTIC}' rounds results of {' '.join(map(str, SHORT))}; "
                                f"{result.name} is {result.dtype}")
        return tuple({o.name: _tensor(o, result) for o in self.operands}.values())

    def views(self, c: View) -> tuple[View, ...]:
        """Views of ``tensors`` at the point of C that ``c`` describes."""
        masks = {o.name: o.mask for o in self.operands}
        return tuple(_view(t, masks[t.name], c) for t in self.tensors(c.tensor))

    def steps(self, acc: Expr, c: View) -> tuple[Step, ...]:
        """The steps from the sum ``acc`` to the store at the point that ``c`` describes."""
        if not self.ops and not self.random:
            return (Write(c, saturated(acc, c.tensor.dtype)),)
        computed = f64 if acc.dtype is f64 else f32
        reads = [Read(f"{v.tensor.name}_value", v) for v in self.views(c)]
        given: dict[str, Expr] = {r.view.tensor.name: Cast(r.var, computed) for r in reads}
        given["acc"] = acc if acc.dtype is computed else Cast(acc, computed)
        lets, value = self.function.lets(given, computed)
        if self.random:
            value = value if computed is f32 else Cast(value, f32)
            at = _place(c)
            return (*reads, *lets, Write(c, at_random(value, c.tensor.dtype, reads[-1].var, at)))
        numbers: set[Expr] = {r.var for r in reads}  # scales and what is added, as calls expect them
        for let in lets:
            numbers |= {let.var} if is_number(let.value, numbers) else set()
        return (*reads, *lets, Write(c, saturated(value, c.tensor.dtype, numbers)))

    def in_torch(self, acc: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``acc`` and the tensors that are read, as f64 tensors that broadcast to the result."""
        wide = {o.name: extra[o.name].double() for o in self.operands if o is not SEED}
        if "bia" in wide:
            wide["bia"] = wide["bia"].view(-1, *[1] * (acc.ndim - 2))
        return {"acc": acc, **wide}


def _place(c: View) -> Expr:
    """The number of an element of the result, counted in the order of its dimensions."""
    sizes = c.tensor.extents or tuple(map(Const, c.tensor.shape))
    place: Expr = c.dims[0].coord
    for dim, size in zip(c.dims[1:], sizes[1:], strict=True):
        place = place * size + dim.coord
    return place


@dataclass(frozen=True, slots=True)
class _Meaning:
    function: Pointwise
    operands: tuple[PostOpOperand, ...]


@lru_cache(maxsize=4096)
def _meaning(ops: tuple[str, ...]) -> _Meaning:
    function, operands = IDENTITY, list[PostOpOperand]()
    for word in ops:
        found = post_op(word, sum(o.name.startswith("arg") for o in operands))
        if found is None:
            raise ScheduleError(f"'{word}' is no operation of epilogues any more")
        function = found.function.of("acc", function)
        operands += found.operands
    return _Meaning(function, tuple(operands))


def _tensor(operand: PostOpOperand, result: Tensor) -> Tensor:
    dtype, rank = operand.dtype or result.dtype, len(result.shape)
    if operand.name == "bia":
        channels = result.shape[1:2]
        return Tensor("bia", result.dims[1:2], channels, Layout.dense(dtype, channels))
    if operand.mask >= 1 << rank:
        raise ScheduleError(f"post-op tensor {operand.name} has the mask {operand.mask}; expected less "
                            f"than {1 << rank}, for a result of {rank} dimensions")
    along = [operand.mask < 0 or bool(operand.mask >> d & 1) for d in range(rank)]
    shape = tuple(n if on else 1 for n, on in zip(result.shape, along, strict=True))
    extents = result.extents and tuple(e if on else Const(1) for e, on in
                                       zip(result.extents, along, strict=True))
    return Tensor(operand.name, result.dims, shape, _layout(operand, dtype, shape, result),
                  extents=extents if shape != (1,) * rank else ())


def _layout(operand: PostOpOperand, dtype: DType, shape: tuple[int, ...], result: Tensor) -> Layout:
    """The layout of the tag; without one the result's, or for another shape its order of dimensions."""
    if operand.tag:
        try:
            return Layout.parse(operand.tag, dtype, shape, RANK[:len(shape)])
        except LayoutError as error:
            raise ScheduleError(f"post-op tensor {operand.name}: {error}") from error
    if shape == result.shape:
        return replace(result.layout, dtype=dtype)
    blocks = result.layout.blocks
    if len(blocks) != len(shape):
        return Layout.dense(dtype, shape)
    return Layout.dense(dtype, shape, [b.dim for b in blocks])


def _view(tensor: Tensor, mask: int, c: View) -> View:
    if tensor.name == "bia":
        return View(tensor, (ViewDim(c.dims[1].coord),))
    return View(tensor, tuple(dim if mask < 0 or mask >> d & 1 else ViewDim(Const(0))
                              for d, dim in enumerate(c.dims)))
