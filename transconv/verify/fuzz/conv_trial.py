"""A trial, drawn from a seed and a number, and written to and read from one line of text.

A trial says nothing about a machine. It is a problem, a direction, the chip it is
compiled for, a schedule, an epilogue, which passes run, and by how many elements tensors are shifted
from alignment. Trial ``i`` of seed ``s`` is the same on every machine.

The line is benchdnn's, with options of ours for what benchdnn has no word for:

    --dir=BWD_W --dt=f16:f16:f32 --stag=nhwc --wtag=oihw --dtag=nhwc --target=sm_90
        --schedule=ic:16+oc:16+ow:16+mma+swap=1 --epilogue=bias+relu --passes=-cse,-hoist mb2ic3...

It has no blanks inside of words: blanks of a schedule are written ``+``, commas of strides ``_``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from transconv import knobs
from transconv.compute import Compute
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop, computes, for_weights
from transconv.errors import ProblemError
from transconv.ir import SHORT
from transconv.passes import passes
from transconv.schedule import Schedule
from transconv.target import Target
from transconv.verify.draw import conv_problems, legal_schedules, post_op_lists
from transconv.verify.draw.conv_problems import chance

DIRECTIONS = {Prop.FWD: "FWD_D", Prop.BWD_D: "BWD_D", Prop.BWD_W: "BWD_W"}
FEW_KERNELS, MANY_KERNELS = 2, 6  # stride phases that are kernels: rare above, very rare


@dataclass(frozen=True)
class ConvTrial:
    """One question. ``schedule`` is None where the heuristic chooses; ``shift``: elements between
    a multiple of 16 bytes and the first of every tensor; ``passes``: switched against default;
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
        options = {"dir": DIRECTIONS[self.prop], "dt": dtypes,
                   **{k: v.replace(",", "_") for k, v in zip(("stag", "wtag", "dtag"), tags,
                                                            strict=True)},
                   "math": said.get("math", ""), "target": self.target,
                   "schedule": _glued(self.schedule), "epilogue": self.epilogue,
                   "passes": ",".join(f"{'+' if on else '-'}{n}" for n, on in self.passes),
                   "shift": str(self.shift or ""), "values": str(self.values or "")}
        return " ".join([*(f"--{k}={v}" for k, v in options.items() if v), shape])

    @staticmethod
    def parse(line: str) -> ConvTrial:
        """Read a line. Raises ProblemError or ScheduleError, one sentence."""
        said: dict[str, str] = {}
        shapes = []
        for word in line.split():
            name, _, value = word.removeprefix("--").partition("=")
            name = FORMER.get(name, name)
            if not word.startswith("--"):
                shapes.append(word)
            elif name in OPTIONS:
                said[name] = value
            else:
                raise ProblemError(f"'{word}' in a trial; expected one of "
                                   + " ".join(f"--{name}=" for name in OPTIONS))
        ways = [p for p, name in DIRECTIONS.items() if name == said.get("dir", "FWD_D")]
        if len(shapes) != 1 or not ways:
            raise ProblemError(f"the trial '{line}' names {len(shapes)} shapes and the direction "
                               f"{said.get('dir')}; expected one shape, and --dir= one of "
                               f"{' '.join(DIRECTIONS.values())}")
        tags = [said.get(k, "abx").replace("_", ",") for k in ("stag", "wtag", "dtag")]
        text = f"{shapes[0]} dt={said.get('dt', 'f32')} tag={':'.join(tags)}"
        text += f" math={said['math']}" if "math" in said else ""
        schedule = said.get("schedule", "").replace("+", " ")
        return ConvTrial(ConvProblem.parse(text), ways[0], said.get("target", "sm_90"),
                     Schedule.parse(schedule) if schedule else None, said.get("epilogue", ""),
                     _switches(said.get("passes", "")), int(said.get("shift", "0")),
                     int(said.get("values", "0")))

    @cached_property
    def computes(self) -> tuple[Compute, ...]:
        """What the schedule is for: all but the sums that zero points and operands of u8 need."""
        workload = ConvWorkload(self.problem, self.prop, Epilogue.parse(self.epilogue))
        return tuple(c for c in workload.computations if not workload.prepares(c))

    @property
    def chip(self) -> Target:
        """The chip, by its record alone: what the machine at hand counts does not matter."""
        made = Target.parse(self.target)
        return without_boxes(made) if self.shift else made

    @property
    def facts(self) -> dict[str, str]:
        """What the trial is about, to count by: a word for each dimension of the drawing."""
        p = self.problem
        orders = {layout_kind(p, name) for name in p.specs}
        found = {"direction": self.prop.value, "axes": f"{p.ndims}D",
                 "dtype": ":".join(dict.fromkeys(t.name for t in p.dtypes)),
                 "layout": "+".join(sorted(orders)),
                 "groups": "depthwise" if 1 < p.g == p.ic else "grouped" if p.g > 1 else "one",
                 "stride": "strided" if max(p.stride) > 1 else "dense",
                 "dilation": "dilated" if max(p.dilation) > 1 else "dense",
                 "padding": "negative" if min(p.pad_hi) < 0 else
                 "none" if not any((*p.pad_lo, *p.pad_hi)) else
                 "even" if p.pad_lo == p.pad_hi else "uneven",
                 "epilogue": "chain" if ":" in self.epilogue else self.epilogue or "none",
                 "passes": "default" if not self.passes else "switched",
                 "alignment": "shifted" if self.shift else "aligned"}
        if p.src.dtype.name == "f32":
            found["math"] = p.math
        if self.schedule is not None:
            found |= legal_schedules.words(self.schedule)
        return found


FORMER = {"config": "schedule"}  # words under the names that older corpora have
OPTIONS = ("dir", "dt", "stag", "wtag", "dtag", "math", "target", "schedule", "epilogue", "passes",
           "shift", "values")


GONE = ("strength", "tidy")  # passes that older corpora switch; kernels meant the same with and without
OPTIONAL = tuple(step.name for step in passes() if step.optional)


def _switches(text: str) -> tuple[tuple[str, bool], ...]:
    """The passes that a trial switches. Raises ProblemError for a name of none."""
    try:
        made = tuple((name, on) for name, on in knobs.passes.read(text) if name not in GONE)
    except ValueError:
        raise ProblemError(f"--passes={text}; expected {knobs.passes.legal}") from None
    if unknown := [name for name, _ in made if name not in OPTIONAL]:
        raise ProblemError(f"--passes={text}: there is no optional pass '{unknown[0]}'; expected some of "
                           + " ".join(OPTIONAL))
    return made


def without_boxes(target: Target) -> Target:
    """Boxes need tensors that begin at multiples of 16 bytes."""
    return replace(target, features=target.features - {"box"})


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
    return "nhwc" if shape[1] == 1 or strides[1] == min(kept) and (
        strides[:1] + strides[2:] == tuple(sorted(strides[:1] + strides[2:], reverse=True))
    ) else "order"


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
    zeros = post_op_lists.zeros(rng, problem, prop)
    after = post_op_lists.quantised(rng, prop) if small else post_op_lists.epilogue(rng, prop)
    trial = ConvTrial(problem, prop, target, None, after,
                  tuple(sorted(conv_problems.switches(rng, OPTIONAL).items())),
                  rng.choice((1, 3, 8)) if chance(rng, 10) else 0)
    schedule = legal_schedules.schedule(rng, trial.computes, trial.chip)
    last = ["stochastic"] if problem.specs[prop.result].dtype in SHORT and chance(rng, 12) else []
    words = "+".join([*zeros, *filter(None, [trial.epilogue]), *last])  # the schedule is the product's
    return ConvTrial.parse(str(replace(trial, schedule=schedule, epilogue=words)))
