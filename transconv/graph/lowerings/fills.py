"""Rows of tensors that are made of no other ones: of one number, of any numbers, and of counted ones."""

from __future__ import annotations

from typing import Any

import torch

from transconv.graph.fusion.index_ir import ConstantValue, Counted, Piece
from transconv.graph.lowerings.table import NodeCall, NotOurs, computed, kind, number, row
from transconv.graph.sizes import Fraction, SymbolicSize
from transconv.ir import Const


@row("full", "full_like", "scalar_tensor", "zeros", "ones", "zeros_like", "ones_like", "new_zeros",
     "new_ones", "new_full")
def _full(call: NodeCall) -> Piece:
    computed(call.dtype)
    name = call.name
    value: Any = 0 if "zeros" in name else 1 if "ones" in name else call.args[0] if "scalar" in name else (
        call.arg(2, "fill_value") if "new_full" in name else call.arg(1, "fill_value"))
    if kind(call.dtype) == "bool":
        raise NotOurs("a tensor of one truth")
    held = filled(value, call.dtype)
    return ConstantValue(shape=call.shape, dtype=call.dtype, value=held, label="full")


def filled(value: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor of a type has it. Raises NotOurs."""
    if isinstance(value, Fraction) and kind(dtype) != "float":
        raise NotOurs("a broken number made of sizes is cast to a whole one")
    held = value if isinstance(value, (SymbolicSize, Fraction)) else (
        float(value) if kind(dtype) == "float" else int(value))
    number(held)
    return held


@row("empty.memory_format", "empty_permuted", "empty_strided", "empty_like", "new_empty",
     "new_empty_strided")
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
    start, step = given[0] if given else call.kwargs.get("start", 0), (
        given[2] if len(given) > 2 else call.kwargs.get("step", 1))
    if not isinstance(start, int) or not isinstance(step, int) or kind(call.dtype) == "bool":
        raise NotOurs("a range of broken numbers")
    return Counted(shape=call.shape, dtype=call.dtype, label="iota",
                   count=lambda at: at[0] * Const(step) + Const(start))
