"""Compiled kernels beside the simulator, which executes functions in Python: their first results, of which
some groups are simulated, and ``kernel.check``.

A chip's compilers miscompile a few kernels, the same way every time. So the first launch of a kernel on a
machine is followed by a simulation of its last, its first and two other groups, on the arrays as they were
before, and the elements that these groups write are compared. What a group adds in one step, to which
others may add, is not; nor is a group that takes longer than some milliseconds: the log says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv.backend_triton import Miscompiled, torch_module
from transconv.ir import CALLS, Call, find
from transconv.kernel.annotations import KernelCall
from transconv.kernel.group import Group
from transconv.kernel.launch.arguments import Arguments, as_tensor, plain_number
from transconv.kernel.launch.kernel_plan import CompiledKernel
from transconv.kernel.simulator.group_samples import GroupSamples, OutOfTime, numbers_of
from transconv.runtime import check_records, first_run_check
from transconv.support import KernelError

if TYPE_CHECKING:
    from transconv.kernel.decorator import KernelFunction

LONGEST_S = 0.02  # that a group is simulated
LEAST, ENOUGH_S = 2, 0.005  # groups that are compared, and seconds after which no more are
EXACT = 2.0**-10  # of the largest element beside it: another order of summation, functions of a chip
ROUNDED = 2.0**-7  # the same where products of float32 round their operands
UNITS = 8  # units in the last place of the coarsest type, which intermediate values may have
FEW = 16  # one of so many whole numbers may differ where floats decide: the place of a largest element
SPEAKING = {"print", "breakpoint", "input"}  # what a kernel does in the simulator alone
log = logging.getLogger("transconv.trust")


class SimulatorMismatch(Miscompiled):
    """A kernel whose first result is not the simulator's."""


def refusal(name: str, mistake: Miscompiled) -> Exception:
    """The error for who calls a kernel that has no right machine code."""
    if not isinstance(mistake, SimulatorMismatch):
        return mistake
    return KernelError(f"{name} gives wrong results: {mistake.why}; expected those of the simulator "
                       "(kernel.check compares all elements, TRANSCONV_TRUST=never none)")


def start_checked(function: Callable[..., Any], asked: KernelCall, arguments: Arguments,
                  made: CompiledKernel, values: Mapping[str, int]) -> None:
    """Launch a kernel that may be new to this machine. Raises SimulatorMismatch for one that is wrong; the
    arrays are then as they were."""
    plan, step, given = made.plan, made.step, arguments.tensors | arguments.floats
    aligned, device = first_run_check.is_aligned(arguments.tensors), arguments.device
    if check_records.look_up(check_records.variant(step.digest, aligned)) == check_records.WRONG:
        raise SimulatorMismatch(step.launcher.function, "its first result was not the simulator's")
    why, before = _why_not(function, arguments), dict[str, Any]()
    try:
        before = {} if why else {n: _copied(arguments.tensors[n]) for n in made.stored}
    except first_run_check.out_of_memory():
        why = "there is no memory for copies of what it writes"
    made.start(given, values)
    wrong = ""
    if not why:
        try:
            samples = GroupSamples(function, asked.group, arguments.tensors | before,
                                   numbers_of(asked.given, arguments.tensors),
                                   asked.symbols | asked.meant.tuned)
        except Exception as error:  # the kernel runs on
            why = f"the simulator does not begin: {error}"
        else:
            wrong, why = _Comparison(samples, arguments, plan.workload.math).run(asked.group)
    if why:
        log.info("the first result of %s is not checked: %s", plan.workload.title, why)
    elif not wrong:
        first_run_check.note(plan, plan.steps, check_records.RIGHT, aligned, device)
    else:
        for name, old in before.items():
            arguments.tensors[name].copy_(old)
        first_run_check.note(plan, plan.steps, check_records.WRONG, aligned, device, wrong, keep=False)
        log.warning("rejected: %s with %d warps: %s; kernel in %s", plan.workload.title,
                    step.schedule.warps, wrong, step.path)
        raise SimulatorMismatch(step.launcher.function, wrong)


def _why_not(function: Callable[..., Any], arguments: Arguments) -> str:
    """Why a first result cannot be compared; empty if it can."""
    if first_run_check.is_capturing(arguments.device):
        return "a CUDA graph is captured"
    if arguments.alike:
        return "arrays share memory"
    code = getattr(function, "__code__", None)
    return "it speaks in the simulator" if code is None or SPEAKING & {*code.co_names} else ""


def _copied(tensor: Any) -> Any:
    """A copy whose elements lie as those of the tensor."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


class _Comparison:
    """Groups of a call that was launched, beside their simulation."""

    def __init__(self, samples: GroupSamples, arguments: Arguments, precision: str) -> None:
        self.samples, self.tensors = samples, arguments.tensors
        coarse = [_eps(t) for t in arguments.tensors.values() if t.is_floating_point()]
        self.floats = bool(coarse or arguments.floats)
        self.share = max(EXACT if precision == "ieee" else ROUNDED, UNITS * max(coarse, default=0.0))

    def run(self, group: Group) -> tuple[str, str]:
        """What is wrong with the result, empty if nothing; why it was not compared."""
        began, compared, why = time.perf_counter(), 0, "its groups add to what others add to"
        for number, ids in enumerate(_sampled(group.groups)):
            now = time.perf_counter()
            if number >= LEAST and now - began > ENOUGH_S:
                break
            try:
                written = self.samples.run(ids, now + LONGEST_S)
                for name, places in written.items():
                    compared += len(places)
                    if wrong := self.difference(name, places):
                        return wrong, ""
            except OutOfTime:
                why = f"the simulator takes more than {LONGEST_S * 1e3:g} ms for a group"
                break
            except Exception as error:  # what the simulator refuses, such as a race, may be compiled
                why = f"the simulator has no result: {error}"
                break
            finally:
                self.samples.undo()
        return "", "" if compared else why

    def difference(self, name: str, places: np.ndarray[Any, Any]) -> str:
        """The first element of an array that differs; empty if none does."""
        if not len(places):
            return ""
        memory = self.samples.memories[name]
        wanted, got = memory.device.read(places), memory.device.like(self.tensors[name]).read(places)
        if wanted.dtype.kind in "fV":
            a, b = got.astype(np.float64), wanted.astype(np.float64)
            size = np.abs(b[np.isfinite(b)])
            near = self.share * (np.abs(np.nan_to_num(b)) + size.max(initial=0.0))
            with np.errstate(invalid="ignore"):
                wrong = ~((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= near))
        else:
            wrong = got != wanted
            if self.floats and wrong.sum() * FEW <= len(places):
                return ""
        if not wrong.any():
            return ""
        at = int(np.flatnonzero(wrong)[0])
        return (f"{_element(self.tensors[name], name, int(places[at]))} is {got[at]:.9g}, and "
                f"{wanted[at]:.9g} in the simulator ({int(wrong.sum())} of {len(places)} elements differ)")


def _sampled(groups: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The last group, whose tiles may reach beyond the work, the first one, and two others."""
    count = prod(groups)
    for number in dict.fromkeys((count - 1, 0, count // 2, count * 5 // 7)):
        yield tuple(int(n) for n in np.unravel_index(number, groups))


def _eps(tensor: Any) -> float:
    return float(torch_module().finfo(tensor.dtype).eps)


def _element(tensor: Any, name: str, place: int) -> str:
    """An element by its place in memory, in the user's words."""
    if not tensor.is_contiguous():
        return f"the element {place} of {name}'s memory"
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(place, tuple(tensor.shape)))}]"


def check(kernel: KernelFunction, group: Group, given: dict[str, Any], rtol: float | None,
          atol: float | None) -> None:
    """Run a kernel and its simulation on copies of the arguments, and compare the arrays. Raises
    KernelError for the first difference."""
    torch = torch_module()
    compiled, simulated = ({n: v if plain_number(v) is not None or isinstance(v, ModuleType)
                            else as_tensor(n, v).clone() for n, v in given.items()} for _ in range(2))
    kernel(group, **compiled)
    kernel.simulate(group, **simulated)
    own = {c.name for c in find(kernel.lower(group, **given).kernel, Call) if CALLS[c.name].takes}
    for name, value in compiled.items():
        if not isinstance(value, torch.Tensor):
            continue
        got, wanted = (t.detach().cpu().double().numpy() for t in (value, simulated[name]))
        near = 2.0 * float(torch.finfo(value.dtype).eps) if value.dtype.is_floating_point else 0.0
        r, a = (16 * near if rtol is None else rtol), (16 * near if atol is None else atol)
        wrong = ~np.isclose(got, wanted, rtol=r, atol=a, equal_nan=True)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            told = f"; it has functions of a chip: {' '.join(sorted(own))}" if own else ""
            place = f"{name}[{', '.join(map(str, at))}]"
            raise KernelError(f"{kernel.source.name}: {place} is {got[at]:.9g}, and {wanted[at]:.9g} in "
                              f"the simulator ({int(wrong.sum())} of {wrong.size} elements differ){told}")
