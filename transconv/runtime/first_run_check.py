"""The first-run check: the first result of a plan is compared before the plan is used.

Triton and ptxas miscompile a few kernels, in the same way every time. So a plan is used only after its
first result on a machine agrees with the workload's reference. Its kernels then get verdicts, which other
processes read from disk; a kernel known to be wrong is never chosen again, and the next best schedule
replaces it.

This does not catch an illegal memory access: after one, the process cannot use the device, and there is no
result to check."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transconv.backend_triton import Miscompiled, torch_module
from transconv.compute import Read, Workload, examine
from transconv.ir import Sizes, Values, free_vars
from transconv.runtime import check_records, compiler
from transconv.runtime.compilation import rehearsal_thread
from transconv.runtime.compiler import MOST_REJECTED
from transconv.runtime.operands import draw, is_capturing, torch_type
from transconv.runtime.plans import Plan, PlanStep
from transconv.schedule import is_copy
from transconv.support import Unsupported, __version__, knobs

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

log = logging.getLogger("transconv.trust")
Made = TypeVar("Made", bound=Plan)
DRIVER = "Triton Error ["  # what Triton says of an error of the driver begins so
ROOM = 1 << 29  # bytes of tensors on which a result is checked that no call has asked for
CORNER = 8  # elements along each dim of an operand, which are looked at
FEW = 16  # elements of a result that say little
SIDE = 32  # the longest of a size that is an argument of a result before the first call, where it may be


def is_trusted(plan: Plan, aligned: bool = True) -> bool:
    """Whether a plan may run unchecked: its kernels were found correct, or checks are disabled. Triton's
    interpreter is not checked, unless TRANSCONV_TRUST=always. ``aligned``: all tensors begin at
    multiples of 16 bytes."""
    policy = knobs.trust()
    if policy == "never" or (policy == "check" and plan.target.backend == "interpreter"):
        return True
    return all(check_records.is_right(s.digest, aligned) for s in plan.steps if s.triton.grid)


def is_aligned(tensors: Tensors) -> bool:
    """Whether all tensors begin at multiples of 16 bytes; numbers among them do not count."""
    return not any(t.data_ptr() & 15 for t in tensors.values() if not isinstance(t, float))


class FirstRunVerdict(NamedTuple):
    """What a first launch showed. ``reason``: why the result is wrong, empty if it is not; ``blamed``: the
    steps that may have made it so; ``lasting``: whether that is kept on disk; ``error``: what is raised
    then, None where the next plan is tried; ``unseen``: why nothing was compared, but later."""

    reason: str = ""
    blamed: Sequence[PlanStep] = ()
    lasting: bool = True
    error: Exception | None = None
    unseen: str = ""


Judge = Callable[[Plan, "Tensors", bool], FirstRunVerdict]
"""Launches a plan on tensors by name, and looks at the result: with whether all tensors are aligned."""


def by_samples(plan: Plan, tensors: Tensors, aligned: bool) -> FirstRunVerdict:
    """Launch, and compare samples of the result with the workload's own reference; of other data, too, if
    these say little."""
    try:
        reason, blamed, weak = _launch_and_look(plan, tensors)
        if weak and not reason:
            try:
                reason, blamed, _ = _launch_and_look(plan, _telling(plan.workload.results, tensors))
            except out_of_memory():
                log.debug("no memory to check %s with other data", plan.workload)
    except Miscompiled as error:
        wrong = [s for s in plan.steps if s.triton.function == error.function]
        _let_go(error)
        return FirstRunVerdict(error.why, wrong or plan.steps)
    except Exception as error:
        # A failure of Triton: the kernel needs too many resources, or the compiler has a bug.
        if not _is_tritons(error):
            raise
        _let_go(error)
        return FirstRunVerdict(f"{type(error).__name__}: {error}", _suspects(plan, tensors), lasting=False)
    return FirstRunVerdict(reason, blamed)


def beside_samples(agrees: Callable[[], bool]) -> Judge:
    """Launch, and hold the result against another implementation's by ``agrees``, where operands and
    result say enough. What is not found right so is looked at by samples: these alone say whether a
    kernel is to blame."""

    def judge(plan: Plan, tensors: Tensors, aligned: bool) -> FirstRunVerdict:
        try:
            if not _in_part(plan.workload) and _vary(plan.workload.results, tensors):
                _clear(plan, tensors)
                plan.launch(**tensors)
                if agrees() and _tell(plan.workload.results, tensors):
                    return FirstRunVerdict()
        except Exception as error:
            if not isinstance(error, Miscompiled) and not _is_tritons(error):
                raise
            _let_go(error)
        return by_samples(plan, tensors, aligned)

    return judge


def run(plan: Made, tensors: Tensors, judge: Judge = by_samples) -> Made:
    """Launch a plan that may be new to this machine, and return the plan that made the result.

    ``tensors`` by name, in the order of a call; the result is written in place. A trusted plan is only
    launched. Any other is launched and judged, which waits for the device; if the result is wrong, its
    kernels are rejected and the next plan is tried. While a CUDA graph is captured, a plan is launched
    without a check.

    Raises Unsupported("miscompiled") if ``MOST_REJECTED`` plans are wrong, or the first one if the caller
    gave its schedule."""
    aligned, device = is_aligned(tensors), _device(tensors)
    for _ in range(MOST_REJECTED + check_records.MOST_SPILT):
        if is_trusted(plan, aligned) or is_capturing(device):
            plan.launch(**tensors)
            return plan
        began = time.perf_counter()
        found = judge(plan, tensors, aligned)
        log.debug("first result in %.3f s: %s", time.perf_counter() - began, plan.workload.title)
        if found.unseen:
            log.info("the first result of %s is not checked: %s", plan.workload.title, found.unseen)
            return plan
        if not found.reason:
            note(plan, plan.steps, check_records.RIGHT, aligned, device)
            if not (spilled := compiler.spills(plan)):
                return plan
            compiler.adopt({"spilled": spilled})
            plan = compiler.replan(plan)
            continue
        note(plan, found.blamed, check_records.WRONG, aligned, device, found.reason, found.lasting)
        for step in found.blamed:
            log.warning(
                "rejected: %s with schedule %s: %s; kernel in %s",
                f"{plan.workload.direction} {plan.workload}".strip(),
                step.schedule,
                found.reason,
                step.path,
            )
        if found.error is not None:
            raise found.error
        if plan.fixed:
            raise Unsupported("miscompiled", f"{plan.schedule} gives wrong results: {found.reason}")
        plan = compiler.replan(plan)
    raise Unsupported(
        "miscompiled",
        f"{MOST_REJECTED} plans for {plan.workload.direction} of {plan.workload} gave wrong results",
    )


def first_result(plan: Made, device: Any) -> Made:
    """Run a plan once on small integers, and return the plan that made the result: kernels are then loaded
    on ``device``, and checked if they are new to this machine. Raises as ``run``, and torch's error if
    there is no memory."""
    if plan.required is not None and plan.sizes is None:
        plan = plan.at(_small(plan.required.sizes))
    return run(plan, {w.name: w.filled(device, at) for at, w in enumerate(plan.operands())})


def rehearse(plan: Plan, device: torch.device, aligned: bool, sizes: Sequence[int] = ()) -> bool:
    """Load a plan's kernels on a device, the current one, and check their result there on data of their
    own; whether the first call has nothing left to do. ``aligned``: for tensors at multiples of 16 bytes;
    ``sizes``: those of a call, in their order, where they are arguments of the kernels.

    Only that the kernels are right is recorded. What looks wrong, or too uniform, or needs too much memory
    is left to the first call, whose data decide. Raises as ``TritonKernel.load``, and torch's errors."""
    rest = rehearsal_thread.thread.rest  # behind each part: a call of the program has its turn
    for step in plan.steps:
        step.triton.load(device, aligned)
        rest()
    if is_trusted(plan, aligned):
        return True
    held = _fitting(plan, sizes, _room(device))
    rest()
    if held is None:
        return False
    tensors = _varied(held, device, aligned)
    rest()
    reason, _, weak = _launch_and_look(held, tensors)
    rest()
    if reason or weak:
        return False
    note(plan, plan.steps, check_records.RIGHT, aligned, device)
    return True


def _room(device: torch.device) -> int:
    """How many bytes a check may take beside the program."""
    return min(ROOM, rehearsal_thread.room(device))


def _fitting(plan: Plan, sizes: Sequence[int], room: int) -> Plan | None:
    """The plan for sizes whose tensors have so many bytes at most: those given, or the examples, or small
    ones. None if there are none."""
    if plan.required is None:
        each = [plan]
    else:
        asked = plan.required.sizes
        told = [dict(zip(asked.names, sizes, strict=True))] if sizes else []
        each = [plan.at(n) for n in (*told, asked.like, _small(asked)) if not asked.why_not(n)]
    return next((p for p in each if sum(w.span * w.elements.itemsize for w in p.operands()) <= room), None)


def _varied(plan: Plan, device: torch.device, aligned: bool) -> Tensors:
    """Tensors for a call of a plan."""
    indices = {
        s.view.tensor.name
        for c in plan.workload.computations
        for s in c.names.placing
        if isinstance(s, Read)
    }
    return {
        w.name: w.varied(device, at, int(not aligned), w.name in indices)
        for at, w in enumerate(plan.operands())
    }


def _small(sizes: Sizes) -> dict[str, int]:
    """Sizes for which the kernel does little; the examples where these are not allowed."""
    found = {s.name: max(s.least, min(s.like, SIDE)) for s in sizes.each}
    return sizes.like if sizes.why_not(found) else found


def _device(tensors: Tensors) -> torch.device:
    return next(iter(tensors.values())).device


def out_of_memory() -> type[Exception]:
    """torch's error where a device has no memory."""
    found: type[Exception] = torch_module().OutOfMemoryError
    return found


def _let_go(error: BaseException) -> None:
    """Take the frames from an error that goes no further. Triton raises some from a variable of the frame
    that raises them: error, traceback and frame are a cycle then, and the frames of all callers, with
    their tensors, would be there until Python looks for cycles."""
    seen: BaseException | None = error
    while seen is not None and seen.__traceback__ is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _is_tritons(error: BaseException) -> bool:
    """Whether an error is one of Triton's types, or was raised by its code, as a failed assertion is. What
    the driver or torch reports there, such as a device that another kernel has lost, is no kernel's."""
    kind = type(error).__module__.partition(".")[0]
    if kind == "torch" or str(error).startswith(DRIVER):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = last.tb_frame.f_globals.get("__name__", "") if last else ""
    return "triton" in (kind, where.partition(".")[0])


def _launch_and_look(plan: Plan, tensors: Tensors) -> tuple[str, Sequence[PlanStep], bool]:
    """What is wrong with a result (empty if nothing), in which steps, and whether the data are too uniform
    for a check. What other workloads stored to a tensor of which this one stores a part is there again
    afterwards."""
    kept = {name: tensors[name].clone() for name in _in_part(plan.workload)}
    try:
        _clear(plan, tensors)
        began = time.perf_counter()
        plan.launch(**tensors)
        log.debug("loaded and launched in %.3f s: %s", time.perf_counter() - began, plan.workload.title)
        found = plan.workload.examine(tensors, tensors[plan.workload.result])
    finally:
        for name, before in kept.items():
            tensors[name].copy_(before)
    if kept and not found.reason:
        plan.launch(**tensors)
    if not found.reason:
        return "", (), found.weak
    return found.reason, _blamed(plan, found.wrong, tensors), found.weak


def _clear(plan: Plan, tensors: Tensors) -> None:
    """Fill results, so that elements that are not written are found."""
    for name in plan.workload.results:
        t = tensors[name]
        t.fill_(float("nan") if t.is_floating_point() else -1 if t.dtype.is_signed else 0)


def _vary(results: Sequence[str], tensors: Tensors) -> bool:
    """Whether the first elements of each operand have more than one value: data that are all alike could
    hide errors."""
    corners = [
        t[(slice(CORNER),) * t.dim()]
        for name, t in tensors.items()
        if name not in results and not isinstance(t, float) and t.numel() > 1
    ]
    return all(bool((c != c.flatten()[0]).any()) for c in corners)


def _tell(results: Sequence[str], tensors: Tensors) -> bool:
    """Whether each result has more than a few elements, of which 0 would not do for most (see
    ``SampleOutcome.weak``)."""
    count = torch_module().count_nonzero
    return all(
        tensors[name].numel() >= FEW and 8 * int(count(tensors[name])) >= tensors[name].numel()
        for name in results
    )


def _in_part(workload: Workload) -> list[str]:
    """The results of which not every element is stored: a text may store a part of a tensor."""
    stored: dict[str, int] = {}
    whole: dict[str, int] = {}
    for compute in workload.computations:
        for write in compute.writes:
            tensor, name = write.view.tensor, write.view.tensor.name
            seen = {v for d in write.view.dims for v in free_vars(d.coord)}
            whole[name] = prod(tensor.shape)
            stored[name] = stored.get(name, 0) + (
                whole[name] if write.op else prod(x.size for x in compute.axes if x.var in seen)
            )
    return [name for name in workload.results if stored.get(name, 0) < whole.get(name, 0)]


def _telling(results: Sequence[str], tensors: Tensors) -> Tensors:
    """Tensors like these, with the same alignment, and small random integers instead of data that could
    hide errors. Integer tensors are copied, because they may be indices."""
    torch = torch_module()
    made: Tensors = {}
    for name, like in tensors.items():
        shift = like.data_ptr() % 16 // like.element_size()
        span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        memory = torch.empty(span + shift, dtype=like.dtype, device=like.device)
        made[name] = memory.as_strided(like.shape, like.stride(), shift)
        if name in results:
            continue
        if like.is_floating_point():
            draw(memory[shift:], len(made))
        else:
            memory[shift:].copy_(like.as_strided((span,), (1,)))  # its memory, as strides may be 0
    return made


def _suspects(plan: Plan, tensors: Tensors) -> Sequence[PlanStep]:
    """The copies that are wrong when run alone; if none is, all steps but the copies."""
    copies = [step for step in plan.steps if is_copy(step.compute)]
    sizes = plan.required and (plan.sizes or plan.required.of_call(tensors))
    wrong = [step for step in copies if not _copies_well(step, _device(tensors), sizes or {})]
    return wrong or [step for step in plan.steps if step not in copies]


def _copies_well(step: PlanStep, device: torch.device, sizes: Values) -> bool:
    """Whether a copy of small random integers is correct, of another shape at samples; ``sizes``: those
    that are arguments."""
    torch = torch_module()
    a, c = step.compute.a.tensor.at(sizes), step.compute.c.tensor.at(sizes)
    strides = a.layout.strides(), c.layout.strides()
    if strides[0] is None or strides[1] is None:
        return True  # a blocked layout has no view in torch to compare
    given = torch.empty(a.layout.span, dtype=torch_type(a), device=device).random_(-99, 100)
    made = torch.full((c.layout.span,), float("nan"), dtype=torch_type(c), device=device)
    try:
        step.triton.run([given, made], sizes)
    except Exception as error:
        if not _is_tritons(error):
            raise
        _let_go(error)
        return False
    views = [
        t.as_strided(of.shape, step, of.layout.offset)
        for t, of, step in zip((given, made), (a, c), strides, strict=True)
    ]
    if a.shape != c.shape:
        return not examine(step.compute.at(**sizes), {a.name: views[0], c.name: views[1]}).reason
    same: bool = torch.equal(*views)
    return same


def _blamed(plan: Plan, wrong: Sequence[tuple[int, ...]], tensors: Tensors) -> Sequence[PlanStep]:
    """The steps that may have made wrong elements: wrong copies; else, if each kernel computes one stride
    phase, those of the wrong phases; else all but the copies."""
    suspects = _suspects(plan, tensors)
    if any(is_copy(step.compute) for step in suspects):
        return suspects
    phases = {plan.workload.part_of(at) for at in wrong}
    if any(step.compute.part is None for step in suspects):
        return suspects
    return [step for step in suspects if step.compute.part in phases] or suspects


def note(
    plan: Plan,
    steps: Sequence[PlanStep],
    verdict: str,
    aligned: bool,
    device: torch.device,
    reason: str = "",
    keep: bool = True,
) -> None:
    """Record what was found of some steps of a plan on a device: whether they are right, or why not."""
    name = torch_module().cuda.get_device_name(device) if device.type == "cuda" else device.type
    for step in steps:
        check_records.record(
            check_records.variant(step.digest, aligned),
            verdict,
            keep,
            reason=reason,
            function=step.triton.function,
            problem=str(plan.workload),
            schedule=str(step.schedule),
            device=name,
            transconv=__version__,
            torch=torch_module().__version__,
        )
