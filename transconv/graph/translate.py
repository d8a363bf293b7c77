"""Translates a graph of aten's operations into pieces, node by node, by the table of rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from transconv.functional.launches import TYPES
from transconv.graph import map_rows, moves, product_rows, reduction_rows, view_rows
from transconv.graph.pieces import Counted, Piece, Seen, Source
from transconv.graph.rows import ROWS, Call, NotOurs

TABLES = (map_rows, view_rows, reduction_rows, product_rows)  # imported for their rows


def source(node: fx.Node, device: torch.device) -> Source:
    """A tensor that is in memory. Raises NotOurs."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise NotOurs("an operand is no tensor")
    if reason := why_not_tensor(val, device):
        raise NotOurs(reason)
    return Source(shape=tuple(val.shape), dtype=val.dtype, strides=tuple(val.stride()), of=node)


def why_not_tensor(val: torch.Tensor, device: torch.device) -> str:
    """Why kernels of a device do not take a tensor; empty if they do."""
    if val.device != device:
        return f"a tensor on {val.device} beside others on {device}"
    if any(not isinstance(n, int) for n in (*val.shape, *val.stride())):
        return "its size is known when it runs alone"
    if val.layout is not torch.strided or val.is_complex() or val.is_quantized:
        return f"a tensor of {val.dtype}, {val.layout}"
    if val.dtype not in TYPES:
        return f"{str(val.dtype).removeprefix('torch.')} has no kernels"
    return "" if val.numel() else "a tensor without elements"


def translated(node: fx.Node, known: Mapping[fx.Node, Any], device: torch.device) -> Any:
    """The piece of a node, or a tuple of them, of the pieces of its operands. Raises NotOurs."""
    if node.target is operator.getitem:
        whole, place = node.args
        assert isinstance(whole, fx.Node) and isinstance(place, int)
        found = known[whole][place]
        if found is None:
            raise NotOurs("a result that is not computed")
        return _as_torch(found, node.meta["val"])
    rule = ROWS.get(node.target)
    if rule is None:
        raise NotOurs("no row of the table has this operation")
    val = node.meta.get("val")
    results = tuple(val) if isinstance(val, (tuple, list)) else (val,)
    for t in results:
        if isinstance(t, torch.Tensor) and (reason := why_not_tensor(t, device)):
            raise NotOurs(reason)
    if not isinstance(results[0], torch.Tensor) and not any(isinstance(t, torch.Tensor) for t in results):
        raise NotOurs("its result is no tensor")
    values = _values(node, val, known)
    args = _pieces(node.args, known)
    kwargs = _pieces(node.kwargs, known)
    name = str(node.target).partition(".")[2] if str(node.target).startswith(("aten.", "prims.")) else str(
        node.target)
    try:
        made = rule(Call(name, tuple(args), dict(kwargs), results))
    except NotOurs:
        if values is None or (found := counted(values)) is None:
            raise
        made = found
    if isinstance(made, tuple):
        return made
    made.values = values
    assert isinstance(val, torch.Tensor)
    return _as_torch(made, val, node)


MOST_KNOWN = 1 << 14  # elements of what is computed ahead


def _values(node: fx.Node, val: Any, known: Mapping[fx.Node, Any]) -> torch.Tensor | None:
    """What a node has at every call, where nothing that it is made of is known only then."""
    if not isinstance(val, torch.Tensor) or not 0 < val.numel() <= MOST_KNOWN or any(
            getattr(known[x], "values", None) is None for x in node.all_input_nodes):
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda x: known[x].values)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with torch.no_grad():
        found = node.target(*args, **kwargs)  # type: ignore[operator]
    return found if isinstance(found, torch.Tensor) else None


def counted(values: torch.Tensor) -> Counted | None:
    """Whole numbers along one dim as an expression of the position, i*up // down; None for others."""
    wide = [d for d, n in enumerate(values.shape) if n > 1]
    if values.dtype not in (torch.int32, torch.int64) or len(wide) > 1:
        return None
    flat = values.flatten().numpy()
    dim, n = (wide or [0])[0], len(flat)
    last = int(flat[-1])
    found = next(((up, down) for up, down in moves.ratios(n, last + 1, last / max(1, n - 1))
                  if np.array_equal(np.arange(n) * up // down, flat)), None)
    if found is None:
        return None
    up, down = found
    return Counted(shape=tuple(values.shape), dtype=values.dtype, label="iota",
                   count=lambda at: at[dim] * up // down)


def _as_torch(made: Piece, val: torch.Tensor, node: fx.Node | None = None) -> Piece:
    """With torch's strides; RuntimeError where a rule made another shape or type."""
    if made.shape != tuple(val.shape) or made.dtype is not val.dtype:
        raise NotOurs(f"its rule makes {made.shape} {made.dtype}, torch {tuple(val.shape)} {val.dtype}")
    if made.strides is None and not isinstance(made, Source):
        made.strides = tuple(val.stride())
    if isinstance(made, Seen) and node is not None and isinstance(node.args[0], fx.Node):
        base = node.args[0].meta.get("val")
        made.alias = isinstance(base, torch.Tensor) and _same_memory(base, val)
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
