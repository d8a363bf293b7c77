"""Divides a graph into regions: what is translated, and what torch computes, each with the reason.

Regions run one after another. Of torch's nodes none passes another, and no node at all passes one that
writes to memory that it is handed. Random numbers are drawn by torch, in the graph's order; kernels draw
none and may pass them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.graph.fusion.index_ir import ConstantValue, Counted, Piece
from transconv.graph.lowerings.table import NotOurs
from transconv.graph.symbols import Symbols
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


NONE: Mapping[str, str] = MappingProxyType({})


def regions(graph: fx.Graph, device: torch.device, symbols: Symbols | None = None,
            whole: str = "", refused: Mapping[str, str] = NONE) -> list[Region]:
    """The regions of a graph, in the order in which they run; ours are about tensors on one device.
    ``whole``: why all of it is torch's; ``refused``: why some nodes are, by their names. Sizes that are
    known at a call's beginning, and parts of results that are not computed, are in no region."""
    symbols = symbols or Symbols(graph)
    while True:
        found = _Partition(device, symbols, whole, refused)
        try:
            for node in graph.nodes:
                found.add(node)
            break
        except _PartRefused as part:  # then all of the result is torch's
            refused = {**refused, part.result.name: part.why}
    made = [r for r in found.regions if r.nodes]
    for region in made:
        _ends(region, found.constants)
    return made


class _PartRefused(Exception):
    """A part of a result that is ours cannot be."""

    def __init__(self, result: fx.Node, why: str) -> None:
        super().__init__(why)
        self.result, self.why = result, why


class _Partition:
    """Nodes by level: a node is in the first region of its kind that no operand of it is behind."""

    def __init__(self, device: torch.device, symbols: Symbols, whole: str,
                 refused: Mapping[str, str]) -> None:
        self.device, self.symbols, self.whole, self.refused = device, symbols, whole, refused
        self.regions: list[Region] = []
        self.level: dict[fx.Node, int] = {}
        self.ours: dict[fx.Node, bool] = {}
        self.constants: dict[fx.Node, Piece] = {}  # each region that reads one has it
        self.last = 0  # of torch's nodes
        self.barrier = 0  # nothing passes

    def add(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            self.level[node] = 0
            return
        if node.op == "output" or nothing(node) or is_size(node, self.symbols) or self.is_constant(node):
            return
        reason = self.whole or self.refused.get(node.name) or self.try_ours(node)
        if not reason:
            return
        least = max(self.last, self.barrier)
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and self.ours.get(parent, False):
            raise _PartRefused(parent, reason)
        level = (self.level[parent] if isinstance(parent, fx.Node) and parent in self.ours
                 else self.at_level(node, False, least))
        if parent is None:
            self.last = level
            if _writes(node):
                self.barrier = level + 1
        nodes = self.region(level, False).nodes
        nodes += [x for x in self.constants_of(node) if x not in nodes]
        nodes.append(node)
        self.level[node], self.ours[node] = level, False
        if parent is None:
            self.region(level, False).reasons[node.name] = reason

    def is_constant(self, node: fx.Node) -> bool:
        """Whether a node is one number, or counts, or is made of such ones alone, so that its values are
        known: the indices of an upsampling. What is handed out needs memory."""
        if node.op != "call_function" or any(u.op == "output" for u in node.users) or not all(
                x in self.constants for x in node.all_input_nodes):
            return False
        try:
            made = translated(node, {x: self.constants[x] for x in node.all_input_nodes}, self.device,
                              self.symbols)
        except NotOurs:
            return False
        if (
            isinstance(made, (ConstantValue, Counted))
            or isinstance(made, Piece)
            and made.values is not None
        ):
            self.constants[node] = made
        return node in self.constants

    def constants_of(self, node: fx.Node) -> list[fx.Node]:
        """The constants that a node is made of, operands first."""
        found: dict[fx.Node, None] = {}
        for x in node.all_input_nodes:
            if x in self.constants:
                found |= dict.fromkeys([*self.constants_of(x), x])
        return [*found]

    def try_ours(self, node: fx.Node) -> str:
        """Translate a node into a region; why that cannot be."""
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and not self.ours.get(parent, False):
            return "a part of such a result"
        level = self.level[parent] if isinstance(parent, fx.Node) else self.at_level(
            node, True, self.barrier)
        region = self.region(level, True)
        known = {x: region.pieces[x] for x in node.all_input_nodes if x in region.pieces}
        try:
            if node.op != "call_function":
                raise NotOurs(f"a node of kind {node.op}")
            for x in node.all_input_nodes:
                if x not in known:
                    known[x] = self.constants.get(x) or source(x, self.device, self.symbols)
            made = translated(node, known, self.device, self.symbols)
        except NotOurs as why:
            return str(why)
        for x in self.constants_of(node):
            if x not in region.pieces:
                region.nodes.append(x)
                region.pieces[x] = self.constants[x]
        region.pieces |= {x: known[x] for x in node.all_input_nodes}
        region.pieces[node] = made
        region.nodes.append(node)
        self.level[node], self.ours[node] = level, True
        return ""

    def at_level(self, node: fx.Node, ours: bool, least: int) -> int:
        """The level of a node behind all of its operands; odd ones are ours."""
        found = least
        for x in node.all_input_nodes:
            if x in self.ours:
                found = max(found, self.level[x] + (self.ours[x] is not ours))
        return found + (found % 2 != ours)

    def region(self, level: int, ours: bool) -> Region:
        while len(self.regions) <= level:
            self.regions.append(Region(len(self.regions) % 2 == 1))
        assert self.regions[level].ours is ours
        return self.regions[level]


def is_size(node: fx.Node, symbols: Symbols) -> bool:
    """Whether a node's value is a size, or a number made of sizes, that a call's inputs tell."""
    val = node.meta.get("val")
    if not isinstance(val, (torch.SymInt, torch.SymFloat)):
        return False
    try:
        symbols.number(val)
    except NotOurs:
        return False
    return True


def nothing(node: fx.Node) -> bool:
    """Whether a node is a part of a result that is not computed: None, such as the gradient of an input
    that needs none."""
    return node.target is operator.getitem and node.meta.get("val", node) is None


def _writes(node: fx.Node) -> bool:
    """Whether an operation may change what it is handed, or cannot be known."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return not callable(node.target) or getattr(node.target, "__module__", "") not in (
            "_operator", "math", "torch")
    return bool(schema.is_mutable)


def _ends(region: Region, constants: Container[fx.Node]) -> None:
    """What a region takes, and what others need of it."""
    own = {*region.nodes}
    region.inputs = list(dict.fromkeys(x for n in region.nodes for x in n.all_input_nodes if x not in own))
    region.outputs = [n for n in region.nodes if n not in constants and any(
        u not in own and not nothing(u) for u in n.users)]


def extracted(region: Region, graph: fx.GraphModule) -> fx.GraphModule:
    """A region as a graph of its own, from its inputs to a tuple of its outputs."""
    made = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for x in region.inputs:
        known[x] = made.placeholder(x.name)
        known[x].meta = dict(x.meta)
    for node in region.nodes:
        known[node] = made.node_copy(node, lambda x: known[x])
        if node.target is torch.ops.aten.view.default:  # what it reads may lie otherwise than traced
            known[node].target = torch.ops.aten.reshape.default
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


def graph_of(nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Some nodes as a graph of their own, with the parts of their results that others take."""
    own = {*nodes} | {u for n in nodes for u in n.users if u.target is operator.getitem and not nothing(u)}
    whole = nodes[0].graph
    region = Region(False, [n for n in whole.nodes if n in own])
    _ends(region, ())
    assert whole.owning_module is not None
    return extracted(region, whole.owning_module)


class Origin(NamedTuple):
    """Where an operation comes from: the path of the module in the model, and what the model's code calls
    the operation: the class of a module of torch's, or a function."""

    module: str
    operation: str


STACKS = (("nn_module_stack", "source_fn_stack", ""),
          ("fwd_nn_module_stack", "fwd_source_fn_stack", " gradient"))


def origin(node: fx.Node) -> Origin:
    """What torch's compiler notes of a node; of a gradient, of the operation that it belongs to."""
    for modules, calls, of in STACKS:
        if node.meta.get(calls):
            path = [*(node.meta.get(modules) or {"": ("",)}).values()][-1][0]
            # L['self']._modules['block'].norm, L['fn'].block.norm: of the model, block.norm
            inside = re.sub(r"\._modules\b|\['?|'?\]", ".", re.sub(r"^L\['\w+'\]", "", path))
            return Origin(re.sub(r"\.+", ".", inside).strip("."), _called(node.meta[calls][-1][1]) + of)
    return Origin("", _called(node.target))


def _called(by: Any) -> str:
    """The name of a function, a method or a class; of aten's, and of an operator in place, in short."""
    name = str(by) if isinstance(by, str) or not hasattr(by, "__name__") else str(by.__name__)
    name = name.removeprefix("aten.").partition(".")[0].strip("_")
    return name[1:] if name[:1] == "i" and hasattr(operator, f"__{name[1:]}__") else name


def title(nodes: Sequence[fx.Node]) -> str:
    """Operations by the model's own names, with the module of the first: ``d1.0: GroupNorm + SiLU``."""
    found = [origin(n) for n in nodes]
    words = [*dict.fromkeys(o.operation for o in found)]
    more = f" + {len(words) - SAID} more" if len(words) > SAID else ""
    where = next((f"{o.module}: " for o in found if o.module), "")
    return f"{where}{' + '.join(words[:SAID])}{more}"


SAID = 6  # operations in a title at most
