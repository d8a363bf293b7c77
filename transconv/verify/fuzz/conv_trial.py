"""A trial, drawn from a seed and a number, and written to and read from one line of text.

A trial says nothing about a machine. It is a problem, a direction, the chip it is
compiled for, a schedule, an epilogue, which passes run, and by how many elements tensors are shifted
from alignment. Trial ``i`` of seed ``s`` is the same on every machine.

The line is benchdnn's, with options of ours for what benchdnn has no word for:

    --dir=BWD_W --dt=f16:f16:f32 --stag=nhwc --wtag=oihw --dtag=nhwc --target=sm_90
        --schedule=ic:16+oc:16+ow:16+mma+swap=1 --epilogue=bias+relu --passes=-cse,-hoist mb2ic3...

It has no blanks inside of words: blanks of a schedule are written ``+``, commas of strides ``_``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from random import Random

from transconv.compute import Compute
from transconv.conv import (
    CompiledDirection,
    ConvProblem,
    ConvWorkload,
    Epilogue,
    Prop,
    compiler,
    computes,
    for_weights,
)
from transconv.ir import SHORT
from transconv.passes import passes
from transconv.runtime import Plan
from transconv.schedule import Block, Schedule, Scheduled, k_steps, programs
from transconv.selection.proposals import heuristics
from transconv.support import ProblemError, TransconvError, knobs
from transconv.target import Target
from transconv.verify.case import ProblemCase, epilogue_operands
from transconv.verify.fuzz import conv_problems, legal_schedules
from transconv.verify.fuzz.trial import (
    MOST_STEPS,
    Trial,
    TrialRun,
    chance,
    simpler_problems,
    simpler_schedules,
)
from transconv.verify.machine import executable

DIRECTIONS = {Prop.FWD: "FWD_D", Prop.BWD_D: "BWD_D", Prop.BWD_W: "BWD_W"}
GUARD = 1 << 12  # elements on either side: fewer than a check has, there are many small tensors
SETS_APART = 7919  # between the seeds of two sets of values
MOST_STEPS_TWICE = 100  # of loops in Triton's interpreter, of trials that it runs on float data, too
LAUNCHES = ("first", "second")  # through Triton's dispatcher, which compiles, then as a kept kernel
DATA = ("exact", "float")
FEW_KERNELS, MANY_KERNELS = 2, 6  # stride phases that are kernels: rare above, very rare


@dataclass(frozen=True)
class ConvTrial(Trial):
    """A trial of a convolution. ``schedule`` is None where the heuristic chooses; ``shift``: elements
    between a multiple of 16 bytes and the first of every tensor; ``passes``: switched against default;
    ``values``: which numbers the tensors hold, of scales and zero points too."""

    problem: ConvProblem
    prop: Prop
    target: str = "sm_90"
    schedule: Schedule | None = None
    epilogue: str = ""
    passes: tuple[tuple[str, bool], ...] = ()
    shift: int = 0
    values: int = 0

    def __str__(self) -> str:
        shape, *words = str(self.problem).split()
        said = dict(word.split("=", 1) for word in words)
        dtypes = ":".join(t.name for t in self.problem.dtypes)
        tags = _three_tags(said.get("tag", "nchw"), self.problem)
        options = {
            "dir": DIRECTIONS[self.prop],
            "dt": dtypes,
            **{k: v.replace(",", "_") for k, v in zip(("stag", "wtag", "dtag"), tags, strict=True)},
            "math": said.get("math", ""),
            "target": self.target,
            "schedule": _glued(self.schedule),
            "epilogue": self.epilogue,
            "passes": ",".join(f"{'+' if on else '-'}{n}" for n, on in self.passes),
            "shift": str(self.shift or ""),
            "values": str(self.values or ""),
        }
        return " ".join([*(f"--{k}={v}" for k, v in options.items() if v), shape])

    @staticmethod
    def parse(line: str) -> ConvTrial:
        """Read a line. Raises ProblemError or ScheduleError, one sentence."""
        said: dict[str, str] = {}
        shapes = []
        for word in line.split():
            name, _, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                shapes.append(word)
            elif name in OPTIONS:
                said[name] = value
            else:
                raise ProblemError(
                    f"'{word}' in a trial; expected one of " + " ".join(f"--{name}=" for name in OPTIONS)
                )
        ways = [p for p, name in DIRECTIONS.items() if name == said.get("dir", "FWD_D")]
        if len(shapes) != 1 or not ways:
            raise ProblemError(
                f"the trial '{line}' names {len(shapes)} shapes and the direction {said.get('dir')}; "
                f"expected one shape, and --dir= one of {' '.join(DIRECTIONS.values())}"
            )
        tags = [said.get(k, "abx").replace("_", ",") for k in ("stag", "wtag", "dtag")]
        text = f"{shapes[0]} dt={said.get('dt', 'f32')} tag={':'.join(tags)}"
        text += f" math={said['math']}" if "math" in said else ""
        schedule = said.get("schedule", "").replace("+", " ")
        return ConvTrial(
            ConvProblem.parse(text),
            ways[0],
            said.get("target", "sm_90"),
            Schedule.parse(schedule) if schedule else None,
            said.get("epilogue", ""),
            _switches(said.get("passes", "")),
            int(said.get("shift", "0")),
            int(said.get("values", "0")),
        )

    @cached_property
    def computes(self) -> tuple[Compute, ...]:
        """What the schedule is for: all but the sums that zero points and operands of u8 need."""
        workload = ConvWorkload(self.problem, self.prop, Epilogue.parse(self.epilogue))
        return tuple(c for c in workload.computations if not workload.prepares(c))

    @property
    def chip(self) -> Target:
        """The chip, by its record alone: what the machine at hand counts does not matter."""
        made = Target.parse(self.target)
        # Boxes need tensors that begin at multiples of 16 bytes.
        return replace(made, features=made.features - {"box"}) if self.shift else made

    @property
    def switches(self) -> tuple[tuple[str, bool], ...]:
        return self.passes

    def run(self, run: TrialRun) -> str:
        return _ran(self, run)

    def simpler(self) -> Iterator[ConvTrial]:
        return simpler(self)

    def case(self, way: str) -> ProblemCase:
        """Its tensors on the CPU, between guards."""
        return ProblemCase(
            self.problem,
            self.prop,
            self.epilogue,
            "cpu",
            target=self.chip,
            shift=self.shift,
            numpy=way == "numpy",
            guard=GUARD,
        )

    @property
    def facts(self) -> dict[str, str]:
        """A word for each dimension of the drawing."""
        p = self.problem
        orders = {layout_kind(p, name) for name in p.specs}
        found = {
            "direction": self.prop.value,
            "axes": f"{p.ndims}D",
            "dtype": ":".join(dict.fromkeys(t.name for t in p.dtypes)),
            "layout": "+".join(sorted(orders)),
            "groups": "depthwise" if 1 < p.g == p.ic else "grouped" if p.g > 1 else "one",
            "stride": "strided" if max(p.stride) > 1 else "dense",
            "dilation": "dilated" if max(p.dilation) > 1 else "dense",
            "padding": "negative"
            if min(p.pad_hi) < 0
            else "none"
            if not any((*p.pad_lo, *p.pad_hi))
            else "even"
            if p.pad_lo == p.pad_hi
            else "uneven",
            "epilogue": "chain" if ":" in self.epilogue else self.epilogue or "none",
            "passes": "default" if not self.passes else "switched",
            "alignment": "shifted" if self.shift else "aligned",
        }
        if p.src.dtype.name == "f32":
            found["math"] = p.math
        if self.schedule is not None:
            found |= legal_schedules.words(self.schedule)
        return found


OPTIONS = tuple("dir dt stag wtag dtag math target schedule epilogue passes shift values".split())
OPTIONAL = tuple(step.name for step in passes() if step.optional)


def _switches(text: str) -> tuple[tuple[str, bool], ...]:
    """The passes that a trial switches. Raises ProblemError for a name of none."""
    try:
        made = tuple(knobs.passes.read(text))
    except ValueError:
        raise ProblemError(f"--passes={text}; expected {knobs.passes.legal}") from None
    if unknown := [name for name, _ in made if name not in OPTIONAL]:
        raise ProblemError(
            f"--passes={text}: there is no optional pass '{unknown[0]}'; expected some of "
            + " ".join(OPTIONAL)
        )
    return made


def _glued(schedule: Schedule | None) -> str:
    return "" if schedule is None else "+".join(str(schedule).replace("|", " ").split())


def _three_tags(tag: str, p: ConvProblem) -> tuple[str, str, str]:
    """The three tags that one stands for."""
    parts = tag.split(":")
    if len(parts) == 3:
        return parts[0], parts[1], parts[2]
    if tag == "nchw":
        return "abx", "abx", "abx"
    return tag, for_weights(tag), tag


def layout_kind(p: ConvProblem, name: str) -> str:
    """``nchw``, ``nhwc``, ``blocked``, ``repeated``, ``gaps`` or ``order``."""
    made = p.specs[name].layout
    strides, shape = made.strides(), p.shapes[name]
    if strides is None:
        return "blocked"
    if any(s == 0 and n > 1 for s, n in zip(strides, shape, strict=True)):
        return "repeated"
    if not made.is_dense or made.offset:
        return "gaps"
    kept = [s for s, n in zip(strides, shape, strict=True) if n > 1]
    if kept == sorted(kept, reverse=True):
        return "nchw"
    return (
        "nhwc"
        if shape[1] == 1
        or (
            strides[1] == min(kept)
            and (strides[:1] + strides[2:] == tuple(sorted(strides[:1] + strides[2:], reverse=True)))
        )
        else "order"
    )


def draw_trial(seed: int | str, number: int, target: str = "sm_90", small: bool = False) -> ConvTrial:
    """Trial ``number`` of a seed: the same for everybody. ``small``: of those with a type of 8 bits."""
    rng = Random(f"transconv {seed} {number}")
    while True:
        prop = rng.choice(tuple(Prop))
        problem = conv_problems.drawn(rng, prop)
        if small and not any(t.bits == 8 for t in problem.dtypes):
            continue
        kernels = len(computes(problem, prop))
        if kernels <= FEW_KERNELS or chance(rng, 4 if kernels <= MANY_KERNELS else 40):
            break
    zeros = conv_problems.zeros(rng, problem, prop)
    after = conv_problems.quantised(rng, prop) if small else conv_problems.epilogue(rng, prop)
    trial = ConvTrial(
        problem,
        prop,
        target,
        None,
        after,
        tuple(sorted(conv_problems.switches(rng, OPTIONAL).items())),
        rng.choice((1, 3, 8)) if chance(rng, 10) else 0,
    )
    schedule = legal_schedules.schedule(rng, trial.computes, trial.chip)
    last = ["stochastic"] if problem.specs[prop.result].dtype in SHORT and chance(rng, 12) else []
    words = "+".join([*zeros, *filter(None, [trial.epilogue]), *last])  # the schedule is the product's
    return ConvTrial.parse(str(replace(trial, schedule=schedule, epilogue=words)))


# -- simpler trials ----------------------------------------------------------------------------------


def simpler(trial: ConvTrial) -> Iterator[ConvTrial]:
    """Legal trials that differ from this one in one respect."""
    for made in _ways(trial):
        try:
            known = ConvTrial.parse(str(made))
            legal = [a for a in known.computes if all(x.size for x in a.axes)]
            if known != trial and (
                known.schedule is None
                or (legal and legal_schedules.is_legal(known.schedule, legal, known.chip))
            ):
                yield known
        except (TransconvError, ValueError):  # no such problem
            continue


def _ways(trial: ConvTrial) -> Iterator[ConvTrial]:
    if trial.shift:
        yield replace(trial, shift=0)
    if trial.passes:
        yield replace(trial, passes=())
        for one in trial.passes:
            yield replace(trial, passes=tuple(p for p in trial.passes if p != one))
    ops = Epilogue.parse(trial.epilogue).ops
    if ops:
        yield replace(trial, epilogue="")
    for at in range(len(ops)):
        yield replace(trial, epilogue="+".join(ops[:at] + ops[at + 1 :]))
    if trial.schedule is not None:
        yield from (replace(trial, schedule=c) for c in simpler_schedules(trial.schedule))
    for problem in simpler_problems(trial.problem):
        yield from _on(trial, problem)


def _on(trial: ConvTrial, problem: ConvProblem) -> Iterator[ConvTrial]:
    """The trial for another problem; blocks forget axes that are gone. Nothing where the epilogue cannot
    follow, such as one that rounds at random, to f32."""
    made = replace(trial, problem=problem)
    if trial.schedule is None:
        yield made
        return
    try:
        known = {x.name for a in made.computes[:1] for x in a.axes}
    except TransconvError:
        return
    blocks = []
    for block in trial.schedule.blocks:
        if kept := tuple(a for a in block.axes if a in known):
            blocks.append(Block(kept, block.extent))
    order = ".".join(a for a in trial.schedule.order.split(".") if a in known)
    yield replace(made, schedule=replace(trial.schedule, blocks=tuple(blocks), order=order))


# -- runs --------------------------------------------------------------------------------------------


def _ran(trial: ConvTrial, run: TrialRun) -> str:
    """Compile, run and judge. Data are integers, so that results are compared bit for bit, and then
    random, to find roundings that should not be there."""
    started, row = time.perf_counter(), run.row
    if run.way == "triton" and trial.schedule is not None and trial.schedule.via != "tl":
        run.interpret()  # Triton's interpreter cannot read explicit kernels
    chip = executable(trial.chip, "cpu") if run.way == "triton" else trial.chip
    compiled = compiler.build(
        trial.problem, trial.prop, chip, trial.schedule, Epilogue.parse(trial.epilogue), heuristics.default
    )
    row["kernels"], row["generate_s"] = len(compiled.steps), round(time.perf_counter() - started, 4)
    steps = interpreted_steps(compiled) if run.way == "triton" else 0
    if steps > MOST_STEPS:
        run.interpret()
    slow = MOST_STEPS_TWICE < steps <= MOST_STEPS
    case = trial.case(run.way)
    row["answers"] = case.answers
    for data in DATA[:1] if slow else DATA:
        if reason := judged(trial, case, compiled, run, data, LAUNCHES):
            return reason
    row["problems"] = 1
    for other, data in zip(_others(trial, run.sets, slow), cycle(DATA)):
        if reason := judged(other, case, compiled, run, data, LAUNCHES[1:]):
            row["line"] = str(other)
            return reason
        row["problems"] += 1
    return ""


def judged(
    trial: ConvTrial,
    case: ProblemCase,
    compiled: CompiledDirection,
    run: TrialRun,
    data: str,
    launches: Sequence[str],
) -> str:
    """What is wrong with the results of data of one kind."""
    case.fill(data, run.number + SETS_APART * trial.values)
    for launch in launches if run.way == "device" else ("",):
        if launch and launch != launches[0]:
            case.tensors[trial.prop.result].poison()
        started = time.perf_counter()
        case.launch(compiled, run.device)
        if launch == "first" and data == "exact":
            run.row["compile_s"] = round(time.perf_counter() - started, 4)
        found = case.judged(compiled, data)
        run.row.setdefault("nonzero", round(found.nonzero, 3))  # the share in the exact data
        if found.reason:
            return f"{data} data: {f'{launch} launch: ' if launch else ''}{found.reason}"
    return ""


def _others(trial: ConvTrial, sets: int, slow: bool) -> Iterator[ConvTrial]:
    """The same kernels' other problems: other scales, zero points and operands of post-ops."""
    if sets > 1 and not slow and is_of_values(trial):
        yield from (replace(trial, values=trial.values + n) for n in range(1, sets))


def is_of_values(trial: ConvTrial) -> bool:
    """Whether other values may show what the first do not: there are zero points or operands of post-ops,
    and what they make is rounded or saturates in the result."""
    after = Epilogue.parse(trial.epilogue)
    result = trial.problem.specs[trial.prop.result].dtype
    return bool(epilogue_operands(trial.problem, trial.prop, after)) and (
        bool(after.zeros) or after.random or result.bits < trial.problem.acc.bits
    )


def interpreted_steps(compiled: Plan) -> int:
    """How often Triton's interpreter goes through the body of a loop, program by program."""
    return sum(
        max(s.triton.grid, programs(s.schedule, seen))
        * max(1, k_steps(s.schedule, seen) // s.schedule.split_k)
        for s in compiled.steps
        for seen in [Scheduled(s.compute, s.schedule, compiled.target).grouped]
    )
