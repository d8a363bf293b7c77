"""What a compiled model became: its kernels with what they cost, what torch computes, and why.

Also here: from what torch.compile returned to the calls of the backend that it made.

torch's compiler leaves them in code that is kept by code of Python: of a function, of what continues one
behind a graph break, of the ``forward`` of a class, or, for modules of torch, of one function for all.

Also here: microseconds of a kernel on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from transconv.compute import Workload
from transconv.functional.calls.compiled_launch import launch
from transconv.graph.fusion.fusion_cost import Price, counted
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.fusion.plan import Edge
from transconv.graph.regions.region_calls import RegionLaunches
from transconv.graph.regions.region_kernel import RegionKernel
from transconv.runtime import Wanted, estimated, timing, torch_internals
from transconv.support import TransconvError

if TYPE_CHECKING:
    from transconv.report import PrintedTable


UNSAID = ("reshape", "expand", "view", "copy")  # they compute nothing and move nothing


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel: the operations it computes, bytes that it reads and writes at least, operations;
    ``estimate`` and ``measure`` find its microseconds on the target. ``numbers``: why it is one for each
    sizes of a call, and not for all; ``measured_us``: its time, if asked for; None on a CPU."""

    name: str
    operations: tuple[str, ...]
    bytes: int
    flops: float
    estimate: Callable[[], float]
    measure: Callable[[timing.Clock], float | None]
    text: str
    numbers: str = ""
    measured_us: float | None = None

    @property
    def us(self) -> float:
        """Estimated microseconds: of the launches that it becomes, by the cost room."""
        return self.estimate()


@dataclass(frozen=True, slots=True)
class TorchRow:
    """A region that torch computes: with ``by``, its operations, and the reason of each kind."""

    by: str
    operations: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One graph: ``phase`` is inference, forward or backward. ``rows`` are in the order in which they run;
    ``edges``: values that go through memory, with the reasons. ``whole``: why torch computes all of it.
    ``sizes``: the names of its sizes, with an example and their ranges, and what is assumed of them;
    ``peak``: bytes of what kernels of a region store that are held at once at most; ``compared``: for how
    many sets of sizes first results were held against torch's operators; ``remarks``: what was wrong then,
    or not compared."""

    phase: str
    rows: tuple[KernelRow | TorchRow, ...]
    edges: tuple[Edge, ...]
    whole: str = ""
    sizes: str = ""
    peak: int = 0
    compared: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def kernels(self) -> tuple[KernelRow, ...]:
        """The rows of ours."""
        return tuple(r for r in self.rows if isinstance(r, KernelRow))

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The text, line by line; the first has the sums."""
        ours = self.kernels
        others = len(self.rows) - len(ours)
        yield (f"{self.phase}: {many(len(ours), 'kernel')}, {many(others, 'region')} of torch, "
               f"{sum(r.us for r in ours):.4g} us, {sum(r.bytes for r in ours) / 1e6:.4g} MB, "
               f"{sum(r.flops for r in ours) / 1e9:.4g} GFLOP (estimated), {self.peak / 1e6:.4g} MB held")
        if self.sizes:
            yield f"  sizes: {self.sizes}"
        if self.whole:
            yield f"  all of it is torch's: {self.whole}"
        yield from (f"  {remark}" for remark in self.remarks)
        for row in self.rows:
            if isinstance(row, KernelRow):
                took = "" if row.measured_us is None else f"{row.measured_us:9.4g} us measured  "
                yield (f"  {row.us:9.4g} us  {took}{row.bytes / 1e6:9.4g} MB  "
                       f"{row.flops / 1e9:9.4g} GFLOP  {row.name}: {', '.join(row.operations)}")
                if row.numbers:
                    yield f"      a kernel for each sizes: {row.numbers}"
            else:
                yield f"  {row.by}: {row.operations}"
                yield from (f"      {reason}" for reason in row.reasons)
        if self.edges:
            yield "  through memory:"
        for edge, n in _counts(self.edges).items():
            times = f" ({n} times)" if n > 1 else ""
            yield f"    {edge.value} -> {edge.user}: {edge.reason}{times}"


def many(n: int, what: str) -> str:
    """A number of things in words."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def _counts(edges: tuple[Edge, ...]) -> dict[Edge, int]:
    found: dict[Edge, int] = {}
    for edge in edges:
        found[edge] = found.get(edge, 0) + 1
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """All graphs of a compiled model that were made so far: nothing before its first call.
    ``optimization``: what ``transconv.optimize`` chose."""

    graphs: tuple[GraphReport, ...]
    optimization: Any = None

    def __str__(self) -> str:
        chosen = () if self.optimization is None else (self.optimization,)
        return ("\n".join(map(str, (*chosen, *self.graphs)))
                or "no graph yet: a model is compiled by its first call")

    def html(self) -> str:
        """The same as a page, one text that needs no other file."""
        from transconv.report import tables_page

        return tables_page("Kernels of a model", [t for g in self.graphs for t in _tables(g)])


def _tables(graph: GraphReport) -> Iterator[PrintedTable]:
    from transconv.report import PrintedTable

    rows = [(r.name, ", ".join(r.operations), r.bytes / 1e6, r.flops / 1e9, r.us, r.measured_us)
            if isinstance(r, KernelRow) else
            (f"by {r.by}", f"{r.operations}: {'; '.join(r.reasons)}", None, None, None, None)
            for r in graph.rows]
    head = ("kernel", "operations", "MB", "GFLOP", "estimate, us", "measured, us")
    remarks = (next(graph.lines()), *([graph.whole] if graph.whole else []), *graph.remarks)
    yield PrintedTable(graph.phase, head, tuple(rows), remarks)
    edges = tuple((e.value, e.user, float(n), e.reason) for e, n in _counts(graph.edges).items())
    yield PrintedTable(f"{graph.phase}: through memory", ("value", "for", "times", "reason"), edges)


def kernel_rows(region: RegionLaunches, rates: Price) -> list[KernelRow | TorchRow]:
    """The rows of a region."""
    return [_row(k, region, rates) for k in region.kernels]


def _row(kernel: RegionKernel, region: RegionLaunches, rates: Price) -> KernelRow:
    moved, operations = counted(kernel.group, {*region.plan.stored})

    def us() -> float:
        try:
            return estimated(kernel.workload, rates.target)
        except TransconvError:  # it has none on a chip that is not the device
            return rates.kernel(moved, 0.0 if kernel.group.product else operations, kernel.group.product)

    said = tuple(w for w in kernel.group.labels if w not in UNSAID)
    return KernelRow(kernel.group.name, said, moved, operations, us,
                     lambda clock: measured(kernel.asked, region.device, clock), "\n".join(kernel.texts),
                     kernel.sized.refused if kernel.sized else "")


def peak_of(region: RegionLaunches) -> int:
    """Bytes of what a region stores that are held at once at most."""
    held = most = 0
    inputs = {piece for _, _, piece in region.inputs}
    cut: set[Piece] = set()  # tensors that hold several values, and are there
    for kernel, done, over in zip(region.kernels, region.last, region.over, strict=True):
        new = {region.cut[p].whole for p in kernel.stored if p in region.cut} - cut
        cut |= new
        held += sum(p.bytes for p in new)
        held += sum(p.bytes for i, p in enumerate(kernel.stored) if i not in over and p not in region.cut)
        most = max(most, held)
        held += sum(kernel.stored[i].bytes for i in over)  # in the place of operands, which go
        held -= sum(p.bytes for p in done if p not in inputs and p not in region.cut)
    return most


def report(compiled: Any, measure: bool = False) -> Report:
    """What a function or module of ``torch.compile(..., backend="transconv")`` or of ``optimize``
    became. ``str`` of it is a text, ``html()`` a page; ``graphs`` has the same as data. ``measure``: time
    every kernel on its device, on random data; nothing is timed on a CPU. TypeError for what torch.compile
    did not make."""
    chosen = getattr(getattr(compiled, "_compiled_call_impl", None), "optimization", None)
    graphs = tuple(g for made in found(compiled) for g in made.graphs)
    timed = measure and torch.cuda.is_available()
    return Report(tuple(map(_measured, graphs)) if timed else graphs, chosen)


def _measured(graph: GraphReport) -> GraphReport:
    clock = timing.Clock("cuda", 20.0)
    return replace(graph, rows=tuple(replace(r, measured_us=r.measure(clock)) if isinstance(r, KernelRow)
                                     else r for r in graph.rows))


@dataclass(slots=True)
class Made:
    """The graphs of one call of the backend, as they come: the backward one at the first backward.
    ``owner``: the module for which it was called, in torch's words."""

    owner: str
    graphs: list[GraphReport] = field(default_factory=list)


def owner() -> str:
    """The module whose ``forward`` is being compiled, in torch's words; empty for a function, and where
    torch's compiler compiles nothing."""
    try:
        at: Any = torch_internals.InstructionTranslator.current_tx()
    except (AttributeError, AssertionError):
        return ""
    while getattr(at, "parent", None) is not None:
        at = at.parent
    return next((str(x) for x in at.f_locals.values() if isinstance(x, nn.Module)), "")


def found(compiled: Any) -> list[Made]:
    """The calls of the backend for what torch.compile returned. Code is common to modules of a class: of
    its calls those count that were made for modules like the ones here. TypeError for anything else."""
    model: Any = getattr(compiled, "_orig_mod", None)
    call: Any = getattr(compiled, "_compiled_call_impl", None)
    if hasattr(call, "optimization"):  # of ``optimize``: the function that it compiled, or eager's
        model, compiled = compiled, call.compiled
    left = [*_functions(compiled, model)]
    if not left:
        raise TypeError(f"expected what torch.compile returned, got {type(compiled).__name__}")
    calls: dict[int, Made] = {}
    like: set[int] = set()
    seen: set[Any] = set()
    while left:
        at, owners = left.pop(0)
        if at.__code__ in seen:
            continue
        seen.add(at.__code__)
        for entry in torch_internals.cache_entries(at.__code__):
            for name in entry.code.co_names:
                value: Any = _original(at.__globals__.get(name))
                if isinstance(made := getattr(value, "transconv", None), Made):
                    calls.setdefault(id(made), made)
                    like |= {id(made)} if not owners or made.owner in owners | {""} else set()
                elif name.startswith("__resume") and hasattr(value, "__code__"):
                    left.append((value, owners))
    return [made for at, made in calls.items() if at in like]


def _functions(compiled: Any, model: Any) -> Iterator[tuple[Callable[..., Any], set[str]]]:
    """Those whose code may have been compiled, and of which modules; a model's own before its parts'."""
    every = {*map(str, model.modules())} if isinstance(model, nn.Module) else set()
    if isinstance(model, nn.Module):
        forwards = dict.fromkeys(type(m).forward for m in model.modules())
        yield from ((f, every) for f in forwards if hasattr(f, "__code__"))
        compiled = getattr(compiled, "forward", compiled)
    elif not hasattr(compiled, "_torchdynamo_orig_callable"):
        return
    inner = _original(compiled)
    if isinstance(inner, nn.Module):
        inner, every = type(inner).forward, {str(inner)}
    inner = getattr(inner, "__func__", inner)
    if hasattr(inner, "__code__"):
        yield inner, {str(model)} if every else every


def _original(value: Any) -> Any:
    while hasattr(value, "_torchdynamo_orig_callable"):
        value = value._torchdynamo_orig_callable
    return value


Tensor = torch.Tensor


def measured(asked: str | Workload, device: torch.device, clock: timing.Clock) -> float | None:
    """The median of a kernel on random data; indices are zeros. None on a CPU, where nothing that is
    measured says anything about a device. Raises Unsupported."""
    if device.type != "cuda":
        return None
    found = launch(asked, device, True, "now")

    operands = found.operands()

    def make(_: int) -> Callable[[], object]:
        tensors = [_made(m, device) for m in operands]
        return lambda: found.start(tensors)
    return clock.one(make, sum(prod(m.shape) * m.elements.itemsize for m in operands)).us


def _made(m: Wanted, device: torch.device) -> Tensor:
    assert m.strides is not None
    t = torch.empty_strided(m.shape, m.strides, dtype=m.elements, device=device)
    return t.normal_() if t.is_floating_point() else t.zero_()
