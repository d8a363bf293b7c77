"""A computation compiled once for a device, and launched on torch tensors.

``launch`` finds it by the text, or by the workload that several texts are; ``CompiledLaunch.start`` takes
tensors of any shape whose memory is what the text says, in the order of its reads and then of its stores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

import torch

from transconv import knobs
from transconv.calls.guard import ALIGNMENT, current_device
from transconv.calls.settings import settings
from transconv.compute import Alone, Compute, Workload, parse
from transconv.errors import ProblemError, ScheduleError, StageError, TensorError, Unsupported
from transconv.ir import DType, boolean, f8e4m3, f8e5m2, i8, i32, i64, u8
from transconv.ir import Tensor as Declared
from transconv.runtime import FirstSizes, Plan, PlanRequest, check_indices, first_run_check, ready
from transconv.torch_ops.calls.lower_call import DTYPES, capturing, target_of

Tensor = torch.Tensor

log = logging.getLogger("transconv.functional")

TYPES: dict[torch.dtype, DType] = DTYPES | {
    torch.int8: i8, torch.int32: i32, torch.int64: i64, torch.bool: boolean}
HELD = TYPES | {torch.uint8: u8, torch.float8_e4m3fn: f8e4m3, torch.float8_e5m2: f8e5m2}
"""The types of tensors that texts declare; those beyond ``TYPES`` are no operands of torch's functions."""
TORCH = {ours: theirs for theirs, ours in HELD.items()}
Spaces = tuple[tuple[tuple[int], torch.dtype], ...]
"""The shape and type of each workspace."""
LIMIT = 4096  # launches kept
SIZES = 256  # sizes of one launch kept


class TensorMemory(NamedTuple):
    """A tensor of a text, as torch says it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Program(NamedTuple):
    """A text that was read: what it reads in order, and what it stores."""

    compute: Compute
    given: dict[str, TensorMemory]
    stored: dict[str, TensorMemory]


@lru_cache(maxsize=LIMIT)
def program(text: str) -> Program:
    """Raises ComputeError, and Unsupported for layouts that no strides describe."""
    compute = parse(text)
    stored = {w.view.tensor.name for w in compute.writes}
    memory = {t.name: _memory(t) for t in compute.tensors}
    if both := {r.view.tensor.name for r in compute.reads} & stored:
        raise Unsupported("tensor:both", f"{min(both)} is read and stored; expected two tensors")
    return Program(compute, {n: m for n, m in memory.items() if n not in stored},
                   {n: m for n, m in memory.items() if n in stored})


def _memory(tensor: Declared) -> TensorMemory:
    strides = tensor.layout.strides()
    if strides is None or tensor.layout.offset:
        raise Unsupported("layout:blocked",
                          f"{tensor.name} has the layout {tensor.layout}; expected strides")
    return TensorMemory(tensor.shape, strides, TORCH[tensor.dtype])


class CompiledLaunch:
    """A plan of a workload on one kind of device, and what starts it without asking once it has run
    there. ``computes``: what it computes, as texts say it."""

    __slots__ = ("agreed", "aligned", "begin", "computes", "device", "indexed", "memory", "names", "of",
                 "plan", "sized", "sizes")

    def __init__(self, workload: Workload, computes: Sequence[Compute], device: torch.device,
                 aligned: bool, mode: str) -> None:
        tensors = sorted(workload.tensors, key=lambda t: t.name in workload.results)
        self.memory: list[TensorMemory] = [_memory(t) for t in tensors]
        self.names = tuple(t.name for t in tensors)
        self.of = self  # whose plan it is
        self.agreed = FirstSizes()  # for which a result was that of torch: see calls/first_call_check.py
        self.sizes: Mapping[str, int] | None = None
        self.sized: dict[tuple[int, ...], CompiledLaunch] = {}
        self.aligned = aligned
        self.computes, self.indexed = computes, any(c.names.indices for c in computes)
        self.begin: Callable[..., None] | None = None
        self.device = -1
        self.plan = _planned(workload, device, aligned, mode)

    def at(self, sizes: Mapping[str, int]) -> CompiledLaunch:
        """The same plan for given sizes, where they are arguments of its kernels. Raises TensorError for
        sizes that do not meet the requirements."""
        key = tuple(sizes.values())
        if (found := self.sized.get(key)) is None:
            if len(self.sized) >= SIZES:
                self.sized.clear()
            found = self.sized[key] = object.__new__(CompiledLaunch)
            for name in CompiledLaunch.__slots__:
                setattr(found, name, getattr(self, name))
            found.memory = []  # see views
            found.plan, found.sizes, found.begin = self.plan.at(sizes), sizes, None
        return found

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Launch on the current stream of the tensors' device. The first result of kernels that are new
        to a machine is held against the text's meaning at samples, in compiled graphs too; while a CUDA
        graph is captured nothing can be looked at. Raises Unsupported("miscompiled") where no kernel is
        right; IndexError, in torch's words, for an index that leaves its tensor: on a CPU, and where
        TRANSCONV_VERIFY=1 asks for it."""
        if self.begin is not None and current_device() == self.device:
            self.begin(*tensors)
            return
        device = tensors[0].device
        if self.sizes is not None and device.type == "cuda" and (begin := self._begun_before(device)):
            begin(*tensors)
            return
        views = self.views(tensors)
        with self.on(device):
            if self.indexed and (device.type == "cpu" or knobs.verify()):
                try:
                    check_indices(self.computes, views)
                except TensorError as error:
                    raise IndexError(str(error)) from None
            self.run(views)
            if device.type == "cuda" and not (self.indexed and knobs.verify()):
                self.begin = self.plan.starter(device.index, self.aligned, self.names)
                self.device = device.index

    def _begun_before(self, device: torch.device) -> Callable[..., None] | None:
        """What starts kernels that take these sizes as arguments, if they run on the device already and
        were found to be right: nothing is left to look at then."""
        if current_device() != device.index or knobs.verify() or not first_run_check.is_trusted(
                self.plan, self.aligned):
            return None
        self.begin = self.plan.starter(device.index, self.aligned, self.names)
        self.device = device.index
        return self.begin

    def views(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors by the plan's names, as it takes them."""
        if self.sizes is not None and not self.memory:
            self.computes = tuple(c.at(**self.sizes) for c in self.of.computes)
            known = {t.name: _memory(t) for c in self.computes for t in c.tensors}
            self.memory = [known[n] for n in self.names]
        return {name: t.detach().as_strided(m.shape, m.strides, t.storage_offset())
                for name, t, m in zip(self.names, tensors, self.memory, strict=True)}

    def within(self) -> tuple[Callable[..., None] | None, Spaces]:
        """What starts it on its device, as ``begin``, and workspaces that this takes behind its tensors:
        one who starts many allocates them for several together."""
        plan = self.plan
        if not plan.workspaces or any(
                s.zero and s.zero.name in plan.workspaces for s in plan.steps):  # no more is cleared
            return self.begin, ()
        begin = plan.starter(self.device, self.aligned, self.names, spaces=True)
        return (self.begin, ()) if begin is None else (begin, plan.spaces())

    def is_known(self) -> bool:
        """Whether it is one kernel, whose result is not looked at any more."""
        return len(self.plan.steps) == 1 and first_run_check.is_trusted(self.plan, self.aligned)

    @staticmethod
    def on(device: torch.device) -> AbstractContextManager[object]:
        """The device as the current one, if it is a GPU."""
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def run(self, views: dict[str, Tensor]) -> None:
        """Launch the plan, and keep the one that made the result."""
        found = first_run_check.run(self.plan, views)
        if found is not self.plan and self.sizes is not None:  # made anew, for all sizes
            self.of.plan, found = found, found.at(self.sizes)
            self.of.sized = {key: at for key, at in self.of.sized.items() if at is self}
        self.plan = found


_launches: dict[Hashable, CompiledLaunch] = {}


def launch(asked: str | Workload, device: torch.device, aligned: bool, mode: str) -> CompiledLaunch:
    """The launch of a text or workload, made when it is first asked for. Raises ComputeError, and
    Unsupported where no kernel can be made, or is there as the mode has it, with the reason."""
    key = (asked, device.type, device.index, aligned, deterministic())
    found = _launches.get(key)
    if found is None:
        if capturing(device):
            raise Unsupported("capture:cold", "a kernel cannot be built while a CUDA graph is captured; "
                              "call once before capturing")
        if len(_launches) >= LIMIT:
            _launches.clear()
        if isinstance(asked, str):
            compute = program(asked).compute
            made = CompiledLaunch(Alone(compute), (compute,), device, aligned, mode)
        else:
            made = CompiledLaunch(asked, asked.computations, device, aligned, mode)
        found = _launches.setdefault(key, made)
    return found


def deterministic() -> bool:
    """Whether the same bits are asked for at every run."""
    return bool(torch._C._get_deterministic_algorithms())


def question(asked: str | Workload, device: torch.device, aligned: bool = True) -> PlanRequest:
    """What ``launch`` asks for."""
    workload = Alone(program(asked).compute) if isinstance(asked, str) else asked
    return PlanRequest(workload, target_of(device), deterministic(), aligned)


def _planned(workload: Workload, device: torch.device, aligned: bool, mode: str) -> Plan:
    if deterministic() and any(c.added for c in workload.computations):
        raise Unsupported("deterministic:add", f"{workload.title} adds in place, in no order, and the "
                          "same bits were asked for")
    try:
        asked = question(workload, device, aligned)
        return ready(workload, asked.target, None, asked.deterministic, Plan, aligned, mode)
    except (ScheduleError, ProblemError) as error:
        raise Unsupported("schedule:refused", str(error)) from error
    except StageError as error:  # a program in training must not stop for a bug of ours
        log.warning("no kernel for %s: %s", workload.title, error, exc_info=True)
        raise Unsupported("error:StageError", str(error)) from error


def refused(tensors: Sequence[Tensor], whole: Sequence[bool] = (),
            types: Mapping[torch.dtype, DType] = TYPES) -> str:
    """Why no kernel may take these tensors; empty if one may. ``whole``: which of them may be of any of
    ``types``, such as whole numbers and truth values."""
    device = tensors[0].device
    if device.type == "cpu":
        if settings.cpu != "interpret":
            return "device:cpu"
    elif device.type != "cuda":
        return f"device:{device.type}"
    for i, t in enumerate(tensors):
        if t.dtype not in (types if i < len(whole) and whole[i] else DTYPES):
            return f"dtype:{str(t.dtype).removeprefix('torch.')}"
        if t.device != device:
            return "device:several"
        if t.layout is not torch.strided:
            return f"layout:{str(t.layout).removeprefix('torch.')}"
        if t.numel() == 0:
            return "shape:empty"
    return ""


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors begin at multiples of 16 bytes."""
    return not reduce(or_, map(Tensor.data_ptr, tensors), 0) & ALIGNMENT


settings.on_change(_launches.clear)
