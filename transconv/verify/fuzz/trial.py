"""A trial of the fuzzer, and its kinds: drawn from a seed and a number, written to and read from a line,
run, made simpler.

Trial ``i`` of a seed is the same on every machine. It is run in one of three ways: ``numpy``, kernels in
the interpreter of the IR; ``triton``, the emitted text in Triton's interpreter; ``device``, compiled
kernels on a GPU.

A failing trial is made simpler greedily: of all that are simpler in one respect, the first that fails in
the same way is taken, until none does. Changes that remove most are tried first: words, layouts and types
before sizes, and of a size first 1, then half, then one less."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, TypeVar

from transconv.conv import ConvProblem
from transconv.ir import Layout, LayoutBlock
from transconv.schedule import Block, Schedule
from transconv.support import ScheduleError, TransconvError, Unsupported

Row = dict[str, Any]
GOOD = ("passed", "refused", "resources")
MOST_STEPS = 1000  # of loops in Triton's interpreter, several ms each


def chance(rng: Random, one_in: int) -> bool:
    return rng.randrange(one_in) == 0


@dataclass(slots=True)
class TrialRun:
    """How a trial is run. ``number``: seeds its data; ``sets``: with how many sets of scales and zero
    points kernels run, where they are arguments; ``scratch``: a folder of the worker; ``row``: what is
    told."""

    way: str
    number: int = 0
    sets: int = 1
    scratch: str = ""
    target: str = "sm_90"
    row: Row = field(default_factory=dict)

    @property
    def device(self) -> str:
        """Where emitted kernels run; a GPU's name is told."""
        if self.way == "device":
            import torch

            self.row["device"] = torch.cuda.get_device_name()
        return "cuda" if self.way == "device" else "cpu"

    def interpret(self) -> None:
        """Run in the interpreter of the IR instead."""
        self.way = self.row["way"] = "numpy"


class Trial(ABC):
    """A trial; ``str`` of it is its line. ``refusals``: errors that say that there is no such kernel."""

    refusals: tuple[type[Exception], ...] = (ScheduleError, Unsupported)

    @property
    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What the trial is about, to count by."""

    @abstractmethod
    def run(self, run: TrialRun) -> str:
        """What is wrong; empty if nothing is."""

    @abstractmethod
    def simpler(self) -> Iterator[Trial]:
        """Legal trials that differ from this one in one respect."""

    @property
    def switches(self) -> tuple[tuple[str, bool], ...]:
        """The passes that run or do not."""
        return ()

    def program(self) -> str:
        """The trial as a program; empty if its line says it all."""
        return ""


@dataclass(frozen=True, slots=True)
class TrialKind:
    """A kind of trials. ``worker``: the function that runs one, ``module:name``; ``drawn``: the trial of a
    seed, a number and a chip; ``read``: that of a line; ``corpus``: whether trials that have failed before
    run first."""

    name: str
    drawn: Callable[[int | str, int, str], Trial]
    read: Callable[[str], Trial]
    worker: str = "transconv.verify.fuzz.main_loop:work"
    corpus: bool = False


T = TypeVar("T")
BATCH = 16  # trials asked about at once
SPATIAL = ("i", "o", "k", "stride", "dilation", "pad_lo")


def shrink(trial: Trial, fails: Callable[[Sequence[Any]], int | None], most: int = 600) -> tuple[Any, int]:
    """The simplest trial found with at most ``most`` questions, and how many were asked. ``fails``: the
    first of some trials that fails as before."""
    asked, seen = 0, {str(trial)}
    while True:
        found = False
        queue: list[Trial] = []
        ways = trial.simpler()
        while not found and asked < most:
            queue = []
            for way in ways:
                if str(way) not in seen:
                    seen.add(str(way))
                    queue.append(way)
                if len(queue) == BATCH:
                    break
            if not queue:
                break
            asked += len(queue)
            first = fails(queue)
            if first is not None:
                # The trials after it have no answer yet, and may be proposed again.
                trial, found = queue[first], True
                seen.difference_update(map(str, queue[first + 1 :]))
        if not found:
            return trial, asked


def simpler_schedules(schedule: Schedule) -> Iterator[Schedule]:
    """Simpler ones, legal or not."""
    default = Schedule()
    if schedule.unit == "mma":  # takes whole blocks; element by element the problem can get smaller
        yield replace(schedule, unit="fma")
    for f in fields(Schedule):
        value = getattr(schedule, f.name)
        if f.name not in ("blocks", "unit") and value != getattr(default, f.name):
            yield _with(schedule, f.name, getattr(default, f.name))
            if isinstance(value, int) and value > 2:
                yield _with(schedule, f.name, value // 2)
    for at, block in enumerate(schedule.blocks):
        others = schedule.blocks[:at], schedule.blocks[at + 1 :]
        yield replace(schedule, blocks=others[0] + others[1])
        if block.extent > 1:
            smaller = Block(block.axes, block.extent // 2)
            yield replace(schedule, blocks=(*others[0], smaller, *others[1]))
        for axis in block.axes if len(block.axes) > 1 else ():
            fewer = Block(tuple(a for a in block.axes if a != axis), block.extent)
            yield replace(schedule, blocks=(*others[0], fewer, *others[1]))


def _with(made: T, name: str, value: Any) -> T:
    """The same but for one field, whose name is a value here."""
    changes: dict[str, Any] = {name: value}
    return replace(made, **changes)  # type: ignore[type-var]


def simpler_problems(p: ConvProblem) -> Iterator[ConvProblem]:
    """Problems that differ from this one in one respect."""
    yield from _types_and_layouts(p)
    yield from _sizes(p)


def _types_and_layouts(p: ConvProblem) -> Iterator[ConvProblem]:
    for name in ("f32", "f16"):
        if {t.name for t in p.dtypes} not in ({"f32"}, {name}):
            yield p.with_dtype(name)
    if p.math != "tf32":
        yield replace(p, math="tf32")
    yield p.with_layout("nchw")
    yield p.with_layout("nhwc")
    for name, spec in p.specs.items():
        dense = Layout.dense(spec.dtype, p.shapes[name])
        if spec.layout is not dense:
            yield _with(p, name, replace(spec, layout=dense))


def _sizes(p: ConvProblem) -> Iterator[ConvProblem]:
    """Problems with one size smaller, layouts alike."""
    for x in range(p.ndims) if p.ndims > 1 else ():
        yield from resized(p, dropped=x)
    for mb in less(p.mb):
        yield from resized(p, mb=mb)
    if p.g > 1:
        yield from resized(p, g=1, ic=p.icg, oc=p.ocg)
    for g in less(p.g):
        yield from resized(p, g=g, ic=g * p.icg, oc=g * p.ocg)
    for c in less(p.icg):
        yield from resized(p, ic=p.g * c)
    for c in less(p.ocg):
        yield from resized(p, oc=p.g * c)
    for x in range(p.ndims):
        yield from _along(p, x)


def _along(p: ConvProblem, x: int) -> Iterator[ConvProblem]:
    """One size of one spatial axis smaller; the image shrinks with what reaches over it."""

    def made(**values: int) -> Iterator[ConvProblem]:
        sizes: dict[str, Any] = {}
        for name, value in values.items():
            old = getattr(p, name)
            sizes[name] = (*old[:x], max(int(name != "pad_lo"), value), *old[x + 1 :])
        yield from resized(p, **sizes)

    for o in less(p.o[x]):
        yield from made(o=o, i=p.i[x] - (p.o[x] - o) * p.stride[x])
    for k in less(p.k[x]):
        yield from made(k=k, i=p.i[x] - (p.k[x] - k) * p.dilation[x])
        yield from made(k=k)
    for i in less(p.i[x]):
        yield from made(i=i)
    for stride in less(p.stride[x]):
        yield from made(stride=stride)
    for dilation in less(p.dilation[x]):
        yield from made(dilation=dilation)
    if p.pad_lo[x]:
        yield from made(pad_lo=0)
        yield from made(pad_lo=p.pad_lo[x] - 1)


def less(size: int) -> list[int]:
    """Sizes to try in the place of one."""
    return [n for n in dict.fromkeys((1, size // 2, size - 1)) if 0 < n < size]


def resized(p: ConvProblem, dropped: int | None = None, **sizes: Any) -> Iterator[ConvProblem]:
    """The problem with other sizes, or without a spatial axis; nothing if there is none such."""
    spatial: dict[str, tuple[int, ...]] = {n: sizes.get(n, getattr(p, n)) for n in SPATIAL}
    if dropped is not None:
        spatial = {name: v[:dropped] + v[dropped + 1 :] for name, v in spatial.items()}
    whole = {name: sizes.get(name, getattr(p, name)) for name in ("mb", "ic", "oc", "g")}
    try:
        made = ConvProblem.make(
            whole["mb"],
            whole["ic"],
            whole["oc"],
            spatial["i"],
            spatial["k"],
            spatial["stride"],
            spatial["dilation"],
            spatial["pad_lo"],
            o=spatial["o"],
            g=whole["g"],
            dtype=p.dtypes,
            math=p.math,
        )
        yield made.with_layout(
            [alike(p.specs[name].layout, shape, dropped) for name, shape in made.shapes.items()]
        )
    except TransconvError:
        return


def alike(layout: Layout, shape: Sequence[int], dropped: int | None = None) -> Layout:
    """A layout for another shape: the same order of dimensions, the same gaps between them, the
    same repeats, the same offset. A blocked one stays blocked if its tag says it all."""
    letters = "abcdefgh"
    if layout.strides() is None:
        tag = layout.tag(letters[: layout.ndims])
        if tag is None or dropped is not None:
            return Layout.dense(layout.dtype, shape)
        return Layout.parse(tag, layout.dtype, shape, letters[: layout.ndims])
    gone = None if dropped is None else dropped + 2
    made: list[LayoutBlock] = []
    step, before = 1, 1  # what the next stride is without a gap, there and here
    for b in sorted(layout.blocks, key=lambda b: b.stride):
        gap = b.stride - before if b.stride else 0
        before = b.stride * b.size if b.stride else before
        if b.dim == gone:
            continue
        dim = b.dim - (gone is not None and b.dim > gone)
        stride = step + max(0, gap) if b.stride else 0
        made.insert(0, LayoutBlock(dim, shape[dim], stride))
        step = stride * shape[dim] if stride else step
    return Layout(layout.dtype, len(shape), tuple(made), layout.offset)
