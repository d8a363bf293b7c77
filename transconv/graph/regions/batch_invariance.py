"""Invariant mode of a graph: a sample's bits are the same in every batch.

What decides bits is made for a fixed number of samples, whatever a call has: the regions, the kernels, and
the schedule of each. The number has to be a name of the graph, as ``mark_dynamic(x, 0)`` or
``dynamic=True`` make it; the sizes beside it are as in the call. Samples lie along the first dims.

    sizes of a call   (5, 64, 56)  of x[5, 3, 64, 56]
    planned for       (8, 64, 56)

torch computes only what adds up nothing, by its own operators: Inductor and libraries choose by sizes."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from transconv.calls.settings import settings
from transconv.graph.regions.torch_region import is_view
from transconv.graph.symbols import Symbols
from transconv.ir import Expr, Var, free_vars, readable
from transconv.runtime import torch_internals
from transconv.simplify import Facts, prove
from transconv.support import Unsupported

SAMPLES = 8
"""What a graph is planned for."""
LARGEST_BATCH = 1 << 15
"""The most samples of a call."""
MOST = 64
"""Ways to compute a graph, for different sizes of samples."""
MOVING = frozenset(
    "_to_copy arange cat clone constant_pad_nd copy embedding empty eye fill full full_like gather index "
    "index_select lift_fresh_copy ones ones_like scalar_tensor select slice stack where zeros "
    "zeros_like".split()
)
"""Operations of torch's that move elements and add up nothing, beside those that torch calls pointwise."""
TOLD = frozenset("embedding gather index index_select".split())
"""Those of them whose places are told by the values of a tensor."""


def batch_names(graph: fx.Graph, symbols: Symbols) -> tuple[str, ...]:
    """The names of a graph that are numbers of samples. Raises Unsupported where there are none."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder" and isinstance(val, torch.Tensor) and val.dim():
            first = val.shape[0]
            own: Any = first.node.expr.free_symbols if isinstance(first, torch.SymInt) else ()
            found |= {v.name: None for s in own if s in symbols.names for v in free_vars(symbols.names[s])}
    if not found:
        raise Unsupported(
            "invariant:graph",
            "the number of samples is no name of this graph: call mark_dynamic(x, 0) of torch's compiler "
            "on its inputs before, or compile it with dynamic=True; a first batch of 1 is a number, too, "
            "where transconv.config.invariant is not set before",
        )
    return tuple(found)


def planned_sizes(symbols: Symbols, values: Sequence[int], batch: Collection[str]) -> tuple[int, ...]:
    """The sizes that a graph is planned for, where a call has these. Raises Unsupported for a call of too
    many samples."""
    refuse_larger(symbols, values, batch, LARGEST_BATCH)
    pairs = zip(symbols.known.names, symbols.told, values, strict=True)
    return tuple([max(1, SAMPLES // told.times) if n in batch else size for n, told, size in pairs])


def planned_symbols(graph: fx.Graph, values: tuple[int, ...], batch: Collection[str]) -> Symbols:
    """The names of a graph's sizes, with those of a call as the example; in invariant mode with a number
    of samples that is always the same, and without its bounds."""
    found = Symbols(graph, values)
    if not batch:
        return found
    like = values or tuple([found.known.like[n] for n in found.known.names])
    return Symbols(graph, planned_sizes(found, like, batch), bounded=False)


def largest_batch(symbols: Symbols, batch: Collection[str]) -> int:
    """The most samples for which all that was assumed of their number on the way is proved, such as that
    offsets fit into an integer. Raises Unsupported where that is not proved for what is planned for."""
    told = [c for c in symbols.known.assumed if {*batch} & {v.name for v in free_vars(c)}]

    def unproved(most: int) -> Expr | None:
        facts = Facts()
        for name in symbols.known.names:
            like = symbols.known.like[name]  # of a way, which has these other sizes alone
            facts = facts.with_range(Var(name), *((1, most) if name in batch else (like, like)))
        return next((c for c in told if not prove(c, facts)), None)

    if (wrong := unproved(SAMPLES)) is not None:
        raise Unsupported("invariant:sizes", f"its kernels are for batches with {readable(wrong)}")
    more = range(SAMPLES, LARGEST_BATCH)
    return SAMPLES + bisect.bisect_left(more, True, key=lambda n: unproved(n + 1) is not None)


def refuse_larger(symbols: Symbols, values: Sequence[int], batch: Collection[str], most: int) -> None:
    """Raise Unsupported for a call of more samples than that."""
    count = samples(symbols, values, batch)
    if count > most:
        raise Unsupported("invariant:sizes", f"a batch of {count}; its kernels take {most} at most")


def samples(symbols: Symbols, values: Sequence[int], batch: Collection[str]) -> int:
    """How many samples a call of these sizes has."""
    return max(n for name, n in zip(symbols.known.names, values, strict=True) if name in batch)


def lookups(graph: fx.Graph) -> dict[str, str]:
    """The operations, by their names, whose places are told by values, which torch computes in invariant
    mode: no kernel has the size of what it looks up in as an argument."""
    why = "places are told by the values of a tensor"
    return {n.name: why for n in graph.nodes if _name(n) in TOLD}


def refuse_adding(nodes: Iterable[fx.Node], reasons: Mapping[str, str]) -> None:
    """Raise Unsupported, which names the operations, where torch would add something up, draw random
    numbers or choose its way by sizes. ``reasons``: why nodes are torch's, by their names."""
    wrong = [n for n in nodes if not _moves(n)]
    if wrong:
        said = ", ".join(dict.fromkeys(_name(n) or str(n.target) for n in wrong))
        why = next((f" ({r})" for n in wrong if (r := reasons.get(n.name))), "")
        raise Unsupported(
            "invariant:torch", f"torch would compute {said}{why}, whose bits may depend on the batch"
        )


def _moves(node: fx.Node) -> bool:
    """Whether each element of a result follows from elements alone, whatever lies beside them."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch_internals.OpOverload):
        return node.op in ("placeholder", "get_attr", "output") or callable(target)
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or is_view(node) or _name(node) in MOVING


def _name(node: fx.Node) -> str:
    """That of an operator of torch's, without its overload; empty for other nodes."""
    target = node.target
    is_operator = isinstance(target, torch_internals.OpOverload)
    return target.name().partition("::")[2].partition(".")[0] if is_operator else ""  # type: ignore[union-attr]


class _SizesOfOne:
    """The hook by which torch's compiler takes sizes of 1 as any others in invariant mode: a batch of one
    sample is no graph of its own then."""

    def __init__(self) -> None:
        self.before: bool | None = None  # torch's switch, while it is changed
        self.follow()

    def follow(self) -> None:
        """Set or restore torch's switch, as the settings say."""
        if settings.invariant and self.before is None:
            self.before = torch_internals.take_one_as_any(True)
        elif not settings.invariant and self.before is not None:
            torch_internals.take_one_as_any(self.before)
            self.before = None


settings.on_change(_SizesOfOne().follow)
