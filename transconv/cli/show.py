"""``show``: a problem's computations, schedule, stages and source, for reading. ``words``: what the words
of a schedule mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import unified_diff

from transconv.backend_triton import emit
from transconv.cli.arguments import computations, options
from transconv.compute import Compute, Workload, describe, kernels
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, LayerRegistry, Prop, build, marked
from transconv.ir import Kernel, readable
from transconv.passes import EMIT, PROBLEM, SCHEDULE, TOGETHER, Form, forms, lower, stages, told_addresses
from transconv.runtime import PlanStep, build_compute, header, kernel_name, plan_steps
from transconv.schedule import Block, Schedule, Scheduled, footprint, told, why_not, words
from transconv.selection import choice
from transconv.selection.proposals import heuristics
from transconv.support import ScheduleError, nearest
from transconv.target import Target

RULE = "-" * 100
GRADIENT = "of a computation: the gradient of this tensor, which it reads, or of all tensors"


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "show",
        "print how a problem becomes a kernel",
        "Prints the computation (axes with kinds, views, masks, and the masks that were proven\n"
        "unnecessary), the schedule and alternatives to it, the kernel, and which addresses it forms and\n"
        "reaches; or any stage between them.",
        (
            f"show {options.EXAMPLE} --prop bwd_d",
            f"show {options.EXAMPLE} --stage gridwise",
            f"show {options.EXAMPLE} --diff",
        ),
        show,
    )
    options.add_problem(made)
    options.add_props(made, "fwd")
    made.add_argument(
        "--stage",
        type=_stage,
        choices=[*_names(), "all"],
        metavar="STAGE",
        help=f"print this stage: {', '.join(_names())}, or all",
    )
    made.flag("--diff", "print what each pass changed, as unified diffs")
    options.add_chip(made)
    options.add_epilogue(made)
    made.option("--gradient", "NAME", GRADIENT)
    options.add_schedule(made)


def show(words: argparse.Namespace) -> int:
    if found := computations.asked(words, sizes=True):
        found = computations.gradients(found, words.gradient) if words.gradient else found
        for compute in found:
            for text in text_pages(compute, options.target(words.target), words):
                print(text)
        if words.stage is None and not words.diff and "?" in (text := " ".join(words.problem)):
            for prop in options.props(words):
                _print_registry(text, prop, options.chip(words.target))
        return 0
    problem, target = options.problem(words), options.chip(words.target)
    for prop in options.props(words):
        for text in pages(problem, prop, target, words):
            print(text)
    return 0


def _print_registry(text: str, prop: Prop, target: Target) -> None:
    """The kernels for any size of a layer, as calls of torch choose among them."""
    problem = ConvProblem.parse(marked(text)[0])
    made = LayerRegistry(problem, prop, target, Epilogue(), True, False)
    print(
        "\n".join(
            [
                "",
                f"of {prop} at {problem.shape_text}, with TRANSCONV_SIZES=any:",
                *made.told((problem.mb, *problem.i)),
            ]
        )
    )


def pages(problem: ConvProblem, prop: Prop, target: Target, words: argparse.Namespace) -> Iterator[str]:
    """The requested pieces of output, one after another."""
    workload = ConvWorkload(problem, prop, options.epilogue(words))
    steps = plan_steps(workload, target, options.schedule(words))
    shown = words.stage
    if not steps:
        yield f"{problem} {prop}: nothing to compute, the result has no elements"
        return
    yield f"problem    {problem}\n           {prop} on {target}, {_sizes(problem)}"
    if shown == PROBLEM.name:
        return
    works = [ShownStep(workload, a, c, target) for a, c in steps]
    for w in works:
        if reason := why_not(w.schedule, w.compute, target):
            raise ScheduleError(f"{w.schedule}: {reason}")
    whole = shown is None and not words.diff
    first, *later = forms()
    if whole or shown in (first.name, "all"):
        yield from (f"\n{describe(w.compute)}" for w in works)
    if whole or shown in (SCHEDULE.name, "all"):
        yield from _schedules(works)
    for form in later:
        if shown in (form.name, "all"):
            yield from (w.form(form) for w in works)
    if whole:
        yield from (f"\n{RULE}\n{w.source}\n{w.addresses}" for w in works)
    else:
        for w in works:
            yield from w.diffs(shown) if words.diff else w.stages(shown)
    if whole or shown in (TOGETHER.name, "all"):
        made = build(problem, prop, target, options.schedule(words), options.epilogue(words))
        phases = any(w.compute.phase for w in works)
        joined = [s for s in made.steps if phases and s.compute.does == "compute" and not s.compute.phase]
        yield from _together(joined, not whole)
        if shown == TOGETHER.name and not joined:
            yield f"\nnothing to put together: {', '.join(s.compute.name for s in made.steps)}"


def text_pages(compute: Compute, target: Target, words: argparse.Namespace) -> Iterator[str]:
    """The same of a computation that is given as text."""
    made, shown = build_compute(compute, target, options.schedule(words)), words.stage
    works = [ShownStep(made.workload, s.compute, s.schedule, target) for s in made.steps]
    if words.diff:
        for w in works:
            yield from w.diffs(shown)
        return
    yield str(compute) if shown in (None, PROBLEM.name, "all") else f"compute {compute.name}"
    if shown is None:
        yield from (f"\n{describe(part)}" for part in kernels(compute))
    first, *later = forms()
    if shown in (first.name, "all"):
        yield from (f"\n{describe(w.compute)}" for w in works)
    for form in later:
        if shown in (form.name, "all"):
            yield from (w.form(form) for w in works)
    if shown in (None, SCHEDULE.name, "all"):
        yield ""
        for w in works:
            reduced = told(w.schedule, w.compute, target)
            yield "\n".join(
                [
                    f"schedule   {w.schedule}",
                    *([f"reduced    {reduced}"] if reduced else []),
                    *choice.behind(w.schedule, w.compute, target),
                ]
            )
        yield f"chosen     {made.why}"
        for t in made.workspaces.values():
            size = t.layout.span * t.dtype.bytes
            yield f"warning    {t.name} lies in memory between kernels, {size} bytes"
    if shown not in (None, EMIT.name):
        for w in works:
            yield from w.stages(shown)
    if shown in (None, EMIT.name):
        yield f"\n{made.source}"
    if shown is None:
        yield from (f"\n{w.addresses}" for w in works)


def _together(joined: list[PlanStep], stages: bool) -> Iterator[str]:
    """The kernel that does all stride phases, where one does."""
    for step in joined:
        title = f"\n---- {TOGETHER.name}: {TOGETHER.phrase} "
        if stages:
            yield f"{title:-<101}\n{readable(step.kernel)}"
        yield f"\n{RULE}\n{step.source}"


def _schedules(works: list[ShownStep]) -> Iterator[str]:
    """Each schedule once, with its neighbours; stride phases mostly share theirs."""
    for schedule in dict.fromkeys(w.schedule for w in works):
        first = next(w for w in works if w.schedule == schedule)
        users = [w.compute.name for w in works if w.schedule == schedule]
        of = f"  (of {', '.join(users)})" if len(works) > 1 else ""
        yield "\n".join([f"\nschedule   {schedule}{of}", *why(first), *neighbours(first)])


def _sizes(p: ConvProblem) -> str:
    return f"{p.flops() / 1e9:.3g} GFLOP, {p.bytes_moved() / 1e6:.3g} MB"


@dataclass
class ShownStep:
    """One launch, lowered on demand."""

    workload: Workload
    compute: Compute
    schedule: Schedule
    target: Target

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.made: list[tuple[str, Kernel]] = []

    def lowered(self) -> list[tuple[str, Kernel]]:
        if not self.made:
            name = kernel_name(self.workload, self.compute, self.schedule, self.target)
            self.made = lower(
                self.compute, self.schedule, self.target, name, self.workload.math, seconds=self.seconds
            )
        return self.made

    @property
    def source(self) -> str:
        kernel = self.lowered()[-1][1]
        return emit(
            kernel,
            header(self.workload, self.compute, self.schedule, self.target),
            "early" in self.target.features,
        )

    @property
    def addresses(self) -> str:
        """What its kernel's accesses form and reach, and the box of each tensor that one program does."""
        boxes: dict[str, None] = {}
        for view in self.compute.views():
            of = " x ".join(f"{d}={n}" for d, n in zip(view.tensor.dims, view.tensor.shape, strict=True))
            box = " x ".join(map(str, footprint(self.schedule, self.compute, view)))
            boxes[f"    {view.tensor.name:<12} {box or '1'} of {of or '1'}"] = None
        return "\n".join(
            [
                told_addresses(self.lowered()[-1][1]),
                "footprint  of one program, with what lies between and around the elements",
                *boxes,
            ]
        )

    def title(self, stage: str) -> str:
        spent = f"  ({self.seconds[stage] * 1e3:.0f} ms)" if stage in self.seconds else ""
        (phrase,) = (s.phrase for s in stages() if s.name == stage)
        return f"\n---- {stage}: {phrase}{spent} ---- {self.compute.name} "

    def form(self, form: Form) -> str:
        """The computation in a later form, where that differs from the one before."""
        whole = Scheduled(self.compute, self.schedule, self.target)
        made, before = form.of(whole), forms()[forms().index(form) - 1].of(whole)
        return f"{self.title(form.name):-<101}\n{'(unchanged)' if made == before else describe(made)}"

    def stages(self, wanted: str) -> Iterator[str]:
        """The kernel after the stage, or after every one."""
        for name, kernel in self.lowered():
            if wanted in (name, "all"):
                yield f"{self.title(name):-<101}\n{readable(kernel)}"
        if wanted in (EMIT.name, "all"):
            yield f"{self.title(EMIT.name):-<101}\n{self.source}"

    def diffs(self, wanted: str | None) -> Iterator[str]:
        """The changes of each stage in the text."""
        before: list[str] = []
        for name, kernel in self.lowered():
            after = readable(kernel).splitlines()
            if wanted in (None, name, "all"):
                yield f"{self.title(name):-<101}"
                off = "(switched off)" if name not in self.seconds else "(unchanged)"
                changed = unified_diff(before, after, lineterm="", n=2)
                yield "\n".join([*changed][2:]) or off
            before = after
        if wanted in (None, EMIT.name, "all"):
            yield f"{self.title(EMIT.name):-<101}\n{self.source}"


def why(work: ShownStep) -> list[str]:
    """Why the schedule was chosen, the parts of its estimate, and the refused schedules."""
    compute, target = work.compute, work.target
    choices = choice.ranked(compute, target, work.workload)
    if work.schedule != choices[0].schedule:
        return choice.given(work.schedule, choices, compute, target)
    return [*choice.reasons(choices[0], choices, compute, target), *choice.refusals(compute, target)]


def neighbours(work: ShownStep, most: int = 9) -> list[str]:
    """Schedules one step away from the chosen one, with the verdict on each."""
    compute, schedule, target = work.compute, work.schedule, work.target
    chosen = heuristics.estimate(schedule, compute, target)
    lines = []
    for change, other in _near(schedule, compute):
        if reason := why_not(other, compute, target):
            verdict = f"refused: {reason}"
        else:
            factor = heuristics.estimate(other, compute, target) / chosen
            verdict = f"legal, estimated to take {factor:.2f} times as long"
        lines.append(f"           {change:<23} {verdict}")
    return lines[:most]


def _near(schedule: Schedule, compute: Compute) -> Iterator[tuple[str, Schedule]]:
    for i, block in enumerate(schedule.blocks):
        for extent in (block.extent * 2, block.extent // 2):
            if extent >= 1:
                changed = Block(block.axes, extent)
                yield (
                    str(changed),
                    replace(schedule, blocks=(*schedule.blocks[:i], changed, *schedule.blocks[i + 1 :])),
                )
    yield from ((f"stages={n}", replace(schedule, stages=n)) for n in (schedule.stages + 1,))
    other = "fma" if schedule.unit == "mma" else "mma"
    yield other, replace(schedule, unit=other)
    if compute.axes_of("K"):
        yield "split_k=4 reduce=atomic", replace(schedule, split_k=4, reduce="atomic")


def _names() -> list[str]:
    return [s.name for s in stages()]


def _stage(name: str) -> str:
    return "compute" if name == "algorithm" else name  # its name before 0.1; for one release


# -- words ------------------------------------------------------------------------------------------


def add_words(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "words",
        "explain the words of a schedule",
        "Prints each word of a schedule with its default, its values and its meaning.",
        ("words", "words split_k reduce"),
        explain,
    )
    made.add_argument("word", nargs="*", help="the words to print; default: all")


def explain(given: argparse.Namespace) -> int:
    known = {w.name: w for w in words()}
    if unknown := [name for name in given.word if name not in known]:
        raise ScheduleError(
            f"there is no word '{unknown[0]}'; expected some of {' '.join(known)}"
            f"{nearest(unknown[0], known)}"
        )
    for name in given.word or known:
        word = known[name]
        default = f"default {word.default}" if word.default != "" else "default: none"
        print(f"{name:<9} {word.expected} ({default})\n          {word.says}")
    return 0
