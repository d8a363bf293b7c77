"""The report of a compiled model: its kernels with what they cost, what torch computes, and why.

Of what torch.compile returned, ``found`` gives the calls of the backend that it made. torch's compiler
leaves them in code that is kept by code of Python: of a function, of what continues one behind a graph
break, of the ``forward`` of a class, or, for modules of torch, of one function for all.

The microseconds of a kernel are measured on the device, beside those of torch for the same operations."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from transconv.compute import Workload
from transconv.functional.calls.compiled_launch import launch
from transconv.graph.fusion.groups import Edge, Price, traffic
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.regions.partition import graph_of, names, origin, title
from transconv.graph.regions.region_kernel import Region, RegionKernel, RegionPlan, origins
from transconv.runtime import estimated, timing, torch_internals
from transconv.support import TransconvError
from transconv.target import Target

if TYPE_CHECKING:
    from transconv.report import PrintedTable

Tensor = torch.Tensor
Compiled = Callable[[torch.fx.GraphModule], Callable[..., Any]]
Origins = Mapping[Piece, torch.fx.Node]
"""The operations of values."""


def measured(asked: str | Workload, device: torch.device, clock: timing.Clock) -> float | None:
    """The median of a kernel on random data; indices are zeros. None on a CPU, where nothing that is
    measured says anything about a device. Raises Unsupported."""
    if device.type != "cuda":
        return None
    found = launch(asked, device, True, "now")
    operands = found.operands()

    def make(_: int) -> Callable[[], object]:
        tensors = [_made(m.shape, m.strides or (), m.elements, device) for m in operands]
        return lambda: found.start(tensors)

    return clock.one(make, sum(prod(m.shape) * m.elements.itemsize for m in operands)).us


@dataclass(frozen=True, eq=False, slots=True)
class TorchSide:
    """Operations of a graph as torch computes them; ``compiled`` makes a function of a graph of them."""

    nodes: tuple[torch.fx.Node, ...]
    compiled: Compiled
    device: torch.device

    def us(self, clock: timing.Clock) -> float | None:
        """The median on random data; indices are zeros. None where sizes are names, and where torch does
        not compute the operations of such data alone."""
        gm = graph_of(self.nodes)
        given = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
        if not all(
            isinstance(t, Tensor) and all(isinstance(n, int) for n in (*t.shape, *t.stride()))
            for t in given
        ):
            return None
        run = self.compiled(gm)

        def make(_: int) -> Callable[[], object]:
            tensors = [_made(t.shape, t.stride(), t.dtype, self.device) for t in given]
            return lambda: run(*tensors)

        try:
            with torch.no_grad():
                return clock.one(make, sum(t.numel() * t.dtype.itemsize for t in given)).us
        except Exception:  # whatever torch says of it: a report has one number less
            return None


def sides(kernels: Sequence[Origins], compiled: Compiled, device: torch.device) -> list[TorchSide | None]:
    """What of torch each kernel stands beside, by the values that it evaluates; None: nothing. Kernels
    with parts of one operation, such as the moments of a norm and its result, stand together."""
    Nodes = set[torch.fx.Node]
    sets: list[tuple[set[int], Nodes, Nodes]] = []  # kernels; operations; those with sums
    for i, made in enumerate(kernels):
        joined, every = {i}, {*made.values()}
        summed = {n for p, n in made.items() if p.anchored}
        for s in [s for s in sets if s[1] & summed or s[2] & every]:
            sets.remove(s)
            joined, every, summed = joined | s[0], every | s[1], summed | s[2]
        sets.append((joined, every, summed))
    found: list[TorchSide | None] = [None] * len(kernels)
    for joined, every, _ in sets:
        side = TorchSide(tuple(every), compiled, device) if every else None
        for i in joined:
            found[i] = side
    return found


def _made(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    t = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return t.normal_() if t.is_floating_point() else t.zero_()


UNSAID = ("reshape", "expand", "view", "copy")  # they compute nothing and move nothing


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel: the operations it computes, bytes that it reads and writes at least, operations;
    ``estimate`` and ``measure`` find its microseconds on the target; ``on``: its row for another chip.
    ``numbers``: why it is one for each sizes of a call, not for all; ``title``: what it computes by the
    model's own names; ``limit_us``: what no kernel of these operations stays below, and which rate of the
    chip says so, ``limit``.

    If it is asked for, on a GPU: ``measured_us``, its time; ``torch_us``, that of torch.compile's own
    kernels for the operations of ``beside``, which it may have together with other kernels, and ``gain``,
    that time over the one of all these kernels."""

    name: str
    operations: tuple[str, ...]
    bytes: int
    flops: float
    estimate: Callable[[], float]
    measure: Callable[[timing.Clock], float | None]
    on: Callable[[Target], KernelRow]
    text: str
    numbers: str = ""
    measured_us: float | None = None
    title: str = ""
    limit_us: float = 0.0
    limit: str = ""
    beside: TorchSide | None = None
    torch_us: float | None = None
    gain: float | None = None

    @property
    def us(self) -> float:
        """Estimated microseconds: of the launches that it becomes, by the cost room."""
        return self.estimate()


@dataclass(frozen=True, slots=True)
class LeftOperation:
    """An operation that torch computes: what the model calls it, its module's path, and why."""

    operation: str
    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class TorchRow:
    """A region that torch computes: with ``by``, its operations, and the reason of each kind; ``left``:
    the same for each operation; ``side`` finds ``measured_us``, its time, if asked for."""

    by: str
    operations: str
    reasons: tuple[str, ...]
    left: tuple[LeftOperation, ...] = ()
    side: TorchSide | None = None
    measured_us: float | None = None

    @property
    def title(self) -> str:
        """What it computes, and who does."""
        words = re.sub(r"\.\w+(?=,|$)", "", self.operations)  # of an operation's overloads which
        return f"{words} by torch ({self.by})"

    def measure(self, clock: timing.Clock) -> float | None:
        """Microseconds on its device."""
        return self.side.us(clock) if self.side else None


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One graph: ``phase`` is inference, forward or backward. ``rows`` are in the order in which they run;
    ``edges``: values that go through memory, with the reasons. ``whole``: why torch computes all of it.
    ``sizes``: the names of its sizes, with an example and their ranges, and what is assumed of them;
    ``peak``: bytes of what kernels of a region store that are held at once at most; ``compared``: for how
    many sets of sizes first results were held against torch's operators; ``remarks``: what was wrong then,
    or not compared; ``step_us``: measured microseconds of all graphs of the model, if asked for; ``chip``:
    whose estimates were asked for."""

    phase: str
    rows: tuple[KernelRow | TorchRow, ...]
    edges: tuple[Edge, ...]
    whole: str = ""
    sizes: str = ""
    peak: int = 0
    compared: int = 0
    remarks: tuple[str, ...] = ()
    step_us: float | None = None
    chip: str = ""

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
        yield (
            f"{self.phase}: {many(len(ours), 'kernel')}, {many(others, 'region')} of torch, "
            f"{sum(r.us for r in ours):.4g} us, {sum(r.bytes for r in ours) / 1e6:.4g} MB, "
            f"{sum(r.flops for r in ours) / 1e9:.4g} GFLOP "
            f"(estimated{self.chip and f' for {self.chip}'}), {self.peak / 1e6:.4g} MB held"
        )
        if self.sizes:
            yield f"  sizes: {self.sizes}"
        if self.whole:
            yield f"  all of it is torch's: {self.whole}"
        yield from (f"  {remark}" for remark in self.remarks)
        yield from self._estimates() if self.step_us is None else self._times(self.step_us)
        if counts := _counted(self.left):
            by = dict.fromkeys(row.by for row in self.rows if isinstance(row, TorchRow))
            yield f"  left to torch ({', '.join(by)}):"
        for said, n in counts.items():
            yield f"    {f'{n} x ' if n > 1 else ''}{said}"
        if self.edges:
            yield "  through memory:"
        for edge, n in Counter(self.edges).items():
            times = f" ({n} times)" if n > 1 else ""
            yield f"    {edge.value} -> {edge.user}: {edge.reason}{times}"

    @property
    def left(self) -> tuple[LeftOperation, ...]:
        """What torch computes."""
        return tuple(
            x
            for row in self.rows
            if isinstance(row, TorchRow)
            for x in row.left or (LeftOperation(row.operations, "", "; ".join(row.reasons)),)
        )

    def _estimates(self) -> Iterator[str]:
        """Kernels in the order in which they run."""
        if self.kernels:
            yield f"  {'us':>9} {'MB':>10} {'GFLOP':>10}  kernel"
        for row in self.kernels:
            yield (
                f"  {row.us:9.4g} {row.bytes / 1e6:10.4g} {row.flops / 1e9:10.4g}  "
                f"{row.title} ({row.name})"
            )
            if row.numbers:
                yield f"      a kernel for each sizes: {row.numbers}"

    def _times(self, step: float) -> Iterator[str]:
        """Kernels and regions of torch, those first that lose most time."""
        yield (
            f"  {'us':>9} {'of step':>8} {'limit us':>9} {'by':10} {'torch us':>9} {'torch/ours':>10}"
            "  what, most above its limit first"
        )
        for row in _worst_first(self.rows):
            limit, by, name = f"{'-':>9}", "-", ""
            beside: tuple[float | None, ...] = row.measured_us, None, None
            if isinstance(row, KernelRow):
                limit, by, name = f"{row.limit_us:9.4g}", row.limit, f" ({row.name})"
                beside = row.measured_us, row.torch_us, row.gain
            took, torchs, gain = (f"{'-':>9}" if x is None else f"{x:9.4g}" for x in beside)
            yield (
                f"  {took} {(row.measured_us or 0.0) / step:8.1%} {limit} {by:10} {torchs} {gain:>10}"
                f"  {row.title}{name}"
            )


def _worst_first(rows: Iterable[KernelRow | TorchRow]) -> list[KernelRow | TorchRow]:
    """Those first that lose most time above their limit; of torch's regions none is known."""
    return sorted(rows, key=lambda row: getattr(row, "limit_us", 0.0) - (row.measured_us or 0.0))


def many(n: int, what: str) -> str:
    """A number of things in words."""
    return f"{n} {what}{'' if n == 1 else 's'}"


SHOWN = 3  # modules of one reason


def _counted(left: Iterable[LeftOperation]) -> dict[str, int]:
    """How often operations are left to torch for the same reason, with their first modules."""
    modules: dict[tuple[str, str], list[str]] = {}
    for x in left:
        modules.setdefault((x.operation, x.reason), []).append(x.module)
    found = {}
    for (operation, reason), paths in modules.items():
        known = [*dict.fromkeys(p for p in paths if p)]
        more = ", ..." if len(known) > SHOWN else ""
        where = f" ({', '.join(known[:SHOWN])}{more})" if known else ""
        found[f"{operation}{where}: {reason}"] = len(paths)
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """All graphs of a compiled model that were made so far: nothing before its first call.
    ``optimization``: what ``transconv.optimize`` chose."""

    graphs: tuple[GraphReport, ...]
    optimization: Any = None

    def __str__(self) -> str:
        chosen = () if self.optimization is None else (self.optimization,)
        return (
            "\n".join(map(str, (*chosen, *self.graphs)))
            or "no graph yet: a model is compiled by its first call"
        )

    def html(self) -> str:
        """The same as a page, one text that needs no other file."""
        from transconv.report import tables_page

        return tables_page("Kernels of a model", [t for g in self.graphs for t in _tables(g)])


def _tables(graph: GraphReport) -> Iterator[PrintedTable]:
    from transconv.report import PrintedTable

    head: tuple[str, ...] = ("what", "estimate, us", "MB", "GFLOP", "kernel")
    rows: list[tuple[str | float | None, ...]] = [
        (r.title, r.us, r.bytes / 1e6, r.flops / 1e9, r.name) for r in graph.kernels
    ]
    if graph.step_us is not None:
        head = ("what", "us", "% of step", "limit, us", "by", "torch, us", "torch / ours", "kernel")
        rows = [
            (
                r.title,
                r.measured_us,
                100 * (r.measured_us or 0.0) / graph.step_us,
                *(
                    (r.limit_us, r.limit, r.torch_us, r.gain, r.name)
                    if isinstance(r, KernelRow)
                    else (None, "", None, None, "")
                ),
            )
            for r in _worst_first(graph.rows)
        ]
    remarks = (next(graph.lines()), *([graph.whole] if graph.whole else []), *graph.remarks)
    yield PrintedTable(graph.phase, head, tuple(rows), remarks)
    if left := tuple((float(n), said) for said, n in _counted(graph.left).items()):
        yield PrintedTable(f"{graph.phase}: left to torch", ("times", "what, and why"), left)
    edges = tuple((e.value, e.user, float(n), e.reason) for e, n in Counter(graph.edges).items())
    yield PrintedTable(f"{graph.phase}: through memory", ("value", "for", "times", "reason"), edges)


def kernel_rows(region: RegionPlan, rates: Price, compiled: Compiled) -> list[KernelRow | TorchRow]:
    """The rows of a region; ``compiled`` makes functions of torch's of graphs."""
    by = origins(region.region)
    made: list[Origins] = [{p: by[p] for p in k.group.evaluated if p in by} for k in region.kernels]
    return [
        _row(kernel, region, rates, _said(values), side)
        for kernel, values, side in zip(
            region.kernels, made, sides(made, compiled, region.device), strict=True
        )
    ]


def _said(values: Origins) -> str:
    """What a kernel computes in the model's own names."""
    return title([n for p, n in values.items() if p.label and p.label not in UNSAID] or [*values.values()])


def _row(
    kernel: RegionKernel, region: RegionPlan, rates: Price, said: str, side: TorchSide | None
) -> KernelRow:
    moved, operations = traffic(kernel.group, {*region.plan.stored})

    def us() -> float:
        try:
            return estimated(kernel.workload, rates.target)
        except TransconvError:  # it has none on a chip that is not the device
            return rates.kernel(moved, 0.0 if kernel.group.product else operations, kernel.group.product)

    product = kernel.group.product
    limits = {
        "memory": rates.moved(moved),
        "products" if product else "arithmetic": (
            rates.multiplied(product) if product else rates.worked(operations)
        ),
    }
    limit = max(limits, key=limits.__getitem__)
    labels = tuple(w for w in kernel.group.labels if w not in UNSAID)
    return KernelRow(
        kernel.group.name,
        labels,
        moved,
        operations,
        us,
        lambda clock: measured(kernel.asked, region.device, clock),
        lambda chip: _row(kernel, region, Price(chip), said, side),
        "\n".join(kernel.texts),
        kernel.sized.refused if kernel.sized else "",
        title=said or kernel.group.name,
        limit_us=limits[limit],
        limit=limit,
        beside=side,
    )


def torch_row(
    region: Region, by: str, reasons: list[str], compiled: Compiled, device: torch.device
) -> TorchRow:
    """The row of a region of torch's. ``reasons``: why, where that is one for all operations."""
    side = TorchSide(tuple(region.nodes), compiled, device)
    each = {n: region.reasons[n.name] for n in region.nodes if n.name in region.reasons}
    left = tuple(LeftOperation(origin(n).operation, origin(n).module, why) for n, why in each.items())
    return TorchRow(by, names(region.nodes), tuple(dict.fromkeys(reasons)), left, side)


def report(compiled: Any, measure: bool = False, target: Target | str | None = None) -> Report:
    """What a function or module of ``torch.compile(..., backend="transconv")`` or of ``optimize``
    became. ``str`` of it is a text, ``html()`` a page; ``graphs`` has the same as data. ``measure``: time
    every kernel on its device, on random data, and beside it torch.compile's own kernels for the same
    operations, which have to be compiled for that; nothing is timed on a CPU. ``target``: the chip of the
    estimates, such as "sm_90"; default: the device, or an H100 where there is none. TypeError for what
    torch.compile did not make, ScheduleError for an unknown chip."""
    chosen = getattr(getattr(compiled, "_compiled_call_impl", None), "optimization", None)
    graphs = tuple(g for made in found(compiled) for g in made.graphs)
    if target is not None:
        chip = target if isinstance(target, Target) else Target.parse(str(target))
        graphs = tuple(
            replace(
                g,
                chip=chip.name,
                rows=tuple(r.on(chip) if isinstance(r, KernelRow) else r for r in g.rows),
            )
            for g in graphs
        )
    timed = measure and torch.cuda.is_available()
    return Report(_measured(graphs, timing.Clock("cuda", 20.0)) if timed else graphs, chosen)


def _measured(graphs: tuple[GraphReport, ...], clock: timing.Clock) -> tuple[GraphReport, ...]:
    """With the time of every row, what torch takes for the same, and the time of all graphs."""
    timed = [[replace(row, measured_us=row.measure(clock)) for row in g.rows] for g in graphs]
    step = sum(r.measured_us or 0.0 for rows in timed for r in rows)
    return tuple(
        replace(g, rows=tuple(_beside(rows, clock)), step_us=step or None)
        for g, rows in zip(graphs, timed, strict=True)
    )


def _beside(rows: list[KernelRow | TorchRow], clock: timing.Clock) -> Iterator[KernelRow | TorchRow]:
    """With torch's time for the operations of each kernel, and of the others that have parts of them."""
    ours: dict[TorchSide, float] = {}
    for row in rows:
        if isinstance(row, KernelRow) and row.beside and row.measured_us is not None:
            ours[row.beside] = ours.get(row.beside, 0.0) + row.measured_us
    torchs = {side: side.us(clock) for side in ours}
    for row in rows:
        if isinstance(row, KernelRow) and row.beside and (us := torchs.get(row.beside)) is not None:
            row = replace(row, torch_us=us, gain=us / ours[row.beside])
        yield row


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
    given = at.f_locals.values() if at is not None else ()
    return next((str(x) for x in given if isinstance(x, nn.Module)), "")


def found(compiled: Any) -> list[Made]:
    """The calls of the backend for what torch.compile returned. Code is common to modules of a class: of
    its calls those count that were made for modules like the ones here. TypeError for anything else."""
    model: Any = getattr(compiled, "_orig_mod", None)
    call: Any = getattr(compiled, "_compiled_call_impl", None)
    if hasattr(call, "optimization"):  # of ``optimize``: the function that it compiled, or eager's
        model, compiled = compiled, call.compiled
    left = [*_functions(compiled, model)]
    if not left:
        raise TypeError(
            f"expected what torch.compile or transconv.optimize returned, got {type(compiled).__name__}; "
            'write compiled = torch.compile(model, backend="transconv"), call it, and report(compiled)'
        )
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
