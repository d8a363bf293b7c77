"""How AOTAutograd writes graphs: torch's decompositions, but for operations that rows translate whole, and
its division into forward and backward, which keeps nothing that costs nothing to have again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from transconv.graph import translate  # noqa: F401  # its tables have entered their rows
from transconv.graph.rows import ROWS

# Softmax, batch norms and the gradients of norms become moments and maps, of which kernels are made again.
ALSO = ("_softmax", "_log_softmax", "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "native_batch_norm",
        "_batch_norm_with_update_functional", "_batch_norm_no_update", "batch_norm_backward", "addcmul",
        "addcdiv", "linalg_vector_norm", "std", "glu", "hardsigmoid", "mish", "native_dropout_backward")


@functools.lru_cache(maxsize=1)
def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by operation."""
    aten = torch.ops.aten
    more = get_decompositions([getattr(aten, name) for name in ALSO if hasattr(aten, name)])
    found = {**core_aten_decompositions(), **more}
    return {op: how for op, how in found.items() if op not in ROWS}


MOVED = {getattr(getattr(torch.ops.aten, packet), "default") for packet in (  # noqa: B009
    "cat", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d")}


def divided(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's division of a joint graph. What is made of no input, or only moves elements of what is kept,
    is not kept: the backward graph reads it through a view again."""
    told: set[fx.Node] = set()
    for node in joint.graph.nodes:
        known = all(x in told for x in node.all_input_nodes)
        if node.op == "call_function" and known and not _random(node):
            told.add(node)
        if node in told or node.target in MOVED or _told_by_place(node, told):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    found: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
        joint, *args, **kwargs)
    return found


def _told_by_place(node: fx.Node, told: set[fx.Node]) -> bool:
    """Whether elements are taken from positions that are the same at every call: nearest upsampling."""
    return node.target in (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor) and all(
        i is None or i in told for i in node.args[1])  # type: ignore[union-attr]


def _random(node: fx.Node) -> bool:
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
