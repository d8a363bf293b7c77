"""Known miscompilations are recognised in PTX and SASS, and right code is not mistaken for them."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from transconv.backend_triton import miscompiles
from transconv.backend_triton.launch import compile_records
from transconv.backend_triton.machine_code import LISTED, listing, stack_bytes
from transconv.backend_triton.miscompiles import Miscompiled, flaw, refuse, takes_uniform_branches
from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.compute import parse
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir import Const
from transconv.passes.scalar import simplification
from transconv.runtime import build_compute, job_of
from transconv.runtime.check_records import ALLOWED
from transconv.schedule import legality as boxes
from transconv.schedule.schedule import Schedule
from transconv.simplify import Verdict
from transconv.target.records import TARGETS
from transconv.verify.matrix import jobs_of

NEWEST = Path(__file__).parents[2] / ".newest"
HEAD = ".version 8.7\n.target sm_90a\n"
PACKED = HEAD + "mov.b32 \t%r82, 50;\n\tadd.s16x2 \t%r83, %r81, %r82;\n"
LOST = "--:-:-:-:1\tVIADD.16x2 R6, R6, 0x0;\n"
KEPT = LOST.replace("0x0;", "0x32;")

# Index arithmetic of three divisions, known to be small: 288 of 289 elements were wrong on an H200.
PROBLEM = ConvProblem.parse("mb2ic17id5oc17od5kd1 dt=f32 math=ieee")
WRONG = "ic:16 oc:16 mb.od.oh.ow:64 | mma | stages=2 warps=4"
RIGHT = "ic:16 oc:16 mb.od.oh.ow:64 | mma | stages=4 warps=8"


@pytest.mark.parametrize(
    ("ptx", "sass", "wrong"),
    [
        (PACKED, LOST, True),
        (PACKED.replace("8.7", "8.8"), LOST.replace("R6", "R16"), True),
        (PACKED, KEPT + LOST, True),
        (PACKED, LOST.replace("R6, 0x0", "R2.reuse, 0x0"), True),  # seen on an H200
        (PACKED, KEPT, False),
        (PACKED, "VIADD.16x2 R8, R8, 0xff00ff;", False),
        (PACKED, "VIADD R8, R8, 0x0;", False),  # not packed
        (PACKED.replace("8.7", "9.4"), LOST, False),  # the assembler of this version is right
        (HEAD + "add.s32 %r83, %r81, %r82;", LOST, False),
    ],
)
def test_texts(ptx: str, sass: str, wrong: bool) -> None:
    assert bool(flaw({"ptx": ptx, "sass": sass})) == wrong


ABSOLUTE = "neg.s32 \t%r2, %r1;\nmax.s32 \t%r3, %r1, %r2;\nmax.s32 \t%r5, %r3, %r4;\n"
THREE = "VIMNMX3 R167, R8, R8, R167, !PT ;\n"


@pytest.mark.parametrize(
    ("ptx", "sass", "wrong"),
    [
        (ABSOLUTE, THREE, True),
        (ABSOLUTE.replace("%r1, %r2", "%r2, %r1"), THREE.replace("R8, R8", "R9, R9"), True),
        (ABSOLUTE.replace("%r3, %r4", "%r4, %r3"), THREE.replace("R167, R8", "R167, PT, R8"), True),
        (ABSOLUTE, THREE.replace("R8, R8", "R8, R9"), False),
        (ABSOLUTE, THREE.replace("R8, R8", "R8, -R8"), False),
        (ABSOLUTE.replace("max.s32 \t%r5", "min.s32 \t%r5"), THREE, False),  # of something else
        ("abs.s32 \t%r3, %r1;\nmax.s32 \t%r5, %r3, %r4;\n", THREE, False),
        (ABSOLUTE.replace("%r1, %r2", "%r1, %r6"), THREE, False),  # no absolute value
    ],
)
def test_absolute_values_that_keep_their_sign(ptx: str, sass: str, wrong: bool) -> None:
    assert ("absolute value" in flaw({"ptx": ptx, "sass": sass})) == wrong


PRODUCT = "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1,%r2}, "
WAIT = "wgmma.wait_group.sync.aligned "


@pytest.mark.parametrize(
    ("ptx", "wrong"),
    [
        (PRODUCT + "{%r56, %r57, %r58, %r59}, %rd5, p, 1, 1, 0;\n" + WAIT + "\t3;", True),
        (PRODUCT + "{%r56, %r57, %r58, %r59}, %rd5, p, 1, 1, 0;\n" + WAIT + "\t0;", False),
        (PRODUCT + "%rd4, %rd5, p, 1, 1, 0, 0;\n" + WAIT + "1;", False),
    ],
)
def test_registers_that_are_overwritten(ptx: str, wrong: bool) -> None:
    assert bool(flaw({"ptx": HEAD + ptx})) == wrong
    assert not flaw({"ptx": HEAD + ptx, "llir": "call void @__triton_consan_wait()"}), "ConSan's own text"


TOGETHER, APART = "mov.b32 \t%r{}, {{%rs1, %rs2}};\n", "mov.b32 \t{{%rs3, %rs4}}, %r{};\n"
CHANGED = TOGETHER + "and.b32 \t%r{}, %r{}, 16711935;\n" + APART


@pytest.mark.parametrize(
    ("ptx", "wrong"),
    [
        (CHANGED.format(1, 2, 1, 2) + CHANGED.format(3, 4, 3, 4), True),
        (CHANGED.format(1, 2, 1, 2) + ".entry" + CHANGED.format(3, 4, 3, 4), False),  # another function
        (CHANGED.format(1, 2, 1, 2) + CHANGED.format(3, 4, 5, 4), False),  # no pair that was put together
        (CHANGED.format(1, 2, 1, 2) + TOGETHER.format(3) + APART.format(3), False),  # as it was
        (CHANGED.format(1, 2, 1, 2), False),
    ],
)
def test_upper_halves(ptx: str, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not flaw({"ptx": HEAD + ptx}), "no branch of whole warps"
    monkeypatch.setattr(miscompiles, "takes_uniform_branches", lambda cubin: True)
    assert bool(flaw({"ptx": HEAD + ptx})) == wrong


PAIR = "or.b64  \t%rd22, %rd19, %rd21;\n"
UPPER = "mov.b64 \t{_, %r49}, %rd22;\n"


@pytest.mark.parametrize(
    ("ptx", "wrong"),
    [
        ("mul.wide.u32 \t%rd19, %r1, 2147483648;\n" + PAIR + UPPER, True),
        ("mul.wide.u32 \t%rd21, %r1, 2147483648;\n" + PAIR + "shr.u64 \t%rd3, %rd22, 32;", True),
        ("shl.b64 \t%rd19, %rd18, 31;\n" + PAIR + "mov.b64 \t{%r48, %r49}, %rd22;", True),
        ("mul.wide.u32 \t%rd19, %r1, 4;\n" + PAIR, False),  # the pair is not split
        ("mul.wide.u32 \t%rd9, %r1, 4;\n" + PAIR + UPPER, False),  # the multiplication has another result
        ("cvt.u64.u32 \t%rd19, %r1;\nshl.b64 \t%rd21, %rd20, 32;\n" + PAIR + UPPER, False),
    ],
)
def test_pairs_that_run_over(ptx: str, wrong: bool) -> None:
    assert bool(flaw({"ptx": HEAD + ptx})) == wrong


# Its first loads are offset by half of the thread's number: 32 of 4,096 elements were wrong on an H200.
OVER = ConvProblem.parse("g8ic32ih8oc32oh8kh5ph6dh2 dt=f32 math=ieee")
OVER_SCHEDULE = (
    "mb:1 ih:1 iw:32 ic:16 kh.kw.oc:32 | mma | order=kh.kw.oc split_k=3 programs=1 stages=2 warps=4"
)


@pytest.mark.every(3)
@pytest.mark.parametrize("chip", ["sm_90", "sm_80", "sm_100"])
def test_an_offset_with_bits_of_the_thread(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kernel as it is with the masks that rules alone leave."""
    monkeypatch.setattr(
        simplification,
        "decide",
        lambda e, facts: Verdict(bool(e.value), "simplify") if isinstance(e, Const) else None,
    )
    jobs = jobs_of(
        OVER, Prop.BWD_D, TARGETS[chip], Schedule.parse(OVER_SCHEDULE), None, "ptx", words=False
    )[:1]
    (found,) = compile_offline(jobs)
    assert isinstance(found, Resources) and "its lower half runs over" in found.flaw
    if (NEWEST / "ready").exists():
        (mended,) = compile_offline(jobs, triton=NEWEST)
        assert isinstance(mended, Resources) and not mended.flaw


def test_a_left_operand_in_registers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The legality rules refuse this schedule; without them, the check of its machine code finds the
    error."""
    monkeypatch.setattr(boxes, "_rank", lambda box, target: 2)
    p = ConvProblem.parse("mb1ic320ih96oc320oh96kh3ph1 dt=bf16 tag=nhwc")
    schedule = Schedule.parse("ih:8 iw:32 ic:128 oc:64 | mma | a=box b=box swap=1 stages=3 warps=8")
    (found,) = compile_offline(jobs_of(p, Prop.BWD_D, TARGETS["sm_90"], schedule, words=False))
    assert isinstance(found, Resources) and "registers that the next step writes" in found.flaw


# Of the 64 rows of a tile three are stored: "an illegal instruction was encountered" on an H200.
BRANCHING = ConvProblem.parse("g6ic96ih6oc96oh3kh4sh2ph1 dt=f16 tag=nhwc")
BRANCH_SCHEDULE = "qw:64 ic:16 oc:16 | mma | a=box b=box | group_m=1 stages=4 warps=4 via=gluon"


def test_an_upper_half_of_another_pair() -> None:
    """The PTX text tells; without it, a branch of threads that disagree."""
    words = (BRANCH_SCHEDULE, BRANCH_SCHEDULE.replace("stages", "programs=132 stages"))
    right, wrong = compile_offline(
        [
            replace(
                jobs_of(BRANCHING, Prop.BWD_D, TARGETS["sm_90"], Schedule.parse(w))[0],
                code=True,
                words=False,
            )
            for w in words
        ]
    )
    assert isinstance(right, Resources) and isinstance(wrong, Resources)
    assert not right.flaw and "of another pair" in wrong.flaw
    assert "of another pair" in flaw({"cubin": wrong.code})
    assert not takes_uniform_branches(right.code)
    assert not takes_uniform_branches(b"") and not takes_uniform_branches(b"no file of machine code")


SPILLING = """compute spilling math=ieee
    tensor A f32 [m=256, k=197]
    tensor B bf16 [k=197, n=64]
    tensor C f32 [m=256, n=64]
    axes   m=256 n=64 | k=197
    read   a = A[m, k]
    read   b = B[k, n]
    let    c = f32(b)
    store  C[m, n] = sum(a*c; k)"""


@pytest.mark.slow
def test_the_memory_of_a_thread_is_read_as_cuobjdump_reads_it() -> None:
    plans = [
        build_compute(
            parse(SPILLING), TARGETS["sm_90"], Schedule.parse(f"m:{m} n:64 k:16 | mma | stages=3 warps=4")
        )
        for m in (128, 64)
    ]
    jobs = [replace(job_of(p.steps[0], p.target), code=True, words=False) for p in plans]
    many, none = compile_offline(jobs)
    assert isinstance(many, Resources) and isinstance(none, Resources)
    assert stack_bytes({"cubin": many.code}) == many.spill_bytes > ALLOWED
    assert stack_bytes({"cubin": none.code}) == none.spill_bytes < ALLOWED
    assert stack_bytes({}) == stack_bytes({"cubin": b"no file of machine code"}) == 0
    assert stack_bytes({"amdgcn": "    .private_segment_fixed_size: 320"}) == 320


def test_what_cannot_be_read_is_not_believed() -> None:
    assert "cannot be read" in flaw({"ptx": PACKED})
    assert not flaw({"ptx": HEAD}) and not flaw({"amdgcn": ""}) and not flaw({})


def test_machine_code_alone_is_looked_at() -> None:
    """As Triton keeps it with TRITON_STORE_BINARY_ONLY."""
    assert flaw({"cubin": b"", "sass": LOST}) and not flaw({"cubin": b"", "sass": KEPT})


def test_kernels_from_disk_were_read_for_the_same() -> None:
    """A record of a kernel is void when one of the files changes that say what is a known miscompile."""
    room = "transconv.backend_triton."
    modules = {getattr(it, "__module__", None) or "" for it in vars(miscompiles).values()}
    assert {f"{m.removeprefix(room).replace('.', '/')}.py" for m in modules if m.startswith(room)} == {
        *compile_records.RULES
    }


def test_a_kernel_is_refused_before_it_runs() -> None:
    refuse(SimpleNamespace(asm={"ptx": HEAD}), "good")
    refuse(object(), "of another kind")
    with pytest.raises(Miscompiled, match="bad: ptxas lost the constant") as told:
        refuse(SimpleNamespace(asm={"ptx": PACKED, "sass": LOST}), "bad")
    again = pickle.loads(pickle.dumps(told.value))
    assert (again.function, again.why, again.reason) == ("bad", told.value.why, "miscompiled")


def test_a_kernel_that_was_wrong_on_the_device() -> None:
    jobs = [
        jobs_of(PROBLEM, Prop.BWD_W, TARGETS["sm_90"], Schedule.parse(c), None, "ptx")[0]
        for c in (WRONG, RIGHT)
    ]
    wrong, right = compile_offline(jobs)
    assert isinstance(wrong, Resources) and isinstance(right, Resources)
    assert "ptxas lost the constant" in wrong.flaw and "miscompiled" in str(wrong)
    assert not right.flaw and "miscompiled" not in str(right)
    if (NEWEST / "ready").exists():
        (mended,) = compile_offline(jobs[:1], triton=NEWEST)
        assert isinstance(mended, Resources) and not mended.flaw
        assert "add.s16x2" in mended.texts["ptx"]


@pytest.mark.slow
def test_long_machine_code_is_read_to_its_end() -> None:
    """Triton's listing ends after 4,096 instructions; what is read instead has the same ones."""
    (job,) = jobs_of(PROBLEM, Prop.BWD_W, TARGETS["sm_90"], Schedule.parse(RIGHT), None, "sass")
    (found,) = compile_offline([replace(job, code=True)])
    assert isinstance(found, Resources)
    short = found.texts["sass"]
    code = re.compile(r"\t(?:@!?\w+ )?([A-Z][\w.]*)")
    again = listing({"sass": "\n" * LISTED, "cubin": found.code})
    assert code.findall(again) == code.findall(short) != [] and "/*0010*/" in again
    assert listing({"sass": short, "cubin": found.code}) == short
    assert "cannot be read" in flaw({"sass": "\n" * LISTED, "cubin": b"no file of machine code"})
