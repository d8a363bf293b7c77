"""How AOTAutograd writes graphs: torch's decompositions, but for operations that rows translate whole, and
its division into forward and backward, which keeps nothing that costs nothing to have again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from transconv.graph import translate  # noqa: F401  # its tables have entered their rows
from transconv.graph.lowerings.table import ROWS
from transconv.graph.regions import saved_tensors  # noqa: F401  # its tables have entered their rows
from transconv.runtime import torch_internals

Tensor = torch.Tensor

# Softmax, batch norms and the gradients of norms become moments and maps, of which kernels are made again.
ALSO = ("_softmax", "_log_softmax", "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "native_batch_norm",
        "_batch_norm_with_update_functional", "_batch_norm_no_update", "batch_norm_backward", "addcmul",
        "addcdiv", "linalg_vector_norm", "std", "glu", "hardsigmoid", "mish", "native_dropout_backward")


@functools.lru_cache(maxsize=1)
def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by operation."""
    aten = torch.ops.aten
    also = [getattr(aten, name) for name in ALSO if hasattr(aten, name)]
    more = torch_internals.get_decompositions(also)
    found = {**torch_internals.core_aten_decompositions(), **more, aten.native_dropout.default: _dropout}
    return {op: how for op, how in found.items() if op not in ROWS}


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Its mask by torch, of nothing that is computed before; what is done with it is arithmetic. In the
    type, the order and the numbers of torch's dropout on a CPU."""
    shape, device = x.shape, x.device
    if train is False or p == 0:
        return x.clone(), torch.ones(shape, dtype=torch.bool, device=device)
    mask = torch.ops.aten.bernoulli.p(torch.empty(shape, dtype=torch.bool, device=device), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
MOVED = {getattr(getattr(torch.ops.aten, packet), "default") for packet in (  # noqa: B009
    "cat", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d")}


EQUAL = {torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor}


def divided(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's division of a joint graph. What is made of no input, or only moves elements of what is kept,
    is not kept: the backward graph reads it through a view again. Where values are equal is kept: one that
    is evaluated again is not that of which the largest was stored, as it is not rounded alike."""
    saved_tensors.prepared(joint.graph)
    told: set[fx.Node] = set()
    for node in joint.graph.nodes:
        known = all(x in told for x in node.all_input_nodes)
        if node.op == "call_function" and known and not _random(node):
            told.add(node)
        if node in told or node.target in MOVED or _told_by_place(node, told):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif node.target in EQUAL and any(_is_float(x) for x in node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    found: tuple[fx.GraphModule, fx.GraphModule] = torch_internals.min_cut_partition(
        joint, *args, **kwargs)
    saved_tensors.shared(*found, kwargs["num_fwd_outputs"])
    return found


def _is_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.is_floating_point()


def repeated(gm: fx.GraphModule) -> None:
    """Write nearest upsampling by a power of 2 as what it is, each element several times, in a graph of
    torch's functions. Of sizes that are known when a graph runs torch makes arithmetic on tensors."""
    for node in gm.graph.nodes:
        if node.target is torch.nn.functional.interpolate and (times := _times(node)):
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(_repeated, (node.args[0], times))
                made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
    gm.recompile()


def normalized(gm: fx.GraphModule) -> None:
    """Write instance norms without running statistics as group norms with a group for each feature, in a
    graph of torch's functions. torch computes them as batch norms of an image that has the features of all
    images, where a convolution has to look for each of its own."""
    for node in gm.graph.nodes:
        if node.target is not torch.nn.functional.instance_norm:
            continue
        given = dict(zip(NORM, node.args, strict=False)) | node.kwargs
        if given.get("running_mean") is None and given.get("use_input_stats", True):
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(_normalized, (
                    given["input"], given.get("weight"), given.get("bias"), given.get("eps", 1e-5)))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
    gm.recompile()


def once(graph: fx.Graph) -> None:
    """Compute equal operations of torch's once, as its partitioner does in graphs of training. Results
    that are handed out stay apart; random numbers stay, and graphs in which something is written to."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    writes = [n for n in calls if n.target is not torch.ops.aten.copy_.default and _writes(n)]
    handed = {_memory(n) for n in graph.output_node().all_input_nodes} - {None}
    known: dict[tuple[Any, str, str], fx.Node] = {}
    for node in calls if not writes else ():
        if not isinstance(node.target, torch_internals.OpOverload) or _random(node) or _writes(node) or (
                node.target.namespace not in ("aten", "prims") or _memory(node) in {None, *handed}):
            continue
        found = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    """Whether a call may write to what it is handed."""
    schema = getattr(node.target, "_schema", None)
    return node.target is not operator.getitem if schema is None else bool(schema.is_mutable)


def _memory(node: fx.Node) -> int | None:
    """What the memory of a tensor is known by, which its views have too; None for other values."""
    val = node.meta.get("val")
    if isinstance(val, Tensor) and val.layout is torch.strided:
        return int(val.untyped_storage()._cdata)
    return None


def waiting_for_nothing(graph: fx.Graph) -> None:
    """Write memory that is as large as another tensor without it, so that random numbers that are drawn
    into it need not wait for what computes the other one. Where sizes are symbols it stays as it is."""
    aten = torch.ops.aten
    for node in graph.nodes:
        if node.target not in (aten.empty_like.default, aten.new_empty.default,
                               aten.new_empty_strided.default):
            continue
        val = node.meta["val"]
        shape, strides = list(val.shape), list(val.stride())
        if all(isinstance(n, int) for n in (*shape, *strides)):
            with graph.inserting_before(node):
                made = graph.call_function(aten.empty_strided.default, (shape, strides),
                                           {"dtype": val.dtype, "device": val.device})
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _times(node: fx.Node) -> tuple[int, ...]:
    """How often an upsampling takes each element along each dim; empty for one that is otherwise."""
    given = dict(zip(("input", "size", "scale_factor", "mode"), node.args, strict=False)) | node.kwargs
    like, scale = getattr(given["input"], "meta", {}).get("example_value"), given.get("scale_factor")
    if not isinstance(like, torch.Tensor) or given.get("mode", "nearest") != "nearest" or not any(
            isinstance(n, torch.SymInt) for n in like.shape[2:]):
        return ()
    scales = [*scale] if isinstance(scale, (list, tuple)) else [scale] * (like.dim() - 2)
    if given.get("size") is not None or any(s not in (1, 2, 4, 8) for s in scales):
        return ()
    return tuple(int(s) for s in scales if isinstance(s, (int, float)))


def _repeated(x: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    lead, sizes = list(x.shape[:2]), x.shape[2:]
    wide = x.reshape(lead + [e for n in sizes for e in (n, 1)])
    wide = wide.expand(lead + [e for n, k in zip(sizes, times, strict=True) for e in (n, k)])
    return wide.reshape(lead + [n * k for n, k in zip(sizes, times, strict=True)])


def _normalized(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
                eps: float) -> torch.Tensor:
    """In the type of the image, as instance norms are under autocast, too; that of the weight may be
    wider."""
    wide = x if weight is None else x.to(weight.dtype)
    return torch.nn.functional.group_norm(wide, x.shape[1], weight, bias, eps).to(x.dtype)


def _told_by_place(node: fx.Node, told: set[fx.Node]) -> bool:
    """Whether elements are taken from positions that are the same at every call: nearest upsampling."""
    places: Any = node.args[1] if len(node.args) > 1 else ()
    return node.target in (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor) and all(
        i is None or i in told for i in places)


def _random(node: fx.Node) -> bool:
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
