"""What a compiled model became: its kernels with what they cost, what torch computes, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from transconv.graph.compiled import Kernel, Launches
from transconv.graph.plan import Edge
from transconv.graph.price import Price, counted

UNSAID = ("reshape", "expand", "view", "copy")  # they compute nothing and move nothing


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel: the operations it computes, bytes that it reads and writes at least, operations, and
    estimated microseconds on the target."""

    name: str
    operations: tuple[str, ...]
    bytes: int
    flops: float
    us: float
    text: str


@dataclass(frozen=True, slots=True)
class TorchRow:
    """A region that torch computes: with ``by``, its operations, and the reason of each kind."""

    by: str
    operations: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One graph: ``phase`` is inference, forward or backward. ``rows`` are in the order in which they run;
    ``edges``: values that go through memory, with the reasons. ``whole``: why torch computes all of it."""

    phase: str
    rows: tuple[KernelRow | TorchRow, ...]
    edges: tuple[Edge, ...]
    whole: str = ""

    @property
    def kernels(self) -> tuple[KernelRow, ...]:
        """The rows of ours."""
        return tuple(r for r in self.rows if isinstance(r, KernelRow))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        ours = self.kernels
        others = len(self.rows) - len(ours)
        yield (f"{self.phase}: {_many(len(ours), 'kernel')}, {_many(others, 'region')} of torch, "
               f"{sum(r.us for r in ours):.4g} us, {sum(r.bytes for r in ours) / 1e6:.4g} MB, "
               f"{sum(r.flops for r in ours) / 1e9:.4g} GFLOP (estimated)")
        if self.whole:
            yield f"  all of it is torch's: {self.whole}"
        for row in self.rows:
            if isinstance(row, KernelRow):
                yield (f"  {row.us:9.4g} us  {row.bytes / 1e6:9.4g} MB  {row.flops / 1e9:9.4g} GFLOP  "
                       f"{row.name}: {', '.join(row.operations)}")
            else:
                yield f"  {row.by}: {row.operations}"
                yield from (f"      {reason}" for reason in row.reasons)
        if self.edges:
            yield "  through memory:"
        for edge, n in _counts(self.edges).items():
            times = f" ({n} times)" if n > 1 else ""
            yield f"    {edge.value} -> {edge.user}: {edge.reason}{times}"


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _counts(edges: tuple[Edge, ...]) -> dict[Edge, int]:
    found: dict[Edge, int] = {}
    for edge in edges:
        found[edge] = found.get(edge, 0) + 1
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """All graphs of a compiled model that were made so far: nothing before its first call."""

    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "no graph yet: a model is compiled by its first call"


def kernel_rows(found: Launches, rates: Price) -> list[KernelRow | TorchRow]:
    """The rows of a region."""
    return [_row(k, found, rates) for k in found.kernels]


def _row(kernel: Kernel, found: Launches, rates: Price) -> KernelRow:
    moved, operations = counted(kernel.group, {*found.plan.stored})
    us = rates.kernel(moved, operations if kernel.group.product is None else 0.0, kernel.group.product)
    said = tuple(w for w in kernel.group.labels if w not in UNSAID)
    return KernelRow(kernel.group.name, said, moved, operations, us, kernel.written.text)


# -- from what torch.compile returned to its graphs ------------------------------------------------


def report(compiled: Any) -> Report:
    """What a function or module of ``torch.compile(..., backend="transconv")`` became. ``str`` of it is a
    text; ``graphs`` has the same as data. TypeError for what torch.compile did not make."""
    return Report(tuple(g for made in _found(compiled) for g in made.graphs))


def _found(compiled: Any) -> list[Any]:
    """The calls that the compiler left in the code of a function, and in what continues it."""
    inner = getattr(compiled, "_orig_mod", None)
    function: Any = getattr(compiled, "_torchdynamo_orig_callable", None)
    function = function if inner is None else inner.forward
    function = getattr(function, "__func__", function)
    if isinstance(function, torch.nn.Module):
        function = type(function).forward
    if not hasattr(function, "__code__"):
        raise TypeError(f"expected what torch.compile returned, got {type(compiled).__name__}")
    found: dict[int, Any] = {}
    left: list[Any] = [function]
    seen: set[Any] = set()
    while left:
        at = left.pop()
        if not hasattr(at, "__code__") or at.__code__ in seen:
            continue
        seen.add(at.__code__)
        for entry in torch._dynamo.eval_frame._debug_get_cache_entry_list(at.__code__):
            for name in entry.code.co_names:
                value: Any = at.__globals__.get(name)
                while hasattr(value, "_torchdynamo_orig_callable"):
                    value = value._torchdynamo_orig_callable
                if hasattr(value, "transconv"):
                    found.setdefault(id(value.transconv), value.transconv)
                elif name.startswith("__resume"):
                    left.append(value)
    return list(found.values())
