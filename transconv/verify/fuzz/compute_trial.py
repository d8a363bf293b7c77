"""A trial of a computation: drawn from a seed and a number, written to and read from one line, run.

A trial is a computation's text, a chip and a legal schedule, the same for everybody. Its line is

    --target=sm_90 --schedule=m:8+k:16+fma compute rows ;; axes m=21 k=37 ;; read x = X[m, k] ;; ...

A schedule that says ``red=`` or ``row=`` alone gets a tile, and several kernels, as selection has it.
Where sizes are arguments, one kernel is run at several: the edges of what it requires first."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np

from transconv.compute import END, Alone, Compute, kernels, one_line, parse
from transconv.runtime import Plan, build_compute, plan_steps
from transconv.schedule import Block, Schedule
from transconv.support import AddressError, ProblemError, ScheduleError, TransconvError
from transconv.target import Target
from transconv.verify import any_size
from transconv.verify.computation import ComputationCase, after_every_pass
from transconv.verify.fuzz import compute_texts, legal_schedules
from transconv.verify.fuzz.conv_trial import interpreted_steps
from transconv.verify.fuzz.trial import MOST_STEPS, Trial, TrialRun, chance, less, simpler_schedules
from transconv.verify.machine import executable

TARGETS = ("sm_90", "sm_90", "sm_80", "gfx942")
SIZES = 3  # at which one kernel is run that takes them as arguments
TRIES = 6  # to complete words without a tile
Lines = list[str]
NAME = r"[A-Za-z_]\w*"
LINE = re.compile(r"((?:--(?:target|schedule)=\S+\s+)*)(compute\s.*)", re.DOTALL)


@dataclass(frozen=True)
class ComputeTrial(Trial):
    """A computation's text, and what its kernel is made for. Without a schedule the best is taken."""

    text: str
    target: str
    schedule: str = ""

    def __str__(self) -> str:
        schedule = "+".join(self.schedule.replace("|", " ").split())
        words = [f"--target={self.target}", *([f"--schedule={schedule}"] if schedule else [])]
        return " ".join((*words, one_line(self.text)))

    @staticmethod
    def parse(line: str) -> ComputeTrial:
        """Read a line. Raises ProblemError, ComputeError or ScheduleError, one sentence."""
        found = LINE.fullmatch(line.strip())
        if found is None:
            raise ProblemError(
                f"the trial '{line[:80]}'; expected --target=, --schedule=, and a text "
                "that begins with compute"
            )
        said = dict(word.removeprefix("--").split("=", 1) for word in found[1].split())
        schedule = said.get("schedule", "").replace("+", " ")
        parse(found[2])
        Target.parse(said.get("target", "sm_90"))
        return ComputeTrial(
            one_line(found[2]),
            said.get("target", "sm_90"),
            str(Schedule.parse(schedule)) if schedule else "",
        )

    @cached_property
    def compute(self) -> Compute:
        return parse(self.text)

    @property
    def facts(self) -> dict[str, str]:
        c = self.compute
        found = {
            "computation": c.name,
            "chip": self.target,
            "math": c.math,
            "dtype": ":".join(sorted({t.dtype.name for t in c.tensors})),
            "sizes": "arguments" if c.named else "numbers",
            "stores": "add" if c.added else "apart",
            "places": "told by values" if c.names.indices else "told by axes",
            "factors": "none" if c.factors is None else "computed" if c.prologue else "read",
            "kernels": "one" if len(kernels(c)) == 1 else "several",
        }
        if self.schedule:
            found |= legal_schedules.words(Schedule.parse(self.schedule))
        return found

    def plan(self, target: Target | None = None) -> Plan:
        """The kernels of the computation, for its target or another one."""
        schedule = Schedule.parse(self.schedule) if self.schedule else None
        return build_compute(self.compute, target or Target.parse(self.target), schedule)

    def sizes(self) -> list[dict[str, int]]:
        """The sizes to run one kernel at; one empty choice where they are numbers."""
        return any_size.drawn(self.compute, SIZES) if self.compute.named else [{}]

    def repeated(self) -> str:
        """The command that repeats the trial."""
        words = ["transconv", "check", f"--target={self.target}"]
        words += [f"--schedule={self.schedule}"] if self.schedule else []
        return shlex.join([*words, self.text])

    def simpler(self) -> Iterator[ComputeTrial]:
        return simpler(self)

    def run(self, run: TrialRun) -> str:
        """Compile, run and judge; in the interpreter of the IR after every pass."""
        started = time.perf_counter()
        chip = Target.parse(self.target)
        try:
            plan = self.plan(chip if run.way in ("numpy", "device") else executable(chip, "cpu"))
        except ScheduleError:  # such as the matrix unit that rounds, which no interpreter has
            if run.way != "triton":
                raise
            plan = None
        if run.way == "triton" and (
            plan is None
            or interpreted_steps(plan) > MOST_STEPS
            or any(s.schedule.via != "tl" for s in plan.steps)
        ):
            run.interpret()
            plan = self.plan()
        assert plan is not None
        run.row |= {"kernels": len(plan.steps), "generate_s": round(time.perf_counter() - started, 4)}
        return _interpreted(self, plan) if run.way == "numpy" else _launched(self, plan, run.device)

    def problem(self) -> str:
        """What is wrong, and after which pass; empty if nothing is, or if no kernel can do the
        computation."""
        try:
            return _interpreted(self, self.plan())
        except Exception as error:  # a drawn schedule is legal: whatever is raised is ours
            return f"{type(error).__name__}: {error}"


def _interpreted(trial: ComputeTrial, plan: Plan) -> str:
    if not _reads_back(trial.compute):
        return f"its text does not read back: {trial.compute}"
    first, *others = trial.sizes()
    for stage, judged in after_every_pass(trial.compute, plan, first):
        if judged.problem:
            return f"{_at(first)}after {stage}: {judged.problem}"
    for sizes in others:
        judged = ComputationCase(trial.compute.at(**sizes)).interpreted(
            *(s.kernel.at(sizes) for s in plan.steps)
        )
        if judged.problem:
            return f"{_at(sizes)}after the last pass: {judged.problem}"
    return ""


def _launched(trial: ComputeTrial, plan: Plan, device: str) -> str:
    """On exact and on float data: two launches, of which the second takes another way to the driver."""
    for sizes in trial.sizes():
        for data in ("exact", "float"):
            judged = ComputationCase(trial.compute.at(**sizes), data).launched(plan, device)
            if judged.problem:
                return f"{_at(sizes)}{data} data: {judged.problem}"
    return ""


def _at(sizes: dict[str, int]) -> str:
    return f"at {' '.join(f'{n}={v}' for n, v in sizes.items())} " if sizes else ""


def _reads_back(compute: Compute) -> bool:
    """Whether the printed text parses back to the same computation."""
    again = parse(str(compute))
    if compute.named:
        return again == compute
    told = (ComputationCase(c).answers for c in (compute, again))
    return all(
        np.array_equal(a.value, b.value, equal_nan=True)
        for a, b in zip(*(x.values() for x in told), strict=True)
    )


def draw_trial(seed: int | str, number: int, only: str = "") -> ComputeTrial:
    """Trial ``number`` of a seed: the same for everybody. ``only``: the chip of all trials."""
    rng = Random(f"transconv computes {seed} {number}")
    text = any_size.drawn_text(rng) if chance(rng, 12) else compute_texts.text(rng)
    target = rng.choice((only,) if only else TARGETS)
    made = parse(text)
    chip = Target.parse(target)
    if made.sum is not None and made.streams and chance(rng, 4):
        bare = next((s for s in _bare(rng) if completes(s, made, chip)), None)
        if bare is not None:
            return ComputeTrial(text, target, str(bare))
    schedule = None  # several kernels have axes of their own, and get the best
    if kernels(made) == (made,):
        schedule = legal_schedules.schedule(rng, [made], chip)
    return ComputeTrial(text, target, str(schedule) if schedule else "")


def _bare(rng: Random) -> Iterator[Schedule]:
    """Schedules that say how rows are divided, or read, and leave the tile to selection."""
    for _ in range(TRIES):
        red = rng.choice(("lane", "warp", "block", "split", "split", ""))
        row = rng.choice(("", "held", "again")) if red else rng.choice(("held", "again"))
        reduce = rng.choice(("partials", "atomic")) if red == "split" else "partials"
        yield Schedule(red=red, row=row, reduce=reduce)


def completes(schedule: Schedule, compute: Compute, target: Target) -> bool:
    """Whether selection finds tiles for what a schedule says without any."""
    try:
        plan_steps(Alone(compute), target, schedule)
    except ScheduleError as error:
        return isinstance(error, AddressError)  # which the trial reports
    return True


# -- simpler trials ----------------------------------------------------------------------------------


def simpler(trial: ComputeTrial) -> Iterator[ComputeTrial]:
    """Legal trials that differ from this one in one respect."""
    lines = [line.strip() for line in one_line(trial.text).split(END)]
    for made in _ways(trial, lines):
        try:
            if made != trial and _is_legal(made):
                yield made
        except (TransconvError, ValueError):  # no such computation
            continue


def smaller(trial: ComputeTrial) -> Iterator[ComputeTrial]:
    """Legal trials that have half of the largest axis that can be halved."""
    lines = str(trial.compute).splitlines()
    lines = [line.strip() for line in lines]
    for name, size in sorted(trial.compute.sizes.items(), key=lambda x: -x[1]):
        for made in _axes(lines, name, [size // 2]) if size > 1 else ():
            try:
                if _is_legal(found := _on(trial, made)):
                    yield found
            except (TransconvError, ValueError):
                continue


def _is_legal(trial: ComputeTrial) -> bool:
    compute, target = trial.compute, Target.parse(trial.target)
    if not trial.schedule or not all(x.size for x in compute.axes):
        return not trial.schedule
    schedule = Schedule.parse(trial.schedule)
    if (schedule.red or schedule.row) and not schedule.blocks:
        return completes(schedule, compute, target)
    return kernels(compute) == (compute,) and legal_schedules.is_legal(schedule, [compute], target)


def _ways(trial: ComputeTrial, lines: Lines) -> Iterator[ComputeTrial]:
    if trial.schedule:
        yield replace(trial, schedule="")
        said = Schedule.parse(trial.schedule)
        yield from (replace(trial, schedule=str(s)) for s in simpler_schedules(said))
    yield from (
        _on(trial, made)
        for ways in (_fewer, _numbers, _values, _coordinates, _shorter)
        for made in ways(lines)
    )


def _on(trial: ComputeTrial, lines: Lines) -> ComputeTrial:
    """The trial of another text; blocks forget axes that are gone."""
    made = replace(trial, text=f" {END} ".join(lines))
    if not trial.schedule:
        return made
    known = {x for line in lines if line.startswith("axes ") for x in re.findall(rf"({NAME})=", line)}
    schedule = Schedule.parse(trial.schedule)
    kept = [(tuple(a for a in b.axes if a in known), b.extent) for b in schedule.blocks]
    order = ".".join(a for a in schedule.order.split(".") if a in known)
    return replace(
        made,
        schedule=str(
            replace(schedule, blocks=tuple(Block(axes, n) for axes, n in kept if axes), order=order)
        ),
    )


def _fewer(lines: Lines) -> Iterator[Lines]:
    """Without a line, a condition, a fill, a way to multiply."""
    for at, line in enumerate(lines):
        before, after = lines[:at], lines[at + 1 :]
        if not line.startswith(("compute ", "axes ", "sizes ")):
            yield before + after
        for part in (
            r" math=\w+",
            r" where [^=]*?(?= \+?= | else |$)",
            r" where .*?(?= else |$)",
            r" else \S+",
            r" strides\([\d,]*\)",
        ):
            if (shorter := re.sub(part, "", line)) != line and "where(" not in re.findall(part, line):
                yield [*before, shorter, *after]
        if line.startswith("tensor "):
            yield [*before, re.sub(rf"^(tensor {NAME}) \w+", r"\1 f32", line), *after]


def _numbers(lines: Lines) -> Iterator[Lines]:
    """A number in place of a size that is an argument; a condition less."""
    at = next((i for i, line in enumerate(lines) if line.startswith("sizes ")), None)
    if at is None:
        return
    words = [w.strip() for w in lines[at].removeprefix("sizes ").split(",")]
    for word in words:
        found = re.match(rf"({NAME})=(\d+)", word)
        gone = rf"\b{found[1]}\b" if found else re.escape(word)  # a size, and what is asked of it
        rest = [w for w in words if not re.search(gone, w)]
        others = [*lines[:at], *([f"sizes {', '.join(rest)}"] if rest else []), *lines[at + 1 :]]
        if found is None:
            yield others
            continue
        yield [re.sub(rf"\b{found[1]}\b", found[2], line) for line in others]


def _values(lines: Lines) -> Iterator[Lines]:
    """A name, or a part, in place of a value."""
    known: list[str] = []
    for at, line in enumerate(lines):
        word, _, rest = line.partition(" ")
        if word in ("let", "store"):
            target, equals, value = re.split(r"(?<![=<>!])(\s\+?=)(?!=)", line, maxsplit=1)
            inner = [*known, *re.findall(r"\(([^();]+)\)", value), *re.split(r" [-+*/] ", value.strip())]
            for other in dict.fromkeys(p.strip() for p in inner):
                if other != value.strip() and len(other) < len(value):
                    yield [*lines[:at], f"{target}{equals} {other}", *lines[at + 1 :]]
        if word in ("let", "read"):
            known.append(rest.partition("=")[0].strip())


def _coordinates(lines: Lines) -> Iterator[Lines]:
    """An axis, or the first position, in place of what is computed of it."""
    for at, line in enumerate(lines):
        found = re.search(r"\[(.*)\]", line) if line.startswith(("read ", "store ")) else None
        if found is None:
            continue
        parts = re.split(r",\s*(?![^()]*\))", found[1])
        for i, part in enumerate(parts):
            for other in (*dict.fromkeys(re.findall(NAME, part)), "0"):
                if other != part.strip():
                    changed = ", ".join((*parts[:i], other, *parts[i + 1 :]))
                    yield [*lines[:at], line.replace(found[0], f"[{changed}]", 1), *lines[at + 1 :]]


def _shorter(lines: Lines) -> Iterator[Lines]:
    at = next(i for i, line in enumerate(lines) if line.startswith("axes "))
    for name, size in re.findall(rf"({NAME})=(\d+)", lines[at]):
        yield from _axes(lines, name, less(int(size)))


def _axes(lines: Lines, name: str, sizes: list[int]) -> Iterator[Lines]:
    """An axis of other sizes, with the dimensions that are as large, and alone."""
    at = next(i for i, line in enumerate(lines) if line.startswith("axes "))
    size = next(n for a, n in re.findall(rf"({NAME})=(\d+)", lines[at]) if a == name)
    for n in sizes:
        made = [*lines[:at], re.sub(rf"\b{name}={size}\b", f"{name}={n}", lines[at]), *lines[at + 1 :]]
        yield [
            re.sub(rf"(?<![\w.]){size}(?=[\],])", str(n), line) if line.startswith("tensor ") else line
            for line in made
        ]
        yield made
