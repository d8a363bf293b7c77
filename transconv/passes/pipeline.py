"""The compiler's pipeline: the kernel of a computation and a schedule after each pass.

``STAGES`` lists all stages in order, from the problem to the text. ``lower`` runs those from ``naive`` to
``roles``; each pass is a function from kernel to kernel in a file of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from transconv.compute import Compute, Write, describe
from transconv.ir import Kernel, RowTable, verify
from transconv.passes import warp_roles
from transconv.passes.footprints import verify_addresses, why_not_inside
from transconv.passes.lowering import blockwise, gridwise, lanewise, legalization, naive
from transconv.passes.scalar import cse, dp4a, hoist, index_width, simplification, unroll
from transconv.passes.scope import VariableNames, hidden, renamed
from transconv.schedule import Schedule, Scheduled, why_not
from transconv.support import AddressError, ScheduleError, knobs, leave_text
from transconv.target import Target


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may use: the computation, the schedule, the target, and the precision of f32
    products. ``scheduled``: None for a kernel that was written by hand, for which passes that ask for a
    computation or a schedule do not run; ``chip``: its target."""

    scheduled: Scheduled | None
    precision: str = "tf32"
    chip: Target | None = None

    @property
    def whole(self) -> Scheduled:
        """The computation with its schedule."""
        assert self.scheduled is not None, "a kernel that was written by hand has no schedule"
        return self.scheduled

    @property
    def compute(self) -> Compute:
        """The computation of the main kernel: groups merged, over the copies."""
        return self.whole.main

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.whole.schedule

    @property
    def target(self) -> Target:
        """The chip."""
        return self.chip or self.whole.target

    @property
    def dot_precision(self) -> str:
        """The precision of products of f32: the requested one if the chip has it, else ``ieee``."""
        if self.target.upcast16 or self.precision not in self.target.precisions:
            return "ieee"
        return self.precision


@dataclass(frozen=True, slots=True)
class Stage:
    """A step from a problem to a text, with a phrase about it. ``takes`` and ``gives`` are each one of
    problem, compute, schedule, kernel, text. ``level``: that of its result (a key of ``ir.LEVELS``); empty
    if it is the level of the stage before."""

    name: str
    phrase: str
    takes: str = field(default="kernel", kw_only=True)
    gives: str = field(default="kernel", kw_only=True)
    level: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class Form(Stage):
    """A stage that gives a form of the computation; ``of`` derives it."""

    of: Callable[[Scheduled], Compute]
    takes: str = field(default="compute", kw_only=True)
    gives: str = field(default="compute", kw_only=True)


@dataclass(frozen=True, slots=True)
class Pass(Stage):
    """A function ``run`` from kernel to kernel. Without an ``optional`` pass the kernel is still correct.
    ``default``: whether an optional pass runs unless TRANSCONV_PASSES says otherwise. ``scheduled``: it
    asks for the computation or the schedule."""

    run: Callable[[Kernel, Context], Kernel]
    optional: bool = True
    default: bool = True
    scheduled: bool = False


log = logging.getLogger("transconv.compiler")

STAGES: tuple[Stage, ...] = (
    Stage("problem", "what is asked for", takes="", gives="problem"),
    Form("compute", "what is computed", lambda s: s.compute, takes="problem", level="compute"),
    Stage("schedule", "how it is computed", takes="compute", gives="schedule"),
    Form("merging", "neighbouring groups are seen as one", lambda s: s.grouped),
    Form("packing", "tensors are seen through their copies", lambda s: s.main),
    Stage("naive", "the loop nest of the computation", takes="compute", level="nest"),
    Pass(
        "gridwise",
        "axes become grid x loop x tile",
        lambda k, c: gridwise.gridwise(k, c.schedule, c.compute),
        optional=False,
        level="tiles",
        scheduled=True,
    ),
    Pass(
        "blockwise",
        "boxes, and how the parts of a split sum meet",
        lambda k, c: blockwise.blockwise(k, c.schedule, c.compute),
        optional=False,
        scheduled=True,
    ),
    Pass(
        "lanewise",
        "tiles become vectors, products become calls",
        lambda k, c: lanewise.lanewise(k, c.schedule, c.compute, c.dot_precision),
        optional=False,
        level="lanes",
        scheduled=True,
    ),
    Pass("unroll", "short loops are written out", lambda k, c: unroll.unroll(k)),
    Pass("reuse", "what is loaded twice is loaded once", lambda k, c: cse.reuse(k)),
    Pass("simplify", "shorter indices, fewer masks", lambda k, c: simplification.simplify_kernel(k)),
    Pass("lets", "names that nothing reads disappear", lambda k, c: cse.optimise_lets(k)),
    Pass(
        "hoist",
        "what does not change leaves the loop",
        lambda k, c: hoist.hoist(k, c.scheduled is not None and c.compute.sums_positions),
    ),
    Pass(
        "edges",
        "tiles inside need no masks of the edges",
        lambda k, c: unroll.edges(k, c.schedule),
        scheduled=True,
    ),
    Pass("cse", "repeated divisions get a name", lambda k, c: cse.cse(k)),
    Pass("narrow", "32 or 64 bits for every index", lambda k, c: index_width.narrow(k), optional=False),
    Pass(
        "widen",
        "operands are loaded along all lanes of their products",
        lambda k, c: blockwise.widen(k, c.schedule, c.compute),
        scheduled=True,
    ),
    Pass(
        "upright",
        "rows of results are the first dimension of their tiles",
        lambda k, c: lanewise.upright(k, c.schedule),
        scheduled=True,
    ),
    Pass(
        "final",
        "what the target spells differently",
        lambda k, c: legalization.final(k, c.target.upcast16),
        optional=False,
    ),
    Pass(
        "quads",
        "bytes are multiplied four at a time",
        lambda k, c: dp4a.quads(k, c.schedule, c.compute, c.target),
        scheduled=True,
    ),
    Pass(
        "roles",
        "shared memory, barriers and the roles of warps",
        lambda k, c: warp_roles.roles(k, c.schedule),
        optional=False,
        level="explicit",
        scheduled=True,
    ),
    Stage("together", "all stride phases in one launch"),
    Stage("emit", "the kernel in Triton", gives="text"),
)
"""All stages, in their order."""
# The stages that are neither a form of the computation nor a pass.
PROBLEM: Stage
"""What is asked for."""
SCHEDULE: Stage
"""How it is computed."""
NAIVE: Stage
"""The loop nest of the computation."""
TOGETHER: Stage
"""All stride phases in one launch."""
EMIT: Stage
"""The kernel's text."""
PROBLEM, SCHEDULE, NAIVE, TOGETHER, EMIT = (s for s in STAGES if type(s) is Stage)
PIPELINE: tuple[Pass, ...] = tuple(s for s in STAGES if isinstance(s, Pass))
"""The stages from kernel to kernel."""


class _Registered(NamedTuple):
    """A pass of a program's, by its name, and the pass that it runs before."""

    name: str
    step: Pass
    before: str


_registered: RowTable[_Registered] = RowTable()


def register(step: Pass, before: str = "roles") -> None:
    """Add a pass before another one, in this process. Raises ValueError if the name is taken, or if there
    is no pass ``before``."""
    names = [s.name for s in stages()]
    if step.name in names:
        raise ValueError(f"there is a stage '{step.name}' already; expected a name of its own")
    names = [p.name for p in passes()]
    if before not in names:
        raise ValueError(f"there is no pass '{before}'; expected one of {' '.join(names)}")
    _registered.add(_Registered(step.name, step, before))


def unregister(name: str) -> None:
    """Remove a registered pass. Does nothing if there is none of this name."""
    if name in _registered:
        _registered.remove(name)


def stages() -> tuple[Stage, ...]:
    """All stages in their order: ``STAGES`` with the registered passes."""
    made = list(STAGES)
    for _, step, before in _registered.values():
        made.insert(next(i for i, p in enumerate(made) if p.name == before), step)
    return tuple(made)


def forms() -> tuple[Form, ...]:
    """The stages that give a computation."""
    return tuple(s for s in stages() if isinstance(s, Form))


def passes() -> tuple[Pass, ...]:
    """The stages from kernel to kernel that ``lower`` walks."""
    return tuple(s for s in stages() if isinstance(s, Pass))


def levels() -> dict[str, str]:
    """The level of the IR after each stage, by the stage's name."""
    found: dict[str, str] = {}
    level = ""
    for stage in stages():
        level = found[stage.name] = stage.level or level
    return found


def running(switches: Mapping[str, bool] | None = None) -> dict[str, bool]:
    """Whether each pass runs, by name: as ``switches`` says, by default TRANSCONV_PASSES. Raises
    ValueError for an unknown name, and for switching off a pass that always runs."""
    said = dict(knobs.passes()) if switches is None else switches
    optional = [p.name for p in passes() if p.optional]
    always = [p.name for p in passes() if not p.optional]
    for name, on in said.items():
        if name not in optional and not (on and name in always):
            raise ValueError(
                f"{knobs.passes.name}: there is no optional pass '{name}'; expected some of "
                + " ".join(optional)
            )
    return {p.name: said.get(p.name, p.default or not p.optional) for p in passes()}


def lower(
    compute: Compute,
    schedule: Schedule,
    target: Target,
    name: str,
    precision: str = "tf32",
    switches: Mapping[str, bool] | None = None,
    seconds: dict[str, float] | None = None,
) -> list[tuple[str, Kernel]]:
    """The kernel after ``naive`` and after every pass: ``[(stage, kernel), ...]``. With the words
    ``merge`` and ``pack`` it is over merged groups and over copies of the packed tensors. ``seconds``
    receives the time of each pass.

    A value of the computation whose name a pass gives to a variable of its own gets another name.

    Raises ScheduleError for a schedule that is not legal and for an axis with such a name, AddressError if
    an access without a mask is not proved to be inside of its tensor. With TRANSCONV_VERIFY=1 the kernel
    is verified after each pass, and all accesses of the last one are; raises VerifyError."""
    if reason := why_not(schedule, compute, target):
        raise ScheduleError(f"{schedule}: {reason}")
    context = Context(Scheduled(compute, schedule, target), precision)
    runs, spent, checked = running(switches), {} if seconds is None else seconds, knobs.verify()
    level = levels() if checked else {}
    started = time.perf_counter()
    kernel = naive.naive(context.compute, name)
    spent[NAIVE.name] = time.perf_counter() - started
    if checked:
        verify(kernel, level[NAIVE.name], NAIVE.name)
    made = [(NAIVE.name, kernel)]
    for step in passes():
        started = time.perf_counter()
        if runs[step.name]:
            kernel = step.run(kernel, context)
            spent[step.name] = time.perf_counter() - started
            if twice := hidden(kernel):
                return lower(
                    _apart(compute, schedule, twice), schedule, target, name, precision, switches, seconds
                )
            if checked:
                verify(kernel, level[step.name], step.name)
        made.append((step.name, kernel))
    started = time.perf_counter()
    if checked:
        verify_addresses(kernel, made[-1][0])
    elif reason := why_not_inside(kernel):
        raise AddressError(f"{schedule}: {reason}")
    spent[ADDRESSES] = time.perf_counter() - started
    _trace(context.whole, made, spent)
    return made


ADDRESSES = "addresses"  # what proves them, among the seconds of passes


def _apart(compute: Compute, schedule: Schedule, names: frozenset[str]) -> Compute:
    """The computation with other names for the values of these names. ScheduleError if
    one is no value's."""
    values = {s.name: s.var for s in compute.steps if not isinstance(s, Write)}
    if left := sorted(names - values.keys()):
        raise ScheduleError(
            f"{schedule}: the kernel has a variable '{left[0]}' of its own; expected "
            "another name for the axis or size"
        )
    taken = VariableNames(taken=compute.names.all)
    return renamed(compute, {values[n]: taken.fresh(f"{n}_") for n in sorted(names)})


def finish(
    kernel: Kernel, target: Target, switches: Mapping[str, bool] | None = None
) -> list[tuple[str, Kernel]]:
    """The stages of a kernel that was written by hand, at the level of lanes: as it is, then after each
    pass that needs no schedule. It is verified before, at the end with the addresses of accesses that have
    no mask, and with TRANSCONV_VERIFY=1 after each pass with all addresses; raises VerifyError."""
    context, runs, level = Context(None, chip=target), running(switches), levels()
    verify(kernel, WRITTEN, "the source")
    made = [("written", kernel)]
    steps = passes()
    first = next(i for i, p in enumerate(steps) if p.level == WRITTEN)
    for step in (p for p in steps[first:] if not p.scheduled):
        if runs[step.name]:
            kernel = step.run(kernel, context)
            if knobs.verify():
                verify(kernel, level[step.name], step.name)
        made.append((step.name, kernel))
    verify(kernel, WRITTEN, made[-1][0])
    verify_addresses(kernel, made[-1][0], masked=knobs.verify())
    return made


WRITTEN = "lanes"  # the level of kernels that are written by hand


def _trace(whole: Scheduled, made: list[tuple[str, Kernel]], seconds: dict[str, float]) -> None:
    """TRANSCONV_DUMP writes the result of each stage to a folder; TRANSCONV_DEBUG=3 logs the kernels that
    a pass has changed, 4 all of them."""
    name, level = made[0][1].name, knobs.debug()
    before: Kernel | None = None
    for stage, kernel in made if level >= 3 else ():
        if level > 3 or kernel is not before:
            log.warning(
                "after %s of %s, %.1f ms\n%s",
                stage,
                name,
                1e3 * seconds.get(stage, 0.0),
                "(unchanged)" if kernel is before else kernel,
            )
        before = kernel
    if knobs.dump() is not None:
        leave(name, SCHEDULE.name, str(whole.schedule))
        for form in forms():
            leave(name, form.name, describe(form.of(whole)))
        for stage, kernel in made:
            leave(name, stage, str(kernel))


def leave(name: str, stage: str, text: str) -> None:
    """Write the result of a stage for the kernel ``name`` to the folder of TRANSCONV_DUMP, if it is
    set."""
    if folder := knobs.dump():
        place = [s.name for s in stages()].index(stage)
        leave_text(folder, f"{name}.{place:02}.{stage}.txt", f"{text}\n")
