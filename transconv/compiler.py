"""From a problem to a kernel that can be launched: algorithms, configs, steps, and what is kept.

``pipeline.py`` lowers one algorithm, ``plans.py`` is the result; here a direction of a problem
becomes the steps of a plan (``plan_steps``), each the best kernel that is not known to be wrong
(``build``), once per process (``plan``).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from transconv import knobs, verdicts
from transconv.algorithm import Algorithm, algorithms
from transconv.backend_triton.emit import boxes, emit, grid_size, is_explicit
from transconv.backend_triton.launch import Launcher
from transconv.backend_triton.module import write
from transconv.config import Config, why_not
from transconv.database import choice
from transconv.epilogue import Epilogue
from transconv.errors import ConfigError, StageError, Unsupported
from transconv.ir import Kernel, Tensor
from transconv.packing import (
    PACK,
    UNPACK,
    copies,
    is_copy,
    over_copies,
    with_letter,
    without,
    workspaces,
)
from transconv.passes import blockwise
from transconv.passes.together import together
from transconv.pipeline import PIPELINE, STAGES, Context, Pass, lower
from transconv.plans import Compiled, Step
from transconv.problem import ConvProblem, Prop
from transconv.target import Target

__all__ = ["PIPELINE", "STAGES", "Compiled", "Context", "Pass", "Step", "build", "header",
           "kernel_name", "lower", "plan", "plan_steps", "replan"]

log = logging.getLogger("transconv.compiler")


def _switches() -> dict[str, bool]:
    return dict(knobs.passes())


Choose = Callable[[Algorithm, Target], Config]
Planned = list[tuple[Algorithm, Config]]


def plan_steps(problem: ConvProblem, prop: Prop, target: Target, config: Config | None,
               epilogue: Epilogue,
               choose: Choose | None = None) -> Planned:
    """The algorithms to run, in order, each with its config: copies into workspaces, phases and
    second stages of sums, copies of results."""
    choose = choose or (lambda a, t: choice.default(a, t, problem, prop))
    mains: Planned = []
    for algorithm in algorithms(problem, prop, epilogue):
        if any(x.size == 0 for x in algorithm.axes if algorithm.kind(x.name) != "K"):
            continue
        empty = any(x.size == 0 for x in algorithm.axes_of("K"))
        chosen = choose(algorithm, target) if config is None or empty else choice.fitted(config, algorithm)
        mains.append((algorithm, chosen))
    made: Planned = []
    around: dict[str, Algorithm] = {}
    for algorithm, chosen in _agreed(mains, target):
        around |= {c.name: c for c in copies(algorithm, chosen.pack, chosen.split_k)}
        made.append((algorithm, chosen))
        if blockwise.meeting(chosen, over_copies(algorithm, chosen.pack)):
            second = blockwise.second(over_copies(algorithm, chosen.pack), chosen)
            if chosen.pack:
                second = replace(second, c=algorithm.c)
            made.append((second, choose(second, target)))
    before = [(c, choose(c, target)) for c in around.values() if c.name.startswith(PACK)]
    after = [(c, choose(c, target)) for c in around.values() if c.name.startswith(UNPACK)]
    return [*before, *made, *after]


def _agreed(mains: Planned, target: Target) -> Planned:
    """All stride phases write to the copy of the result, or none: it is copied back as a whole."""
    if len({c.unpacks for _, c in mains}) < 2:
        return mains
    asked = [(a, c if c.unpacks else replace(c, c="gather", split_k=1, pack=with_letter(c.pack, "c")))
             for a, c in mains]
    if all(why_not(c, a, target) is None for a, c in asked):
        return asked
    return [(a, replace(c, c="gather", pack=without(c.pack, "c")) if c.unpacks else c)
            for a, c in mains]


def build(problem: ConvProblem, prop: Prop, target: Target, config: Config | None = None,
          epilogue: Epilogue | None = None, choose: Choose | None = None) -> Compiled:
    """Compile one direction of a problem, without looking at what is kept.

    Without a config, each kernel is the best that is not known to be wrong, or what ``choose``
    says for each algorithm in turn. Raises ConfigError when
    the given config is not legal, Unsupported when nothing is.
    """
    epilogue = epilogue or Epilogue()
    if problem.src.dtype.kind != "float":
        raise Unsupported(f"dtype:{problem.src.dtype}")
    started = time.perf_counter()
    steps: list[Step] = []
    spaces: dict[str, Tensor] = {}
    shelf = _Shelf(problem, prop)
    planned, one = shelf.one_launch(
        plan_steps(problem, prop, target, config, epilogue, choose or shelf.choose), target)
    for algorithm, chosen in planned:
        made = one if one and algorithm.phase else shelf.step(algorithm, chosen, target)
        if made not in steps:
            steps.append(made)
        spaces |= {t.name: t for t in workspaces(algorithm, chosen.pack, chosen.split_k)}
        if meeting := blockwise.meeting(chosen, over_copies(algorithm, chosen.pack)):
            parts = blockwise.workspace(over_copies(algorithm, chosen.pack), meeting)
            if "partials" not in spaces or spaces["partials"].layout.span < parts.layout.span:
                spaces["partials"] = parts  # stride phases share one; they may be split differently
        elif chosen.split_k > 1 and not any(s.zero for s in steps):
            steps[-1].zero = algorithm.c.tensor
    used = next((s.config for s in steps if not is_copy(s.algorithm)), config or Config())
    spent = time.perf_counter() - started
    level = logging.INFO if spent > 1 else logging.DEBUG
    if knobs.debug() >= 1:
        level = logging.WARNING
    log.log(level, "%s %s on %s: %s, generated in %.2f s", problem, prop, target.name, used, spent)
    if knobs.debug() >= 2:
        for step in steps:
            log.warning("%s\n%s", step.algorithm, step.source)
    return Compiled(problem, prop, target, used, epilogue, tuple(steps), spaces,
                    config is not None or choose is not None, shelf.rejected,
                    shelf.why or "given by the caller")


MOST_REJECTED = 8  # wrong kernels of one algorithm after which torch is the better choice


class _Shelf:
    """The kernels of one plan as they are made, each once."""

    def __init__(self, problem: ConvProblem, prop: Prop) -> None:
        self.problem, self.prop = problem, prop
        self.switches = _switches()
        self.made: dict[tuple[str, Config], Step] = {}
        self.rejected = 0
        self.why = ""  # the first kernel's config was chosen

    def step(self, algorithm: Algorithm, config: Config, target: Target) -> Step:
        """The kernel of an algorithm. Raises ConfigError, or StageError for an error of ours."""
        key = (algorithm.name, config)
        if key not in self.made:
            try:
                self.made[key] = _step(self.problem, algorithm, config, target, self.switches)
            except ConfigError:
                raise
            except Exception as cause:
                raise StageError(
                    stage="passes", problem=str(self.problem), direction=self.prop.value,
                    config=str(config), reason=f"{type(cause).__name__}: {cause}") from cause
        return self.made[key]

    def one_launch(self, planned: Planned, target: Target) -> tuple[Planned, Step | None]:
        """The stride phases of one result as one launch, all with the config of the longest sum, where
        their kernels are explicit; else None, and what was planned."""
        phases = [(a, c) for a, c in planned if a.phase]
        if len(phases) < 2:
            return planned, None
        longest, config = max(phases, key=lambda p: prod(x.size for x in p[0].axes_of("K")))
        if config.via != "gluon" or any(
                c.split_k > 1 or c.pack != config.pack or why_not(config, a, target) is not None
                for a, c in phases):
            return planned, None
        joined = together([self.step(a, config, target).kernel for a, _ in phases])
        if joined is None:
            return planned, None
        step = _launched(self.problem, replace(longest, name=self.prop.value), config, target, joined)
        if verdicts.is_wrong(step.digest):
            self.rejected += 1
            return planned, None
        return [(a, config if a.phase else c) for a, c in planned], step

    def choose(self, algorithm: Algorithm, target: Target) -> Config:
        """The best config whose kernel is not known to be wrong. Raises Unsupported when the first
        ``MOST_REJECTED`` are."""
        candidates = choice.ranked(algorithm, target, self.problem, self.prop)[:MOST_REJECTED]
        for made in candidates:
            try:
                digest = self.step(algorithm, made.config, target).digest
            except (ConfigError, StageError) as error:
                if made.row is None:
                    raise
                log.warning("a row of the tuning database is passed over: %s", error)
                continue
            if not verdicts.is_wrong(digest):
                self.why = self.why or made.why
                return made.config
            self.rejected += 1
        raise Unsupported("miscompiled", f"the {len(candidates)} best kernels for {algorithm.name} "
                          f"of {self.problem} are known to give wrong results on {target.name}")


MAX_NAME = 64  # characters of a name in the IR


def kernel_name(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target) -> str:
    """``conv_fwd_mb32ic64..._1f3a``: direction, problem, and a short digest of everything else."""
    rest = f"{_subject(problem, algorithm)} {algorithm.epilogue} {config} {target.name} {algorithm.name}"
    digest = hashlib.blake2b(rest.encode(), digest_size=4).hexdigest()
    stem = algorithm.name if is_copy(algorithm) else f"conv_{algorithm.name}"
    sizes = "".join(f"{x.name}{x.size}" for x in algorithm.axes)
    shape = sizes if is_copy(algorithm) else problem.shape_text
    shape = "".join(c for c in shape if c.isalnum() or c == "_")
    return f"{stem}_{shape[:MAX_NAME - len(f'{stem}__{digest}')]}_{digest}"


def _subject(problem: ConvProblem, algorithm: Algorithm) -> str:
    """What a kernel is about. Problems share the copies of tensors that they share."""
    return f"{algorithm.a.tensor}" if is_copy(algorithm) else f"{problem}"


def header(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target) -> tuple[str, ...]:
    return (f"{algorithm.name} of {_subject(problem, algorithm)}",
            *([f"epilogue {algorithm.epilogue}"] if algorithm.epilogue else []),
            f"config {config}", f"target {target.name}")


def _step(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target,
          switches: dict[str, bool]) -> Step:
    name = kernel_name(problem, algorithm, config, target)
    return _launched(problem, algorithm, config, target,
                     lower(algorithm, config, target, name, problem.math, switches)[-1][1])


def _launched(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target,
              kernel: Kernel) -> Step:
    """The step that launches a kernel, under the name of its algorithm."""
    name = kernel_name(problem, algorithm, config, target)
    kernel = Kernel(name, kernel.params, kernel.body, kernel.notes)
    source = emit(kernel, header(problem, algorithm, config, target))
    path = write(source, name)
    boxed = boxes(kernel)
    descriptors = tuple((t, boxed[t.name]) if t.name in boxed else None for t in kernel.params)
    launcher = Launcher(source, name, path, grid_size(kernel), config.warps, config.stages,
                        descriptors, is_explicit(kernel))
    digest = verdicts.digest(source, f"{target.name} {config.warps} {config.stages}")
    return Step(algorithm, config, kernel, source, path, launcher,
                tuple(t.name for t in kernel.params), digest)


_plans: dict[tuple[Any, ...], Compiled] = {}
_lock = threading.Lock()


def plan(problem: ConvProblem, prop: Prop, target: Target, config: Config | str | None = None,
         epilogue: Epilogue | str = "", *, aligned: bool = True,
         deterministic: bool = False) -> Compiled:
    """``build``, remembered: the same question gets the same plan, compiled once per process.

    ``aligned`` says that every tensor will begin at a multiple of 16 bytes, as boxes need.
    ``deterministic`` asks for the same bits every run; only ``reduce=atomic`` cannot give them.
    """
    if not aligned:
        target = replace(target, features=target.features - {"box"})
    if isinstance(config, str):
        config = Config.parse(config)
    if config is not None and deterministic and config.split_k > 1 and config.reduce == "atomic":
        raise ConfigError(f"{config}: atomic sums differ from run to run, and the same bits were "
                          "asked for; use reduce=partials")
    if isinstance(epilogue, str):
        epilogue = Epilogue.parse(epilogue)
    key = (problem, prop, target, config, epilogue)
    found = _plans.get(key)
    if found is None:
        made = build(problem, prop, target, config, epilogue)
        with _lock:
            found = _plans.setdefault(key, made)
    return found


def replan(wrong: Compiled) -> Compiled:
    """Forget a plan and make the next, after verdicts on its kernels. Raises as ``build``."""
    key = (wrong.problem, wrong.prop, wrong.target, None, wrong.epilogue)
    with _lock:
        if _plans.get(key) is wrong:
            del _plans[key]
    return plan(wrong.problem, wrong.prop, wrong.target, None, wrong.epilogue)
