"""The launch of a workload on a device: its plan, the check of its first result, and what starts it then.
Texts, regions of graphs, quantised calls and kernels written in Python are launched by it.

    launch = Launch.requested(PlanRequest(workload, target), device, "now")
    launch.start(tensors)              the first one is checked
    launch.at({"N": 40}).start(...)    where sizes are arguments of its kernels

Tensors, and floats that kernels take themselves, come in the order of the workload's reads and then of its
stores. They may have any shape whose memory is what the workload says: sizes are not looked at again.

A plan is split in two, the copies of one tensor, which depend on nothing else, and the rest, which takes
their results as additional tensors: one that does not change between calls is copied only once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from transconv.backend_triton import torch_internals, torch_module
from transconv.compute import Alone
from transconv.ir import Tensor
from transconv.runtime import first_run_check
from transconv.runtime.compilation.async_compile import ready
from transconv.runtime.compilation.plan_request import PlanRequest
from transconv.runtime.first_run_check import Judge, by_samples
from transconv.runtime.operands import GPUS, Wanted, check_indices, is_capturing, torch_type
from transconv.runtime.plans import Plan, PlanStep
from transconv.support import ProblemError, ScheduleError, StageError, TensorError, Unsupported, knobs

if TYPE_CHECKING:
    import torch


log = logging.getLogger("transconv.functional")

Begin = Callable[..., None]
"""What starts kernels on tensors without looking at them."""
Spaces = tuple[tuple[tuple[int], Any], ...]
"""The shape and torch's type of each workspace."""
SIZES = 256
"""How many sizes of one launch are kept."""


class PrepackStore(Protocol):
    """The copies of tensors that do not change, in the order that kernels read."""

    def find(self, halves: WeightPrepack[Any], weight: Any, /) -> Sequence[Any] | None:
        """The copies that ``halves.rest`` takes; None where they have to be made anew."""

    def lay_out(self, halves: WeightPrepack[Any], weight: Any, /) -> None:
        """Make the copies of a tensor, if it is one that does not change."""


class Launch:
    """A plan of a workload on one kind of device, and what starts it without asking once it has run there.
    ``aligned``: all its tensors begin at multiples of 16 bytes; ``names``: their order."""

    __slots__ = (
        "agreed",
        "aligned",
        "begin",
        "computes",
        "current",
        "device",
        "divided",
        "indexed",
        "names",
        "of",
        "plan",
        "request",
        "sized",
        "sizes",
        "starts",
    )

    def __init__(self, plan: Plan, aligned: bool, names: Sequence[str] = ()) -> None:
        workload = plan.workload
        stored = {*workload.results}
        self.names = tuple(names) or tuple(
            sorted([t.name for t in workload.tensors], key=stored.__contains__)
        )
        self.aligned = aligned
        self.computes = (workload.compute,) if isinstance(workload, Alone) else workload.computations
        self.indexed = any(c.names.indices for c in self.computes)
        self.plan = plan
        self.request: PlanRequest | None = None  # what was asked for, if a request was
        self.of = self  # whose plan it is
        self.agreed = FirstSizes()  # for which front ends compared results with another implementation's
        self.sizes: Mapping[str, int] | None = None
        self.sized: dict[tuple[int, ...], Launch] = {}
        self.starts: dict[tuple[Any, ...], Any] = {}  # from sizes to what starts them, of the plan
        self.current = torch_internals.current_device()
        self.begin: Begin | None = None
        self.device = -1
        self.divided: DividedPlan | None = None

    @classmethod
    def requested(
        cls, request: PlanRequest, device: torch.device, mode: str, names: Sequence[str] = ()
    ) -> Launch:
        """The launch of what is asked for. ``request``, ``mode``: as for ``ready``. Raises Unsupported
        where there is no kernel, or none yet as the mode has it, with the reason."""
        if is_capturing(device):
            raise Unsupported(
                "capture:cold",
                "a kernel cannot be built while a CUDA graph is captured; call once before capturing",
            )
        workload, same = request.workload, request.deterministic
        for t in (t for t in workload.tensors if t.layout.strides() is None or t.layout.offset):
            raise Unsupported("layout:blocked", f"{t.name} has the layout {t.layout}; expected strides")
        if same and any(c.added for c in workload.computations):
            raise Unsupported(
                "deterministic:add",
                f"{workload.title} adds in place, in no order, and the same bits were asked for",
            )
        try:
            plan = ready(workload, request.target, None, same, Plan, request.aligned, mode)
        except (ScheduleError, ProblemError) as error:
            raise Unsupported("schedule:refused", str(error)) from error
        except StageError as error:  # a program in training must not stop for a bug of ours
            log.warning("no kernel for %s: %s", workload.title, error, exc_info=True)
            raise Unsupported("error:StageError", str(error)) from error
        made = cls(plan, request.aligned, names)
        made.request = request
        return made

    def at(self, sizes: Mapping[str, int]) -> Launch:
        """The same plan for given sizes, where they are arguments of its kernels. Raises TensorError for
        sizes that do not meet the requirements."""
        key = tuple(sizes.values())
        if (found := self.sized.get(key)) is None:
            if len(self.sized) >= SIZES:
                self.sized.clear()
            found = self.sized[key] = object.__new__(Launch)
            for name in Launch.__slots__:
                setattr(found, name, getattr(self, name))
            found.computes = tuple([c.at(**sizes) for c in self.computes]) if self.indexed else ()
            found.plan, found.sizes, found.begin, found.divided = self.plan.at(sizes), sizes, None, None
        return found

    def start(self, tensors: Sequence[Any], judge: Judge = by_samples) -> None:
        """Launch on the current stream of the tensors' device. ``judge`` looks at the first result of
        kernels that are new to a machine, in compiled graphs too; while a CUDA graph is captured nothing
        can be looked at, and a later launch is judged. Raises Unsupported("miscompiled") where no kernel
        is right; IndexError, in torch's words, for an index that leaves its tensor: on a CPU, and where
        TRANSCONV_VERIFY=1 asks for it."""
        if self.begin is not None and self.current() == self.device:
            self.begin(*tensors)
            return
        device = tensors[0].device
        if self.sizes is not None and device.type == "cuda" and (begin := self._begun_before(device)):
            begin(*tensors)
            return
        views = self.views(tensors)
        with on_device(device):
            if self.indexed and (device.type == "cpu" or knobs.verify()):
                try:
                    check_indices(self.computes, views)
                except TensorError as error:
                    raise IndexError(str(error)) from None
            self._run(views, judge)
            if (
                device.type == "cuda"
                and not (self.indexed and knobs.verify())
                and (first_run_check.is_trusted(self.plan, self.aligned))
            ):
                self.begin, self.device = self._starter(device.index), device.index

    def guarded(
        self, device: int, names: tuple[str, ...], spans: Mapping[str, int]
    ) -> Callable[..., bool] | None:
        """``Plan.guarded_at``, written once for all sizes; ``spans``: the bytes of each tensor."""
        at = self.starts.get((device, names)) or self.plan.guarded_at(device, names, [*spans])
        self.starts[device, names] = at
        return at and at(self.plan.in_order(self.sizes), (*spans.values(),))

    def _starter(self, device: int, spaces: bool = False) -> Begin | None:
        """``Plan.starter``, written once for all sizes."""
        if self.plan.required is not None and not self.sizes:
            return None
        at = self.starts.get((device, spaces)) or self.plan.starter_at(
            device, self.aligned, self.names, spaces
        )
        self.starts[device, spaces] = at
        return at and at(self.plan.in_order(self.sizes))

    def _begun_before(self, device: torch.device) -> Begin | None:
        """What starts kernels that take these sizes as arguments, if they run on the device already and
        were found to be right: nothing is left to look at then."""
        if (
            self.current() != device.index
            or knobs.verify()
            or not first_run_check.is_trusted(self.plan, self.aligned)
        ):
            return None
        self.begin, self.device = self._starter(device.index), device.index
        return self.begin

    def views(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """The tensors by the plan's names, as it takes them."""
        return {
            w.name: t if w.number else t.detach().as_strided(w.shape, w.strides, t.storage_offset())
            for w, t in zip(self.operands(), tensors, strict=True)
        }

    def operands(self) -> list[Wanted]:
        """What each of its tensors has to be, in their order."""
        each = {w.name: w for w in self.plan.operands()}
        return [each[name] for name in self.names]

    def _run(self, views: dict[str, Any], judge: Judge) -> None:
        """Launch the plan, and keep the one that made the result."""
        found = first_run_check.run(self.plan, views, judge)
        if found is not self.plan:
            self.starts = self.of.starts = {}
        if found is not self.plan and self.sizes is not None:  # made anew, for all sizes
            self.of.plan, found = found, found.at(self.sizes)
            self.of.sized = {key: at for key, at in self.of.sized.items() if at is self}
        self.plan = found

    def is_known(self) -> bool:
        """Whether it is one kernel, whose result is not looked at any more."""
        return len(self.plan.steps) == 1 and first_run_check.is_trusted(self.plan, self.aligned)

    # -- one who starts many -----------------------------------------------------------------------

    def begun(self) -> tuple[Begin | None, Spaces]:
        """What starts it on its device, which has to be the current one, if nothing is left to look at,
        neither copies nor results: a function of its tensors and, behind them, of the workspaces that are
        named, which one who starts many allocates for several together."""
        divided, plan = self.divided, self.plan
        if divided is None or divided.plan is not plan or divided.copied or self.begin is None:
            return None, ()
        cleared = [s.zero.name for s in plan.steps if s.zero]
        if not plan.workspaces or plan.workspaces.keys() & cleared:  # no more is cleared
            return self.begin, ()
        begin = self._starter(self.device, spaces=True)
        return (self.begin, ()) if begin is None else (begin, plan.spaces())

    def start_prepacked(
        self, tensors: Sequence[Any], store: PrepackStore, judge: Judge = by_samples
    ) -> None:
        """As ``start``; what the plan copies first is copied once of a tensor that the store knows, and
        found by the tensor itself at every launch."""
        divided = self.divided
        for place, halves in divided.copied if divided is not None else ():
            made = store.find(halves, tensors[place])
            if made is not None:
                self._start_rest(place, halves, tensors, made)
                return
        self.start(tensors, judge)
        if divided is None or divided.plan is not self.plan:
            divided = self.divided = DividedPlan(self.plan, () if self.indexed else self.names)
        for place, halves in divided.copied:
            store.lay_out(halves, tensors[place])

    def _start_rest(
        self, place: int, halves: WeightPrepack[Plan], tensors: Sequence[Any], made: Sequence[Any]
    ) -> None:
        """Launch what is behind the copies."""
        copies, divided = [c.name for c in halves.copies], self.divided
        if divided is not None and self.begin is not None and self.current() == self.device:
            begin = divided.begins.get(place) or halves.rest.starter(
                self.device, self.aligned, (*self.names, *copies)
            )
            if begin is not None:
                divided.begins[place] = begin
                begin(*tensors, *made)
                return
        views = self.views(tensors) | dict(zip(copies, made, strict=True))
        with on_device(tensors[place].device):
            halves.rest.launch(**views)


class DividedPlan:
    """A plan divided into its copies and the rest. ``copied``: of each tensor of ``names`` that it copies,
    its place, and the plan without these copies; ``begins``: the start function of each of these plans."""

    __slots__ = ("begins", "copied", "plan")

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        self.plan = plan
        found = [apart(plan, name) for name in names]
        self.copied = [(place, halves) for place, halves in enumerate(found) if halves is not None]
        self.begins: dict[int, Begin] = {}


class FirstSizes:
    """Sizes of kernels that take any, whose results are compared: the first ones, ``FURTHER`` more, and
    then those in which a size has another number of bits, or other factors of 2: they cross the edge of a
    tile or need another mask. At most ``MOST``. ``seen``: what was compared, in that order."""

    FURTHER, MOST = 4, 16

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.beside: dict[Hashable, Any] = {}  # what a thread compares, by the kind of call
        self.met: set[tuple[int, int, int]] = set()

    def due(self, sizes: tuple[int, ...]) -> bool:
        """Whether a result of these sizes is compared."""
        if sizes in self.seen or len(self.seen) >= self.MOST:
            return False
        return len(self.seen) <= self.FURTHER or not _edges(sizes) <= self.met

    def done(self, sizes: tuple[int, ...]) -> None:
        """That it was."""
        self.seen.append(sizes)
        self.met |= _edges(sizes)


def _edges(sizes: Sequence[int]) -> set[tuple[int, int, int]]:
    """How many bits each size has, by its place, and how often 2 divides it, as far as masks tell."""
    return {(i, max(0, n - 1).bit_length(), min(n & -n, 128)) for i, n in enumerate(sizes)}


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """The device as the current one, if it is a GPU."""
    if device.type not in GPUS:
        return nullcontext()
    current: AbstractContextManager[object] = getattr(torch_module(), device.type).device(device)
    return current


Kind = TypeVar("Kind", bound=Plan)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a tensor. ``name``: its name in the plan; ``key``: equal for equal copies of equal
    tensors, also in different plans."""

    name: str
    key: str
    tensor: Tensor
    step: PlanStep

    def make(self, of: Any) -> Any:
        """The copy of a torch tensor, made on its device and the current stream, with zeros in gaps."""
        made = of.new_zeros(self.tensor.layout.span, dtype=torch_type(self.tensor))
        self.step.triton.run([made if p == self.name else of for p in self.step.params])
        return made


@dataclass(frozen=True, slots=True, eq=False)
class WeightPrepack(Generic[Kind]):
    """The copies of a weight. ``rest``: the launches of the plan after ``copies``, which are additional
    tensors, by their names."""

    copies: tuple[Copy, ...]
    rest: Kind


def apart(plan: Kind, name: str) -> WeightPrepack[Kind] | None:
    """A plan split into the copies of its tensor ``name`` and the rest; None if it does not copy it."""
    found: list[Copy] = []
    steps: list[PlanStep] = []
    cleared: Tensor | None = None  # cleared by a copy that is taken out, and so by the first launch left
    for step in plan.steps:
        given = not step.triton.sizes  # others may have other sizes at each call
        if step.does == "pack" and given and len(step.params) == 2 and name in step.params:
            made = next(p for p in step.params if p != name)
            found.append(Copy(made, step.digest, plan.workspaces[made], step))
            cleared = cleared or step.zero
        else:
            steps.append(step)
    if not found or not steps or (cleared and steps[0].zero):
        return None
    if cleared:
        steps[0] = replace(steps[0], zero=cleared)
    copied = {c.name for c in found}
    spaces = {n: t for n, t in plan.workspaces.items() if n not in copied}
    return WeightPrepack(tuple(found), replace(plan, steps=tuple(steps), workspaces=spaces))
