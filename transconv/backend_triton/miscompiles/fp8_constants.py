"""Finds conversions of two 8-bit floats for which ptxas took the number of a constant in its own tables.

Triton converts four 8-bit floats as two halves of a register:

    mov.u32 %r18, %r51;                        // 0, where the mask does not hold
    @%p2 ld.global.b32 %r18, [%rd1];
    mov.b32 {_, %rs4}, %r18;
    cvt.rn.f16x2.e5m2x2 %r24, %rs4;      ->    F2FP.F16.E5M2.UNPACK_B R2, 2.24e-44;

Where ptxas unrolls the loop and finds that a mask holds in none of its elements (of a step that reads
nothing but padding, of rows beyond the last), the register is 0, and the upper half of it another
constant. The instruction gets that constant's number in a table, such as 2, 4, 8 or 16: 16 is 2**-11 as
f8e5m2, so that of each four elements the third has a term more. On an H100 8 of 96 were wrong. The lower
half, and other instructions that read an upper half, have the constant itself. The assemblers of CUDA
12.8, 12.9, 13.0 and 13.4 do so for sm_89, 90, 100 and 120 alike.

What is loaded where a mask does not hold is 0, so that a right conversion of a constant reads RZ. Of 208
drawn kernels of 8-bit floats one has such an instruction beside the first that was seen: there the other
factor is 0, too.
"""

from __future__ import annotations

from transconv.backend_triton.offline.machine_code import instructions

OPCODE, OF_CONSTANT = 0xFFF, 0x83E  # the lowest bits of the first word: F2FP of a number
UNPACKS = 1 << 25  # in the second word: to two f16, of two 8-bit floats


def takes_numbers(cubin: bytes) -> bool:
    """Whether a kernel in an ELF file converts 8-bit floats of a constant other than 0."""
    return any(word & OPCODE == OF_CONSTANT and more & UNPACKS and word >> 32
               for word, more in instructions(cubin))
