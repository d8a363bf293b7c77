"""The steps of a plan: the computations of a workload, and the kernel of each with its name, text and
compiled form; and the estimated microseconds of all its launches, with the schedules that they would get.

Decisions of a graph compare hundreds of estimates, and each has a thousand schedules ranked. Processes
make them, and leave them on disk, where this process and later ones find them; a record's key is a digest
of all that the choice of schedules depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isfinite, prod

from transconv.backend_triton import (
    CompileJob,
    TritonKernel,
    emit,
    grid_size,
    is_explicit,
    parameters,
    programs,
    write,
)
from transconv.compute import Compute, Workload
from transconv.cost import estimate
from transconv.ir import Kernel
from transconv.passes import EMIT, PROBLEM, leave
from transconv.passes.lowering import split_k
from transconv.runtime import check_records
from transconv.runtime.plans import LoweredStep, Plan, PlanStep
from transconv.schedule import (
    Schedule,
    Scheduled,
    finishes,
    is_copy,
    is_framed,
    registered_words,
    rounds,
    why_not,
    with_letter,
    without,
)
from transconv.selection import choice, completed, fitted, shortlist, spread, stamp
from transconv.support import Content, Drawer, ScheduleError, TransconvError, Unsupported, knobs
from transconv.target import Target

Choose = Callable[[Compute, Target], Schedule]
"""A function that chooses the schedule of a computation for a chip."""
Planned = list[tuple[Compute, Schedule]]
"""Computations with their schedules, in the order of launches."""

MAX_NAME = 64  # characters of a name in the IR


def plan_steps(
    workload: Workload, target: Target, schedule: Schedule | None = None, choose: Choose | None = None
) -> Planned:
    """The computations to run, in order, each with its schedule: copies of operands, main kernels, kernels
    that add partial sums, copies of results. Raises Unsupported and ProblemError for a workload without a
    plan, ScheduleError for a given schedule that is not legal."""
    choose = choose or (lambda a, t: choice.default(a, t, workload))
    computations, schedule = main_computations(workload, target, schedule)
    mains = [(c, given_schedule(c, workload, target, schedule) or choose(c, target)) for c in computations]
    return with_copies(mains, target, schedule, choose)


def main_computations(
    workload: Workload, target: Target, schedule: Schedule | None
) -> tuple[list[Compute], Schedule | None]:
    """The computations of the main kernels, and the given schedule, None where none is for all of them.
    Raises Unsupported and ProblemError for a workload without a plan."""
    workload.refuse()
    for t in workload.tensors:
        if reason := target.why_not_held(t.dtype):
            raise Unsupported(f"dtype:{t.dtype}", f"{t.name}: {reason}")
    computations = workload.computations
    if schedule is None:
        computations = tuple(k for c in computations for k in spread(c, target))
    elif schedule.red == "split" and not schedule.blocks:
        parts = {c: spread(c, target, asked=True) for c in computations}
        computations = tuple(k for c in computations for k in parts[c])
        if len(computations) > len(parts):  # rows are in parts, each kernel with a schedule of its own
            schedule = None
    return [c for c in computations if all(x.size or c.kind(x.name) == "K" for x in c.axes)], schedule


def given_schedule(
    compute: Compute, workload: Workload, target: Target, schedule: Schedule | None
) -> Schedule | None:
    """The given schedule, as a computation has it; None where its own is chosen."""
    if schedule is None or workload.prepares(compute) or any(not x.size for x in compute.axes_of("K")):
        return None
    return fitted(completed(schedule, compute, target), compute, target)


def with_copies(mains: Planned, target: Target, schedule: Schedule | None, choose: Choose) -> Planned:
    """The main kernels' computations with copies before and after them, and those that add partial sums.
    Raises ScheduleError for a given schedule that is not legal."""
    made: Planned = []
    around: dict[str, Compute] = {}
    for compute, chosen in _agreed(_same_copies(mains, target), target):
        if schedule is not None and (reason := why_not(chosen, compute, target)):
            raise ScheduleError(f"{chosen}: {reason}")
        made += _to_the_end(compute, chosen, target, choose)
    for compute, chosen in made:
        copied = Scheduled(compute, chosen, target).copies
        around |= {c.name: c for c in copied if c.name not in around}
    return _in_order(made, [(c, choose(c, target)) for c in around.values()])


def _in_order(made: Planned, copies: Planned) -> Planned:
    """Kernels with copies where what they copy is there: those of operands first, those of results last. A
    tensor that one kernel stores and a later one reads is copied between the two."""
    stored = {w.view.tensor.name: i for i, (k, _) in enumerate(made) for w in k.writes}
    needed = {t.name: i for i, (k, _) in enumerate(made) for t in k.tensors}
    first: Planned = []
    behind: list[Planned] = [[] for _ in made]
    for copy, chosen in sorted(copies, key=lambda m: m[0].does == "pack"):  # packed after it is unpacked
        packs = copy.does == "pack"
        tensor = (copy.a if packs else copy.c).tensor
        at = stored.get(tensor.name, len(made))
        between = at < needed[tensor.name]
        (behind[at] if between else first if packs else behind[-1]).append((copy, chosen))
    return [*first, *(m for main, after in zip(made, behind, strict=True) for m in (main, *after))]


def _to_the_end(
    compute: Compute, chosen: Schedule, target: Target, choose: Choose
) -> Iterator[tuple[Compute, Schedule]]:
    """The kernel, the one that adds its partial sums, and those that combine what it leaves of statistics;
    the schedule of any of these may leave partial sums again."""
    yield compute, chosen
    whole = Scheduled(compute, chosen, target)
    behind = [_second(whole)] if split_k.most_parts(chosen, whole.main) else []
    for last in (*behind, *finishes(whole.main, chosen)):
        yield from _to_the_end(last, choose(last, target), target, choose)


def _same_copies(mains: Planned, target: Target) -> Planned:
    """If stride phases differ in ``pack``, give all of them the schedule of the one with the longest sum
    where it is legal: they then share the copies, and may be one launch."""
    phases = [(a, c) for a, c in mains if a.phase and all(x.size for x in a.axes)]
    if len({c.pack for _, c in phases}) < 2:
        return mains
    _, longest = max(phases, key=lambda m: prod(x.size for x in m[0].axes_of("K")))
    if not longest.pack:
        return mains
    return [
        (
            a,
            longest
            if (a, c) in phases and c.pack != longest.pack and why_not(longest, a, target) is None
            else c,
        )
        for a, c in mains
    ]


def _second(whole: Scheduled) -> Compute:
    """The computation that adds partial sums. After stream-K it needs the main kernel's tiles, hence its
    merged groups; otherwise groups are not merged, and there are no features of a frame, so that it skips
    what is off the diagonal and what is not stored."""
    schedule = whole.schedule
    plain = replace(schedule, merge=1, pack="" if is_framed(schedule.pack) else schedule.pack)
    apart = whole if schedule.reduce == "stream" else replace(whole, schedule=plain)
    second = split_k.second(apart.main, schedule)
    return second.through(c=whole.compute.c) if schedule.pack else second


def _agreed(mains: Planned, target: Target) -> Planned:
    """Make all kernels that store parts of one result, such as stride phases, write to its copy, or none,
    because it is copied back as a whole."""
    made, parts = list(mains), dict[str, list[int]]()
    for i, (compute, _) in enumerate(mains):
        parts.setdefault(compute.c.tensor.name, []).append(i)
    for places in parts.values():
        if len({mains[i][1].unpacks for i in places}) == 2:
            for i, main in zip(places, _same_result([mains[i] for i in places], target), strict=True):
                made[i] = main
    return made


def _same_result(mains: Planned, target: Target) -> Planned:
    """The kernels of one result, some of which write to its copy: all of them, or where that is not legal
    none."""
    asked = [
        (a, c if c.unpacks else replace(c, c="gather", split_k=1, pack=with_letter(c.pack, "c")))
        for a, c in mains
    ]
    if all(why_not(c, a, target) is None for a, c in asked):
        return asked
    return [(a, replace(c, c="gather", pack=without(c.pack, "c")) if c.unpacks else c) for a, c in mains]


def kernel_name(workload: Workload, compute: Compute, schedule: Schedule, target: Target) -> str:
    """``name_sizes_1f3a``: computation, workload, and a short digest of everything else."""
    alone = _has_no_example(workload, compute)
    subject = f"{compute}" if alone else _subject(workload, compute)
    rest = f"{subject} {compute.behind} {schedule.key} {target.name} {compute.name}"
    digest = hashlib.blake2b(rest.encode(), digest_size=4).hexdigest()
    stem = compute.name if is_copy(compute) else f"{workload.prefix}{compute.name}"
    sizes = "".join(f"{x.name}{x.size if x.extent is None else ''}" for x in compute.axes)
    shape = sizes if is_copy(compute) or alone else workload.shape_text
    shape = "".join(c for c in shape if (c.isascii() and c.isalnum()) or c == "_")
    return f"{stem}_{shape[: MAX_NAME - len(f'{stem}__{digest}')]}_{digest}"


def _subject(workload: Workload, compute: Compute) -> str:
    """The subject of a kernel's name: the workload, or the tensor of a copy, so that workloads share
    copies."""
    if _has_no_example(workload, compute):
        return f"{compute.a.tensor} to {compute.c.tensor}"
    if not is_copy(compute):
        return f"{workload}"
    return f"{compute.a.tensor}" + f" rounded to {compute.c.tensor.dtype}" * rounds(compute)


def _has_no_example(workload: Workload, compute: Compute) -> bool:
    """Whether the sizes that are arguments of a workload's kernels are no matter of this one, which adds
    up parts: it then is the same kernel whatever they are chosen for."""
    return (
        compute.named is None
        and not is_copy(compute)
        and any(c.named is not None for c in workload.computations)
    )


def header(workload: Workload, compute: Compute, schedule: Schedule, target: Target) -> tuple[str, ...]:
    """The comment lines above a kernel's text."""
    about = workload.lines or (f"{compute.name} of {_subject(workload, compute)}",)
    return (
        *about,
        *([f"epilogue {compute.behind}"] if compute.behind else []),
        f"schedule {schedule}",
        f"target {target.name}",
    )


def launched(
    workload: Workload, compute: Compute, schedule: Schedule, target: Target, kernel: Kernel
) -> PlanStep:
    """The step that launches a kernel, under the name of its computation."""
    name = kernel_name(workload, compute, schedule, target)
    kernel = replace(kernel, name=name)
    early = "early" in target.features
    source = emit(kernel, header(workload, compute, schedule, target), early)
    leave(name, PROBLEM.name, f"{workload} {workload.direction} on {target}")
    leave(name, EMIT.name, source)
    lowered = LoweredStep(compute, kernel)
    return kernel_step(compute.does, kernel, source, name, schedule, target, lambda: lowered, early)


def kernel_step(
    does: str,
    kernel: Kernel,
    source: str,
    file: str,
    schedule: Schedule,
    target: Target,
    lowered: Callable[[], LoweredStep],
    early: bool = False,
    fuse: bool = True,
) -> PlanStep:
    """The step that launches a kernel of a text. ``file``: the name of the text's readable copy;
    ``early``, ``fuse``: as for ``TritonKernel``."""
    types = tuple(t.dtype.torch for t in kernel.params)
    descriptors = tuple(None if p.box is None else (p.tensor, p.box) for p in parameters(kernel))
    digest = digest_of(source, schedule, target, () if fuse else types)
    path, words = write(source, file), (schedule.warps, schedule.stages)
    grid = programs(kernel) if kernel.sizes else grid_size(kernel)
    made = TritonKernel(
        source,
        kernel.name,
        path,
        grid,
        *words,
        descriptors,
        is_explicit(kernel),
        early,
        types,
        digest,
        fuse,
        kernel.sizes,
    )
    params = tuple(t.name for t in kernel.params)
    return PlanStep(does, schedule, lowered, source, path, made, params, digest)


def job_of(step: PlanStep, target: Target, text: str = "", words: bool = True) -> CompileJob:
    """One launch, to be compiled offline; ``text`` names an intermediate text to bring back,
    ``words``: see ``CompileJob``."""
    boxes = step.triton.boxes or (None,) * len(step.kernel.params)
    params = tuple(
        (p.dtype.name, box[1] if box else ()) for p, box in zip(step.kernel.params, boxes, strict=True)
    )
    return CompileJob(
        step.source,
        step.kernel.name,
        params,
        target.name,
        target.backend,
        target.arch,
        target.warp_size,
        step.schedule.warps,
        step.schedule.stages,
        (text,) if text else (),
        is_explicit(step.kernel),
        words=words,
        sizes=len(step.kernel.sizes.each) if step.kernel.sizes else 0,
        dots="mma" in target.features,
    )


def one_kernel_plan(
    workload: Workload, target: Target, kernel: Kernel, source: str, file: str, warps: int, stages: int
) -> Plan:
    """The plan of a workload that is one kernel of no computation, in which nothing is fused."""

    def lowered() -> LoweredStep:
        raise NotImplementedError(f"{workload.title} is no computation")

    schedule = Schedule(warps=warps, stages=stages)
    step = kernel_step(workload.title, kernel, source, file, schedule, target, lowered, fuse=False)
    return Plan(workload, target, schedule, (step,), fixed=True, why="given by the caller")


def digest_of(source: str, schedule: Schedule, target: Target, types: Sequence[str] = ()) -> str:
    """The key of a kernel's verdict and of the record that it was compiled. ``types``: of a kernel in
    which nothing is fused, and whose text may not say them, torch's element types of its tensors."""
    source = source.replace(str(schedule), schedule.key)  # in the comment above the kernel
    told = f"{target.name} {schedule.warps} {schedule.stages}"
    return check_records.digest(source, " ".join([told, *types]))


SCHEMA = 1
DRAWER = Drawer("microseconds", SCHEMA, longest=1 << 12, lasting=False)
LONGEST = 1000  # characters of the reason why there is none


@lru_cache(maxsize=4096)
def estimated(workload: Workload, target: Target) -> float:
    """Of all launches of a workload. Raises ScheduleError where it has no plan."""
    key = _key(workload, target)
    found = _read(DRAWER.get(key)) if key else None
    if found is None:
        found = _made(workload, target)
        if key:
            DRAWER.put(key, {"us": found} if isinstance(found, float) else {"why": found[:LONGEST]})
    if isinstance(found, str):
        raise ScheduleError(found)
    return found


def is_estimated(workload: Workload, target: Target) -> bool:
    """Whether the estimate is there, or none is kept."""
    key = _key(workload, target)
    return not key or _read(DRAWER.get(key)) is not None


def _made(workload: Workload, target: Target) -> float | str:
    """The sum, or the reason why there is none."""

    def first(compute: Compute, target: Target) -> Schedule:
        return shortlist(1, compute, target, workload)[0].schedule

    try:
        return microseconds(plan_steps(workload, target, choose=first), target)
    except TransconvError as error:
        return str(error) or type(error).__name__


def microseconds(made: Planned, target: Target) -> float:
    """Of computations with their schedules, each launch once: an estimate has the copies of its
    schedule and the kernel that adds up its parts, and that of a map those that combine statistics."""
    own = [(c, s) for c, s in made if c.does == "compute"]
    within = {last for c, s in own if c.streams for last in finishes(Scheduled(c, s, target).main, s)}
    return float(sum(estimate(s, c, target) for c, s in own if c not in within))


def _key(workload: Workload, target: Target) -> str:
    """The name of a record; empty if none is kept: other processes lack the user's schedule and words."""
    if knobs.schedule() or registered_words():
        return ""
    told = (
        type(workload).__name__,
        workload.text,
        workload.direction,
        workload.behind,
        workload.math,
        stamp(workload, target),
    )
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _read(content: Content | None) -> float | str | None:
    """What a record says; None if it is unreadable."""
    us, why = (content or {}).get("us"), (content or {}).get("why")
    if type(us) is float and isfinite(us):
        return us
    return why if isinstance(why, str) and why else None
