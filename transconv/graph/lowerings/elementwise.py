"""Rows of operations element by element, and of tensors that are made of no other ones.

Values are computed in f32 (f64 in f64), and rounded by casts and where they are stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, log2
from typing import Any

import torch

from transconv.compute import OPS, Op, render
from transconv.graph.fusion.index_ir import ConstantValue, Counted, Indexed, Mapped, MovedView, Piece
from transconv.graph.lowerings.table import (
    NodeCall,
    NotOurs,
    anew,
    arithmetic,
    cast,
    computed,
    converted,
    copied,
    expanded,
    filled,
    from_before,
    kind,
    mapped,
    number,
    row,
    together,
)
from transconv.ir import Const, Var, f32

HEAVY = 6.0  # instructions of exp and the like
INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}
WHOLE = ("max", "min", "neg", "where", *(name for name in INFIX if name != "div"))  # of integers, too
EQUAL = {"eq", "ne"}
BY_NAME = {"sub", "add"}  # whose second operand torch scales
# Arguments behind the values: alpha, scale, input scale; beta, threshold.
USUAL = {"elu": (1, 1, 1), "softplus": (1, 20)}


# -- rows of the table of operations ---------------------------------------------------------------


def _from_table(op: Op) -> Callable[[NodeCall], Piece]:
    work = 1.0 if op.exact else HEAVY

    def rule(call: NodeCall) -> Piece:
        values = list(call.args[: op.arity])
        alpha = call.arg(op.arity, "alpha", 1) if op.name in BY_NAME else 1
        if (bool(alpha) if call.dtype is torch.bool else alpha) != 1:  # truths are scaled by a truth
            scaled = number(alpha)
            return arithmetic(
                call,
                f"{{}} {INFIX[op.name]} {{}}*{scaled}".format,
                *values,
                label=op.name,
                work=2,
                whole=True,
            )
        given = {**call.kwargs}
        if given.pop("alpha", 1) != 1 or given.pop("rounding_mode", None):
            raise NotOurs(f"{op.name} with {call.kwargs}")
        found = next(
            (
                o
                for o in OPS.values()
                if o.torch == op.torch
                and all(dict(o.options).get(k) == v for k, v in given.items())
                and (given or o.options in ((), (("approximate", "none"),)))
            ),
            None,
        )
        rest = tuple(call.args[op.arity :])
        if found is None or rest != USUAL.get(op.name, ())[: len(rest)]:
            raise NotOurs(f"{op.name} with other arguments than its row has")
        if op.name == "where":
            return _where(call, *values)
        text = (
            f"{{}} {INFIX[op.name]} {{}}"
            if op.name in INFIX
            else (f"{found.name}({', '.join(['{}'] * op.arity)})")
        )
        made = arithmetic(call, text.format, *values, label=found.name, work=work, whole=op.name in WHOLE)
        made.equal = op.name in EQUAL and any(x.dtype.is_floating_point for x in made.inputs)
        made.nearest = _nearest(op, made)
        return made

    return rule


def _nearest(op: Op, made: Mapped) -> tuple[Piece, Piece | None] | None:
    """Of what values are the nearest integers, and the integer that is added."""
    if op is OPS["round"]:
        return made.inputs[0], None
    whole, *others = sorted(made.inputs, key=lambda x: not isinstance(x, Mapped) or x.nearest is None)
    if (
        op is OPS["add"]
        and isinstance(whole, Mapped)
        and whole.nearest is not None
        and (whole.nearest[1] is None and others[0].dtype is torch.int32)
    ):
        return whole.nearest[0], others[0]
    return None


def _where(call: NodeCall, cond: Any, a: Any, b: Any) -> Piece:
    computed(call.dtype)
    inputs = together(call, cond, a, b)
    if kind(call.dtype) == "bool":
        raise NotOurs("a choice of truths")
    inputs = (inputs[0], *(cast(x, call.dtype) if kind(x.dtype) == "bool" else x for x in inputs[1:]))
    return mapped("where({}, {}, {})".format, *inputs, dtype=call.dtype, label="where")


for _op in OPS.values():  # whose functions aten has, of tensors and of numbers
    if isinstance(_op.torch, str) and _op.torch.startswith("torch."):
        row(
            *(
                f"{_op.torch.rpartition('.')[2]}.{overload}"
                for overload in ("default", "Tensor", "Scalar", "self")
            )
        )(_from_table(_op))


# -- rows of their own -----------------------------------------------------------------------------


@row("clone", "alias", "detach", "lift_fresh_copy", "contiguous")
def _copy(call: NodeCall) -> Piece:
    return copied(call.args[0])


@row("_to_copy", "prims::convert_element_type")
def _to(call: NodeCall) -> Piece:
    x = call.args[0]
    if x.dtype is call.dtype:
        return copied(x)
    before = from_before(x, call.dtype)
    if before is None:
        return cast(x, call.dtype)
    return anew(before, before.of) if isinstance(before, (MovedView, Indexed)) else copied(before)


def _written(text: str, label: str, work: float, call: NodeCall) -> Piece:
    return arithmetic(call, text.format, call.args[0], label=label, work=work)


def _truths(text: str, call: NodeCall) -> Piece:
    values = call.args[: text.count("{")]
    if any(not isinstance(v, Piece) or kind(v.dtype) != "bool" for v in values):
        raise NotOurs("bits of whole numbers")
    return mapped(text.format, *together(call, *values), dtype=torch.bool, label="logical")


for _names, _write, _work in (
    (("reciprocal",), "1 / {0}", 1.0),
    (("isnan",), "{0} != {0}", 1.0),
    (("sign", "sgn"), "where({0} > 0, 1.0, where({0} < 0, -1.0, 0.0))", 3.0),
):
    row(*_names)(partial(_written, _write, _names[0], _work))
for _names, _write in (
    (("logical_not", "bitwise_not"), "not {}"),
    (("logical_and", "bitwise_and.Tensor"), "({}) and ({})"),
    (("logical_or", "bitwise_or.Tensor"), "({}) or ({})"),
):
    row(*_names)(partial(_truths, _write))


@row("hardtanh", "clamp")
def _clamp(call: NodeCall) -> Piece:
    usual = (-1.0, 1.0) if "min_val" in call.kwargs or call.name.startswith("hardtanh") else (None, None)
    low, high = call.arg(1, "min", usual[0]), call.arg(2, "max", usual[1])
    if kind(call.dtype) == "int":  # torch takes the digits of a bound away
        low, high = (n if n is None else converted(filled(n, call.dtype), call.dtype) for n in (low, high))
    text = "{}"
    if low is not None:
        text = f"max({text}, {number(low)})"
    if high is not None:
        text = f"min({text}, {number(high)})"
    made = arithmetic(call, text.format, call.args[0], label="clamp", work=2, whole=True)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low <= high:
        made.range = low, high
        x = made.inputs[0]
        made.nearest = x.nearest if isinstance(x, Mapped) else None
    return made


@row("clamp_min")
def _clamp_min(call: NodeCall) -> Piece:
    return arithmetic(
        call, f"max({{}}, {number(call.args[1])})".format, call.args[0], label="clamp", whole=True
    )


@row("leaky_relu")
def _leaky(call: NodeCall) -> Piece:
    slope = number(call.arg(1, "negative_slope", 0.01))
    return arithmetic(
        call, lambda x: f"where({x} > 0, {x}, {x}*{slope})", call.args[0], label="leaky_relu", work=2
    )


@row("gelu_backward")
def _gelu_gradient(call: NodeCall) -> Piece:
    """By the derivative of the table: torch's decomposition has the error function, in which what is left
    of 1 is lost."""
    of = OPS["gelu_tanh" if call.kwargs.get("approximate", "none") == "tanh" else "gelu"].derivative
    assert of is not None

    def text(g: str, x: str) -> str:
        (slope,) = of(Var(x, f32))
        assert slope is not None
        return f"{g}*({render(slope)})"

    return arithmetic(call, text, *call.args[:2], label="gelu gradient", work=2 * HEAVY)


MULTIPLIED = 64  # the largest power that is computed by multiplications


@row("pow.Tensor_Scalar")
def _power(call: NodeCall) -> Piece:
    x, power = call.args
    if not isinstance(power, (int, float)) or power != power or abs(power) > 1e30:
        raise NotOurs(f"a power of {power}")
    power = converted(power, call.dtype)
    if power in (0.5, -0.5):
        return arithmetic(call, f"{'r' * (power < 0)}sqrt({{}})".format, x, label="pow", work=HEAVY)
    if power != int(power):
        text = f"pow({{}}, {number(float(power))})"
        return arithmetic(call, text.format, x, label="pow", work=2 * HEAVY)
    if not 1 <= abs(power) <= MULTIPLIED:
        raise NotOurs(f"a power of {power}")
    text = _multiplied(abs(int(power)))
    return arithmetic(call, (f"1 / ({text})" if power < 0 else text).format, x, label="pow", work=3)


@row("pow.Scalar")
def _exponential(call: NodeCall) -> Piece:
    base, x = call.args
    base = converted(base, call.dtype)
    if not isinstance(base, (int, float)) or not 0 < base < inf or base == 1:  # 1**NaN is 1
        raise NotOurs(f"powers of {base}")
    return arithmetic(call, f"exp2({{}}*{log2(base)!r})".format, x, label="pow", work=HEAVY)


def _multiplied(power: int) -> str:
    """A whole power as a text, of eighth powers."""
    eighths, rest = divmod(power, 8)
    parts = [f"({{0}}**8)**{eighths}" if eighths > 1 else "{0}**8"] * (eighths > 0)
    parts += [f"{{0}}**{rest}" if rest > 1 else "{0}"] * (rest > 0)
    return "*".join(parts)


@row("clamp.Tensor")
def _clamp_between(call: NodeCall) -> Piece:
    """Where a bound is no number, neither is the result."""
    found: Piece = call.args[0]
    for bound, op in ((call.arg(1, "min"), "max"), (call.arg(2, "max"), "min")):
        if bound is not None:
            found = arithmetic(call, f"{op}({{}}, {{}})".format, found, bound, label="clamp", whole=True)
    return found


@row("copy")
def _copied(call: NodeCall) -> Piece:
    return cast(expanded(call.args[1], call.shape), call.dtype)


@row(
    "full",
    "full_like",
    "scalar_tensor",
    "zeros",
    "ones",
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_ones",
    "new_full",
)
def _full(call: NodeCall) -> Piece:
    computed(call.dtype)
    name = call.name
    value: Any = (
        0
        if "zeros" in name
        else 1
        if "ones" in name
        else call.args[0]
        if "scalar" in name
        else (call.arg(2, "fill_value") if "new_full" in name else call.arg(1, "fill_value"))
    )
    if kind(call.dtype) == "bool":
        raise NotOurs("a tensor of one truth")
    held = filled(value, call.dtype)
    return ConstantValue(shape=call.shape, dtype=call.dtype, value=held, label="full")


@row(
    "empty.memory_format",
    "empty_permuted",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
)
def _empty(call: NodeCall) -> Piece:
    """Any number will do: what reads it before it is written to reads what memory has."""
    computed(call.dtype)
    if kind(call.dtype) == "bool":
        raise NotOurs("a tensor of one truth")
    return ConstantValue(shape=call.shape, dtype=call.dtype, value=0, label="full")


@row("prims::iota", "arange.start_step")
def _iota(call: NodeCall) -> Piece:
    computed(call.dtype)
    given = call.args if call.name.startswith("arange") else ()
    start, step = (
        given[0] if given else call.kwargs.get("start", 0),
        (given[2] if len(given) > 2 else call.kwargs.get("step", 1)),
    )
    if not isinstance(start, int) or not isinstance(step, int) or kind(call.dtype) == "bool":
        raise NotOurs("a range of broken numbers")
    return Counted(
        shape=call.shape,
        dtype=call.dtype,
        label="iota",
        count=lambda at: at[0] * Const(step) + Const(start),
    )
