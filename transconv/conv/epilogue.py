"""Epilogues: operations on the accumulated sum before it is stored, as one expression over ``acc``.

The text form is the operations in order, joined by ``+``: ``bias+relu``, ``bias+res+silu``. ``bias``
adds one value per feature (dimension 1 of the result), ``res`` adds a tensor of the result's shape (a
residual); the others are functions of one value. Everything is computed in the accumulator's type.
"""

from __future__ import annotations

from dataclasses import dataclass

from transconv.compute import ACTIVATIONS, Read, Step, Write
from transconv.errors import ScheduleError
from transconv.ir import Cast, DType, Expr, Layout, Tensor, Var, View, ViewDim


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations, in order. An empty epilogue stores the sum itself."""

    ops: tuple[str, ...] = ()
    bia: DType | None = None

    @staticmethod
    def parse(text: str, bia: DType | None = None) -> Epilogue:
        """Read ``bias+relu``; ``bia`` is the bias type (default: the type of the result). Raises
        ScheduleError for an unknown operation, or a second bias or res."""
        ops = tuple(w for w in text.replace(" ", "").split("+") if w)
        for op in ops:
            if op not in ACTIVATIONS and op not in ("bias", "res"):
                known = ", ".join(["bias", "res", *ACTIVATIONS])
                raise ScheduleError(f"epilogue '{text}' has '{op}', expected one of: {known}")
        for op in ("bias", "res"):
            if ops.count(op) > 1:
                raise ScheduleError(f"epilogue '{text}' uses '{op}' twice; it can be used once")
        return Epilogue(ops, bia)

    def __str__(self) -> str:
        return "+".join(self.ops)

    def __bool__(self) -> bool:
        return bool(self.ops)

    @property
    def kind(self) -> str:
        """The class of epilogues for tuned rows: empty, ``res`` (reads a tensor of the result's shape), or
        ``point`` (all others)."""
        return "res" if "res" in self.ops else "point" if self.ops else ""

    def tensors(self, result: Tensor) -> tuple[Tensor, ...]:
        """The tensors that the epilogue reads."""
        channels = result.shape[1:2]
        bias = Layout.dense(self.bia or result.dtype, channels)
        known = {"bias": Tensor("bia", result.dims[1:2], channels, bias),
                 "res": Tensor("res", result.dims, result.shape, result.layout, extents=result.extents)}
        return tuple(known[op] for op in self.ops if op in known)

    def views(self, c: View) -> tuple[View, ...]:
        """Views of ``tensors`` at the point of C that ``c`` describes."""
        return tuple(View(t, (ViewDim(c.dims[1].coord),) if t.name == "bia" else c.dims)
                     for t in self.tensors(c.tensor))

    def steps(self, acc: Var, c: View) -> tuple[Step, ...]:
        """The steps from the sum ``acc`` to the store at the point that ``c`` describes."""
        reads = {v.tensor.name: Read(f"{v.tensor.name}_value", v) for v in self.views(c)}
        result: Expr = acc
        for op in self.ops:
            if op in ACTIVATIONS:
                result = ACTIVATIONS[op](result)
            else:
                read = reads["bia" if op == "bias" else "res"]
                result = result + Cast(read.var, acc.dtype)
        return (*reads.values(), Write(c, Cast(result, c.tensor.dtype)))
