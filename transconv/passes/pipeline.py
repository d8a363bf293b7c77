"""Stages 4 to 9. In: a computation and a schedule. Out: the kernel after each pass.

``PIPELINE`` is the whole compiler, read from top to bottom; ``lower`` walks it. A pass is a function
from kernel to kernel in a file of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from transconv import knobs
from transconv.compute import Compute
from transconv.disk_cache import leave_text
from transconv.errors import ScheduleError
from transconv.ir import Kernel, verify
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
from transconv.schedule import Schedule, Scheduled, why_not
from transconv.target import Target

log = logging.getLogger("transconv.compiler")


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may ask: the computation, the schedule, the target, and how f32 is multiplied."""

    compute: Compute
    schedule: Schedule
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
         lambda k, c: gridwise.gridwise(k, c.schedule, c.compute), optional=False),
    Pass("blockwise", "boxes, and how the parts of a split sum meet",
         lambda k, c: blockwise.blockwise(k, c.schedule, c.compute), optional=False),
    Pass("lanewise", "tiles become vectors, products become calls",
         lambda k, c: lanewise.lanewise(k, c.schedule, c.dot_precision), optional=False),
    Pass("unroll", "short loops are written out", lambda k, c: unroll.unroll(k)),
    Pass("reuse", "what is loaded twice is loaded once", lambda k, c: reuse.reuse(k)),
    Pass("simplify", "shorter indices, fewer masks",
         lambda k, c: simplification.simplify_kernel(k)),
    Pass("lets", "names that nothing reads disappear", lambda k, c: lets.optimise_lets(k)),
    Pass("hoist", "what does not change leaves the loop", lambda k, c: hoist.hoist(k)),
    Pass("strength", "products with the loop counter become sums",  # a box has nothing to gain
         lambda k, c: k if c.schedule.via == "gluon" else strength.strength(k), default=False),
    Pass("cse", "repeated divisions get a name", lambda k, c: cse.cse(k)),
    Pass("tidy", "names that the passes before left over",
         lambda k, c: lets.optimise_lets(k)),
    Pass("narrow", "32 or 64 bits for every index", lambda k, c: narrow.narrow(k),
         optional=False),
    Pass("widen", "operands are loaded along all lanes of their products",
         lambda k, c: widen.widen(k, c.schedule, c.compute)),
    Pass("final", "what the target spells differently",
         lambda k, c: final.final(k, c.target.upcast16), optional=False),
    Pass("roles", "shared memory, barriers and the roles of warps",
         lambda k, c: roles.roles(k, c.schedule), optional=False),
)
_registered: list[tuple[Pass, str]] = []


def register(step: Pass, before: str = "roles") -> None:
    """Add a pass of your own in front of another one, for this process. Raises ValueError if the name is
    taken, or if there is no pass ``before``."""
    names = [p.name for p in passes()]
    if step.name in names:
        raise ValueError(f"there is a pass '{step.name}' already; expected a name of its own")
    if before not in names:
        raise ValueError(f"there is no pass '{before}'; expected one of {' '.join(names)}")
    _registered.append((step, before))


def unregister(name: str) -> None:
    """Take a registered pass out again; one that is not registered is no error."""
    _registered[:] = [(p, before) for p, before in _registered if p.name != name]


def passes() -> tuple[Pass, ...]:
    """All passes in their order: ``PIPELINE`` with the registered ones."""
    made = list(PIPELINE)
    for step, before in _registered:
        made.insert(next(i for i, p in enumerate(made) if p.name == before), step)
    return tuple(made)


def stages() -> tuple[str, ...]:
    """The names of what can be printed, from the problem to the text."""
    return ("problem", "compute", "schedule", "naive", *(p.name for p in passes()), "emit", "together")


def lower(compute: Compute, schedule: Schedule, target: Target, name: str, precision: str = "tf32",
          switches: dict[str, bool] | None = None,
          seconds: dict[str, float] | None = None) -> list[tuple[str, Kernel]]:
    """The kernel after ``naive`` and after every pass: ``[(stage, kernel), ...]``, over merged
    groups and over copies of the tensors that the schedule packs. ``seconds`` is filled with what each
    took.

    Raises ScheduleError for a schedule that is not legal. With TRANSCONV_VERIFY=1 the well-formedness
    rules are checked after each pass.
    """
    if reason := why_not(schedule, compute, target):
        raise ScheduleError(f"{schedule}: {reason}")
    compute = Scheduled(compute, schedule).main
    context = Context(compute, schedule, target, precision)
    spent = {} if seconds is None else seconds
    started = time.perf_counter()
    kernel = naive.naive(compute, name)
    spent["naive"] = time.perf_counter() - started
    made = [("naive", kernel)]
    checked = knobs.verify()
    for step in passes():
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
            leave_text(folder, f"{kernel.name}.{place:02}.{stage}.txt", f"{kernel}\n")
        before = kernel
