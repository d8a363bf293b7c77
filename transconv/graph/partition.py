"""Divides a graph into regions: what is translated, and what torch computes, each with the reason.

Regions run one after another. Of torch's nodes none passes another, and no node at all passes one that
writes to memory that it is handed: what has side effects stays where it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from transconv.graph.rows import NotOurs
from transconv.graph.translate import source, translated


@dataclass(eq=False, slots=True)
class Region:
    """Nodes in their order; ``ours``: they have pieces. ``reasons``: of torch's nodes, by their names."""

    ours: bool
    nodes: list[fx.Node] = field(default_factory=list)
    pieces: dict[fx.Node, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def regions(graph: fx.Graph, device: torch.device) -> list[Region]:
    """The regions of a graph, in the order in which they run; ours are about tensors on one device."""
    found = _Partition(device)
    for node in graph.nodes:
        found.add(node)
    made = [r for r in found.regions if r.nodes]
    for region in made:
        _ends(region)
    return made


class _Partition:
    """Nodes by level: a node is in the first region of its kind that no operand of it is behind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.regions: list[Region] = []
        self.level: dict[fx.Node, int] = {}
        self.ours: dict[fx.Node, bool] = {}
        self.last = 0  # of torch's nodes
        self.barrier = 0  # nothing passes

    def add(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.level[node] = 0
            return
        if node.op == "output":
            return
        reason = self.try_ours(node)
        if not reason:
            return
        least = max(self.last, self.barrier)
        parent = node.args[0] if node.target is operator.getitem else None
        known = isinstance(parent, fx.Node) and parent in self.ours
        level = self.level[parent] if known else self.at_level(node, False, least)  # type: ignore[index]
        if parent is None:
            self.last = level
            if _writes(node):
                self.barrier = level + 1
        self.region(level, False).nodes.append(node)
        self.level[node], self.ours[node] = level, False
        if parent is None:
            self.region(level, False).reasons[node.name] = reason

    def try_ours(self, node: fx.Node) -> str:
        """Translate a node into a region; why that cannot be."""
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and not self.ours.get(parent, False):
            return "a part of such a result"
        level = self.level[parent] if isinstance(parent, fx.Node) else self.at_level(
            node, True, self.barrier)
        region = self.region(level, True)
        known = dict(region.pieces)
        try:
            if node.op != "call_function":
                raise NotOurs(f"a node of kind {node.op}")
            for x in node.all_input_nodes:
                if x not in known:
                    known[x] = source(x, self.device)
            made = translated(node, known, self.device)
        except NotOurs as why:
            return str(why)
        for x in node.all_input_nodes:
            region.pieces[x] = known[x]
        region.pieces[node] = made
        region.nodes.append(node)
        self.level[node], self.ours[node] = level, True
        return ""

    def at_level(self, node: fx.Node, ours: bool, least: int) -> int:
        """The level of a node behind all of its operands; even ones are ours."""
        found = least
        for x in node.all_input_nodes:
            if x in self.ours:
                found = max(found, self.level[x] + (self.ours[x] is not ours))
        return found + (found % 2 != (0 if ours else 1))

    def region(self, level: int, ours: bool) -> Region:
        while len(self.regions) <= level:
            self.regions.append(Region(len(self.regions) % 2 == 0))
        assert self.regions[level].ours is ours
        return self.regions[level]


def _writes(node: fx.Node) -> bool:
    """Whether an operation may change what it is handed, or cannot be known."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return not callable(node.target) or getattr(node.target, "__module__", "") not in (
            "_operator", "math", "torch")
    return bool(schema.is_mutable) or torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


def _ends(region: Region) -> None:
    """What a region takes, and what others need of it."""
    own = {*region.nodes}
    region.inputs = list(dict.fromkeys(x for n in region.nodes for x in n.all_input_nodes if x not in own))
    region.outputs = [n for n in region.nodes if any(u not in own for u in n.users)]


def extracted(region: Region, graph: fx.GraphModule) -> fx.GraphModule:
    """A region as a graph of its own, from its inputs to a tuple of its outputs."""
    made = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for x in region.inputs:
        known[x] = made.placeholder(x.name)
        known[x].meta = dict(x.meta)
    for node in region.nodes:
        known[node] = made.node_copy(node, lambda x: known[x])
    made.output(tuple(known[x] for x in region.outputs))
    return fx.GraphModule(graph, made)


def names(nodes: Sequence[fx.Node]) -> str:
    """The operations of nodes, counted."""
    counts: dict[str, int] = {}
    for node in nodes:
        if node.target is not operator.getitem:
            said = str(node.target).removeprefix("aten.")
            counts[said] = counts.get(said, 0) + 1
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())


