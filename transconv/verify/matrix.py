"""The compile matrix: golden problems as machine code for every chip, and the record of what they take.

A case runs in every direction it names. A direction with a schedule uses it on every chip on which it is
legal; where it is not, and where there is none, the chip's heuristics choose as they do for a user who has
tuned nothing. So one case compares chips at one tile, another shows what each chip's heuristics choose.

What a kernel's machine code must contain is in expected_instructions.py.

The record, a CSV file with a row for each chip, Triton, golden problem and kernel, is a budget. A kernel
may use less, and never spills more. While its schedule is the recorded one it may use a few registers
more, because Triton's allocation varies with every change of a text."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path

from transconv.backend_triton import Answer, CompileFailure, CompileJob, Resources
from transconv.compute import Compute, parse
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop, compiler, marked
from transconv.ir import DType
from transconv.runtime import PlanStep, build, build_compute, job_of
from transconv.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.support import AddressError, ScheduleError, read_named
from transconv.target import TARGETS, Target
from transconv.verify.expected_instructions import Expected, expected


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """A problem, of any size where it has question marks, or the file of a computation, and how it is
    asked for. ``schedules``: of the directions that have a fixed one; ``epilogue`` is the forward
    direction's; ``boxes``: whether the copy engine may be used (it may not where a tensor is misaligned);
    ``ways``: the directions, which a computation has not."""

    name: str
    problem: str
    schedules: dict[Prop, str] = field(default_factory=dict)
    epilogue: str = ""
    boxes: bool = True
    ways: tuple[Prop, ...] = tuple(Prop)

    @property
    def compute(self) -> Compute | None:
        """The computation of a file."""
        return parse((ROOT / self.problem).read_text()) if self.problem.endswith(".txt") else None

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The types that its tensors have."""
        if (compute := self.compute) is not None:
            return tuple(t.dtype for t in compute.tensors)
        return ConvProblem.parse(marked(self.problem)[0]).dtypes


ROOT = Path(__file__).parents[2]  # of the repository
BLOCKS = ("mxfp8", "mxfp4_mxfp8", "mxfp4", "nvfp4")
"""The formats of products in blocks, which are computations: weights, and inputs if they are others."""
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
        MatrixCase(  # of MLIR's convolution emitter, N(C/4)HW4
            "first_layer",
            "mb128ic4ih224oc64oh112kh7sh2ph3 dt=f16 tag=nChw4c:oIhw4i:nchw",
            {Prop.FWD: "mb:1 oh:16 ow:16 oc:64 kw.ic:32 | mma | stages=3 warps=8"},
            ways=(Prop.FWD,),
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
CASES |= {f"product_{n}": MatrixCase(f"product_{n}", f"docs/examples/product_{n}.txt") for n in BLOCKS}


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
    if any(target.why_not_held(t) for t in case.dtypes):
        return made
    if (compute := case.compute) is not None:
        plan = build_compute(compute, target)
        return [_planned(case, "compute", step, target, compute.math) for step in plan.steps]
    plain, names = marked(case.problem)
    problem = ConvProblem.parse(plain)
    if not case.boxes:
        target = replace(target, features=target.features - {"box"})
    for way in case.ways:
        epilogue = Epilogue.parse(case.epilogue if way is Prop.FWD else "")
        for step in _plan(case, ConvWorkload(problem, way, epilogue, names), target).steps:
            made.append(_planned(case, way.value, step, target, problem.math))
    return made


def _planned(case: MatrixCase, way: str, step: PlanStep, target: Target, math: str) -> Planned:
    return Planned(
        case.name,
        way,
        step.compute.name,
        target.name,
        str(step.schedule),
        target.shared_bytes,
        job_of(step, target),
        expected(step.schedule, step.compute, target, math),
    )


def _plan(case: MatrixCase, workload: ConvWorkload, target: Target) -> CompiledDirection:
    # Not what was tuned or rejected on this machine: the record is the same everywhere.
    choose = heuristics.default
    if workload.prop in case.schedules:
        try:
            schedule = Schedule.parse(case.schedules[workload.prop])
            return build(workload, target, schedule, choose, False, CompiledDirection)
        except AddressError:
            raise
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
