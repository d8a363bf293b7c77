"""What happens to the accumulated sum before it is stored, as one expression over ``acc``.

The text form is the operations in order, joined by ``+``: ``bias+relu``, ``bias+res+silu``. ``bias``
adds one value per output channel, ``res`` adds a tensor of the result's shape (a residual); the
others are functions of one value. Everything is computed in the accumulator's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transconv.errors import ConfigError
from transconv.ir import (
    Call,
    Cast,
    Const,
    DType,
    Expr,
    Layout,
    Load,
    Tensor,
    View,
    ViewDim,
    maximum,
    minimum,
)


def _sigmoid(x: Expr) -> Expr:
    return Call("sigmoid", (x,))


def _const(value: float, like: Expr) -> Expr:
    return Const(value, like.dtype)


ACTIVATIONS: dict[str, Callable[[Expr], Expr]] = {
    "relu": lambda x: maximum(x, _const(0.0, x)),
    "relu6": lambda x: minimum(maximum(x, _const(0.0, x)), _const(6.0, x)),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "tanh": lambda x: _sigmoid(x * _const(2.0, x)) * _const(2.0, x) - _const(1.0, x),
    "gelu": lambda x: x * _const(0.5, x) * (_const(1.0, x) + Call("erf", (x * _const(0.5**0.5, x),))),
    "gelu_tanh": lambda x: x * _sigmoid(
        (x + x * x * x * _const(0.044715, x)) * _const(1.5957691216057308, x)),
    "hardswish": lambda x: x * minimum(
        maximum(x + _const(3.0, x), _const(0.0, x)), _const(6.0, x)) * _const(1 / 6, x),
}


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations, in order. An empty epilogue stores the sum itself."""

    ops: tuple[str, ...] = ()
    bia: DType | None = None

    @staticmethod
    def parse(text: str, bia: DType | None = None) -> Epilogue:
        """Read ``bias+relu``; ``bia`` is the bias type (default: the type of the result)."""
        ops = tuple(w for w in text.replace(" ", "").split("+") if w)
        for op in ops:
            if op not in ACTIVATIONS and op not in ("bias", "res"):
                known = ", ".join(["bias", "res", *ACTIVATIONS])
                raise ConfigError(f"epilogue '{text}' has '{op}', expected one of: {known}")
        for op in ("bias", "res"):
            if ops.count(op) > 1:
                raise ConfigError(f"epilogue '{text}' uses '{op}' twice; it can be used once")
        return Epilogue(ops, bia)

    def __str__(self) -> str:
        return "+".join(self.ops)

    def __bool__(self) -> bool:
        return bool(self.ops)

    def views(self, c: View) -> tuple[View, ...]:
        """The tensors that the epilogue reads, seen from a point of C."""
        found = []
        for op in self.ops:
            if op == "bias":
                channels = c.tensor.shape[1]
                bia = Tensor("bia", (c.tensor.dims[1],), (channels,),
                             Layout.dense(self.bia or c.tensor.dtype, (channels,)))
                found.append(View(bia, (ViewDim(c.dims[1].coord),)))
            elif op == "res":
                res = Tensor("res", c.tensor.dims, c.tensor.shape, c.tensor.layout)
                found.append(View(res, c.dims))
        return tuple(found)

    def value(self, acc: Expr, c: View) -> Expr:
        """The value to store for the sum ``acc`` at the point that ``c`` describes."""
        reads = {v.tensor.name: v for v in self.views(c)}
        result = acc
        for op in self.ops:
            if op in ACTIVATIONS:
                result = ACTIVATIONS[op](result)
            else:
                view = reads["bia" if op == "bias" else "res"]
                result = result + Cast(Load(view.tensor, view.offset(), view.mask()), acc.dtype)
        return result
