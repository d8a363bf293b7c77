"""Graphs of AOTAutograd: how they are divided, and what a forward graph leaves for its backward graph.

Graphs have torch's decompositions, but for operations that rows translate whole. Only the two graphs see
what one leaves for the other: nothing that costs nothing to have again, and

    cat(a, b) read by both graphs     the concatenation, not a and b: their kernels store into it
    max_pool backward                 the places that were chosen, each in its window, in 8 bits (others
                                      in 32), of its image the shape
    an image of a convolution         has its features last, whatever torch's order would be

torch's compiler is told how those lie whose order is not torch's, and hands the backward graph examples
that lie so.

What a graph writes to its inputs, such as running statistics, it writes at its end, ``copy_(input,
value)``. The values become results, and all inputs are written by one call behind the graph: a launch for
each takes the host longer than the kernels."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from transconv.graph.lowerings.pools import within_windows
from transconv.graph.lowerings.table import ROWS
from transconv.graph.regions.concatenations import is_known, join_slices, listed, parts_cast
from transconv.graph.regions.function_graphs import replace_node
from transconv.graph.regions.torch_region import may_view, memory, readers
from transconv.runtime import torch_internals

aten = torch.ops.aten
FREE = "transconv_free"  # in a node's meta: only kernels of the two graphs see how it lies
MOVED = "transconv_moved"  # of a placeholder: it lies otherwise than when the graph was traced
POOLS = (aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
LONGEST = 2**31  # places that 32 bits tell apart


# -- before the division ---------------------------------------------------------------------------


def prepared(joint: fx.Graph) -> None:
    """Rewrite a graph of forward and backward so that less is left between them."""
    for node in [*joint.nodes]:
        if node.target in POOLS:
            _shape_alone(node)
    join_slices(joint)
    parts_cast(joint)


def _shape_alone(node: fx.Node) -> None:
    """Give a pool's gradient another image of that shape, which it does not read, and its places by way of
    8 or 32 bits."""
    grad, image, *rest, places = node.args
    if not isinstance(image, fx.Node) or not isinstance(places, fx.Node) or not is_known(image):
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
            and is_known(x)
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
    parts: list[fx.Node] = [*listed(cat)]
    given = [left.get(str(p.target)) if p.op == "placeholder" else None for p in parts]
    if None in given or len({*given}) < len(given) or {*given} & {*outs[:results]}:
        return
    cats = {u for g in given if g is not None for u in g.users if u.target is aten.cat.default}
    there = next(iter(cats)) if len(cats) == 1 else None
    if there is None or listed(there) != given or there.args[1:] != cat.args[1:] or not is_known(there):
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
            and is_known(node)
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
ALSO = tuple(
    "_softmax _log_softmax _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "_native_batch_norm_legit_functional native_batch_norm _batch_norm_with_update_functional "
    "_batch_norm_no_update batch_norm_backward addcmul addcdiv linalg_vector_norm std glu hardsigmoid "
    "mish native_dropout_backward".split()
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
        "cat constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
        "replication_pad2d replication_pad3d".split()
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
        if node.op == "call_function" and known and not is_random(node):
            told.add(node)
        drawn = any(map(is_random, (node, *node.all_input_nodes[:1] * (node.target is operator.getitem))))
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
            or is_random(node)
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
    for cat in [n for n in graph.nodes if n.target is aten.cat.default and is_known(n)]:
        empty = [p for p in listed(cat) if 0 in [n for n in p.meta["val"].shape if isinstance(n, int)]]
        kept, val = [p for p in listed(cat) if p not in empty], cat.meta["val"]
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


def is_random(node: fx.Node) -> bool:
    """Whether an operation may draw random numbers."""
    tags: Sequence[Any] = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
