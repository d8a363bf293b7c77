"""The words of epilogues, one row each: what they do to the sum, and which tensors they read.

The names and numbers are oneDNN's: ``relu:0.5``, ``sum:2.5``, ``add:u8:per_dim_01``, ``prelu:per_oc``.
Beside them stand ``bias``, ``res`` and the names of the operations' table (``silu``, ``pow:0.5``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transconv.compute import IDENTITY, OPS, Pointwise, number, pointwise
from transconv.errors import ComputeError, ScheduleError
from transconv.ir import DType, f32, i8, type_named, why_not_text

ALL = -1
"""The mask of a tensor of the result's shape."""
MASKS = {"common": 0, "per_oc": 2, "per_dim_0": 1, "per_dim_1": 2, "per_dim_01": 3, "per_dim_2": 4,
         "per_dim_3": 8, "per_tensor": ALL}
NEAR = 1e-4  # numbers such as 1/6 are written with few digits

# The functions of one value, with oneDNN's names and numbers. The table's rows have the others.
FUNCTIONS = {
    "clip": "clamp(acc, alpha, beta)", "clip_v2": "clamp(acc, alpha, beta)", "elu": "elu(acc, alpha)",
    "hardsigmoid": "clamp(acc*alpha + beta, 0, 1)", "hardswish": "acc*clamp(acc*alpha + beta, 0, 1)",
    "linear": "acc*alpha + beta", "pow": "pow(acc, beta)*alpha", "relu": "leaky_relu(acc, alpha)",
    "soft_relu": "softplus(acc, alpha)", "square": "acc*acc", "swish": "acc*sigmoid(acc*alpha)",
    **{name: f"{name}(acc)" for name in ("abs", "exp", "log", "mish", "round", "sqrt")},
}
# Of the value and a tensor, or a number.
BINARY = {
    "add": "acc + arg", "sub": "acc - arg", "mul": "acc*arg", "div": "acc/arg", "max": "max(acc, arg)",
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
    dtype: DType | None = None
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
        raise ScheduleError(f"post-op '{text}': {why_not_text(text)}")
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
            operand = PostOpOperand(f"arg{first}", f32, _mask(text, _at(arguments, 0)))
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
    return tuple(dict.fromkeys(["bias", "res", "sum", "prelu", "select", *BINARY, *FUNCTIONS, *theirs,
                                *rows]))


def _at(arguments: Sequence[str], place: int) -> str:
    return arguments[place] if len(arguments) > place else ""


def _renamed(text: str, **names: str) -> Pointwise:
    return pointwise(text).named(names)


def _numbers(text: str, words: Sequence[str], defaults: Sequence[float]) -> list[float]:
    if len(words) > len(defaults):
        raise ScheduleError(f"post-op '{text}' has {len(words)} arguments; expected at most "
                            f"{len(defaults)}")
    try:
        given = [float(w) if w else d for w, d in zip(words, defaults, strict=False)]
    except ValueError:
        raise ScheduleError(f"post-op '{text}' has an argument that is no number") from None
    if any(n != n for n in given):
        raise ScheduleError(f"post-op '{text}' has an argument that is no number")
    return given + list(defaults[len(given):])


def _of_table(text: str, name: str, arguments: list[str]) -> PostOp | None:
    """A row of the operations' table, by oneDNN's name and numbers or by its own; None if there is
    none."""
    rows = [(op, a, b) for op in OPS.values() if op.activation for theirs, a, b in op.onednn
            if theirs == name]
    if rows and (arguments or name not in OPS):
        alpha, beta, scale = _numbers(text, arguments, (0, 0, 1))
        for op, a, b in rows:
            if (a is None or abs(alpha - a) < NEAR) and (b is None or abs(beta - b) < NEAR):
                return _scaled(op.name, pointwise(f"{op.name}(acc)"), scale)
    row = OPS.get(name)
    if row is None or row.arity != 1 or (name in FUNCTIONS or rows) and arguments or name in NUMBERED:
        return None
    numbers = "".join(f", {number(n)}" for n in _numbers(text, arguments, row.defaults)[:len(arguments)])
    return PostOp(":".join([name, *arguments]), pointwise(f"{name}(acc{numbers})"))


def _function(text: str, name: str, arguments: list[str]) -> PostOp:
    alpha, beta, scale = _numbers(text, arguments, (0, 0, 1))
    if name in ("clip", "clip_v2") and alpha > beta:
        raise ScheduleError(f"post-op '{text}' clips from {alpha:g} to {beta:g}; expected a range")
    if name == "soft_relu" and not alpha:
        raise ScheduleError(f"post-op '{text}' divides by alpha; expected another number than 0")
    if text.startswith(f"{name}_dst") and name in ("relu", "elu") and alpha < 0:
        raise ScheduleError(f"post-op '{text}' has a negative alpha, with which a result does not tell "
                            "its derivative; expected 0 or more")
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
        raise ScheduleError(f"post-op '{text}' has {len(arguments)} arguments; expected "
                            "sum:SCALE:ZERO:TYPE")
    scale, zero = _numbers(text, arguments[:2], (1, 0))
    dtype = _type(text, arguments[2]) if _at(arguments, 2) else None
    function = pointwise("acc + (res - zero)*scale", {"scale": scale, "zero": zero})
    said = ["sum", number(scale), number(zero), *([dtype.name] if dtype else [])]
    if dtype is None:
        said = said[:3 if zero else 2 if scale != 1 else 1]
    plain = "res" if said == ["sum"] else ":".join(said)
    return PostOp(plain, function, (PostOpOperand("res", dtype),))


def _type(text: str, word: str) -> DType:
    try:
        found = type_named(word)
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
    raise ScheduleError(f"post-op '{text}' has the mask '{word}', which is unknown; expected a number or "
                        f"one of {' '.join(MASKS)}")


def _binary(text: str, name: str, arguments: list[str], first: int) -> PostOp:
    if not arguments or not arguments[0]:
        raise ScheduleError(f"post-op '{text}' has no type; expected {name}:TYPE:MASK or {name}:NUMBER")
    if len(arguments) == 1 and (value := _as_number(arguments[0])) is not None:
        if name == "div" and not value:
            raise ScheduleError(f"post-op '{text}' divides by 0")
        return PostOp(f"{name}:{number(value)}", pointwise(BINARY[name], {"arg": value}))
    if len(arguments) > 3:
        raise ScheduleError(f"post-op '{text}' has strides; expected a tag at most")
    operand = PostOpOperand(f"arg{first}", _type(text, arguments[0]), _mask(text, _at(arguments, 1)),
                      _at(arguments, 2).replace("any", ""))
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
        raise ScheduleError(f"post-op '{text}'; expected select:TYPE.MASK.TAG:MASK.TAG, the latter those "
                            "of the condition")
    kind, *other = arguments[0].split(".")
    told = _at(arguments, 1).split(".")
    tensor = PostOpOperand(f"arg{first}", _type(text, kind), _mask(text, _at(other, 0)), _at(other, 1))
    condition = PostOpOperand(f"arg{first + 1}", i8, _mask(text, told[0]), _at(told, 1))
    return PostOp(text, _renamed(SELECT, arg=tensor.name, cond=condition.name), (tensor, condition))


def _traced(text: str, first: int) -> PostOp:
    """``fn(TYPE:MASK,...|TEXT)``: the text of a function of ``acc`` and ``arg0``, ``arg1``, ..., which are
    the tensors of these types and masks."""
    given, bar, body = text.removeprefix(TRACED).removesuffix(")").partition("|")
    if not bar or not text.endswith(")"):
        raise ScheduleError(f"'{text}' cannot be read; expected fn(TYPE:MASK,...|TEXT)")
    words = [w.split(":") for w in given.split(",") if w]
    operands = tuple(PostOpOperand(f"arg{first + i}", _type(text, w[0]) if w[0] else None,
                             _mask(text, _at(w, 1)))
                     for i, w in enumerate(words))
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
