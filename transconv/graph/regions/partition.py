"""Regions of a graph: what is translated, and what torch computes, each with the reason.

Regions run one after another. Of torch's nodes none passes another, and no node at all passes one that
writes to memory that it is handed. Random numbers are drawn by torch, in the graph's order; kernels draw
none and may pass them. A node is translated into a piece by its row in the table of operations."""

from __future__ import annotations

import logging
import operator
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.graph.fusion.index_ir import TYPES, ConstantValue, Counted, MovedView, Piece, RegionInput
from transconv.graph.lowerings.table import ROWS, NodeCall, NotOurs, ResultSpec, is_bug, why_no_row
from transconv.graph.lowerings.view_indexing import told_by_place
from transconv.graph.regions.region_kernel import Region
from transconv.graph.regions.torch_region import is_view
from transconv.graph.sizes import Fraction, Length, same
from transconv.graph.symbols import Symbols

log = logging.getLogger("transconv.graph")


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


def place_numbers(gm: fx.GraphModule, device: torch.device) -> None:
    """Make numbers that nodes on a device read from the CPU's memory constants on the device. torch takes
    a tensor of the CPU without dims beside any others, as of ``mask[rows] = 3`` or of
    ``x * torch.tensor(0.5)``: otherwise each is copied at each call, in a region of torch that no CUDA
    graph takes."""
    aten = torch.ops.aten
    for node in list(gm.graph.nodes):
        val, number = node.meta.get("val"), _number(node, gm)
        readers = [u for u in node.users if number is not None and _is_on(u.meta.get("val"), device)]
        if not readers:
            continue
        with gm.graph.inserting_after(node):
            placed = gm.graph.call_function(
                aten.full.default, ([], number), {"dtype": val.dtype, "device": device}
            )
        with getattr(val, "fake_mode", nullcontext()):
            placed.meta["val"] = torch.empty((), dtype=val.dtype, device=device)
        for reader in readers:
            reader.replace_input_with(node, placed)
        if not node.users:
            gm.graph.erase_node(node)


def _number(node: fx.Node, gm: fx.GraphModule) -> int | float | None:
    """What a node has that copies a constant tensor of the CPU without dims; a truth is no number."""
    if node.target is not torch.ops.aten.lift_fresh_copy.default:
        return None
    of = node.args[0]
    held = getattr(gm, str(of.target), None) if isinstance(of, fx.Node) and of.op == "get_attr" else None
    if not isinstance(held, torch.Tensor) or held.dim() or held.device.type != "cpu":
        return None
    if held.is_complex() or held.dtype is torch.bool:
        return None
    number: int | float = held.item()
    return number


def _is_on(val: Any, device: torch.device) -> bool:
    """Whether a node's results are tensors on a device."""
    each = val if isinstance(val, (tuple, list)) else (val,)
    return all(isinstance(t, torch.Tensor) and t.device == device for t in each)


def translated(node: fx.Node, known: Mapping[fx.Node, Any], device: torch.device, symbols: Symbols) -> Any:
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
    name = (
        str(node.target).partition(".")[2]
        if str(node.target).startswith(("aten.", "prims."))
        else str(node.target)
    )
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


def _aliasing(made: Piece, node: fx.Node) -> Piece:
    """The piece of a node, of which it is known whether torch's result is the memory of its operand."""
    if isinstance(made, MovedView):
        made.alias = is_view(node)
    return made


MOST_KNOWN = 1 << 14  # elements of what is computed ahead


def _values(node: fx.Node, val: Any, known: Mapping[fx.Node, Any]) -> torch.Tensor | None:
    """What a node has at every call, where nothing that it is made of is known only then."""
    if (
        not isinstance(val, torch.Tensor)
        or any(not isinstance(n, int) for n in val.shape)
        or any(getattr(known[x], "values", None) is None for x in node.all_input_nodes)
    ):
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
    """Integers along one dim as an expression of the position; None for others."""
    count = told_by_place(values)
    return (
        None
        if count is None
        else Counted(shape=tuple(values.shape), dtype=values.dtype, label="iota", count=count)
    )


def _as_torch(made: Piece, result: ResultSpec) -> Piece:
    """With torch's strides. Raises NotOurs where a rule made another shape or type."""
    if not same(made.shape, result.shape) or made.dtype is not result.dtype:
        raise NotOurs(f"its rule makes {made.shape} {made.dtype}, torch {result.shape} {result.dtype}")
    if made.strides is None and not isinstance(made, RegionInput):
        made.strides = result.strides
    return made


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


NONE: Mapping[str, str] = MappingProxyType({})


def regions(
    graph: fx.Graph,
    device: torch.device,
    symbols: Symbols | None = None,
    whole: str = "",
    refused: Mapping[str, str] = NONE,
) -> list[Region]:
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
    """A part of a result that is ours cannot be translated."""

    def __init__(self, result: fx.Node, why: str) -> None:
        super().__init__(why)
        self.result, self.why = result, why


class _Partition:
    """Nodes by level: a node is in the first region of its kind that no operand of it is behind."""

    def __init__(
        self, device: torch.device, symbols: Symbols, whole: str, refused: Mapping[str, str]
    ) -> None:
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
        level = (
            self.level[parent]
            if isinstance(parent, fx.Node) and parent in self.ours
            else self.at_level(node, False, least)
        )
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
        if (
            node.op != "call_function"
            or any(u.op == "output" for u in node.users)
            or not all(x in self.constants for x in node.all_input_nodes)
        ):
            return False
        try:
            made = translated(
                node, {x: self.constants[x] for x in node.all_input_nodes}, self.device, self.symbols
            )
        except NotOurs:
            return False
        if isinstance(made, (ConstantValue, Counted)) or (
            isinstance(made, Piece) and made.values is not None
        ):
            self.constants[node] = made
        return node in self.constants

    def constants_of(self, node: fx.Node) -> list[fx.Node]:
        """The constants that a node is made of, operands first."""
        return [
            *dict.fromkeys(
                y for x in node.all_input_nodes if x in self.constants for y in (*self.constants_of(x), x)
            )
        ]

    def try_ours(self, node: fx.Node) -> str:
        """Translate a node into a region; why that cannot be."""
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, fx.Node) and not self.ours.get(parent, False):
            return "a part of such a result"
        level = (
            self.level[parent] if isinstance(parent, fx.Node) else self.at_level(node, True, self.barrier)
        )
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
            "_operator",
            "math",
            "torch",
        )
    return bool(schema.is_mutable)


def _ends(region: Region, constants: Container[fx.Node]) -> None:
    """What a region takes, and what others need of it."""
    own = {*region.nodes}
    region.inputs = list(dict.fromkeys(x for n in region.nodes for x in n.all_input_nodes if x not in own))
    region.outputs = [
        n
        for n in region.nodes
        if n not in constants and any(u not in own and not nothing(u) for u in n.users)
    ]


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
    counts = Counter(
        str(n.target).removeprefix("aten.") for n in nodes if n.target is not operator.getitem
    )
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


STACKS = (
    ("nn_module_stack", "source_fn_stack", ""),
    ("fwd_nn_module_stack", "fwd_source_fn_stack", " gradient"),
)


def origin(node: fx.Node) -> Origin:
    """What torch's compiler notes of a node; of a gradient, of the operation that it belongs to."""
    for modules, calls, of in STACKS:
        if node.meta.get(calls):
            path = [*(node.meta.get(modules) or {"": ("",)}).values()][-1][0]
            # L['self']._modules['block'].norm, L['call'].__self__.block.norm: of the model, block.norm
            inside = re.sub(r"\._modules\b|\['?|'?\]", ".", re.sub(r"^L\['\w+'\](\.__self__)?", "", path))
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
