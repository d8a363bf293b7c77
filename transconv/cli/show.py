"""``show``: a problem's algorithms, config, stages and source, for reading."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from transconv import heuristics
from transconv.algorithm import Algorithm
from transconv.backend_triton.emit import emit
from transconv.cli import options
from transconv.compiler import (
    PIPELINE,
    STAGES,
    Step,
    build,
    header,
    kernel_name,
    lower,
    plan_steps,
)
from transconv.config import Block, Config
from transconv.database import choice, telling
from transconv.errors import ConfigError
from transconv.ir import Kernel
from transconv.ir.reading import readable
from transconv.legality import why_not
from transconv.problem import ConvProblem, Prop
from transconv.target import TARGETS, Target

PHRASES = {"naive": "the loop nest of the algorithm", **{p.name: p.phrase for p in PIPELINE},
           "emit": "the kernel in Triton"}
RULE = "-" * 100


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "show", "print how a problem becomes a kernel",
        "Prints the algorithm (axes with kinds, views, masks and which were proven away), the\n"
        "config and its neighbours, and the kernel; or the stages in between.",
        (f"show {options.EXAMPLE} --prop bwd_d", f"show {options.EXAMPLE} --stage gridwise",
         f"show {options.EXAMPLE} --diff"), show)
    options.add_problem(made)
    options.add_props(made, "fwd")
    made.add_argument("--stage", choices=[*STAGES, "all"], metavar="STAGE",
                      help=f"print this stage: {', '.join(STAGES)}, or all")
    made.add_argument("--diff", action="store_true",
                      help="print what each pass changed, as unified diffs")
    made.add_argument("--target", default="",
                      help="the chip: sm_90, gfx942, ...; default: this one, sm_90 without a GPU")
    made.add_argument("--epilogue", default="", metavar="E",
                      help="what becomes of the sum before it is stored: bias+relu, bias+res+silu")
    options.add_config(made)


def show(words: argparse.Namespace) -> int:
    problem, target = options.problem(words), options.target(words.target or "auto")
    if target.backend == "interpreter" and not words.target:
        target = TARGETS["sm_90"]
    for prop in options.props(words):
        for text in pages(problem, prop, target, words):
            print(text)
    return 0


def pages(problem: ConvProblem, prop: Prop, target: Target,
          words: argparse.Namespace) -> Iterator[str]:
    """What is asked for, piece by piece."""
    steps = plan_steps(problem, prop, target, options.config(words), options.epilogue(words))
    shown = words.stage
    if not steps:
        yield f"{problem} {prop}: nothing to compute, the result has no elements"
        return
    yield f"problem    {problem}\n           {prop} on {target}, {_sizes(problem)}"
    if shown == "problem":
        return
    works = [Work(problem, prop, a, c, target) for a, c in steps]
    for w in works:
        if reason := why_not(w.config, w.algorithm, target):
            raise ConfigError(f"{w.config}: {reason}")
    whole = shown is None and not words.diff
    if whole or shown in ("algorithm", "all"):
        yield from (f"\n{w.algorithm}" for w in works)
    if whole or shown in ("config", "all"):
        yield from _configs(works)
    if whole:
        yield from (f"\n{RULE}\n{w.source}" for w in works)
    else:
        for w in works:
            yield from w.diffs(shown) if words.diff else w.stages(shown)
    if whole or shown in ("together", "all"):
        made = build(problem, prop, target, options.config(words), options.epilogue(words))
        phases = any(w.algorithm.phase for w in works)
        joined = [s for s in made.steps if phases and s.algorithm.name == prop.value]
        yield from _together(joined, not whole)
        if shown == "together" and not joined:
            yield f"\nnothing to put together: {', '.join(s.algorithm.name for s in made.steps)}"


def _together(joined: list[Step], stages: bool) -> Iterator[str]:
    """The kernel that does all stride phases, where one does."""
    for step in joined:
        title = "\n---- together: all stride phases in one launch "
        if stages:
            yield f"{title:-<101}\n{readable(step.kernel)}"
        yield f"\n{RULE}\n{step.source}"


def _configs(works: list[Work]) -> Iterator[str]:
    """Each config once, with its neighbours; stride phases mostly share theirs."""
    for config in dict.fromkeys(w.config for w in works):
        first = next(w for w in works if w.config == config)
        users = [w.algorithm.name for w in works if w.config == config]
        of = f"  (of {', '.join(users)})" if len(works) > 1 else ""
        yield "\n".join([f"\nconfig     {config}{of}", *why(first), *neighbours(first)])


def _sizes(p: ConvProblem) -> str:
    return f"{p.flops() / 1e9:.3g} GFLOP, {p.bytes_moved() / 1e6:.3g} MB"


@dataclass
class Work:
    """One launch, lowered when somebody asks."""

    problem: ConvProblem
    prop: Prop
    algorithm: Algorithm
    config: Config
    target: Target

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.made: list[tuple[str, Kernel]] = []

    def lowered(self) -> list[tuple[str, Kernel]]:
        if not self.made:
            name = kernel_name(self.problem, self.algorithm, self.config, self.target)
            self.made = lower(self.algorithm, self.config, self.target, name, self.problem.math,
                              seconds=self.seconds)
        return self.made

    @property
    def source(self) -> str:
        kernel = self.lowered()[-1][1]
        return emit(kernel, header(self.problem, self.algorithm, self.config, self.target),
                    "early" in self.target.features)

    def title(self, stage: str) -> str:
        spent = f"  ({self.seconds[stage] * 1e3:.0f} ms)" if stage in self.seconds else ""
        return f"\n---- {stage}: {PHRASES[stage]}{spent} ---- {self.algorithm.name} "

    def stages(self, wanted: str) -> Iterator[str]:
        """The kernel after the stage, or after every one."""
        for name, kernel in self.lowered():
            if wanted in (name, "all"):
                yield f"{self.title(name):-<101}\n{readable(kernel)}"
        if wanted in ("emit", "all"):
            yield f"{self.title('emit'):-<101}\n{self.source}"

    def diffs(self, wanted: str | None) -> Iterator[str]:
        """What each stage changed in the text of the one before it."""
        before: list[str] = []
        for name, kernel in self.lowered():
            after = readable(kernel).splitlines()
            if wanted in (None, name, "all"):
                yield f"{self.title(name):-<101}"
                changed = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
                off = "(switched off)" if name not in self.seconds else "(unchanged)"
                yield "\n".join(changed) if changed else off
            before = after
        if wanted in (None, "emit", "all"):
            yield f"{self.title('emit'):-<101}\n{self.source}"


def why(work: Work) -> list[str]:
    """What spoke for the config, what its time is made of, and what was refused."""
    algorithm, target = work.algorithm, work.target
    choices = choice.ranked(algorithm, target, work.problem, work.prop)
    if work.config != choices[0].config:
        return telling.given(work.config, choices, algorithm, target)
    return [*telling.reasons(choices[0], choices, algorithm, target),
            *telling.refusals(algorithm, target)]


def neighbours(work: Work, most: int = 9) -> list[str]:
    """Configs one step away from the chosen one, with the verdict on each."""
    algorithm, config, target = work.algorithm, work.config, work.target
    chosen = heuristics.estimate(config, algorithm, target)
    lines = []
    for change, other in _near(config, algorithm):
        if reason := why_not(other, algorithm, target):
            verdict = f"refused: {reason}"
        else:
            factor = heuristics.estimate(other, algorithm, target) / chosen
            verdict = f"legal, estimated to take {factor:.2f} times as long"
        lines.append(f"           {change:<23} {verdict}")
    return lines[:most]


def _near(config: Config, algorithm: Algorithm) -> Iterator[tuple[str, Config]]:
    for i, block in enumerate(config.blocks):
        for extent in (block.extent * 2, block.extent // 2):
            if extent >= 1:
                changed = Block(block.axes, extent)
                yield str(changed), replace(config, blocks=(*config.blocks[:i], changed,
                                                            *config.blocks[i + 1:]))
    yield from ((f"stages={n}", replace(config, stages=n)) for n in (config.stages + 1,))
    other = "fma" if config.unit == "mma" else "mma"
    yield other, replace(config, unit=other)
    if algorithm.axes_of("K"):
        yield "split_k=4 reduce=atomic", replace(config, split_k=4, reduce="atomic")
