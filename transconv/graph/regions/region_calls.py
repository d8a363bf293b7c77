"""The kernels of a compiled region, called with its sizes and inputs by one function of Python, written
out for its kernels, in which every tensor is a local variable.

    def run(given):
        a0, a1 = given
        given.clear()
        b0 = empty(*s0)        memory of a result
        w0 = empty(*s1)        a workspace, for all launches that need one
        k0(a0, a1, b0, w0)     a launch
        del a0                 nothing needs it any more
        return [b0, a1]

A dictionary of tensors, and lists made for each launch, take the host as long as the launches. So does
memory for each kernel's workspaces: launches follow each other, and share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from transconv.calls import stats
from transconv.calls.guard import at_multiple, current_device
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.compute import Alone, Workload, with_reference
from transconv.conv import Surrounded
from transconv.functional.calls.compiled_launch import (
    HELD,
    TensorMemory,
    aligned,
    deterministic,
    launch,
    program,
    question,
    refused,
)
from transconv.functional.calls.torch_operators import as_wanted
from transconv.graph.fusion.groups import Slices, slices
from transconv.graph.fusion.index_ir import Piece, RegionInput
from transconv.graph.lowerings.table import is_bug
from transconv.graph.regions.region_kernel import (
    RefusedKernel,
    RegionKernel,
    RegionPlan,
    SizedTensor,
    compile_mode,
    refusal,
)
from transconv.graph.sizes import Length, SymbolicSize
from transconv.graph.verification.eager_check import RegionWatch, WatchedCall
from transconv.ir import value_at
from transconv.runtime import (
    NEVER,
    SIZES,
    Launch,
    PlanRequest,
    Spaces,
    Waiting,
    beside_samples,
    by_samples,
    on_device,
    rehearsal_thread,
    torch_internals,
)
from transconv.support import Unsupported, factory
from transconv.torch_ops.conversion import inference
from transconv.verify.invariance.proof import refuse_grouping

Tensor = torch.Tensor
NONE: Mapping[Piece, Slices] = MappingProxyType({})
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Of another tensor's memory: sizes, strides, and how many elements it begins behind it."""
Run = Callable[[list[Tensor]], list[Tensor]]
SHARED = 2**22  # bytes of the largest workspace that lies in memory which others have, too


class LaunchLine(NamedTuple):
    """A launch: the kernel, what starts it on tensors, what it stores, which results replace operands (see
    regions/region_kernels.py), what nothing needs behind it, and the workspaces that it takes behind its
    tensors."""

    kernel: RegionKernel
    start: Callable[..., None]
    memory: Sequence[TensorMemory]
    over: Mapping[int, int]
    done: Sequence[Piece]
    spaces: Spaces = ()


class RegionWriter:
    """Writes the function of the tensors of ``inputs``, in a list that it empties, that returns those that
    are ``handed`` out. ``empty`` makes memory of a shape, strides and a type; ``cut``: what has a slice of
    a tensor with others; ``known``: the values of names that are no tensors."""

    def __init__(
        self,
        inputs: Sequence[Piece],
        lines: Sequence[LaunchLine],
        handed: Sequence[tuple[Piece, Place | None]],
        empty: Callable[..., Tensor],
        cut: Mapping[Piece, Slices] = NONE,
    ) -> None:
        self.inputs, self.lines, self.handed = inputs, lines, handed
        self.known: dict[str, Any] = {"empty": empty}
        self.cut = cut
        self.names: dict[Piece, str] = {}
        self.constants: dict[Any, str] = {}
        self.spaces = SharedWorkspaces(line.spaces for line in lines)

    def run(self) -> Run:
        body = "\n".join(f"        {line}" for line in self.body())  # has all names entered
        text = f"def made({', '.join(self.known)}):\n    def run(given):\n{body}\n    return run"
        made: Run = factory(text)(*self.known.values())
        return made

    def body(self) -> Iterator[str]:
        self.names = {p: f"a{i}" for i, p in enumerate(self.inputs)}
        if self.names:
            yield f"{''.join(f'{n}, ' for n in self.names.values())}= given"
        yield "given.clear()"
        for number, line in enumerate(self.lines):
            yield from self.launched(number, line)
        yield f"return [{', '.join(self.result(*h) for h in self.handed)}]"

    def launched(self, number: int, line: LaunchLine) -> Iterator[str]:
        names, kernel = self.names, line.kernel
        for into, place in line.over.items():
            names[kernel.stored[into]] = names[kernel.given[place]]
        for p, m in zip(kernel.stored, line.memory, strict=True):
            if p not in names and p in self.cut:
                yield from self.sliced(self.cut[p])
            elif p not in names:  # of others a part is there
                yield self.allocated(p, m)
        spaces, own = self.spaces.of(number)
        for name, ((span,), dtype) in own.items():
            yield f"{name} = empty({', '.join(map(self.constant, ((span,), (1,), dtype)))})"
        self.known[f"k{number}"] = line.start
        yield f"k{number}({', '.join((*[names[p] for p in (*kernel.given, *kernel.stored)], *spaces))})"
        gone = {names[p] for p in line.done} - {
            names[kernel.stored[into]] for into in line.over if kernel.stored[into] not in line.done
        }
        gone |= self.spaces.ended(number)
        if gone:
            yield f"del {', '.join(sorted(gone))}"

    def allocated(self, piece: Piece, memory: TensorMemory) -> str:
        self.names[piece] = name = f"b{len(self.names)}"
        return f"{name} = empty({', '.join(map(self.constant, memory))})"

    def sliced(self, cut: Slices) -> Iterator[str]:
        """Memory that several values have together, and the view that each of them is."""
        yield self.allocated(cut.whole, cut.memory)
        for piece, lies in cut.parts:
            self.names[piece] = name = f"b{len(self.names)}"
            place = ", ".join(map(self.constant, lies))
            yield f"{name} = {self.names[cut.whole]}.as_strided({place})"

    def result(self, piece: Piece, view: Place | None) -> str:
        name = self.names[piece]
        if view is None:
            return name
        shape, strides, behind = map(self.constant, view)
        return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {behind})"

    def constant(self, value: Any) -> str:
        """The name of a value."""
        if value not in self.constants:
            self.constants[value] = name = f"c{len(self.constants)}"
            self.known[name] = value
        return self.constants[value]


class SharedWorkspaces:
    """The memory of workspaces: the first one of a type that each launch needs is the same for all, and so
    is the second one. Larger ones than ``SHARED`` are alone."""

    def __init__(self, spaces: Iterable[Spaces]) -> None:
        self.launches = [self.named(number, each) for number, each in enumerate(spaces)]
        self.span: dict[str, int] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        for number, named in enumerate(self.launches):
            for name, ((span,), _) in named.items():
                self.span[name] = max(span, self.span.get(name, 0))
                self.first.setdefault(name, number)
                self.last[name] = number

    @staticmethod
    def named(number: int, spaces: Spaces) -> dict[str, tuple[tuple[int], torch.dtype]]:
        """The workspaces of a launch by the name of their memory."""
        found: dict[str, tuple[tuple[int], torch.dtype]] = {}
        for (span,), dtype in spaces:
            size, kind = span * dtype.itemsize, str(dtype).rpartition(".")[2]
            at = sum(d is dtype for _, d in found.values())
            found[f"w{at}_{kind}" + f"_{number}" * (size > SHARED)] = (span,), dtype
        return found

    def of(self, number: int) -> tuple[list[str], dict[str, tuple[tuple[int], torch.dtype]]]:
        """The names of what a launch takes, and which of these have to be allocated, as large as any
        launch needs them."""
        named = self.launches[number]
        return [*named], {
            name: ((self.span[name],), dtype)
            for name, (_, dtype) in named.items()
            if self.first[name] == number
        }

    def ended(self, number: int) -> set[str]:
        """What no launch behind this one needs."""
        return {name for name in self.launches[number] if self.last[name] == number}


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: whether each is of the type, shape, strides, device and dispatch keys
    of one of these. torch compares all of them in one call; where it has none that does, never."""
    try:
        found: Callable[..., bool] = torch_internals.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        return found if tensors else lambda *_: True
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return never


def never(*_: Tensor) -> bool:
    """No tensors are alike."""
    return False


NOT_OVER: Mapping[int, int] = MappingProxyType({})
NOTHING = nullcontext()
When = tuple[object, object, bool, tuple[int, ...]]
"""What launches were asked for: the last change of a setting, the function that finds them, whether the
same bits are wanted, and the places of inputs that are not aligned."""


class Start(NamedTuple):
    """A kernel for the sizes of a call: what is asked for, the values of its names, what is stored."""

    asked: str | Surrounded
    sizes: dict[str, int] | None
    memory: tuple[TensorMemory, ...]


@dataclass(slots=True)
class BoundRegion:
    """A region for the sizes of a call: its inputs, kernels, and the views that are handed out; ``lying``:
    the strides of its results, None for an input; ``cut``: what has memory with others. ``ready``: what
    the kernels that made the last results were asked for, and what launches them, which threads see
    together; ``alike``: whether inputs are as those of a call before."""

    inputs: tuple[TensorMemory, ...]
    starts: list[Start]
    views: list[Place | None]
    lying: list[tuple[int, ...] | None]
    cut: Mapping[Piece, Slices]
    ready: tuple[When | None, Run] = (None, list)
    alike: Callable[..., bool] = never


@dataclass(slots=True)
class RegionLaunches(RegionPlan):
    """A region of ours: called with the sizes of a call, by name, and its inputs, it returns its
    outputs."""

    known: dict[tuple[int, ...], BoundRegion] = field(default_factory=dict)  # by sizes
    numbered: set[RegionKernel] = field(default_factory=set)  # that have no schedule for any sizes
    batch: tuple[str, ...] = ()  # the numbers of samples that no bits may depend on (batch_invariance.py)
    pieces: Callable[[Mapping[str, int], list[Any]], Sequence[Tensor]] | None = None  # within a bound

    @classmethod
    def of(cls, made: RegionPlan) -> RegionLaunches:
        """Of the kernels of a region."""
        return cls(*(getattr(made, f.name) for f in fields(RegionPlan)))

    def bound(self, sizes: Mapping[str, int]) -> BoundRegion:
        """The region for some sizes."""
        key = tuple(sizes.values())
        if (found := self.known.get(key)) is None:
            if len(self.known) >= SIZES:
                self.known.clear()

            def value(n: Length) -> int:
                return value_at(n.expr, sizes) if isinstance(n, SymbolicSize) else n

            inputs = tuple(
                [SizedTensor(p.shape, p.strides or (), p.dtype).at(value) for _, _, p in self.inputs]
            )
            views = [
                None
                if h.view is None
                else (tuple(map(value, h.view[0])), tuple(map(value, h.view[1])), value(h.view[2]))
                for h in self.handed
            ]
            lying = [
                view[1]
                if view is not None
                else None
                if isinstance(h.piece, RegionInput)
                else tuple(map(value, self.plan.strides(h.piece)))
                for h, view in zip(self.handed, views, strict=True)
            ]
            starts = [_start(k, sizes, value) for k in self.kernels]
            found = self.known[key] = BoundRegion(inputs, starts, views, lying, slices(self.plan, value))
        return found

    def questions(self, sizes: Mapping[str, int]) -> list[PlanRequest]:
        """What its kernels are asked for, for aligned tensors."""
        pairs = zip(self.kernels, self.bound(sizes).starts, strict=True)
        if self.batch:
            return [question(self.of_batch(k, start), self.device, same=True) for k, start in pairs]
        return [question(start.asked, self.device) for _, start in pairs]

    def of_batch(self, kernel: RegionKernel, start: Start) -> str | Workload:
        """What a kernel is asked for that has the number of samples as a name, if its tensors have any.
        Raises Unsupported where it cannot have it."""
        if kernel.sized is None:
            return start.asked
        if start.sizes is None or not isinstance(start.asked, str):
            why = kernel.sized.refused or "its sizes meet no requirements"
            raise Unsupported("invariant:sizes", f"{kernel.group.name}: {why}")
        compute, own = program(start.asked).compute, kernel.sized.made_of(self.batch)
        if len(own) == 1:  # the plan for about so many samples
            compute = with_reference(compute, own[0], start.sizes[own[0]])
        return Alone(compute)

    def __call__(self, sizes: Mapping[str, int], given: list[Any]) -> Sequence[Tensor]:
        """``given`` is emptied before the first kernel if all of them ran before: each tensor that the
        caller does not hold is then free behind its last reader. Otherwise the inputs are there when this
        raises: Refused where a kernel cannot be had, Unsupported for tensors that no kernel takes."""
        return self.launched(sizes, given) if self.pieces is None else self.pieces(sizes, given)

    def launched(self, sizes: Mapping[str, int], given: list[Any]) -> Sequence[Tensor]:
        """A call of its kernels as they are."""
        bound = self.bound(sizes)
        tensors = self.placed([given[place] for place, _, _ in self.inputs])
        if not bound.alike(*tensors):
            self.arrange(bound, tensors)
        when = (_since[0], launch, deterministic(), () if aligned(tensors) else _loose(tensors))
        with self.here():
            known, run = bound.ready
            if known == when:
                given.clear()
                made = run(tensors)
            else:
                same = bool(self.batch or self.pieces)
                made = self.first(bound, sizes, tensors, when, compile_mode(same))
        stats.add(True, "graph", len(self.kernels))
        return made

    def laid(self, sizes: Mapping[str, int], made: Sequence[Any]) -> list[Any]:
        """Results of torch's operators, lying as those of the kernels."""
        return [
            t if strides is None else _laid(t, strides)
            for t, strides in zip(made, self.bound(sizes).lying, strict=True)
        ]

    def placed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Inputs as they are; in invariant mode at multiples of 16 bytes, whatever part of a batch they
        are."""
        return tensors if not self.batch or aligned(tensors) else [*map(at_multiple, tensors)]

    def arrange(self, bound: BoundRegion, tensors: list[Tensor]) -> None:
        """Have inputs lie as kernels take them; where they do, the next call asks for nothing else."""
        copied = False
        for i, (_, node, _) in enumerate(self.inputs):
            t = tensors[i]
            tensors[i] = as_wanted(node.name, t, bound.inputs[i])
            copied |= tensors[i] is not t
        if not copied:
            bound.alike = alike(tensors)

    def first(
        self,
        bound: BoundRegion,
        sizes: Mapping[str, int],
        tensors: list[Tensor],
        when: When,
        mode: str,
        watch: WatchedCall | None = None,
    ) -> list[Tensor]:
        """A call in which results of kernels are looked at; the later ones start them without. ``watch``:
        compares them with torch's. Raises Waiting while processes compile some, as the mode has it."""
        if why := refused(tensors, [True] * len(tensors), HELD) if tensors else "":
            raise Unsupported(why)
        fresh = self.asked(bound, sizes, {self.inputs[i][2] for i in when[-1]}, mode)
        watched = [self.watched(kernel, start) for kernel, start in zip(self.kernels, fresh, strict=True)]
        looked = RegionWatch(watch, self.region, self.kernels) if watch is not None else None
        begins = (
            [
                self.watched(kernel, start, looked)
                for kernel, start in zip(self.kernels, fresh, strict=True)
            ]
            if looked is not None
            else watched
        )
        made = self.written(bound, [(by, ()) for by in begins], [NOT_OVER] * len(fresh))([*tensors])
        if looked is not None:
            looked.results(self.kernels, made)
        over = [
            over if over and start.is_known() else NOT_OVER
            for over, start in zip(self.over, fresh, strict=True)
        ]
        begun = [
            (begin or by, spaces)
            for (begin, spaces), by in zip([start.begun() for start in fresh], watched, strict=True)
        ]
        bound.ready = when, self.written(bound, begun, over)
        return made

    def asked(
        self, bound: BoundRegion, sizes: Mapping[str, int], loose: set[RegionInput], mode: str
    ) -> list[Launch]:
        """The launches of the kernels, all of which are asked for before one is waited for. ``loose``:
        inputs that are not aligned."""
        found, overs = list[Launch](), list[Callable[[], bool]]()
        for kernel, start in zip(self.kernels, bound.starts, strict=True):
            try:
                found.append(self.started(start, kernel, sizes, not loose & {*kernel.given}, mode))
            except Waiting as waits:
                overs.append(waits.over)
            rehearsal_thread.thread.rest()
        if overs:
            raise Waiting("processes compile its kernels", lambda: all(over() for over in overs))
        return found

    def written(
        self,
        bound: BoundRegion,
        starts: Sequence[tuple[Callable[..., None], Spaces]],
        over: Sequence[Mapping[int, int]],
    ) -> Run:
        """The function that launches the kernels in their order."""
        lines = [
            LaunchLine(kernel, by, start.memory, own, done, spaces)
            for kernel, (by, spaces), start, own, done in zip(
                self.kernels, starts, bound.starts, over, self.last, strict=True
            )
        ]
        handed = [(h.piece, view) for h, view in zip(self.handed, bound.views, strict=True)]
        empty = torch_internals.quickest() if self.device.type == "cuda" else self.empty
        return RegionWriter([p for _, _, p in self.inputs], lines, handed, empty, bound.cut).run()

    def compared(self, sizes: Mapping[str, int], given: list[Any], watch: WatchedCall) -> Sequence[Tensor]:
        """As a call, whose results are compared. Raises Refused also where one is not torch's."""
        state = watch.values.state()
        try:
            made = self.looked_at(sizes, given, compile_mode(bool(self.batch)), watch)
        except (RefusedKernel, Unsupported):
            watch.values.restore(state)
            raise
        stats.add(True, "graph", len(self.kernels))
        return made

    def looked_at(
        self, sizes: Mapping[str, int], given: list[Any], mode: str, watch: WatchedCall | None
    ) -> list[Tensor]:
        """The first call of these sizes and inputs, which is not counted."""
        bound = self.bound(sizes)
        tensors = self.placed([given[place] for place, _, _ in self.inputs])
        self.arrange(bound, tensors)
        when = (_since[0], launch, deterministic(), _loose(tensors))
        with self.here():
            return self.first(bound, sizes, tensors, when, mode, watch)

    def watched(
        self, kernel: RegionKernel, by: Launch, looked: RegionWatch | None = None
    ) -> Callable[..., None]:
        """What starts a kernel, and looks at results that are new. Raises Refused."""

        def start(*tensors: Tensor) -> None:
            judge = (
                by_samples if looked is None else beside_samples(partial(looked.agrees, kernel, tensors))
            )
            try:
                by.start_prepacked(tensors, inference, judge)
                if looked is not None:
                    looked.look(kernel, tensors)
                rehearsal_thread.thread.rest()
            except Exception as error:
                if isinstance(error, Unsupported) or is_bug(error):
                    also = looked.blamed if looked is not None else frozenset()
                    raise refusal(kernel.group, self.plan, self.region, error, also) from error
                raise

        return start

    def here(self) -> AbstractContextManager[object]:
        """The device as the current one."""
        index = self.device.index
        return NOTHING if index is None or index == current_device() else on_device(self.device)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory on the device."""
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def started(
        self, start: Start, kernel: RegionKernel, sizes: Mapping[str, int], whole: bool, mode: str
    ) -> Launch:
        """The launch of a kernel: where none has the names as arguments, one for these sizes alone.
        ``whole``: its tensors are aligned. Raises Refused, and Unsupported for a while, or where nothing
        is to be compiled."""
        try:
            if self.batch:
                made = launch(self.of_batch(kernel, start), self.device, whole, mode, same=True)
                if start.sizes is None or kernel.sized is None:
                    return made
                refuse_grouping(made.plan, kernel.sized.made_of(self.batch))
                return made.at(start.sizes)
            if start.sizes is None or kernel.sized is None:
                return launch(start.asked, self.device, whole, mode)
            if kernel not in self.numbered:
                try:
                    return launch(start.asked, self.device, whole, mode).at(start.sizes)
                except Unsupported as error:
                    if error.reason != "schedule:refused":
                        raise
                    self.numbered.add(kernel)
            return launch(kernel.sized.at(sizes), self.device, whole, mode)
        except Exception as error:
            passing = isinstance(error, Unsupported) and error.reason in (*PASSING, NEVER)
            if passing or (not isinstance(error, Unsupported) and not is_bug(error)):
                raise
            raise refusal(kernel.group, self.plan, self.region, error) from error


def _laid(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A tensor with these strides; those of dims of one element mean nothing."""
    if t.stride() == strides:
        return t
    if all(n == 1 or own == wanted for n, own, wanted in zip(t.shape, t.stride(), strides, strict=True)):
        return t.as_strided(t.shape, strides)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def _loose(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The places of tensors that are not aligned."""
    return tuple([i for i, t in enumerate(tensors) if not aligned([t])])


_since = [object()]  # the last change of a setting


def _changed() -> None:
    _since[0] = object()


settings.on_change(_changed)


def _start(kernel: RegionKernel, sizes: Mapping[str, int], value: Callable[[Length], int]) -> Start:
    """A kernel for some sizes: with names if they meet its requirements, else with numbers."""
    memory = tuple([m.at(value) for m in kernel.memory])
    sized = kernel.sized
    if sized is None:
        return Start(kernel.asked, None, memory)
    if not sized.refused:
        own, named = sized.names(sizes), program(sized.named).compute.named
        if named is not None and not named.why_not(own):
            return Start(sized.named, own, memory)
    return Start(sized.at(sizes), None, memory)
