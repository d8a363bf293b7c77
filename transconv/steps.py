"""From an algorithm and a config to a step of a plan: which algorithms a direction needs, and the kernel
of each with its name, its text and what launches it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from math import prod

from transconv import verdicts
from transconv.algorithm import Algorithm, algorithms
from transconv.backend_triton.emit import boxes, emit, grid_size, is_explicit
from transconv.backend_triton.launch import Launcher
from transconv.backend_triton.module import write
from transconv.config import Config
from transconv.counts import main_of
from transconv.database import choice
from transconv.epilogue import Epilogue
from transconv.errors import ConfigError, Unsupported
from transconv.ir import Kernel
from transconv.ir.dtype import DTYPES
from transconv.legality import why_not
from transconv.merging import merged
from transconv.packing import (
    PACK,
    UNPACK,
    copies,
    is_copy,
    over_copies,
    rounds,
    with_letter,
    without,
)
from transconv.passes import blockwise
from transconv.pipeline import lower
from transconv.plans import Step
from transconv.problem import ConvProblem, Prop
from transconv.target import Target

Choose = Callable[[Algorithm, Target], Config]
Planned = list[tuple[Algorithm, Config]]


def plan_steps(problem: ConvProblem, prop: Prop, target: Target, config: Config | None,
               epilogue: Epilogue,
               choose: Choose | None = None) -> Planned:
    """The algorithms to run, in order, each with its config: copies into workspaces, phases and
    second stages of sums, copies of results. Raises Unsupported for tensors of whole
    numbers, ConfigError for a given config that is not legal."""
    computable(problem)
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
    for algorithm, chosen in _agreed(_same_copies(mains, target), target):
        if config is not None and (reason := why_not(chosen, algorithm, target)):
            raise ConfigError(f"{chosen}: {reason}")
        beside = copies(merged(algorithm, chosen.merge), chosen.pack, chosen.split_k, chosen.unit)
        around |= {c.name: c for c in beside if c.name not in around or not rounds(c)}
        made.append((algorithm, chosen))
        if blockwise.meeting(chosen, main_of(algorithm, chosen)):
            second = _second(algorithm, chosen)
            made.append((second, choose(second, target)))
    before = [(c, choose(c, target)) for c in around.values() if c.name.startswith(PACK)]
    after = [(c, choose(c, target)) for c in around.values() if c.name.startswith(UNPACK)]
    return [*before, *made, *after]


def computable(problem: ConvProblem) -> None:
    """Raises Unsupported for a tensor of an element type that no kernel computes with."""
    for name, spec in problem.specs.items():
        if spec.dtype.kind != "float":
            raise Unsupported(f"dtype:{spec.dtype}", f"{name} is {spec.dtype}; kernels compute with "
                              f"{' '.join(t.name for t in DTYPES.values() if t.kind == 'float')}")


def _same_copies(mains: Planned, target: Target) -> Planned:
    """Stride phases read the same copies: a copy that one of them asks for serves all, and phases of
    one config are one launch. That of the longest sum is asked first."""
    phases = [(a, c) for a, c in mains if a.phase and all(x.size for x in a.axes)]
    if len({c.pack for _, c in phases}) < 2:
        return mains
    _, longest = max(phases, key=lambda m: prod(x.size for x in m[0].axes_of("K")))
    if not longest.pack:
        return mains
    return [(a, longest if (a, c) in phases and c.pack != longest.pack
             and why_not(longest, a, target) is None else c) for a, c in mains]


def _second(algorithm: Algorithm, config: Config) -> Algorithm:
    """What adds the parts of a sum. Tiles that were dealt out it has to see as the main kernel did;
    else it sees groups one by one, and nothing that lies between their blocks."""
    dealt = config.reduce == "stream"
    seen = main_of(algorithm, config) if dealt else over_copies(algorithm, config.pack)
    second = blockwise.second(seen, config)
    return replace(second, c=algorithm.c) if config.pack else second


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
    if not is_copy(algorithm):
        return f"{problem}"
    return f"{algorithm.a.tensor}" + " rounded to tf32" * rounds(algorithm)


def header(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target) -> tuple[str, ...]:
    return (f"{algorithm.name} of {_subject(problem, algorithm)}",
            *([f"epilogue {algorithm.epilogue}"] if algorithm.epilogue else []),
            f"config {config}", f"target {target.name}")


def step_of(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target,
            switches: dict[str, bool]) -> Step:
    """The step of an algorithm. Raises ConfigError."""
    name = kernel_name(problem, algorithm, config, target)
    return launched(problem, algorithm, config, target,
                    lower(algorithm, config, target, name, problem.math, switches)[-1][1])


def launched(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target,
             kernel: Kernel) -> Step:
    """The step that launches a kernel, under the name of its algorithm."""
    name = kernel_name(problem, algorithm, config, target)
    kernel = Kernel(name, kernel.params, kernel.body, kernel.notes)
    early = "early" in target.features
    source = emit(kernel, header(problem, algorithm, config, target), early)
    path = write(source, name)
    boxed = boxes(kernel)
    descriptors = tuple((t, boxed[t.name]) if t.name in boxed else None for t in kernel.params)
    launcher = Launcher(source, name, path, grid_size(kernel), config.warps, config.stages,
                        descriptors, is_explicit(kernel), early)
    digest = verdicts.digest(source, f"{target.name} {config.warps} {config.stages}")
    return Step(algorithm, config, kernel, source, path, launcher,
                tuple(t.name for t in kernel.params), digest)
