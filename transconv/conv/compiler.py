"""The compiler of convolutions: from a direction of a problem to a plan, by the compiler for any workload.

A plan of a convolution launches on src, wei and dst, with cleared blocked padding and torch's settings.
The registry of a layer (runtime/registry.py) has plans for any size. The examples that its schedules are
chosen for:

    middle, small, large (3D: large, small)       at most 6 kernels, and copies in torch's order
    one image between small and middle            in 2D and torch's order
    others for images of a multiple of a stride   which boxes can write, or also read, as planes
    another for rows of a multiple of 16 bytes    which boxes can write, in torch's order; without a window
                                                  for such images, whose tensors are all moved in boxes
    other proportions                             with a window: tiles with longer or shorter rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transconv import runtime
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.epilogue import Epilogue
from transconv.conv.relation import every, phases, planes_of, rows_of, whole
from transconv.conv.workload import ConvWorkload
from transconv.ir import f32
from transconv.passes import lower
from transconv.runtime import Choose, Plan, Planned, PlanRequest, forget, replan
from transconv.schedule import ENGINE_ALIGN, Schedule
from transconv.support import ProblemError, is_direct
from transconv.target import Target

__all__ = ["build", "forget", "lower", "plan", "plan_steps", "question", "replan"]


def build(
    problem: ConvProblem,
    prop: Prop,
    target: Target,
    schedule: Schedule | None = None,
    epilogue: Epilogue | None = None,
    choose: Choose | None = None,
    deterministic: bool = False,
) -> CompiledDirection:
    """Compile one direction of a problem, as ``runtime.build`` does a workload."""
    return runtime.build(
        ConvWorkload(problem, prop, epilogue or Epilogue()),
        target,
        schedule,
        choose,
        deterministic,
        CompiledDirection,
    )


def plan(
    problem: ConvProblem,
    prop: Prop,
    target: Target,
    schedule: Schedule | str | None = None,
    epilogue: Epilogue | str = "",
    *,
    aligned: bool = True,
    deterministic: bool = False,
    mode: str = "now",
) -> CompiledDirection:
    """``build``, cached: equal arguments give the same plan, which is compiled once per process.

    ``aligned``: every tensor will begin at a multiple of 16 bytes, as boxes need. ``deterministic``:
    results have the same bits in every run. Only ``reduce=atomic`` does not: a tuned schedule with it is
    skipped, a given one raises ScheduleError. ``mode``: what to do if the kernels are not compiled yet
    (see ``runtime.ready``)."""
    if isinstance(schedule, str):
        schedule = Schedule.parse(schedule)
    asked = question(problem, prop, target, epilogue, aligned=aligned, deterministic=deterministic)
    return runtime.ready(
        asked.workload, asked.target, schedule, deterministic, CompiledDirection, aligned, mode
    )


def question(
    problem: ConvProblem,
    prop: Prop,
    target: Target,
    epilogue: Epilogue | str = "",
    *,
    aligned: bool = True,
    deterministic: bool = False,
) -> PlanRequest:
    """The arguments of ``plan`` as the key of its cache."""
    if isinstance(epilogue, str):
        epilogue = Epilogue.parse(epilogue)
    return PlanRequest(
        ConvWorkload(problem, prop, epilogue), suited(target, aligned), deterministic, aligned
    )


def suited(target: Target, aligned: bool) -> Target:
    """The target as it can be used for tensors that are ``aligned``: boxes begin at multiples of 16
    bytes."""
    return target if aligned else replace(target, features=target.features - {"box"})


def plan_steps(
    problem: ConvProblem,
    prop: Prop,
    target: Target,
    schedule: Schedule | None,
    epilogue: Epilogue,
    choose: Choose | None = None,
) -> Planned:
    """The computations to run, in order, each with its schedule: see ``runtime.plan_steps``."""
    return runtime.plan_steps(ConvWorkload(problem, prop, epilogue), target, schedule, choose)


NAMES = ("src", "wei", "dst")


@dataclass(slots=True)
class CompiledDirection(Plan):
    """The plan of one direction of a problem."""

    workload: ConvWorkload
    order: tuple[int, ...] = ()  # of src, wei, dst as arguments, if the plan is one kernel of these alone

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        if self.required:
            return
        result = getattr(self.problem, self.prop.result).layout
        shape = self.problem.shapes[self.prop.result]
        self.padding = result.padding(shape) if result.extents != shape else []
        if self.padding:
            return
        if (
            len(self.steps) == 1
            and not self.workspaces
            and self.steps[0].zero is None
            and (all(p in NAMES for p in self.steps[0].params))
        ):
            self.order = tuple(NAMES.index(p) for p in self.steps[0].params)

    @property
    def problem(self) -> ConvProblem:
        """The problem."""
        return self.workload.problem

    @property
    def prop(self) -> Prop:
        """The direction."""
        return self.workload.prop

    @property
    def epilogue(self) -> Epilogue:
        """The operations on the sum before it is stored."""
        return self.workload.epilogue

    @property
    def obeys(self) -> frozenset[str]:
        """The numeric settings of torch that affect this plan: ``deterministic`` if it uses atomic
        additions; ``precision`` if the matrix unit multiplies float32, or would with another setting. Only
        depthwise problems never use the matrix unit."""
        p = self.problem
        found = {"deterministic" for s in self.steps if s.schedule.reduce == "atomic"}
        if any(getattr(p, n).dtype is f32 for n in self.prop.operands) and (
            not p.g == p.ic == p.oc or any(s.schedule.unit == "mma" for s in self.steps)
        ):
            found.add("precision")
        return frozenset(found)

    def starter(
        self, device: int, aligned: bool, names: tuple[str, ...] = NAMES, spaces: bool = False
    ) -> Callable[..., None] | None:
        """As ``Plan.starter``; also None if padding must be cleared after the launches."""
        return None if self.padding else Plan.starter(self, device, aligned, names, spaces)

    def launch(self, src: Any, wei: Any, dst: Any, **extra: Any) -> None:  # type: ignore[override]
        """Run on torch tensors that match the problem; the direction's result is written in place. Raises
        TensorError for tensors that do not match.

        ``extra``: ``bia`` and ``res``, if the epilogue reads them. Launches go to the current stream.
        Split sums and packed operands take workspaces from torch's allocator during the call. A plan with
        boxes needs tensors that begin at multiples of 16 bytes (``plan(..., aligned=True)``)."""
        tensors = {"src": src, "wei": wei, "dst": dst, **extra}
        self.check(tensors)
        if self.order and not extra:
            given = (src, wei, dst)
            self.steps[0].triton.run([given[i] for i in self.order])
            return
        self.run(tensors)
        if self.padding:
            self._clear_padding(tensors[self.prop.result])

    def _clear_padding(self, result: Any) -> None:
        """Store zeros where blocks reach beyond the result's shape, as oneDNN requires."""
        layout = getattr(self.problem, self.prop.result).layout
        blocks = result.as_strided(
            [b.size for b in layout.blocks],
            [b.stride for b in layout.blocks],
            result.storage_offset() + layout.offset,
        )
        for box in self.padding:
            blocks[box].zero_()


# Images and the length of their sides, or each side, by the number of spatial dimensions. Where there is
# no room for all, the first ones are taken. Those from the fourth on have other proportions.
Examples = tuple[tuple[int, int | tuple[int, ...]], ...]
EXAMPLES: dict[int, Examples] = {
    1: ((8, 4096), (1, 256), (32, 32768)),
    2: ((8, 56), (1, 14), (16, 224), (1, (400, 100)), (8, (24, 200)), (16, 96), (1, 48)),
    3: ((4, 16), (8, 32), (1, 8), (1, (128, 64, 32)), (8, (12, 24, 96)), (1, (48, 96, 24))),
}
SQUARE, ALL = 3, 6  # of these; what follows is for torch's order, where middle plans copy
# Where there is room for one: large images cost more, and tiles of several images waste half of one.
ALONE = {1: (8, 16384), 2: (2, 160), 3: (2, 32)}
# Those for images of a multiple of a stride, which may also take the plans for all images.
OTHERS: dict[int, Examples] = {
    1: ((4, 8192), (2, 1024), (32, 8192)),
    2: ((2, 96), (16, 96)),
    3: ((2, 20), (8, 20)),
}
ONE_IMAGE = {1: (1, 16384), 2: (1, 224), 3: (1, 24)}  # where all stride phases are one launch
MOST_KERNELS = 6  # of a layer and direction, where its stride has no more phases
COPIES = 3  # of src, wei and dst with features innermost: further kernels, which its plans share


class LayerRegistry(runtime.Registry[CompiledDirection]):
    """The plans of one layer and direction: of a problem of any size, its filter, strides, channels, types
    and orders of memory. Sizes are images, then the sides of src. Raises ProblemError for a layer that has
    none."""

    def __init__(
        self,
        problem: ConvProblem,
        prop: Prop,
        target: Target,
        epilogue: Epilogue,
        aligned: bool,
        deterministic: bool,
    ) -> None:
        if any(_length(problem, x, i) != problem.o[x] for x, i in enumerate(problem.i)):
            raise ProblemError(f"problem '{problem}': the sizes of dst do not follow from those of src")
        target = suited(target, aligned)
        planes = _has_planes(problem, prop, target)
        together = not planes and problem.g == 1 and _is_innermost(problem)  # phases are one launch
        room = MOST_KERNELS if together else max(1, MOST_KERNELS // len(phases(problem, prop)))
        sizes = _examples(problem, prop, planes)[:room] if room > 1 else (ALONE[problem.ndims],)
        ways = [(every, sizes)]
        if planes and not (is_direct() and len(sizes) == MOST_KERNELS):
            ways.append(
                (whole, OTHERS[problem.ndims][:room] if room > 1 else (*sizes, ONE_IMAGE[problem.ndims]))
            )
        if share := _share_of_rows(problem, prop, target):
            shared = planes_of if _is_pointwise(problem) and problem.ndims > 1 else rows_of
            ways = [(every, sizes[:1]), (partial(shared, share=share), sizes[:1]), (every, sizes[1:])]
        questions = [
            PlanRequest(ConvWorkload(p, prop, epilogue, names(p)), target, deterministic, aligned)
            for names, of in ways
            for p in dict.fromkeys(_like(problem, *e) for e in of)
        ]
        count = len(phases(problem, prop))  # a schedule for each, and then one for all of them
        super().__init__(
            questions,
            CompiledDirection,
            "layer",
            questions[0].workload.title,
            most=max(MOST_KERNELS, count + planes) + (0 if _is_innermost(problem) else COPIES),
            each=count * count,
        )


def _examples(p: ConvProblem, prop: Prop, planes: bool) -> Examples:
    """Those of a layer. Without a window, and where operands are gathered, tiles need no rows. There are
    fewer of groups, whose tiles are small, and of weight gradients, which have two kernels a plan (one of
    them is the same where sums have as many parts); and beside plans for planes, which are needed where no
    box takes every so many-th position."""
    found = EXAMPLES[p.ndims]
    square, others = found[:SQUARE], found[SQUARE:ALL]
    if not _is_innermost(p):
        square = (*square, *found[ALL:])
    gradient = prop is Prop.BWD_W
    if max(p.k) == 1 or p.ic * p.src.dtype.bytes % ENGINE_ALIGN or (gradient and p.g > 1):
        return square
    if gradient and p.ndims > 2:
        return (*square[1:], *others[:2])
    return (*square, *(others[:1] if gradient or p.g > 1 or (planes and not is_direct()) else others))


def _has_planes(p: ConvProblem, prop: Prop, target: Target) -> bool:
    """Whether boxes may read or write src as planes if its sides are multiples of the strides."""
    strided = any(s > 1 and (k > 1 or prop is Prop.BWD_D) for s, k in zip(p.stride, p.k, strict=True))
    return (
        strided
        and prop is not Prop.BWD_W
        and "box" in target.features
        and p.g == 1
        and _is_innermost(p)
        and p.ic * p.src.dtype.bytes % ENGINE_ALIGN == 0
    )


def _is_innermost(p: ConvProblem) -> bool:
    """Whether the features of src lie next to one another."""
    inner = p.src.layout.blocks[-1]
    return (inner.dim, inner.stride) == (1, 1)


def _share_of_rows(p: ConvProblem, prop: Prop, target: Target) -> int:
    """How many elements of the result have 16 bytes, where boxes may write its rows if those of src are
    multiples of so many; without a window also where they may read those of a weight gradient's operands.
    Else 0."""
    written = p.dst if prop is Prop.BWD_W else p.specs[prop.result]
    inner, last = written.layout.blocks[-1], p.ndims - 1
    rows = (inner.dim, inner.stride) == (last + 2, 1) and (prop is not Prop.BWD_W or _is_pointwise(p))
    alike = p.stride[last] == 1 and p.i[last] == p.o[last]
    boxes = "box" in target.features and p.g == 1
    return ENGINE_ALIGN // written.dtype.bytes if rows and alike and boxes else 0


def _is_pointwise(p: ConvProblem) -> bool:
    """Whether src and dst have the same positions, each of which depends on itself alone."""
    return {*p.k, *p.stride} == {1} and p.i == p.o


def _length(p: ConvProblem, x: int, i: int) -> int:
    """How many positions of dst so many of src have, along a dimension."""
    high = p.pad_hi[x] if p.stride[x] == 1 else p.pad_lo[x]
    return (i + p.pad_lo[x] + high - (p.k[x] - 1) * p.dilation[x] - 1) // p.stride[x] + 1


def _like(p: ConvProblem, images: int, side: int | tuple[int, ...]) -> ConvProblem:
    """The layer of a problem at other sizes: sides so long, or as long as the filter needs, which are
    multiples of the strides."""
    sides = side if isinstance(side, tuple) else (side,) * p.ndims
    i = tuple(
        next(n for n in range(-(-sides[x] // s) * s, 1 << 30, s) if _length(p, x, n) >= 1)
        for x, s in enumerate(p.stride)
    )
    return p.at(images, i, tuple(_length(p, x, n) for x, n in enumerate(i)))
