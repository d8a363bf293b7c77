"""Stages 4 to 9. In: an algorithm and a config. Out: the kernel after each pass.

``PIPELINE`` is the whole compiler, read from top to bottom; ``lower`` walks it. A pass is a function
from kernel to kernel in a file of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from transconv import knobs
from transconv.algorithm import Algorithm
from transconv.config import Config
from transconv.counts import main_of
from transconv.errors import ConfigError
from transconv.ir import Kernel
from transconv.ir.verify import verify
from transconv.legality import why_not
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
    reuse,
    roles,
    simplification,
    strength,
    unroll,
    widen,
)
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
    Pass("blockwise", "boxes, and how the parts of a split sum meet",
         lambda k, c: blockwise.blockwise(k, c.config, c.algorithm), optional=False),
    Pass("lanewise", "tiles become vectors, products become calls",
         lambda k, c: lanewise.lanewise(k, c.config, c.dot_precision), optional=False),
    Pass("unroll", "short loops are written out", lambda k, c: unroll.unroll(k)),
    Pass("reuse", "what is loaded twice is loaded once", lambda k, c: reuse.reuse(k)),
    Pass("simplify", "shorter indices, fewer masks",
         lambda k, c: simplification.simplify_kernel(k)),
    Pass("lets", "names that nothing reads disappear", lambda k, c: lets.optimise_lets(k)),
    Pass("hoist", "what does not change leaves the loop", lambda k, c: hoist.hoist(k)),
    Pass("strength", "products with the loop counter become sums",  # a box has nothing to gain
         lambda k, c: k if c.config.via == "gluon" else strength.strength(k), default=False),
    Pass("cse", "repeated divisions get a name", lambda k, c: cse.cse(k)),
    Pass("tidy", "names that the passes before left over",
         lambda k, c: lets.optimise_lets(k)),
    Pass("narrow", "32 or 64 bits for every index", lambda k, c: narrow.narrow(k),
         optional=False),
    Pass("widen", "operands are loaded along all lanes of their products",
         lambda k, c: widen.widen(k, c.config, c.algorithm)),
    Pass("final", "what the target spells differently",
         lambda k, c: final.final(k, c.target.upcast16), optional=False),
    Pass("roles", "shared memory, barriers and the roles of warps",
         lambda k, c: roles.roles(k, c.config), optional=False),
)
STAGES = ("problem", "algorithm", "config", "naive", *(p.name for p in PIPELINE), "emit",
          "together")


def lower(algorithm: Algorithm, config: Config, target: Target, name: str, precision: str = "tf32",
          switches: dict[str, bool] | None = None,
          seconds: dict[str, float] | None = None) -> list[tuple[str, Kernel]]:
    """The kernel after ``naive`` and after every pass: ``[(stage, kernel), ...]``, over merged
    groups and over copies of the tensors that the config packs. ``seconds`` is filled with what each took.

    Raises ConfigError for a config that is not legal. With TRANSCONV_VERIFY=1 the well-formedness
    rules are checked after each pass.
    """
    if reason := why_not(config, algorithm, target):
        raise ConfigError(f"{config}: {reason}")
    algorithm = main_of(algorithm, config)
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
