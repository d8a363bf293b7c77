"""Finds NVIDIA machine code that copies boxes and has branches of whole warps on a condition about which
threads may disagree.

    @P1 BRA.U `(.L_x_17)        P1 = R5 >= 3, and R5 is the row of a thread
    ..
    @P1 BRA `(.L_x_18)          the threads that disagree
    STG.E [R2.64], R25

On an H200 all of 24 runs of one such kernel ended with "an illegal instruction was encountered": a
persistent Gluon kernel whose tile has more rows than the result. compute-sanitizer names the copy of a
box by the warps that load. The branch is not the cause: without it the kernel fails as before, and a
warp takes it only where all of its threads do. The code computes the place of that box wrongly: of two
16-bit values in one register it takes the number of the program instead of the upper one
(miscompiles/signs.py tells how, and finds it in the PTX text). The branch is a sign of such code where
that text is not there: without ``programs`` the same kernel has neither and is right, and none of 91 other
kernels has one. ptxas of CUDA 12.8, 12.9 and 13.0 makes it. Code that copies no box has no place of a box.
"""

from __future__ import annotations

from transconv.backend_triton.offline.machine_code import instructions

BRANCH, OPCODE = 0x947, 0xFFF  # the lowest bits of the first word
COPIES = (0x5b4, 0x3b5)  # of boxes: UTMALDG, UTMASTG
UNIFORM = 1 << 32
ALWAYS = 7  # the predicate of a branch that all threads take, in bits 12 to 14


def takes_uniform_branches(cubin: bytes) -> bool:
    """Whether a kernel in an ELF file (64 bits, little endian) that copies boxes has a conditional branch
    of whole warps."""
    words = [word for word, _ in instructions(cubin)]
    return any(word & OPCODE in COPIES for word in words) and any(
        word & OPCODE == BRANCH and word & UNIFORM and word >> 12 & 7 != ALWAYS for word in words)
