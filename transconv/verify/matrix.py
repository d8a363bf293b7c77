"""The compile matrix: golden problems as machine code for every chip, and the record of what they take.

A case runs in every direction it names. A direction with a schedule uses it on every chip on which it
is legal; where it is not, and where there is none, the chip's heuristics choose as they do for a
user who has tuned nothing. So one case compares chips at one tile, another shows what each chip's
heuristics choose.

What a kernel's machine code must contain follows from its schedule and its chip, by one table of rules. A
rule says when it holds and names words of which at least one must occur (see ``backend_triton.resources``
for what they mean). No rule knows a problem by name.

The record, a CSV file with a row for each chip, Triton, golden problem and kernel, is a budget. A kernel
may use less, and never spills more. While its schedule is the recorded one it may use a few registers
more, because Triton's allocation varies with every change of a text.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from math import prod
from pathlib import Path

from transconv.backend_triton import Answer, CompileFailure, CompileJob, Resources, is_explicit
from transconv.compute import Compute, axis_strides
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop, compiler, marked
from transconv.cost import ASYNCHRONOUS, aligned, count
from transconv.ir import View
from transconv.runtime import PlanStep, build
from transconv.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.support import ScheduleError, read_named
from transconv.target import TARGETS, Target


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
CASES: dict[str, MatrixCase] = {
    c.name: c
    for c in (
        MatrixCase(
            "dense",
            f"{DENSE} dt=bf16 tag=nhwc",
            {
                Prop.FWD: "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box swap=1 programs=132 "
                "stages=4 warps=4"
            },
        ),
        MatrixCase(
            "dense_gather",
            f"{DENSE} dt=bf16 tag=nhwc",
            {Prop.FWD: "mb.oh.ow:128 oc:64 ic:64 | mma | stages=3 warps=4"},
            "bias+relu",
            boxes=False,
        ),
        MatrixCase(
            "residual",
            f"{DENSE} dt=bf16 tag=nhwc",
            {
                Prop.FWD: "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box behind=box swap=1 "
                "programs=132 consumers=2 stages=4 warps=4 via=gluon"
            },
            "res+relu",
            ways=(Prop.FWD,),
        ),
        MatrixCase("dense_f16", f"{DENSE} dt=f16 tag=nhwc", epilogue="bias+silu"),
        MatrixCase("dense_tf32", f"{DENSE} dt=f32 tag=nhwc math=tf32"),
        MatrixCase("dense_ieee", f"{DENSE} dt=f32 tag=nhwc math=ieee"),
        MatrixCase("dense_f64", "mb4ic64ih28oc64oh28kh3ph1 dt=f64 tag=nhwc"),
        MatrixCase(
            "dense_s8",
            f"{DENSE} dt=s8:s8:s32 tag=nhwc",
            {Prop.FWD: "mb.oh.ow:128 oc:64 ic:64 | mma | stages=3 warps=4"},
            ways=(Prop.FWD,),
        ),
        MatrixCase(
            "dense_f8",
            f"{DENSE} dt=f8e4m3:f8e4m3:bf16 tag=nhwc",
            {Prop.FWD: "mb.oh.ow:128 oc:64 ic:64 | mma | stages=3 warps=4"},
            ways=(Prop.FWD,),
        ),
        MatrixCase("dense_f8_gradient", f"{DENSE} dt=bf16:f8e4m3:f8e5m2 tag=nhwc", ways=(Prop.BWD_D,)),
        MatrixCase("depthwise_u8", "g96mb8ic96ih28oc96oh28kh3ph1 dt=u8:s8:s8 tag=nhwc", ways=(Prop.FWD,)),
        MatrixCase(
            "strided",
            "mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc",
            {
                Prop.BWD_D: "mb.qh.qw:128 ic:64 oc:64 | mma | stages=3 warps=4",
                Prop.BWD_W: "ic:64 oc:128 mb.oh.ow:64 | mma | split_k=8 stages=3 warps=4",
            },
        ),
        MatrixCase(
            "pointwise_nchw",
            "mb32ic256ih14oc64oh14kh1 dt=f16",
            {Prop.FWD: "mb.oh.ow:64 oc:64 ic:32 | mma | stages=4 warps=4"},
        ),
        MatrixCase(
            "stem_folded",
            "mb16ic3ih224oc64oh112kh7sh2ph3 dt=f16 tag=nhwc",
            {Prop.FWD: "mb.oh.ow:128 oc:64 kw.ic:32 | mma | stages=3 warps=4"},
        ),
        MatrixCase(
            "depthwise",
            "g96mb8ic96ih28oc96oh28kh3ph1 dt=f16 tag=nhwc",
            {
                Prop.FWD: "mb.oh.ow:32 g:32 | fma | unroll=1 stages=2 warps=4",
                Prop.BWD_W: "kw:3 mb.oh:8 ow:4 g:32 | fma | regs=ow.kw late=1 split_k=16 stages=1",
            },
            "silu",
        ),
        MatrixCase("grouped", "g32mb32ic128ih56oc128oh56kh3ph1 dt=f16 tag=nhwc"),
        MatrixCase(
            "volume_dilated",
            "g2mb2ic16id8oc32od8kd3pd2dd1 tag=ncdhw",
            {Prop.FWD: "mb.od.oh.ow:64 oc:16 ic:16 | mma | swap=1 stages=3 warps=4"},
        ),
        MatrixCase(
            "any_size",
            "mb8?ic64ih56?oc64oh56kh3ph1 dt=bf16 tag=nhwc",
            {
                Prop.FWD: "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box c=box swap=1 programs=132 "
                "stages=4 warps=4",
                Prop.BWD_D: "ih:8 iw:16 ic:64 oc:64 | mma | a=box b=box c=box swap=1 programs=132 "
                "consumers=2 stages=4 warps=4 via=gluon",
            },
        ),
        MatrixCase(
            "any_size_nchw",
            "mb8?ic128ih56?oc512oh56kh1 dt=bf16",
            {
                Prop.FWD: "mb.oh.ow:128 oc:128 ic:64 | mma | a=box b=box pack=a swap=1 programs=132 "
                "stages=4 warps=4"
            },
        ),
        MatrixCase(
            "beyond_32_bits",
            "mb4096ic64ih128oc64oh128kh1 dt=f16",
            {Prop.FWD: "mb.oh.ow:128 oc:64 ic:32 | mma | stages=3 warps=4"},
        ),
    )
}


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
            made.append(
                Planned(
                    case.name,
                    way.value,
                    step.compute.name,
                    target.name,
                    str(step.schedule),
                    target.shared_bytes,
                    job_of(step, target),
                    expected(step.schedule, step.compute, target, problem.math),
                )
            )
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


def share(
    names: Sequence[str], targets: Sequence[Target], part: int, parts: int
) -> list[tuple[MatrixCase, Target]]:
    """The pairs of a case and a chip, or every ``parts``-th diagonal of them: with no more parts
    than chips, each part has every case at least once."""
    return [
        (CASES[name], target)
        for i, name in enumerate(names)
        for j, target in enumerate(targets)
        if (i + j) % parts == part % parts
    ]


WIDEST = 16  # bytes that one lane moves at most


@dataclass(frozen=True, slots=True)
class Expected:
    """At least one of the words, and why."""

    words: tuple[str, ...]
    reason: str

    def missing(self, words: dict[str, int]) -> str | None:
        """None if one of them occurs, else a sentence."""
        if any(words.get(w) for w in self.words):
            return None
        return f"no {' or '.join(self.words)} in the machine code: {self.reason}"


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the rules ask about a kernel. ``left``, ``right``: rows and columns of the tile as the
    matrix unit sees it; ``lane_bytes``: what a lane can take at once of an operand that is gathered,
    0 if none is; ``steps`` of the loop; ``bits`` of an operand's element."""

    backend: str
    features: frozenset[str]
    lanes: int  # of a warp
    matrix: bool
    precision: str  # how f32 is multiplied: ieee, tf32, tf32x3
    bits: int
    left: int
    right: int
    lane_bytes: int
    boxes: bool
    box_store: bool
    box_behind: bool  # of 16 bits
    steps: int
    warps: int
    stages: int
    sums_only: bool
    atomic: bool

    @property
    def cuda(self) -> bool:
        return self.backend == "cuda"

    @property
    def asynchronous(self) -> bool:
        """Whether the tile is large enough for a whole group of warps to multiply together."""
        return self.left >= 64 and self.warps % 4 == 0

    @property
    def exact32(self) -> bool:
        """Whether f32 is multiplied as it is, which matrix units of CUDA chips cannot."""
        return self.bits == 32 and self.precision == "ieee"


def facts(schedule: Schedule, compute: Compute, target: Target, precision: str) -> KernelFacts:
    """The facts of one kernel."""
    work = count(schedule, compute, target)
    # Asynchronous matrix units take f32 from shared memory along K only; other rows are transposed
    # on the way, element by element.
    along_k = work.bits == 32 and bool(ASYNCHRONOUS & target.features)
    gathered = [
        _at_once(view, schedule, compute, target.warp_size, along_k)
        for view, word in ((compute.a, schedule.a), (compute.b, schedule.b))
        if view is not None and word == "gather"
    ]
    return KernelFacts(
        target.backend,
        target.features,
        target.warp_size,
        schedule.unit == "mma" and compute.b is not None,
        precision if precision in target.precisions else "ieee",
        work.bits,
        work.left,
        work.right,
        max(gathered, default=0),
        "box" in (schedule.a, schedule.b),
        schedule.c == "box",
        schedule.behind == "box" and compute.c.tensor.dtype.bits == 16,
        work.steps,
        schedule.warps,
        schedule.stages,
        compute.b is None,
        schedule.split_k > 1 and schedule.reduce == "atomic",
    )


def _at_once(view: View, schedule: Schedule, compute: Compute, lanes: int, along_k: bool) -> int:
    """Bytes that a lane can take with one access: a power of two up to 16 where one axis alone, the
    tensor's innermost, makes a side of the tile, and every row begins at a multiple of it; else one
    element. (Fused axes are left out: their masks and divisions may forbid it.)"""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    blocks = [b for b in schedule.blocks if any(strides[a] for a in b.axes)]
    along = next((b.first for b in blocks if len(b.axes) == 1 and strides[b.first] == 1), None)
    if along is None or (along_k and compute.kind(along) != "K"):
        return size
    steps = [strides[x.name] for x in compute.axes if x.name != along and x.size > 1]
    steps += [strides[""], compute.size(along), prod(b.extent for b in blocks) // (schedule.warps * lanes)]
    vector = WIDEST // size
    while vector > 1 and any(s % vector for s in steps):
        vector //= 2
    return min(vector, aligned(view, (along,), compute)) * size


@dataclass(frozen=True, slots=True)
class Rule:
    """``words`` must occur where ``holds``; ``reason`` is told when none does."""

    holds: Callable[[KernelFacts], bool]
    words: tuple[str, ...]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        lambda f: f.matrix and "wgmma" in f.features and f.asynchronous and not f.exact32,
        ("HGMMA", "IGMMA", "QGMMA"),
        "the schedule says mma, and its tile fills the asynchronous matrix unit",
    ),
    Rule(
        lambda f: f.matrix and "tcgen05" in f.features and f.asynchronous and not f.exact32 and f.bits > 8,
        ("UTCHMMA",),
        "the schedule says mma, and its tile fills the asynchronous matrix unit",
    ),
    Rule(
        lambda f: f.matrix and f.cuda and not f.exact32,
        ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "UTCQMMA", "UTCIMMA"),
        "the schedule says mma",
    ),
    Rule(
        lambda f: f.matrix and f.backend == "hip" and f.lanes == 64, ("v_mfma",), "the schedule says mma"
    ),
    Rule(
        lambda f: f.matrix and f.backend == "hip" and f.lanes == 32 and f.bits <= 16,
        ("v_wmma",),
        "the schedule says mma",
    ),
    Rule(
        lambda f: (
            f.matrix
            and f.backend == "xpu"
            and "mma" in f.features
            and (f.bits <= 16 or (f.bits == 32 and f.precision != "ieee"))
        ),
        ("dpas",),
        "the schedule says mma",
    ),
    Rule(
        lambda f: f.cuda and f.bits == 32 and (f.exact32 or not f.matrix) and not f.sums_only,
        ("FFMA", "FFMA2"),
        "f32 is multiplied as it is",
    ),
    Rule(lambda f: f.cuda and f.bits == 64 and not f.sums_only, ("DFMA", "DMMA"), "f64 is multiplied"),
    Rule(
        lambda f: f.backend == "hip" and f.bits == 64 and not f.sums_only,
        ("v_fma", "v_mfma"),
        "f64 is multiplied",
    ),
    Rule(lambda f: f.boxes, ("UTMALDG",), "an operand is fetched as boxes"),
    Rule(lambda f: f.box_store, ("UTMASTG",), "the result is stored as boxes"),
    Rule(lambda f: f.box_behind, ("LDSM",), "what is read behind the sum comes from shared memory"),
    Rule(
        lambda f: f.matrix and f.cuda and f.lane_bytes >= 4 and f.steps > 1 and f.stages > 1,
        ("LDGSTS",),
        "a gathered operand should be copied past the registers",
    ),
    Rule(
        lambda f: f.matrix and f.cuda and f.lane_bytes >= 16,
        ("LDGSTS.128", "LDG.128"),
        "the channels of a gathered operand lie in aligned runs of 16 bytes",
    ),
    # Triton 3.9 copies f32 past the registers of gfx950 in pieces of 4 bytes.
    Rule(
        lambda f: (
            f.matrix
            and f.backend == "hip"
            and f.lane_bytes >= 16
            and not (f.bits == 32 and "async_copy" in f.features)
        ),
        ("global_load.128", "buffer_load.128"),
        "the channels of a gathered operand lie in aligned runs of 16 bytes",
    ),
    Rule(
        lambda f: f.matrix and f.backend == "xpu" and f.lane_bytes >= 16,
        ("load.ugm.128", "load_block2d.ugm"),
        "the channels of a gathered operand lie in aligned runs of 16 bytes",
    ),
    Rule(lambda f: f.atomic and f.cuda, ("RED", "ATOMG"), "parts of a sum meet in memory"),
    Rule(
        lambda f: f.atomic and f.backend == "hip",
        ("global_atomic", "buffer_atomic"),
        "parts of a sum meet in memory",
    ),
)


def expected(schedule: Schedule, compute: Compute, target: Target, precision: str) -> tuple[Expected, ...]:
    """What the rules ask of one kernel."""
    known = facts(schedule, compute, target, precision)
    return tuple(Expected(rule.words, rule.reason) for rule in RULES if rule.holds(known))


def jobs_of(
    problem: ConvProblem,
    prop: Prop,
    target: Target,
    schedule: Schedule | None = None,
    epilogue: Epilogue | None = None,
    text: str = "",
    words: bool = True,
) -> list[CompileJob]:
    """One job for each launch of a direction. Raises as ``compiler.build``."""
    return [
        job_of(s, target, text, words)
        for s in compiler.build(problem, prop, target, schedule, epilogue).steps
    ]


def job_of(step: PlanStep, target: Target, text: str = "", words: bool = True) -> CompileJob:
    """One launch; ``text`` names an intermediate text to bring back, ``words``: see ``CompileJob``."""
    boxes = step.triton.boxes or (None,) * len(step.kernel.params)
    params = tuple(
        (p.dtype.name, box[1] if box else ()) for p, box in zip(step.kernel.params, boxes, strict=True)
    )
    return CompileJob(
        step.source,
        step.kernel.name,
        params,
        target.name,
        target.backend,
        target.arch,
        target.warp_size,
        step.schedule.warps,
        step.schedule.stages,
        (text,) if text else (),
        is_explicit(step.kernel),
        words=words,
        sizes=len(step.kernel.sizes.each) if step.kernel.sizes else 0,
        dots="mma" in target.features,
    )


SLACK = 8  # registers: the granule in which they are handed out
COMMON = ("LDS", "STS", "HFMA2", "ds_read", "ds_load", "ds_write", "ds_store")  # tell nothing

Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """What one kernel takes: ``registers`` and ``spill_bytes`` per thread, ``shared_bytes`` per
    program. The stride phases of a direction are one row, that of the most of each; ``words`` are
    the telling instructions of all."""

    triton: str
    target: str
    case: str
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialised: bool
    words: str
    schedule: str

    @property
    def key(self) -> Key:
        return self.triton, self.target, self.case, self.kernel

    def join(self, other: ResourceRow) -> ResourceRow:
        """The most of two phases."""
        heavier = max(self, other, key=lambda r: (r.spill_bytes, r.registers))
        words = dict.fromkeys([*self.words.split(), *other.words.split()])
        return replace(
            heavier,
            registers=max(self.registers, other.registers),
            shared_bytes=max(self.shared_bytes, other.shared_bytes),
            serialised=self.serialised or other.serialised,
            words=" ".join(words),
        )


def rows_of(triton: str, planned: Sequence[Planned], answers: Sequence[Answer]) -> list[ResourceRow]:
    """The rows of what was compiled, in the order of the plan."""
    rows: dict[Key, ResourceRow] = {}
    for p, a in zip(planned, answers, strict=True):
        if isinstance(a, Resources):
            row = ResourceRow(
                triton,
                p.target,
                p.case,
                without_phase(p.kernel),
                a.registers,
                a.spill_bytes,
                a.shared_bytes,
                a.serialised,
                " ".join(w for w in a.words if w not in COMMON),
                p.schedule,
            )
            rows[row.key] = rows[row.key].join(row) if row.key in rows else row
    return list(rows.values())


def without_phase(kernel: str) -> str:
    """``bwd_d_0_1`` is a phase of ``bwd_d``."""
    return re.sub(r"(_\d+)+(?=_|$)", "", kernel)


def flaws(planned: Planned, answer: Answer) -> list[str]:
    """What is wrong with a kernel whatever was recorded, in sentences."""
    if isinstance(answer, CompileFailure):
        return [f"{planned.kernel} does not compile: {answer.reason}"]
    found = [f"{planned.kernel} has {m}" for e in planned.expected if (m := e.missing(answer.words))]
    if answer.flaw:
        found.append(f"{planned.kernel} is miscompiled: {answer.flaw}")
    if answer.shared_bytes > planned.shared_limit:
        found.append(
            f"{planned.kernel} asks for {answer.shared_bytes} bytes of shared memory, "
            f"{planned.target} has {planned.shared_limit}"
        )
    return found


def overruns(row: ResourceRow, recorded: ResourceRow | None) -> list[str]:
    """How a kernel exceeds its budget, in sentences."""
    if recorded is None:
        return [f"{row.kernel} is not in the record; --update puts it there"]
    found = []
    if row.spill_bytes > recorded.spill_bytes:
        found.append(
            f"{row.kernel} spills {row.spill_bytes} bytes, {recorded.spill_bytes} are "
            f"recorded ({row.schedule})"
        )
    if row.serialised and not recorded.serialised:
        found.append(
            f"{row.kernel} waits after each product (serialised), as recorded it did not ({row.schedule})"
        )
    allowed = recorded.registers + max(SLACK, recorded.registers // 8)
    if row.schedule == recorded.schedule and row.registers > allowed:
        found.append(
            f"{row.kernel} takes {row.registers} registers, {recorded.registers} are "
            f"recorded and up to {allowed} allowed ({row.schedule})"
        )
    return found


def read(path: Path) -> dict[Key, ResourceRow]:
    """A record; nothing if there is no such file. Raises ValueError for one of other columns."""
    if not path.exists():
        return {}
    lines = csv.DictReader(io.StringIO(read_named(path, "a record of the compile matrix"), newline=""))
    names = [f.name for f in fields(ResourceRow)]
    if lines.fieldnames != names:
        raise ValueError(f"{path} is no record: its columns are {lines.fieldnames}, expected {names}")
    try:
        rows = [
            ResourceRow(
                line["triton"],
                line["target"],
                line["case"],
                line["kernel"],
                int(line["registers"]),
                int(line["spill_bytes"]),
                int(line["shared_bytes"]),
                line["serialised"] == "1",
                line["words"],
                line["schedule"],
            )
            for line in lines
        ]
    except (TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path}: line {lines.line_num} is no row of a record ({error})") from error
    return {r.key: r for r in rows}


def write(path: Path, rows: Iterable[ResourceRow]) -> None:
    """Write a record, sorted, so that a change of one kernel is a change of one line."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(f.name for f in fields(ResourceRow))
        for row in sorted(rows, key=place):
            lines.writerow(int(v) if isinstance(v, bool) else v for v in astuple(row))


def place(row: ResourceRow) -> tuple[object, ...]:
    """Where a row stands: chips in the order of their records, the rest by name."""
    names = list(TARGETS)
    at = names.index(row.target) if row.target in names else len(names)
    return at, row.target, row.case, row.kernel, row.triton
