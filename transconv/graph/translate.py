"""Translates a graph of aten's operations into pieces, node by node, by the table of rows."""

from __future__ import annotations

import logging
import operator
import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import fx

from transconv.graph import lowerings
from transconv.graph.fusion.index_ir import TYPES, Counted, MovedView, Piece, RegionInput
from transconv.graph.lowerings.table import ROWS, NodeCall, NotOurs, ResultSpec, is_bug, why_no_row
from transconv.graph.lowerings.view_indexing import told_by_place
from transconv.graph.sizes import Fraction, Length, same
from transconv.graph.symbols import Symbols

log = logging.getLogger("transconv.graph")

# Each file there enters its rows when it is imported: a new one is all that an operation needs.
for _file in pkgutil.iter_modules(lowerings.__path__):
    import_module(f"{lowerings.__name__}.{_file.name}")


def source(node: fx.Node, device: torch.device, symbols: Symbols) -> RegionInput | Length | Fraction:
    """A tensor that is in memory, or a number made of sizes. Raises NotOurs."""
    val = node.meta.get("val")
    if isinstance(val, (int, torch.SymInt, torch.SymFloat)):
        return symbols.number(val)
    if not isinstance(val, torch.Tensor):
        raise NotOurs("an operand is no tensor")
    found = _result(val, device, symbols)
    return RegionInput(shape=found.shape, dtype=found.dtype, strides=found.strides, of=node)


def _result(val: torch.Tensor, device: torch.device, symbols: Symbols) -> ResultSpec:
    """A tensor that kernels of a device take. Raises NotOurs."""
    if reason := why_not_tensor(val, device):
        raise NotOurs(reason)
    found = symbols.result(val)
    if not all(n > 0 for n in found.shape):
        raise NotOurs("a tensor without elements")
    return found


def why_not_tensor(val: torch.Tensor, device: torch.device) -> str:
    """Why kernels of a device do not take a tensor, whatever its sizes; empty if they do."""
    if val.device != device:
        return f"a tensor on {val.device} beside others on {device}"
    if val.layout is not torch.strided or val.is_complex() or val.is_quantized:
        return f"a tensor of {val.dtype}, {val.layout}"
    if val.dtype not in TYPES:
        return f"{str(val.dtype).removeprefix('torch.')} has no kernels"
    return ""


def translated(node: fx.Node, known: Mapping[fx.Node, Any], device: torch.device,
               symbols: Symbols) -> Any:
    """The piece of a node, or a tuple of them, of the pieces of its operands. Raises NotOurs."""
    if node.target is operator.getitem:
        whole, place = node.args
        assert isinstance(whole, fx.Node) and isinstance(place, int)
        found = known[whole][place]
        if found is None:
            raise NotOurs("a result that is not computed")
        return _aliasing(_as_torch(found, symbols.result(node.meta["val"])), node)
    rule = ROWS.get(node.target)
    if rule is None:
        raise NotOurs(why_no_row(node.target))
    val = node.meta.get("val")
    each = tuple(val) if isinstance(val, (tuple, list)) else (val,)
    results = tuple([_result(t, device, symbols) if isinstance(t, torch.Tensor) else None for t in each])
    if not any(results):
        raise NotOurs("its result is no tensor")
    values = _values(node, val, known)
    args = _pieces(node.args, known)
    kwargs = _pieces(node.kwargs, known)
    name = str(node.target).partition(".")[2] if str(node.target).startswith(("aten.", "prims.")) else str(
        node.target)
    try:
        made = rule(NodeCall(name, tuple(args), dict(kwargs), results))
    except NotOurs:
        if values is None or (found := counted(values)) is None:
            raise
        made = found
    except Exception as error:
        if not is_bug(error):
            raise
        log.warning("the row of %s has a bug: %s", node.target, error, exc_info=True)
        raise NotOurs(f"its row has a bug: {type(error).__name__}: {error}") from error
    if isinstance(made, tuple):
        return made
    made.values = values
    assert isinstance(val, torch.Tensor) and results[0] is not None
    return _aliasing(_as_torch(made, results[0]), node)


def base_of(node: fx.Node) -> fx.Node | None:
    """The node that another one may be a view of: its first operand, or that of the call of which it is
    one of several results."""
    first = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(first, fx.Node):
        first = first.args[0] if first.args else None
    return first if isinstance(first, fx.Node) else None


def _aliasing(made: Piece, node: fx.Node) -> Piece:
    """The piece of a node, of which it is known whether torch's result is the memory of its operand."""
    base = base_of(node)
    val, whole = node.meta["val"], base.meta.get("val") if base is not None else None
    if isinstance(made, MovedView) and base is not None:
        made.alias = isinstance(whole, torch.Tensor) and _same_memory(whole, val)
    return made


MOST_KNOWN = 1 << 14  # elements of what is computed ahead


def _values(node: fx.Node, val: Any, known: Mapping[fx.Node, Any]) -> torch.Tensor | None:
    """What a node has at every call, where nothing that it is made of is known only then."""
    if not isinstance(val, torch.Tensor) or any(not isinstance(n, int) for n in val.shape) or any(
            getattr(known[x], "values", None) is None for x in node.all_input_nodes):
        return None
    if not 0 < val.numel() <= MOST_KNOWN:
        return None
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda x: known[x].values)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with torch.no_grad():
        found = target(*args, **kwargs)
    return found if isinstance(found, torch.Tensor) else None


def counted(values: torch.Tensor) -> Counted | None:
    """Whole numbers along one dim as an expression of the position; None for others."""
    count = told_by_place(values)
    return None if count is None else Counted(shape=tuple(values.shape), dtype=values.dtype, label="iota",
                                              count=count)


def _as_torch(made: Piece, result: ResultSpec) -> Piece:
    """With torch's strides. Raises NotOurs where a rule made another shape or type."""
    if not same(made.shape, result.shape) or made.dtype is not result.dtype:
        raise NotOurs(f"its rule makes {made.shape} {made.dtype}, torch {result.shape} {result.dtype}")
    if made.strides is None and not isinstance(made, RegionInput):
        made.strides = result.strides
    return made


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def _pieces(given: Any, known: Mapping[fx.Node, Any]) -> Any:
    """Arguments, with pieces for nodes. Raises NotOurs for what is no tensor and no number."""
    if isinstance(given, fx.Node):
        found = known[given]
        if isinstance(found, tuple):
            raise NotOurs("an operand is several tensors")
        return found
    if isinstance(given, Mapping):
        return {k: _pieces(v, known) for k, v in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [_pieces(v, known) for v in given]
    return given
