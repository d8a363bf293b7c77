"""Graphs of AOTAutograd: how they are divided, and what a forward graph leaves for its backward graph.

Graphs have torch's decompositions, but for operations that rows translate whole. Only the two graphs see
what one leaves for the other: nothing that costs nothing to have again, and

    cat(a, b) read by both graphs     the concatenation, not a and b: their kernels store into it
    cast(cat(a, b))                   cat(cast(a), cast(b)): the same numbers, which may be stored in place
    slice_scatter(0, a) + ..(0, b)    cat(a, b): gradients of slices that share nothing; select_scatter too
    max_pool backward                 the places that were chosen, each in its window, in 8 bits (others
                                      in 32), of its image the shape
    an image of a convolution         has its features last, whatever torch's order would be

torch's compiler is told how those lie whose order is not torch's, and hands the backward graph examples
that lie so.

What a graph writes to its inputs, such as running statistics, it writes at its end, ``copy_(input,
value)``. The values become results, and all inputs are written by one call behind the graph: a launch for
each takes the host longer than the kernels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from transconv.graph.fusion.index_ir import holds
from transconv.graph.lowerings.pools import within_windows
from transconv.graph.lowerings.table import ROWS
from transconv.graph.regions.function_graphs import replace_node
from transconv.graph.regions.torch_region import may_view, memory, readers
from transconv.runtime import torch_internals

aten = torch.ops.aten
FREE = "transconv_free"  # in a node's meta: only kernels of the two graphs see how it lies
MOVED = "transconv_moved"  # of a placeholder: it lies otherwise than when the graph was traced
POOLS = (aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
SUM = aten.add.Tensor
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
LONGEST = 2**31  # places that 32 bits tell apart


# -- before the division ---------------------------------------------------------------------------


def prepared(joint: fx.Graph) -> None:
    """Rewrite a graph of forward and backward so that less is left between them."""
    for node in [*joint.nodes]:
        if node.target in POOLS:
            _shape_alone(node)
    parts_joined(joint)
    parts_cast(joint)


def _shape_alone(node: fx.Node) -> None:
    """Give a pool's gradient another image of that shape, which it does not read, and its places by way of
    8 or 32 bits."""
    grad, image, *rest, places = node.args
    if not isinstance(image, fx.Node) or not isinstance(places, fx.Node) or not _is_known(image):
        return
    val, at, graph = image.meta["val"], places.meta["val"], node.graph
    with graph.inserting_before(node):
        none = graph.call_function(
            aten.full.default,
            ([*val.shape], 0),
            {"dtype": val.dtype, "device": val.device, "pin_memory": False},
        )
        none.meta["val"] = torch.full_like(val, 0)
        node.args = (grad, none, *rest, places)
        if (back := within_windows(node, 3 if node.target is POOLS[1] else 2)) is None:
            if prod(val.shape[1:]) >= LONGEST:
                return
            short = graph.call_function(aten._to_copy.default, (places,), {"dtype": torch.int32})
            short.meta |= {"val": at.to(torch.int32), "recompute": CheckpointPolicy.MUST_SAVE}
            back = graph.call_function(aten._to_copy.default, (short,), {"dtype": torch.int64})
        back.meta |= {"val": at.clone(), "recompute": CheckpointPolicy.MUST_RECOMPUTE}
    node.args = (grad, none, *rest, back)


def parts_joined(graph: fx.Graph) -> None:
    """Write a sum of gradients of slices along one dim, of which no two share an element, as a
    concatenation: what computes a part may store it in place. Elements of no slice are zeros."""
    for node in reversed([*graph.nodes]):
        if node.target is not SUM or not node.users or not _is_known(node):
            continue
        found = [_scattered(leaf) for leaf in _terms(node, node)]
        slices = sorted((s for s in found if s is not None), key=lambda s: s.first)
        ends = [0, *(s.last for s in slices)]
        if (
            len(slices) < len(found)
            or len({s.dim for s in slices}) > 1
            or any(s.first < end for s, end in zip(slices, ends, strict=False))
        ):
            continue
        replace_node(node, aten.cat.default, (_parts(graph, node, slices), slices[0].dim))
    graph.eliminate_dead_code()


class ScatteredSlice(NamedTuple):
    """A tensor that is zeros but for a slice, elements ``first`` to ``last`` - 1 along ``dim``."""

    dim: int
    first: int
    last: int
    source: fx.Node
    without: bool  # whether ``source`` has no such dim


def _terms(node: Any, whole: fx.Node) -> Iterator[Any]:
    """The terms of a sum of tensors of one shape and type, whose partial sums have no other reader."""
    if (
        isinstance(node, fx.Node)
        and node.target is SUM
        and not node.kwargs
        and (node is whole or len(node.users) == 1)
        and node.meta["val"].shape == whole.meta["val"].shape
    ):
        for arg in node.args:
            yield from _terms(arg, whole)
    else:
        yield node


def _scattered(node: Any) -> ScatteredSlice | None:
    """What a term is, if it is a slice in a tensor of zeros."""
    if not isinstance(node, fx.Node) or node.target not in SCATTERS or not _is_known(node):
        return None
    bound = dict(zip(("zeros", "source", "dim", "start", "end", "step"), node.args, strict=False))
    zeros, source, val = bound["zeros"], bound["source"], node.meta["val"]
    filled = isinstance(zeros, fx.Node) and (
        zeros.target is aten.new_zeros.default
        or (zeros.target is aten.full.default and zeros.args[1] == 0)
    )
    if not filled or not isinstance(source, fx.Node) or not _is_known(source) or node.kwargs:
        return None
    if source.meta["val"].dtype is not val.dtype or bound.get("step", 1) != 1:
        return None
    dim = bound.get("dim", 0) % val.ndim
    size, start, end = val.shape[dim], bound.get("start"), bound.get("end")
    if node.target is aten.select_scatter.default:
        return ScatteredSlice(dim, start % size, start % size + 1, source, True)
    first, last, _ = slice(start, end).indices(size)
    return ScatteredSlice(dim, first, last, source, False) if first < last else None


def _parts(graph: fx.Graph, node: fx.Node, slices: Sequence[ScatteredSlice]) -> list[fx.Node]:
    """The parts of a concatenation, with zeros in gaps."""
    val, made, at = node.meta["val"], list[fx.Node](), 0

    def zeros(until: int) -> None:
        shape = [*val.shape]
        shape[slices[0].dim] = until - at
        if until > at:
            options = {"dtype": val.dtype, "device": val.device, "pin_memory": False}
            made.append(graph.call_function(aten.full.default, (shape, 0), options))
            made[-1].meta["val"] = val.new_zeros(shape)

    with graph.inserting_before(node):
        for s in slices:
            zeros(s.first)
            made.append(s.source)
            if s.without:
                made[-1] = graph.call_function(aten.unsqueeze.default, (s.source, s.dim))
                made[-1].meta["val"] = s.source.meta["val"].unsqueeze(s.dim)
            at = s.last
        zeros(val.shape[slices[0].dim])
    return made


def parts_cast(graph: fx.Graph) -> None:
    """Write a cast of a concatenation as a concatenation of casts."""
    for node in [*graph.nodes]:
        cat = node.args[0] if node.target in CASTS and node.args else None
        if not isinstance(cat, fx.Node) or cat.target is not aten.cat.default or len(cat.users) > 1:
            continue
        dtype = node.meta["val"].dtype
        if {*node.kwargs} - {"dtype"} or not all(_narrows(x, cat, dtype) for x in _listed(cat)):
            continue
        with graph.inserting_before(node):
            parts = [_cast(graph, x, dtype) for x in _listed(cat)]
        replace_node(node, aten.cat.default, (parts, *cat.args[1:]))
        graph.erase_node(cat)


def _narrows(x: fx.Node, cat: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a part has the same numbers if it is cast at once: the concatenation holds all of it."""
    own, wide = x.meta["val"].dtype, cat.meta["val"].dtype
    return own is wide or (own is dtype and holds(wide, own))


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A part in the narrower type: what it was widened from, where that has the type."""
    of = x.args[0] if x.target in CASTS else None
    if x.meta["val"].dtype is dtype:
        return x
    if isinstance(of, fx.Node) and of.meta["val"].dtype is dtype and holds(x.meta["val"].dtype, dtype):
        return of
    made = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
    made.meta["val"] = x.meta["val"].to(dtype)
    return made


# -- behind the division ---------------------------------------------------------------------------


def shared(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Leave concatenations in the place of their parts, and mark what only kernels see. ``results``: how
    many outputs of the forward graph others see."""
    for cat in [n for n in backward.graph.nodes if n.target is aten.cat.default]:
        _whole(cat, forward, backward, results)
    end, outs = forward.graph.output_node(), _results(forward)
    given = {n.target: n for n in backward.graph.nodes if n.op == "placeholder"}
    seen = {x for x in outs[:results] if isinstance(x, fx.Node)}
    for x in outs[results:]:
        if (
            isinstance(x, fx.Node)
            and x not in seen
            and x.op == "call_function"
            and _is_known(x)
            and (x.name in given)
            and all(u is end or _is_ours(u) for u in readers(x))
            and all(map(_is_ours, readers(given[x.name])))
        ):
            x.meta[FREE] = True


def _whole(cat: fx.Node, forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Leave a concatenation, of which the backward graph sees its parts as slices, if all of them are left
    and are parts of no other one."""
    outs: list[Any] = [*_results(forward)]
    left = {o.name: o for o in outs[results:] if isinstance(o, fx.Node) and o.op == "call_function"}
    parts: list[fx.Node] = [*_listed(cat)]
    given = [left.get(str(p.target)) if p.op == "placeholder" else None for p in parts]
    if None in given or len({*given}) < len(given) or {*given} & {*outs[:results]}:
        return
    cats = {u for g in given if g is not None for u in g.users if u.target is aten.cat.default}
    there = next(iter(cats)) if len(cats) == 1 else None
    if there is None or _listed(there) != given or there.args[1:] != cat.args[1:] or not _is_known(there):
        return
    if any(p.meta["val"].ndim < there.meta["val"].ndim for p in parts):  # empty, of one dim: no slice
        return
    outs.insert(min(map(outs.index, given)), there)
    forward.graph.output_node().args = (tuple(o for o in outs if o not in given),)
    _sliced(cat, parts, there, backward.graph)
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()


def _sliced(cat: fx.Node, parts: Sequence[fx.Node], there: fx.Node, graph: fx.Graph) -> None:
    """Take a concatenation from outside, and its parts from it."""
    with graph.inserting_before(next(n for n in graph.nodes if n in parts)):
        whole = graph.placeholder(there.name)
    whole.meta = {**there.meta, MOVED: True}
    dim, start = cat.args[1] if len(cat.args) > 1 else 0, 0
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for p in parts:
        val = p.meta["val"]
        with graph.inserting_after(last):
            last = graph.call_function(aten.slice.Tensor, (whole, dim, start, start + val.shape[dim]))
        last.meta = dict(p.meta)
        p.replace_all_uses_with(last)
        graph.erase_node(p)
        start += val.shape[dim]
    cat.replace_all_uses_with(whole)
    graph.erase_node(cat)


def _results(gm: fx.GraphModule) -> tuple[Any, ...]:
    found: Any = gm.graph.output_node().args[0]
    return tuple(found)


def _listed(cat: fx.Node) -> list[fx.Node]:
    """The parts of a concatenation."""
    found: Any = cat.args[0]
    return [*found]


def _is_known(x: fx.Node) -> bool:
    val = x.meta.get("val")
    return isinstance(val, torch.Tensor) and all(isinstance(n, int) for n in (*val.shape, *val.stride()))


def _is_ours(node: fx.Node) -> bool:
    """Whether an operation has a row, and so no view of memory of its own."""
    return node.target in ROWS or node.op == "output"


# -- how it lies -----------------------------------------------------------------------------------


def told(strides: Sequence[tuple[int, ...] | None]) -> None:
    """Tell torch's compiler how the results of a forward graph lie."""
    context = torch_internals.TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides += strides


def repeatable() -> None:
    """Tell torch's compiler that a backward graph leaves its inputs as they are, so that it may run again
    (``retain_graph``): no kernel writes over what a forward graph leaves."""
    context = torch_internals.TracingContext.try_get()
    donated = context and context.fw_metadata and context.fw_metadata.bw_donated_idxs
    if donated:
        donated.clear()


def examples(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """Give placeholders the strides of a call's examples."""
    given = (n for n in graph.nodes if n.op == "placeholder")
    for node, val in zip(given, inputs, strict=True):
        old = node.meta.get("val")
        if (
            isinstance(old, torch.Tensor)
            and isinstance(val, torch.Tensor)
            and _is_known(node)
            and (old.stride() != val.stride() and old.shape == val.shape)
        ):
            node.meta["val"] = old.as_strided(old.shape, val.stride())
            node.meta[MOVED] = True


Tensor = torch.Tensor
_foreach_copy: Any = torch_internals.foreach_copy


def taken(graph: fx.Graph) -> list[int]:
    """Take the copies at a graph's end out of it. Their values become its last results, and the places of
    the inputs, in the same order, are returned. A copy whose result is used stays, one of a view of
    another input, and what is before it."""
    nodes = [*graph.nodes]
    given: list[Any] = [n for n in nodes if n.op == "placeholder"]
    copies: list[fx.Node] = []
    for node in reversed(nodes[:-1]):
        if not _is_copy(node, given) or any(node.args[0] is c.args[0] for c in copies):
            break
        copies.insert(0, node)
    results: Any = nodes[-1].args[0]
    nodes[-1].args = ((*results, *(c.args[1] for c in copies)),)
    places = [given.index(c.args[0]) for c in copies]
    for node in copies:
        graph.erase_node(node)
    return places


def _is_copy(node: fx.Node, given: Sequence[Any]) -> bool:
    """Whether a node writes to an input a value of its type and shape, in memory of its own."""
    if node.target is not aten.copy_.default or node.users or len(node.args) != 2:
        return False
    into, value = node.args
    if (
        not isinstance(into, fx.Node)
        or not isinstance(value, fx.Node)
        or into not in given
        or (may_view(value))
    ):
        return False
    one, other = into.meta["val"], value.meta["val"]
    return bool(one.dtype is other.dtype and one.shape == other.shape and one.device == other.device)


def write(inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values to inputs, of each type by one launch or a few."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for into, value in zip(inputs, values, strict=True):
        own, new = by_type.setdefault(into.dtype, ([], []))
        own.append(into)
        new.append(value)
    with torch.no_grad():
        for own, new in by_type.values():
            _foreach_copy(own, new)


# Softmax, batch norms and the gradients of norms become moments and maps, of which kernels are made again.
ALSO = (
    "_softmax",
    "_log_softmax",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional",
    "native_batch_norm",
    "_batch_norm_with_update_functional",
    "_batch_norm_no_update",
    "batch_norm_backward",
    "addcmul",
    "addcdiv",
    "linalg_vector_norm",
    "std",
    "glu",
    "hardsigmoid",
    "mish",
    "native_dropout_backward",
)


def table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by operation: of those that no row translates now."""
    return _table(frozenset(ROWS))


@functools.lru_cache(maxsize=1)
def _table(rows: frozenset[Any]) -> dict[Any, Callable[..., Any]]:
    """``table`` where these operations have rows. Attention is one operation on a CPU, too: as products
    and a softmax it would leave its weights, one for each pair of tokens, for the backward graph."""
    also = [getattr(aten, name) for name in ALSO if hasattr(aten, name)]
    more = torch_internals.get_decompositions(also)
    found = {
        **torch_internals.core_aten_decompositions(),
        **more,
        aten.native_dropout.default: _dropout,
        aten.bernoulli.p: _bernoulli,
    }
    whole = aten._scaled_dot_product_flash_attention_for_cpu.default
    return {op: how for op, how in found.items() if op not in ROWS and op is not whole}


def _bernoulli(x: Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """Drawn as booleans, which are the same ones in each type. Inductor draws no others: its decomposition
    of ``bernoulli`` on a GPU has booleans as its result, whatever the type of ``x``."""
    if x.dtype is torch.bool or generator is not None:
        return NotImplemented
    return aten.bernoulli.p(torch.empty(x.shape, dtype=torch.bool, device=x.device), p).to(x.dtype)


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Its mask by torch, of nothing that is computed before; what is done with it is arithmetic. In the
    type, the order and the numbers of torch's dropout on a CPU."""
    shape, device = x.shape, x.device
    if train is False or p == 0:
        return x.clone(), torch.ones(shape, dtype=torch.bool, device=device)
    mask = aten.bernoulli.p(torch.empty(shape, dtype=torch.bool, device=device), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


VIEWS = {
    getattr(torch.ops.aten, packet).default
    for packet in (
        "cat",
        "constant_pad_nd",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
    )
}
# What graphs have in the place of torch's decompositions and costs no more again: arithmetic that a row
# takes whole, and values as they are.
WHOLE = {aten.hardswish, aten.detach}
EQUAL = {aten.eq.Tensor, aten.ne.Tensor}


def divided(
    joint: fx.GraphModule, *args: Any, again: bool = False, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's division of a joint graph. What is made of no input, or only moves elements of what is kept,
    is not kept: the backward graph reads it through a view again. Where values are equal is kept: one that
    is evaluated again is not that of which the largest was stored, as it is not rounded alike. ``again``:
    nothing else is kept, either."""
    prepared(joint.graph)
    told: set[fx.Node] = set()
    for node in joint.graph.nodes:
        known = all(x in told for x in node.all_input_nodes)
        if node.op == "call_function" and known and not _random(node):
            told.add(node)
        drawn = any(map(_random, (node, *node.all_input_nodes[:1] * (node.target is operator.getitem))))
        computed = again and node.op == "call_function" and node.target not in EQUAL and not drawn
        if computed or node in told or node.target in VIEWS or _told_by_place(node, told):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif node.target in EQUAL and any(
            isinstance(v := x.meta.get("val"), Tensor) and v.is_floating_point()
            for x in node.all_input_nodes
        ):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with _arithmetic():
        found: tuple[fx.GraphModule, fx.GraphModule] = torch_internals.min_cut_partition(
            joint, *args, **kwargs
        )
    shared(*found, kwargs["num_fwd_outputs"])
    return found


@contextmanager
def _arithmetic() -> Iterator[None]:
    """Within ``with``, torch's division knows that ``WHOLE`` may be evaluated again and with others: it
    lists what is left of its own decompositions."""
    module: Any = torch_internals.partitioners
    real = module.get_default_op_list

    def listed() -> Any:
        ops = real()
        for known in (ops.recomputable_ops, ops.fusible_ops):
            known |= WHOLE
        return ops

    module.get_default_op_list = listed
    try:
        yield
    finally:
        module.get_default_op_list = real


def once(graph: fx.Graph) -> None:
    """Compute equal operations of torch's once, as its partitioner does in graphs of training. Results
    that are handed out stay apart; random numbers stay, and graphs in which something is written to."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    writes = [n for n in calls if n.target is not aten.copy_.default and _writes(n)]
    handed = {memory(n) for n in graph.output_node().all_input_nodes} - {None}
    known: dict[tuple[Any, str, str], fx.Node] = {}
    for node in calls if not writes else ():
        if (
            not isinstance(node.target, torch_internals.OpOverload)
            or _random(node)
            or _writes(node)
            or (node.target.namespace not in ("aten", "prims") or memory(node) in {None, *handed})
        ):
            continue
        found = known.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    """Whether a call may write to what it is handed."""
    schema = getattr(node.target, "_schema", None)
    return node.target is not operator.getitem if schema is None else bool(schema.is_mutable)


def with_elements(graph: fx.Graph) -> None:
    """Concatenate the parts that have elements alone, where torch's result is the same, and lies so."""
    for cat in [n for n in graph.nodes if n.target is aten.cat.default and _is_known(n)]:
        empty = [p for p in _listed(cat) if 0 in [n for n in p.meta["val"].shape if isinstance(n, int)]]
        kept, val = [p for p in _listed(cat) if p not in empty], cat.meta["val"]
        if not empty or not kept:
            continue
        made = torch.cat([p.meta["val"] for p in kept], *cat.args[1:])
        if made.dtype is val.dtype and made.stride() == val.stride():
            cat.update_arg(0, kept)
        elif made.dtype is val.dtype and len(kept) == 1 and val.is_contiguous():
            replace_node(cat, aten.clone.default, (kept[0],), {"memory_format": torch.contiguous_format})
        for part in {*empty}:
            if part.op == "call_function" and not part.users and not _writes(part):
                graph.erase_node(part)


def waiting_for_nothing(graph: fx.Graph) -> None:
    """Write memory that is as large as another tensor without it, so that random numbers that are drawn
    into it need not wait for what computes the other one. Where sizes are symbols it stays as it is."""
    for node in graph.nodes:
        if node.target not in (
            aten.empty_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
        ):
            continue
        val = node.meta["val"]
        shape, strides = list(val.shape), list(val.stride())
        if all(isinstance(n, int) for n in (*shape, *strides)):
            replace_node(
                node,
                aten.empty_strided.default,
                (shape, strides),
                {"dtype": val.dtype, "device": val.device},
            )


def _told_by_place(node: fx.Node, told: set[fx.Node]) -> bool:
    """Whether elements are taken from positions that are the same at every call: nearest upsampling."""
    places: Any = node.args[1] if len(node.args) > 1 else ()
    return node.target in (aten.index.Tensor, aten._unsafe_index.Tensor) and all(
        i is None or i in told for i in places
    )


def _random(node: fx.Node) -> bool:
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
