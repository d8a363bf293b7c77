"""From a problem to a kernel that can be launched: the pipeline, its stages, and what is kept.

``PIPELINE`` is the whole compiler, read from top to bottom. ``stages`` returns the kernel after each
pass, ``plan`` what is needed to run it, ``explain`` why it looks like this.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transconv import heuristics, knobs, verdicts
from transconv.algorithm import Algorithm, algorithms
from transconv.backend_triton.emit_tl import boxes, emit, grid_size
from transconv.backend_triton.launch import Launcher
from transconv.backend_triton.module import write
from transconv.config import Config, k_steps, why_not
from transconv.epilogue import Epilogue
from transconv.errors import ConfigError, StageError, Unsupported
from transconv.ir import Kernel, Tensor
from transconv.ir.verify import verify
from transconv.passes import (
    blockwise,
    cse,
    final,
    gridwise,
    hoist,
    lanewise,
    lets,
    naive,
    narrow,
    simplification,
    strength,
    unroll,
)
from transconv.problem import ConvProblem, Prop
from transconv.target import Target

log = logging.getLogger("transconv.compiler")


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may ask: the algorithm, the config, the target, and how f32 is multiplied."""

    algorithm: Algorithm
    config: Config
    target: Target
    precision: str = "tf32"

    @property
    def dot_precision(self) -> str:
        if self.target.upcast16 or self.precision not in self.target.precisions:
            return "ieee"
        return self.precision


@dataclass(frozen=True, slots=True)
class Pass:
    """A step of the pipeline. An optional one can be switched off and the kernel is still right."""

    name: str
    phrase: str
    run: Callable[[Kernel, Context], Kernel]
    optional: bool = True
    default: bool = True


PIPELINE: tuple[Pass, ...] = (
    Pass("gridwise", "axes become grid x loop x tile",
         lambda k, c: gridwise.gridwise(k, c.config), optional=False),
    Pass("blockwise", "how the parts of a split sum meet",
         lambda k, c: blockwise.blockwise(k, c.config, c.algorithm), optional=False),
    Pass("lanewise", "tiles become vectors, products become calls",
         lambda k, c: lanewise.lanewise(k, c.config, c.dot_precision), optional=False),
    Pass("unroll", "short loops are written out", lambda k, c: unroll.unroll(k)),
    Pass("simplify", "shorter indices, fewer masks",
         lambda k, c: simplification.simplify_kernel(k)),
    Pass("lets", "names that nothing reads disappear", lambda k, c: lets.optimise_lets(k)),
    Pass("hoist", "what does not change leaves the loop", lambda k, c: hoist.hoist(k)),
    Pass("strength", "products with the loop counter become sums",
         lambda k, c: strength.strength(k), default=False),
    Pass("cse", "repeated divisions get a name", lambda k, c: cse.cse(k)),
    Pass("tidy", "names that the passes before left over",
         lambda k, c: lets.optimise_lets(k)),
    Pass("narrow", "32 or 64 bits for every index", lambda k, c: narrow.narrow(k),
         optional=False),
    Pass("final", "what the target spells differently",
         lambda k, c: final.final(k, c.target.upcast16), optional=False),
)
STAGES = ("problem", "algorithm", "config", "naive", *(p.name for p in PIPELINE), "emit")


def lower(algorithm: Algorithm, config: Config, target: Target, name: str, precision: str = "tf32",
          switches: dict[str, bool] | None = None,
          seconds: dict[str, float] | None = None) -> list[tuple[str, Kernel]]:
    """The kernel after ``naive`` and after every pass: ``[(stage, kernel), ...]``. ``seconds`` is
    filled with what each took.

    Raises ConfigError for a config that is not legal. With TRANSCONV_VERIFY=1 the well-formedness
    rules are checked after each pass.
    """
    if reason := why_not(config, algorithm, target):
        raise ConfigError(f"{config}: {reason}")
    context = Context(algorithm, config, target, precision)
    spent = {} if seconds is None else seconds
    started = time.perf_counter()
    kernel = naive.naive(algorithm, name)
    spent["naive"] = time.perf_counter() - started
    made = [("naive", kernel)]
    checked = knobs.verify()
    for step in PIPELINE:
        started = time.perf_counter()
        if (switches or {}).get(step.name, step.default) or not step.optional:
            kernel = step.run(kernel, context)
            spent[step.name] = time.perf_counter() - started
            if checked:
                verify(kernel)
        made.append((step.name, kernel))
    _trace(made, spent)
    return made


def _trace(made: list[tuple[str, Kernel]], seconds: dict[str, float]) -> None:
    """TRANSCONV_DUMP leaves the kernel after each pass in a folder; TRANSCONV_DEBUG=3 logs those
    that changed it, 4 all of them."""
    folder, level = knobs.dump(), knobs.debug()
    if folder is None and level < 3:
        return
    before: Kernel | None = None
    for place, (stage, kernel) in enumerate(made):
        spent = f"{stage} of {kernel.name}, {1e3 * seconds.get(stage, 0.0):.1f} ms"
        if level > 3 or level == 3 and kernel is not before:
            log.warning("after %s\n%s", spent, "(unchanged)" if kernel is before else kernel)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{kernel.name}.{place:02}.{stage}.txt").write_text(f"{kernel}\n")
        before = kernel


@dataclass(slots=True)
class Step:
    """One launch of a plan: a kernel, its text, and the config that shaped it."""

    algorithm: Algorithm
    config: Config
    kernel: Kernel
    source: str
    path: Path | None
    launcher: Launcher
    params: tuple[str, ...]
    digest: str  # under which its verdict is kept
    zero: Tensor | None = None  # cleared before the launch


@dataclass(slots=True)
class Compiled:
    """A plan: the launches that compute one direction of one problem. ``fixed``: the caller gave
    the config; ``rejected``: better configs that were passed over, their kernels being wrong."""

    problem: ConvProblem
    prop: Prop
    target: Target
    config: Config
    epilogue: Epilogue
    steps: tuple[Step, ...]
    workspaces: dict[str, Tensor] = field(default_factory=dict)
    fixed: bool = False
    rejected: int = 0
    order: tuple[int, ...] = ()  # of src, wei, dst, if the plan is one kernel of these and no more

    def __post_init__(self) -> None:
        names = ("src", "wei", "dst")
        if len(self.steps) == 1 and not self.workspaces and self.steps[0].zero is None and (
                all(p in names for p in self.steps[0].params)):
            self.order = tuple(names.index(p) for p in self.steps[0].params)

    def starter(self, device: int, aligned: bool) -> Callable[[Any, Any, Any], None] | None:
        """A function of (src, wei, dst) that starts the plan with nothing left to decide.

        None for a plan of several kernels, and before the first launch on the device with tensors
        so ``aligned``. The caller sees to it that the device is the current one.
        """
        start = self.steps[0].launcher.kept.get((device, aligned)) if len(self.order) == 3 else None
        if start is None:
            return None
        import torch

        first, second, third = self.order
        stream = torch._C._cuda_getCurrentRawStream

        def run(src: Any, wei: Any, dst: Any) -> None:
            given = (src, wei, dst)
            a, b, c = given[first], given[second], given[third]
            start((a.data_ptr(), b.data_ptr(), c.data_ptr()), (a, b, c), stream(device))

        return run

    @property
    def source(self) -> str:
        return "\n\n".join(s.source for s in self.steps)

    def launch(self, src: Any, wei: Any, dst: Any, **extra: Any) -> None:
        """Run on torch tensors that match the problem; the direction's result is written in place.

        ``bia`` and ``res`` are what the epilogue reads. Launches go to the current stream; a split
        sum takes its workspace from torch's allocator for the time of the call. A plan with boxes
        needs tensors that begin at multiples of 16 bytes (``plan(..., aligned=True)``).
        """
        if self.order and not extra:
            given = (src, wei, dst)
            self.steps[0].launcher([given[i] for i in self.order])
            return
        tensors = {"src": src, "wei": wei, "dst": dst, **extra}
        for name, spec in self.workspaces.items():
            import torch

            dtype = torch.float64 if spec.dtype.bits == 64 else torch.float32
            tensors[name] = torch.empty(spec.layout.span, dtype=dtype, device=src.device)
        for step in self.steps:
            if step.zero is not None:
                tensors[step.zero.name].zero_()
            step.launcher([tensors[name] for name in step.params])


def _switches() -> dict[str, bool]:
    return dict(knobs.passes())


Choose = Callable[[Algorithm, Target], Config]


def plan_steps(problem: ConvProblem, prop: Prop, target: Target, config: Config | None,
               epilogue: Epilogue,
               choose: Choose = heuristics.default) -> list[tuple[Algorithm, Config]]:
    """The algorithms to run, in order, each with its config: phases, and second stages of sums."""
    made: list[tuple[Algorithm, Config]] = []
    for algorithm in algorithms(problem, prop, epilogue):
        if any(x.size == 0 for x in algorithm.axes if algorithm.kind(x.name) != "K"):
            continue
        empty = any(x.size == 0 for x in algorithm.axes_of("K"))
        chosen = choose(algorithm, target) if config is None or empty else _fit(config, algorithm)
        made.append((algorithm, chosen))
        if chosen.split_k > 1 and chosen.reduce == "partials":
            second = blockwise.combine(algorithm, chosen.split_k)
            made.append((second, choose(second, target)))
    return made


def _fit(config: Config, algorithm: Algorithm) -> Config:
    """A config for all stride phases splits the sum of a short phase no further than it goes."""
    known = {x.name for x in algorithm.axes}
    if not algorithm.phase or not all(a in known for b in config.blocks for a in b.axes):
        return config
    return replace(config, split_k=min(config.split_k, max(1, k_steps(config, algorithm))))


def build(problem: ConvProblem, prop: Prop, target: Target, config: Config | None = None,
          epilogue: Epilogue | None = None) -> Compiled:
    """Compile one direction of a problem, without looking at what is kept.

    Without a config, each kernel is the best that is not known to be wrong. Raises ConfigError when
    the given config is not legal, Unsupported when nothing is.
    """
    epilogue = epilogue or Epilogue()
    if problem.src.dtype.kind != "float":
        raise Unsupported(f"dtype:{problem.src.dtype}")
    started = time.perf_counter()
    steps: list[Step] = []
    spaces: dict[str, Tensor] = {}
    shelf = _Shelf(problem, prop)
    for algorithm, chosen in plan_steps(problem, prop, target, config, epilogue, shelf.choose):
        steps.append(shelf.step(algorithm, chosen, target))
        if chosen.split_k > 1 and chosen.reduce == "partials":
            spaces["partials"] = blockwise.workspace(algorithm, chosen.split_k)
        elif chosen.split_k > 1 and not any(s.zero for s in steps):
            steps[-1].zero = algorithm.c.tensor
    used = steps[0].config if steps else config or Config()
    spent = time.perf_counter() - started
    level = logging.INFO if spent > 1 else logging.DEBUG
    if knobs.debug() >= 1:
        level = logging.WARNING
    log.log(level, "%s %s on %s: %s, generated in %.2f s", problem, prop, target.name, used, spent)
    if knobs.debug() >= 2:
        for made in steps:
            log.warning("%s\n%s", made.algorithm, made.source)
    return Compiled(problem, prop, target, used, epilogue, tuple(steps), spaces,
                    config is not None, shelf.rejected)


MOST_REJECTED = 8  # wrong kernels of one algorithm after which torch is the better choice


class _Shelf:
    """The kernels of one plan as they are made, each once."""

    def __init__(self, problem: ConvProblem, prop: Prop) -> None:
        self.problem, self.prop = problem, prop
        self.switches = _switches()
        self.made: dict[tuple[str, Config], Step] = {}
        self.rejected = 0

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

    def choose(self, algorithm: Algorithm, target: Target) -> Config:
        """The best config whose kernel is not known to be wrong. Raises Unsupported when the first
        ``MOST_REJECTED`` are."""
        candidates = heuristics.candidates(algorithm, target)[:MOST_REJECTED]
        for config in candidates:
            if not verdicts.is_wrong(self.step(algorithm, config, target).digest):
                return config
            self.rejected += 1
        raise Unsupported("miscompiled", f"the {len(candidates)} best kernels for {algorithm.name} "
                          f"of {self.problem} are known to give wrong results on {target.name}")


MAX_NAME = 64  # characters of a name in the IR


def kernel_name(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target) -> str:
    """``conv_fwd_mb32ic64..._1f3a``: direction, problem, and a short digest of everything else."""
    rest = f"{problem} {algorithm.epilogue} {config} {target.name} {algorithm.name}"
    digest = hashlib.blake2b(rest.encode(), digest_size=4).hexdigest()
    room = MAX_NAME - len(f"conv_{algorithm.name}__{digest}")
    shape = "".join(c for c in problem.shape_text if c.isalnum() or c == "_")[:room]
    return f"conv_{algorithm.name}_{shape}_{digest}"


def header(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target) -> tuple[str, ...]:
    return (f"{algorithm.name} of {problem}",
            *([f"epilogue {algorithm.epilogue}"] if algorithm.epilogue else []),
            f"config {config}", f"target {target.name}")


def _step(problem: ConvProblem, algorithm: Algorithm, config: Config, target: Target,
          switches: dict[str, bool]) -> Step:
    name = kernel_name(problem, algorithm, config, target)
    kernel = lower(algorithm, config, target, name, problem.math, switches)[-1][1]
    source = emit(kernel, header(problem, algorithm, config, target))
    path = write(source, name)
    boxed = boxes(kernel)
    descriptors = tuple((t, boxed[t.name]) if t.name in boxed else None for t in kernel.params)
    launcher = Launcher(source, name, path, grid_size(kernel), config.warps, config.stages,
                        descriptors)
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
