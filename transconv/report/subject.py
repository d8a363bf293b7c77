"""The data of a page: sections with subjects, each a plan with everything the page shows about it; of its
schedule the words, the alternatives with their estimates or refusals, and what its launches require."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transconv.backend_triton import Answer, grid_size, is_explicit, parameters
from transconv.compute import Compute, Workload
from transconv.cost import estimate
from transconv.runtime import Plan, Planned
from transconv.schedule import Schedule, Scheduled, Word, why_not, words
from transconv.target import Target

Lines = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class LabeledTime:
    """A time in microseconds and its label; ``own``: a kernel of ours; ``from_estimate``: estimated, not
    measured; ``remark``: device and versions, or what else was compared."""

    name: str
    us: float
    own: bool = False
    from_estimate: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Subject:
    """One plan. ``title`` names it, ``about`` describes it in a sentence; ``planned``: every computation
    with its schedule, copies and second stages of sums included; ``reasons``: why each schedule was
    chosen, as (heading, text); ``answers``: the machine code of each launch, or why there is none, empty
    where nothing was compiled; ``times``: measured ones."""

    title: str
    about: str
    workload: Workload
    target: Target
    planned: Planned
    plan: Plan
    reasons: Mapping[Schedule, Lines] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    times: tuple[LabeledTime, ...] = ()
    remarks: tuple[str, ...] = ()
    command: str = ""

    @property
    def mains(self) -> list[tuple[Compute, Schedule]]:
        """The computations that do the work, without copies, second stages, and those of no elements."""
        return [(c, s) for c, s in self.planned if c.does == "compute" and all(x.size for x in c.axes)]

    @property
    def scheduled(self) -> list[Scheduled]:
        return [Scheduled(c, s, self.target) for c, s in self.mains]


@dataclass(frozen=True)
class Section:
    """The subjects of one problem, under one heading; ``facts``: names and values that describe it."""

    title: str
    facts: Lines
    subjects: tuple[Subject, ...]
    refusals: Lines = ()  # computations without a kernel, with reasons


MORE = {"merge": (2, 4, 8), "split_k": (2, 4), "stages": (2, 4, 6), "group_m": (1, 16), "order": (),
        "programs": (0,), "regs": ()}
PACKS = ("", "a", "b", "c", "a.b", "a.b.c")


@dataclass(frozen=True)
class ScheduleWord:
    """A word of the schedule: its value, its meaning, whether the value is the default."""

    word: str
    value: str
    says: str
    usual: bool


@dataclass(frozen=True)
class AlternativeSchedule:
    """The schedule with one word changed: ``factor`` times the estimated time, or why it is not legal."""

    change: str
    factor: float | None
    reason: str


def explained(whole: Scheduled) -> list[ScheduleWord]:
    """Blocks first, then the words in the order of the table."""
    schedule, compute = whole.schedule, whole.grouped
    roles = {"M": "rows of the result", "N": "columns of the result", "K": "the sum", "B": "batches"}
    made = []
    for b in schedule.blocks:
        kind = compute.kind(b.first)
        what = "step of the sum" if kind == "K" else "tile"
        along = ", ".join(f"{a} ({compute.size(a)})" for a in b.axes)
        made.append(
            ScheduleWord(
                str(b),
                str(b.extent),
                f"{b.extent} positions along {along} make one {what}; "
                f"{'they are' if len(b.axes) > 1 else 'it is'} {roles[kind]}.",
                False,
            )
        )
    for word in words():
        value = schedule.word(word.name)
        made.append(ScheduleWord(word.name, str(value) or "none", word.says, value == word.default))
    return made


def others(whole: Scheduled) -> list[AlternativeSchedule]:
    """The schedule with each word at each of its other values, refusals with their reasons."""
    schedule, compute, target = whole.schedule, whole.compute, whole.target
    now = estimate(schedule, compute, target)
    made = []
    for word in words():
        for value in _values(word):
            if value == schedule.word(word.name):
                continue
            other = schedule.with_words(**{word.name: value})
            change = str(value) if word.name == "unit" else f"{word.name}={value}" if value != "" else (
                f"no {word.name}=")
            try:
                if reason := why_not(other, compute, target):
                    made.append(AlternativeSchedule(change, None, reason))
                else:
                    made.append(AlternativeSchedule(change, estimate(other, compute, target) / now, ""))
            except (ArithmeticError, LookupError) as error:
                made.append(AlternativeSchedule(change, None, f"there is no estimate: {error}"))
    return made


def _values(word: Word) -> tuple[object, ...]:
    if word.name == "pack":
        return PACKS
    return MORE.get(word.name, word.values if isinstance(word.values, tuple) else ())


def requirements(plan: Plan) -> list[tuple[str, str]]:
    """What each launch needs: programs, warps, aligned tensors, cleared memory."""
    made = []
    for tensor in plan.workload.tensors:
        sizes = " ".join(f"{d}={n}" for d, n in zip(tensor.dims, tensor.shape, strict=True))
        made.append((tensor.name, f"{tensor.dtype}, {sizes}, in memory {tensor.layout}"))
    for name, space in plan.workspaces.items():
        size = space.layout.span * space.dtype.bytes
        made.append((f"workspace {name}", f"{size} bytes of {space.dtype}"))
    for step in plan.steps:
        boxed = [p.tensor.name for p in parameters(step.kernel) if p.box is not None]
        needs = [f"{grid_size(step.kernel)} programs of {step.schedule.warps} warps"]
        if boxed:
            needs.append(f"descriptors of boxes for {', '.join(sorted(boxed))}, which begin at multiples "
                        "of 16 bytes")
        if is_explicit(step.kernel):
            needs.append("Gluon, with warps in roles")
        if step.zero is not None:
            needs.append(f"{step.zero.name} is cleared first")
        made.append((f"launch {step.compute.name}", "; ".join(needs)))
    return made
