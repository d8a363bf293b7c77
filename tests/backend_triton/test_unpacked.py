"""Conversions of 8-bit floats that ptxas gives the number of a constant are recognised in machine code.

On an H100 8 of the 96 elements of the kernel below were wrong: those that its machine code, read by hand,
makes wrong.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from transconv.backend_triton import Resources, miscompiles
from transconv.backend_triton.machine_code import instructions
from transconv.backend_triton.miscompiles import flaw, takes_numbers
from transconv.backend_triton.offline_compilation import compile_offline
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.verify.matrix import jobs_of

# Three steps, of which the second loads; where the mask does not hold there is the number FILL.
LOOP = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b)
{
    .reg .pred %p<3>; .reg .b16 %rs<5>; .reg .b32 %r<5>; .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [a];
    ld.param.b64 %rd2, [b];
    mov.b32 %r1, 0;
    mov.b32 %r4, 0;
$step:
    setp.eq.b32 %p1, %r1, 1;
    mov.u32 %r2, FILL;
    @%p1 ld.global.b32 %r2, [%rd1];
    HALF
    cvt.rn.f16x2.KIND %r3, %rs1;
    xor.b32 %r4, %r3, %r4;
    add.s32 %r1, %r1, 1;
    setp.ne.b32 %p2, %r1, 3;
    @%p2 bra $step;
    st.global.b32 [%rd2], %r4;
    ret;
}
"""
UPPER, LOWER, SHIFTED = (
    "mov.b32 {_, %rs1}, %r2;",
    "cvt.u16.u32 %rs1, %r2;",
    "shr.u32 %r3, %r2, 16; cvt.u16.u32 %rs1, %r3;",
)


def assembled(ptx: str, folder: Path) -> bytes:
    """Machine code by Triton's assembler."""
    from triton import knobs

    (folder / "it.ptx").write_text(ptx)
    subprocess.run(
        [knobs.nvidia.ptxas.path, "-arch=sm_90a", "it.ptx", "-o", "it.cubin"], cwd=folder, check=True
    )
    return (folder / "it.cubin").read_bytes()


@pytest.mark.parametrize("kind", ["e5m2x2", "e4m3x2"])
@pytest.mark.parametrize(("half", "wrong"), [(UPPER, True), (LOWER, False), (SHIFTED, False)])
def test_halves_of_zero(kind: str, half: str, wrong: bool, tmp_path: Path) -> None:
    ptx = LOOP.replace("KIND", kind).replace("HALF", half).replace("FILL", "0")
    code = assembled(ptx, tmp_path)
    assert takes_numbers(code) == wrong
    assert bool(flaw({"ptx": ptx, "cubin": code})) == bool(flaw({"cubin": code, "sass": ""})) == wrong


def test_the_number_is_none_of_the_program(tmp_path: Path) -> None:
    """The upper half of 0x12345678 is 0x1234; the lower half becomes what it is."""

    def of(half: str) -> set[int]:
        ptx = LOOP.replace("KIND", "e5m2x2").replace("HALF", half).replace("FILL", "0x12345678")
        return {
            word >> 32 & 0xFFFF
            for word, more in instructions(assembled(ptx, tmp_path))
            if word & miscompiles.OPCODE == miscompiles.OF_CONSTANT and more & miscompiles.UNPACKS
        }

    assert of(LOWER) == {0x5678} and of(SHIFTED) == {0x1234}
    (number,) = of(UPPER)
    assert number not in (0x1234, 0x5678, 0)


# The image is 1 wide, so that two of the three taps along it read padding alone.
NARROW = "g24ic24ih7iw{}oc24oh2ow{}kh7kw3sh2sw2ph3pw1 dt=f8e5m2:f8e4m3:bf16"
SCHEDULE = Schedule.parse("mb.oh:64 g:16 | fma | a=gather b=gather | pack=a.b.c stages=1 warps=4")


def found(problem: str, chip: str, words: str = "") -> str:
    """The flaw of the kernel that multiplies."""
    jobs = jobs_of(
        ConvProblem.parse(problem), Prop.FWD, TARGETS[chip], SCHEDULE, Epilogue.parse(words), words=False
    )
    (it,) = compile_offline([job for job in jobs if job.function.startswith("conv_fwd")])
    assert isinstance(it, Resources)
    return it.flaw


@pytest.mark.parametrize("chip", ["sm_90", "sm_89", "sm_100", "sm_120"])
def test_a_kernel_that_was_wrong_on_the_device(chip: str) -> None:
    assert "the number of a constant" in found(NARROW.format(1, 1), chip, "mul:f32:per_oc")


def test_a_wider_image_is_right() -> None:
    """Every tap reads an element somewhere: no mask is known before the kernel runs."""
    assert not found(NARROW.format(4, 2), "sm_90")


def test_what_is_no_machine_code_has_none() -> None:
    assert not takes_numbers(b"") and not takes_numbers(b"no file of machine code")
