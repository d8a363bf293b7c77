"""Epilogues: operations on the accumulated sum before it is stored, as one function of ``acc``.

The text form is the operations in order, joined by ``+``: ``bias+relu``, ``bias+res+silu``,
``mul:f32:per_oc+bias+sum:0.5+relu:0.1``. Each word has a row (below). ``bias`` adds one value per
feature (dimension 1 of the result), ``res`` adds a tensor of the result's shape: a residual, or the old
result, which may be the result's own memory. All is computed in f32, in f64 for f64, and rounded once: to
nearest, or with the last word ``stochastic`` up or down at random, by the one element of ``seed`` (s32).

The words of epilogues, one row each: what they do to the sum, and which tensors they read.

The names and numbers are oneDNN's: ``relu:0.5``, ``sum:2.5``, ``add:u8:per_dim_01``, ``prelu:per_oc``.
Beside them stand ``bias``, ``res`` and the names of the operations' table (``silu``, ``pow:0.5``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from transconv import ir
from transconv.compute import IDENTITY, OPS, Pointwise, Read, Step, Write, number, pointwise
from transconv.conv.compensation import ZeroPoints
from transconv.support import ComputeError, LayoutError, ScheduleError, nearest

if TYPE_CHECKING:
    import torch


ALL = -1
"""The mask of a tensor of the result's shape."""
MASKS = {
    "common": 0,
    "per_oc": 2,
    "per_dim_0": 1,
    "per_dim_1": 2,
    "per_dim_01": 3,
    "per_dim_2": 4,
    "per_dim_3": 8,
    "per_tensor": ALL,
}
NEAR = 1e-4  # numbers such as 1/6 are written with few digits

# The functions of one value, with oneDNN's names and numbers. The table's rows have the others.
FUNCTIONS = {
    "clip": "clamp(acc, alpha, beta)",
    "clip_v2": "clamp(acc, alpha, beta)",
    "elu": "elu(acc, alpha)",
    "hardsigmoid": "clamp(acc*alpha + beta, 0, 1)",
    "hardswish": "acc*clamp(acc*alpha + beta, 0, 1)",
    "linear": "acc*alpha + beta",
    "pow": "pow(acc, beta)*alpha",
    "relu": "leaky_relu(acc, alpha)",
    "soft_relu": "softplus(acc, alpha)",
    "square": "acc*acc",
    "swish": "acc*sigmoid(acc*alpha)",
    **{name: f"{name}(acc)" for name in ("abs", "exp", "log", "mish", "round", "sqrt")},
}
# Of the value and a tensor, or a number.
BINARY = {
    "add": "acc + arg",
    "sub": "acc - arg",
    "mul": "acc*arg",
    "div": "acc/arg",
    "max": "max(acc, arg)",
    "min": "min(acc, arg)",
    **{name: f"where({name}(acc, arg), 1, 0)" for name in ("ge", "gt", "le", "lt", "eq", "ne")},
}
PRELU = "where(acc > 0, acc, acc*arg)"
SELECT = "where(cond != 0, acc, arg)"
# Their derivatives are told from results; forward they are the same.
OF_RESULTS = ("relu", "tanh", "elu", "sqrt", "logistic", "exp", "clip_v2")
WITHOUT_NUMBERS = ("abs", "exp", "log", "mish", "round", "sqrt", "square")
NUMBERED = ("elu", "pow")  # rows of these names have other defaults than oneDNN's functions
TRACED = "fn("


@dataclass(frozen=True, slots=True)
class PostOpOperand:
    """A tensor that a word reads. ``dtype``: None for the result's; ``mask``: a bit for each dimension of
    the result along which it varies, or ALL; ``tag``: its order in memory, if not the result's."""

    name: str
    dtype: ir.DType | None = None
    mask: int = ALL
    tag: str = ""


@dataclass(frozen=True, slots=True)
class PostOp:
    """A word: its one spelling, the function of ``acc``, and the operands that the function names."""

    text: str
    function: Pointwise
    operands: tuple[PostOpOperand, ...] = ()


def post_op(text: str, first: int = 0) -> PostOp | None:
    """Read a word, whose operands are numbered from ``first``; None for one of an unknown name. Raises
    ScheduleError, one line, for a known one with wrong arguments."""
    if not text.isascii():
        raise ScheduleError(f"post-op '{text}': {ir.why_not_text(text)}")
    name, *arguments = text.split(":")
    plain = name.removesuffix("_dst")
    if plain not in (name, *OF_RESULTS):
        return None
    try:
        if text.startswith(TRACED):
            return _traced(text, first)
        if name == "bias":
            return _bias(text, arguments)
        if name in ("sum", "res"):
            return _sum(text, arguments)
        if name == "prelu":
            operand = PostOpOperand(f"arg{first}", ir.f32, _mask(text, _at(arguments, 0)))
            return PostOp(text, _renamed(PRELU, arg=operand.name), (operand,))
        if name == "select":
            return _select(text, arguments, first)
        if name in BINARY:
            return _binary(text, name, arguments, first)
        found = _of_table(text, plain, arguments)
        return _function(text, plain, arguments) if found is None and plain in FUNCTIONS else found
    except ComputeError as error:
        raise ScheduleError(f"post-op '{text}': {error}") from error


def known() -> tuple[str, ...]:
    """Every name of a word."""
    rows = (op.name for op in OPS.values() if op.arity == 1)
    theirs = (name for op in OPS.values() if op.activation for name, _, _ in op.onednn)
    return tuple(
        dict.fromkeys(["bias", "res", "sum", "prelu", "select", *BINARY, *FUNCTIONS, *theirs, *rows])
    )


def _at(arguments: Sequence[str], place: int) -> str:
    return arguments[place] if len(arguments) > place else ""


def _renamed(text: str, **names: str) -> Pointwise:
    return pointwise(text).named(names)


def _numbers(text: str, words: Sequence[str], defaults: Sequence[float]) -> list[float]:
    if len(words) > len(defaults):
        raise ScheduleError(
            f"post-op '{text}' has {len(words)} arguments; expected at most {len(defaults)}"
        )
    try:
        given = [float(w) if w else d for w, d in zip(words, defaults, strict=False)]
    except ValueError:
        raise ScheduleError(f"post-op '{text}' has an argument that is no number") from None
    if any(n != n for n in given):
        raise ScheduleError(f"post-op '{text}' has an argument that is no number")
    return given + list(defaults[len(given) :])


def _of_table(text: str, name: str, arguments: list[str]) -> PostOp | None:
    """A row of the operations' table, by oneDNN's name and numbers or by its own; None if there is
    none."""
    rows = [
        (op, a, b) for op in OPS.values() if op.activation for theirs, a, b in op.onednn if theirs == name
    ]
    if rows and (arguments or name not in OPS):
        alpha, beta, scale = _numbers(text, arguments, (0, 0, 1))
        for op, a, b in rows:
            if (a is None or abs(alpha - a) < NEAR) and (b is None or abs(beta - b) < NEAR):
                return _scaled(op.name, pointwise(f"{op.name}(acc)"), scale)
    row = OPS.get(name)
    if row is None or row.arity != 1 or ((name in FUNCTIONS or rows) and arguments) or name in NUMBERED:
        return None
    numbers = "".join(f", {number(n)}" for n in _numbers(text, arguments, row.defaults)[: len(arguments)])
    return PostOp(":".join([name, *arguments]), pointwise(f"{name}(acc{numbers})"))


def _function(text: str, name: str, arguments: list[str]) -> PostOp:
    alpha, beta, scale = _numbers(text, arguments, (0, 0, 1))
    if name in ("clip", "clip_v2") and alpha > beta:
        raise ScheduleError(f"post-op '{text}' clips from {alpha:g} to {beta:g}; expected a range")
    if name == "soft_relu" and not alpha:
        raise ScheduleError(f"post-op '{text}' divides by alpha; expected another number than 0")
    if text.startswith(f"{name}_dst") and name in ("relu", "elu") and alpha < 0:
        raise ScheduleError(
            f"post-op '{text}' has a negative alpha, with which a result does not tell "
            "its derivative; expected 0 or more"
        )
    said = [] if name in WITHOUT_NUMBERS else [number(alpha), number(beta)]
    while said and said[-1] == "0":
        said.pop()
    made = pointwise(FUNCTIONS[name], {"alpha": alpha, "beta": beta})
    return _scaled(":".join([name, *said]) if made != IDENTITY else "", made, scale)


def _scaled(word: str, function: Pointwise, scale: float) -> PostOp:
    """A function and then a factor, which is a word of its own."""
    if scale == 1:
        return PostOp(word, function)
    made = pointwise("acc*scale", {"scale": scale}).of("acc", function)
    return PostOp("+".join(filter(None, [word, f"mul:{number(scale)}"])), made)


def _bias(text: str, arguments: list[str]) -> PostOp:
    dtype = _type(text, arguments[0]) if arguments else None
    if len(arguments) > 1:
        raise ScheduleError(f"post-op '{text}' has {len(arguments)} arguments; expected a type at most")
    return PostOp(text, pointwise("acc + bia"), (PostOpOperand("bia", dtype, 2),))


def _sum(text: str, arguments: list[str]) -> PostOp:
    if len(arguments) > 3:
        raise ScheduleError(
            f"post-op '{text}' has {len(arguments)} arguments; expected sum:SCALE:ZERO:TYPE"
        )
    scale, zero = _numbers(text, arguments[:2], (1, 0))
    dtype = _type(text, arguments[2]) if _at(arguments, 2) else None
    function = pointwise("acc + (res - zero)*scale", {"scale": scale, "zero": zero})
    said = ["sum", number(scale), number(zero), *([dtype.name] if dtype else [])]
    if dtype is None:
        said = said[: 3 if zero else 2 if scale != 1 else 1]
    plain = "res" if said == ["sum"] else ":".join(said)
    return PostOp(plain, function, (PostOpOperand("res", dtype),))


def _type(text: str, word: str) -> ir.DType:
    try:
        found = ir.type_named(word)
    except KeyError:
        found = None
    if found is None or not found.torch or found.kind not in ("float", "int") or found.within:
        raise ScheduleError(f"post-op '{text}' has the type '{word}', which no tensor has here")
    return found


def _mask(text: str, word: str) -> int:
    if word in MASKS or not word:
        return MASKS.get(word, 0)
    if word.isascii() and word.isdecimal() and int(word) < 32:
        return int(word)
    raise ScheduleError(
        f"post-op '{text}' has the mask '{word}', which is unknown; expected a number or "
        f"one of {' '.join(MASKS)}"
    )


def _binary(text: str, name: str, arguments: list[str], first: int) -> PostOp:
    if not arguments or not arguments[0]:
        raise ScheduleError(f"post-op '{text}' has no type; expected {name}:TYPE:MASK or {name}:NUMBER")
    if len(arguments) == 1 and (value := _as_number(arguments[0])) is not None:
        if name == "div" and not value:
            raise ScheduleError(f"post-op '{text}' divides by 0")
        return PostOp(f"{name}:{number(value)}", pointwise(BINARY[name], {"arg": value}))
    if len(arguments) > 3:
        raise ScheduleError(f"post-op '{text}' has strides; expected a tag at most")
    operand = PostOpOperand(
        f"arg{first}",
        _type(text, arguments[0]),
        _mask(text, _at(arguments, 1)),
        _at(arguments, 2).replace("any", ""),
    )
    return PostOp(text, _renamed(BINARY[name], arg=operand.name), (operand,))


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _select(text: str, arguments: list[str], first: int) -> PostOp:
    """``select:TYPE[.MASK[.TAG]][:MASK[.TAG]]``: the value where the condition, of s8, is not 0, else the
    tensor's."""
    if not arguments or len(arguments) > 2:
        raise ScheduleError(
            f"post-op '{text}'; expected select:TYPE.MASK.TAG:MASK.TAG, the latter those of the condition"
        )
    kind, *other = arguments[0].split(".")
    told = _at(arguments, 1).split(".")
    tensor = PostOpOperand(f"arg{first}", _type(text, kind), _mask(text, _at(other, 0)), _at(other, 1))
    condition = PostOpOperand(f"arg{first + 1}", ir.i8, _mask(text, told[0]), _at(told, 1))
    return PostOp(text, _renamed(SELECT, arg=tensor.name, cond=condition.name), (tensor, condition))


def _traced(text: str, first: int) -> PostOp:
    """``fn(TYPE:MASK,...|TEXT)``: the text of a function of ``acc`` and ``arg0``, ``arg1``, ..., which are
    the tensors of these types and masks."""
    given, bar, body = text.removeprefix(TRACED).removesuffix(")").partition("|")
    if not bar or not text.endswith(")"):
        raise ScheduleError(f"'{text}' cannot be read; expected fn(TYPE:MASK,...|TEXT)")
    words = [w.split(":") for w in given.split(",") if w]
    operands = tuple(
        PostOpOperand(f"arg{first + i}", _type(text, w[0]) if w[0] else None, _mask(text, _at(w, 1)))
        for i, w in enumerate(words)
    )
    function = pointwise(body)
    names = {f"arg{i}": o.name for i, o in enumerate(operands)}
    if unknown := [n for n in function.names if n not in ("acc", *names)]:
        raise ScheduleError(f"'{text}' names {unknown[0]}; expected {', '.join(['acc', *names])}")
    return PostOp(text, function.named(names), operands)


def split(text: str) -> list[str]:
    """The words of an epilogue: its parts between plus signs outside of parentheses."""
    words, depth = [""], 0
    for c in text:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if c == "+" and depth == 0:
            words.append("")
        else:
            words[-1] += c
    return [w for w in words if w]


MOST_OPERATIONS = 32
"""The most operations of an epilogue, as in oneDNN, beside a bias and scales."""
RANK = "abcdefgh"  # the letters of dimensions in tags
STOCHASTIC = "stochastic"
SEED = PostOpOperand("seed", ir.i32, 0)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations, in order. An empty epilogue stores the sum itself. ``bia``: the bias type, if it is
    not that of the result; ``zeros``: the zero points of the operands, before all operations; ``random``:
    whether the result is rounded at random."""

    ops: tuple[str, ...] = ()
    bia: ir.DType | None = None
    zeros: ZeroPoints = ZeroPoints()
    random: bool = False

    @staticmethod
    def parse(text: str, bia: ir.DType | None = None) -> Epilogue:
        """Read ``bias+relu``; ``bia`` is the bias type (default: the type of the result). Raises
        ScheduleError for an unknown operation, wrong arguments, a second bias, or sums that read the old
        result as two types."""
        words: list[str] = []
        zeros, given = ZeroPoints.read(split(text.replace(" ", "")))
        random = given[-1:] == [STOCHASTIC]
        for word in given[:-1] if random else given:
            if word == STOCHASTIC:
                raise ScheduleError(
                    f"epilogue '{text}' has '{word}' ahead of others; expected it last, "
                    "because the result is rounded behind all"
                )
            found = post_op(word)
            if found is None:
                raise ScheduleError(
                    f"epilogue '{text}' has '{word.partition(':')[0]}', expected one of: "
                    f"{', '.join(known())}{nearest(word, known())}"
                )
            words += split(found.text)
        if len(words) > MOST_OPERATIONS + 4:
            raise ScheduleError(
                f"epilogue '{text}' has {len(words)} operations; expected at most {MOST_OPERATIONS}"
            )
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

    def tensors(self, result: ir.Tensor) -> tuple[ir.Tensor, ...]:
        """The tensors that the epilogue reads, each once. Raises ScheduleError for a mask or a tag of
        another rank than the result's, and for a result that is not rounded at random."""
        if self.random and result.dtype not in ir.SHORT:
            raise ScheduleError(
                f"'{STOCHASTIC}' rounds results of {' '.join(map(str, ir.SHORT))}; "
                f"{result.name} is {result.dtype}"
            )
        return tuple({o.name: _tensor(o, result) for o in self.operands}.values())

    def views(self, c: ir.View) -> tuple[ir.View, ...]:
        """Views of ``tensors`` at the point of C that ``c`` describes."""
        masks = {o.name: o.mask for o in self.operands}
        return tuple(_view(t, masks[t.name], c) for t in self.tensors(c.tensor))

    def steps(self, acc: ir.Expr, c: ir.View) -> tuple[Step, ...]:
        """The steps from the sum ``acc`` to the store at the point that ``c`` describes."""
        if not self.ops and not self.random:
            return (Write(c, ir.saturated(acc, c.tensor.dtype)),)
        computed = ir.f64 if acc.dtype is ir.f64 else ir.f32
        reads = [Read(f"{v.tensor.name}_value", v) for v in self.views(c)]
        given: dict[str, ir.Expr] = {r.view.tensor.name: ir.Cast(r.var, computed) for r in reads}
        given["acc"] = acc if acc.dtype is computed else ir.Cast(acc, computed)
        lets, value = self.function.lets(given, computed)
        if self.random:
            value = value if computed is ir.f32 else ir.Cast(value, ir.f32)
            at = _place(c)
            return (*reads, *lets, Write(c, ir.at_random(value, c.tensor.dtype, reads[-1].var, at)))
        numbers: set[ir.Expr] = {r.var for r in reads}  # scales and what is added, as calls expect them
        for let in lets:
            numbers |= {let.var} if ir.is_number(let.value, numbers) else set()
        return (*reads, *lets, Write(c, ir.saturated(value, c.tensor.dtype, numbers)))

    def in_torch(self, acc: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """``acc`` and the tensors that are read, as f64 tensors that broadcast to the result."""
        wide = {o.name: extra[o.name].double() for o in self.operands if o is not SEED}
        if "bia" in wide:
            wide["bia"] = wide["bia"].view(-1, *[1] * (acc.ndim - 2))
        return {"acc": acc, **wide}


def _place(c: ir.View) -> ir.Expr:
    """The number of an element of the result, counted in the order of its dimensions."""
    sizes = c.tensor.extents or tuple(map(ir.Const, c.tensor.shape))
    place: ir.Expr = c.dims[0].coord
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


def _tensor(operand: PostOpOperand, result: ir.Tensor) -> ir.Tensor:
    dtype, rank = operand.dtype or result.dtype, len(result.shape)
    if operand.name == "bia":
        channels = result.shape[1:2]
        return ir.Tensor("bia", result.dims[1:2], channels, ir.Layout.dense(dtype, channels))
    if operand.mask >= 1 << rank:
        raise ScheduleError(
            f"post-op tensor {operand.name} has the mask {operand.mask}; expected less "
            f"than {1 << rank}, for a result of {rank} dimensions"
        )
    along = [operand.mask < 0 or bool(operand.mask >> d & 1) for d in range(rank)]
    shape = tuple(n if on else 1 for n, on in zip(result.shape, along, strict=True))
    extents = result.extents and tuple(
        e if on else ir.Const(1) for e, on in zip(result.extents, along, strict=True)
    )
    alone = shape == (1,) * rank and all(isinstance(e, ir.Const) for e in extents)
    layout = _layout(operand, dtype, shape, result)
    return ir.Tensor(operand.name, result.dims, shape, layout, extents=() if alone else extents)


def _layout(
    operand: PostOpOperand, dtype: ir.DType, shape: tuple[int, ...], result: ir.Tensor
) -> ir.Layout:
    """The layout of the tag; without one the result's, or for another shape its order of dimensions."""
    if operand.tag:
        try:
            return ir.Layout.parse(operand.tag, dtype, shape, RANK[: len(shape)])
        except LayoutError as error:
            raise ScheduleError(f"post-op tensor {operand.name}: {error}") from error
    if shape == result.shape:
        return replace(result.layout, dtype=dtype)
    blocks = result.layout.blocks
    if len(blocks) != len(shape):
        return ir.Layout.dense(dtype, shape)
    return ir.Layout.dense(dtype, shape, [b.dim for b in blocks])


def _view(tensor: ir.Tensor, mask: int, c: ir.View) -> ir.View:
    if tensor.name == "bia":
        return ir.View(tensor, (ir.ViewDim(c.dims[1].coord),))
    return ir.View(
        tensor,
        tuple(
            dim if mask < 0 or mask >> d & 1 else ir.ViewDim(ir.Const(0)) for d, dim in enumerate(c.dims)
        ),
    )
