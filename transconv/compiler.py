"""From a problem to a plan that can be launched, and what is kept of it.

``pipeline.py`` lowers one algorithm, ``steps.py`` says which a direction needs and makes one launch of
each, ``plans.py`` is the result; here a direction of a problem becomes a plan, each step the best
kernel that is not known to be wrong (``build``), once per process (``plan``).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from math import prod
from typing import Any

from transconv import knobs, verdicts
from transconv.algorithm import Algorithm
from transconv.config import Config
from transconv.counts import main_of
from transconv.database.shortlist import shortlist
from transconv.epilogue import Epilogue
from transconv.errors import ConfigError, StageError, Unsupported
from transconv.ir import Tensor
from transconv.legality import why_not
from transconv.merging import merged
from transconv.packing import is_copy, workspaces
from transconv.passes import blockwise
from transconv.passes.together import together
from transconv.pipeline import PIPELINE, STAGES, Context, Pass, lower
from transconv.plans import Compiled, Step
from transconv.problem import ConvProblem, Prop
from transconv.steps import (
    Choose,
    Planned,
    header,
    kernel_name,
    launched,
    plan_steps,
    step_of,
)
from transconv.target import Target

__all__ = ["PIPELINE", "STAGES", "Compiled", "Context", "Pass", "Step", "build", "header",
           "kernel_name", "lower", "plan", "plan_steps", "replan"]

log = logging.getLogger("transconv.compiler")


def _switches() -> dict[str, bool]:
    return dict(knobs.passes())


def build(problem: ConvProblem, prop: Prop, target: Target, config: Config | None = None,
          epilogue: Epilogue | None = None, choose: Choose | None = None) -> Compiled:
    """Compile one direction of a problem, without looking at what is kept.

    Without a config, each kernel is the best that is not known to be wrong, or what ``choose``
    says for each algorithm in turn. Raises ConfigError when the given config is not legal,
    Unsupported when nothing is.
    """
    epilogue = epilogue or Epilogue()
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
        spaces |= {t.name: t for t in workspaces(merged(algorithm, chosen.merge),
                                                     chosen.pack, chosen.split_k)}
        seen = main_of(algorithm, chosen)
        if meeting := blockwise.meeting(chosen, seen):
            parts = blockwise.workspace(seen, meeting)
            if "partials" not in spaces or spaces["partials"].layout.span < parts.layout.span:
                spaces["partials"] = parts  # stride phases share one; they may be split differently
        elif chosen.split_k > 1:  # before anything is stored: not every phase has to add in place
            steps[0].zero = algorithm.c.tensor
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
                self.made[key] = step_of(self.problem, algorithm, config, target, self.switches)
            except ConfigError:
                raise
            except Exception as cause:
                raise StageError(
                    stage="passes", problem=str(self.problem), direction=self.prop.value,
                    config=str(config), reason=f"{type(cause).__name__}: {cause}") from cause
        return self.made[key]

    def one_launch(self, planned: Planned, target: Target) -> tuple[Planned, Step | None]:
        """The stride phases of one result as one launch, where their kernels are explicit and the
        config of one of them, that of the longest sum first, is legal for all; else None, and what
        was planned."""
        phases = [(a, c) for a, c in planned if a.phase]
        phases.sort(key=lambda p: -prod(x.size for x in p[0].axes_of("K")))
        if len(phases) < 2 or any(c.split_k > 1 for _, c in phases):
            return planned, None
        for config in dict.fromkeys(c for _, c in phases if c.via == "gluon"):
            if any((c.pack, c.merge) != (config.pack, config.merge)
                   or why_not(config, a, target) for a, c in phases):
                continue
            joined = together([self.step(a, config, target).kernel for a, _ in phases])
            if joined is None:
                continue
            whole = replace(phases[0][0], name=self.prop.value)
            step = launched(self.problem, whole, config, target, joined)
            if not verdicts.is_wrong(step.digest):
                return [(a, config if a.phase else c) for a, c in planned], step
            self.rejected += 1
        return planned, None

    def choose(self, algorithm: Algorithm, target: Target) -> Config:
        """The best config whose kernel is not known to be wrong. Raises Unsupported when the first
        ``MOST_REJECTED`` are."""
        candidates = shortlist(MOST_REJECTED, algorithm, target, self.problem, self.prop)
        for made in candidates:
            try:
                digest = self.step(algorithm, made.config, target).digest
            except (ConfigError, StageError) as error:
                if not made.tuned:
                    raise
                log.warning("a row of the tuning database is passed over: %s", error)
                continue
            if not verdicts.is_wrong(digest):
                self.why = self.why or made.why
                return made.config
            self.rejected += 1
        raise Unsupported("miscompiled", f"the {len(candidates)} best kernels for {algorithm.name} "
                          f"of {self.problem} are known to give wrong results on {target.name}")


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
