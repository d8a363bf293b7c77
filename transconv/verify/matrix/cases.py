"""The golden problems of the matrix, and their kernels for a chip.

A case runs in every direction it names. A direction with a schedule uses it on every chip on which it
is legal; where it is not, and where there is none, the chip's heuristics choose as they do for a
user who has tuned nothing. So one case compares chips at one tile, another shows what each chip's
heuristics choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transconv.backend_triton import CompileJob
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop, marked
from transconv.errors import ScheduleError
from transconv.runtime import build
from transconv.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.verify.matrix.expect import Expected, expected
from transconv.verify.matrix.jobs import job_of


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """A problem, of any size where it has question marks, and how it is asked for. ``schedules``: of the
    directions that have a fixed one; ``epilogue`` is the forward direction's; ``boxes``: whether the copy
    engine may be used (it may not where a tensor is misaligned); ``ways``: the directions."""

    name: str
    problem: str
    schedules: dict[Prop, str] = field(default_factory=dict)
    epilogue: str = ""
    boxes: bool = True
    ways: tuple[Prop, ...] = tuple(Prop)


DENSE = "mb32ic64ih56oc64oh56kh3ph1"
CASES: dict[str, MatrixCase] = {c.name: c for c in (
    MatrixCase("dense", f"{DENSE} dt=bf16 tag=nhwc",
         {Prop.FWD: "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box swap=1 programs=132 "
                    "stages=4 warps=4"}),
    MatrixCase("dense_gather", f"{DENSE} dt=bf16 tag=nhwc",
         {Prop.FWD: "mb.oh.ow:128 oc:64 ic:64 | mma | stages=3 warps=4"}, "bias+relu", boxes=False),
    MatrixCase("residual", f"{DENSE} dt=bf16 tag=nhwc",
         {Prop.FWD: "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box behind=box swap=1 "
                    "programs=132 consumers=2 stages=4 warps=4 via=gluon"}, "res+relu", ways=(Prop.FWD,)),
    MatrixCase("dense_f16", f"{DENSE} dt=f16 tag=nhwc", epilogue="bias+silu"),
    MatrixCase("dense_tf32", f"{DENSE} dt=f32 tag=nhwc math=tf32"),
    MatrixCase("dense_ieee", f"{DENSE} dt=f32 tag=nhwc math=ieee"),
    MatrixCase("dense_f64", "mb4ic64ih28oc64oh28kh3ph1 dt=f64 tag=nhwc"),
    MatrixCase("dense_s8", f"{DENSE} dt=s8:s8:s32 tag=nhwc",
         {Prop.FWD: "mb.oh.ow:128 oc:64 ic:64 | mma | stages=3 warps=4"}, ways=(Prop.FWD,)),
    MatrixCase("dense_f8", f"{DENSE} dt=f8e4m3:f8e4m3:bf16 tag=nhwc",
         {Prop.FWD: "mb.oh.ow:128 oc:64 ic:64 | mma | stages=3 warps=4"}, ways=(Prop.FWD,)),
    MatrixCase("dense_f8_gradient", f"{DENSE} dt=bf16:f8e4m3:f8e5m2 tag=nhwc", ways=(Prop.BWD_D,)),
    MatrixCase("depthwise_u8", "g96mb8ic96ih28oc96oh28kh3ph1 dt=u8:s8:s8 tag=nhwc", ways=(Prop.FWD,)),
    MatrixCase("strided", "mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc",
         {Prop.BWD_D: "mb.qh.qw:128 ic:64 oc:64 | mma | stages=3 warps=4",
          Prop.BWD_W: "ic:64 oc:128 mb.oh.ow:64 | mma | split_k=8 stages=3 warps=4"}),
    MatrixCase("pointwise_nchw", "mb32ic256ih14oc64oh14kh1 dt=f16",
         {Prop.FWD: "mb.oh.ow:64 oc:64 ic:32 | mma | stages=4 warps=4"}),
    MatrixCase("stem_folded", "mb16ic3ih224oc64oh112kh7sh2ph3 dt=f16 tag=nhwc",
         {Prop.FWD: "mb.oh.ow:128 oc:64 kw.ic:32 | mma | stages=3 warps=4"}),
    MatrixCase("depthwise", "g96mb8ic96ih28oc96oh28kh3ph1 dt=f16 tag=nhwc",
         {Prop.FWD: "mb.oh.ow:32 g:32 | fma | unroll=1 stages=2 warps=4",
          Prop.BWD_W: "kw:3 mb.oh:8 ow:4 g:32 | fma | regs=ow.kw late=1 split_k=16 stages=1"}, "silu"),
    MatrixCase("grouped", "g32mb32ic128ih56oc128oh56kh3ph1 dt=f16 tag=nhwc"),
    MatrixCase("volume_dilated", "g2mb2ic16id8oc32od8kd3pd2dd1 tag=ncdhw",
         {Prop.FWD: "mb.od.oh.ow:64 oc:16 ic:16 | mma | swap=1 stages=3 warps=4"}),
    MatrixCase("any_size", "mb8?ic64ih56?oc64oh56kh3ph1 dt=bf16 tag=nhwc",
         {Prop.FWD: "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box swap=1 programs=132 stages=4 "
                    "warps=4",
          Prop.BWD_D: "ih:8 iw:16 ic:64 oc:64 | mma | a=box b=box c=box swap=1 programs=132 consumers=2 "
                      "stages=4 warps=4 via=gluon"}),
    MatrixCase("any_size_nchw", "mb8?ic128ih56?oc512oh56kh1 dt=bf16",
         {Prop.FWD: "mb.oh.ow:128 oc:128 ic:64 | mma | a=box b=box pack=a swap=1 programs=132 stages=4 "
                    "warps=4"}),
    MatrixCase("beyond_32_bits", "mb4096ic64ih128oc64oh128kh1 dt=f16",
         {Prop.FWD: "mb.oh.ow:128 oc:64 ic:32 | mma | stages=3 warps=4"}),
)}


@dataclass(frozen=True, slots=True)
class Planned:
    """One kernel of the matrix: which it is, and what its machine code has to contain."""

    case: str
    way: str
    kernel: str  # the computation's name: a direction's launches differ in it
    target: str
    schedule: str
    shared_limit: int
    job: CompileJob
    expected: tuple[Expected, ...]


def planned(case: MatrixCase, target: Target) -> list[Planned]:
    """Every kernel of a case for a chip, direction by direction; none where the chip has no such types.
    Raises Unsupported for a direction with no legal schedule at all."""
    made: list[Planned] = []
    plain, names = marked(case.problem)
    problem = ConvProblem.parse(plain)
    if any(target.why_not_held(t) for t in problem.dtypes):
        return made
    if not case.boxes:
        target = replace(target, features=target.features - {"box"})
    for way in case.ways:
        epilogue = Epilogue.parse(case.epilogue if way is Prop.FWD else "")
        for step in _plan(case, ConvWorkload(problem, way, epilogue, names), target).steps:
            made.append(Planned(
                case.name, way.value, step.compute.name, target.name, str(step.schedule),
                target.shared_bytes, job_of(step, target),
                expected(step.schedule, step.compute, target, problem.math)))
    return made


def _plan(case: MatrixCase, workload: ConvWorkload, target: Target) -> CompiledDirection:
    # Not what was tuned or rejected on this machine: the record is the same everywhere.
    choose = heuristics.default
    if workload.prop in case.schedules:
        try:
            schedule = Schedule.parse(case.schedules[workload.prop])
            return build(workload, target, schedule, choose, False, CompiledDirection)
        except ScheduleError:
            pass  # not legal on this chip, which chooses its own
    return build(workload, target, None, choose, False, CompiledDirection)


def share(names: Sequence[str], targets: Sequence[Target], part: int,
          parts: int) -> list[tuple[MatrixCase, Target]]:
    """The pairs of a case and a chip, or every ``parts``-th diagonal of them: with no more parts
    than chips, each part has every case at least once."""
    return [(CASES[name], target) for i, name in enumerate(names)
            for j, target in enumerate(targets) if (i + j) % parts == part % parts]
