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
16-bit values in one register it takes the number of the program instead of the upper one (flaws.py tells
how, and finds it in the PTX text). The branch is a sign of such code where that text is not there: without
``programs`` the same kernel has neither and is right, and none of 91 other kernels has one. ptxas of CUDA
12.8, 12.9 and 13.0 makes it. Code that copies no box has no place of a box.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

CODE = 16  # bytes of an instruction from sm_70 on
BRANCH, OPCODE = 0x947, 0xFFF  # the lowest bits of the first word
COPIES = (0x5b4, 0x3b5)  # of boxes: UTMALDG, UTMASTG
UNIFORM = 1 << 32
ALWAYS = 7  # the predicate of a branch that all threads take, in bits 12 to 14
PROGBITS, EXECUTABLE = 1, 0x4  # type and flag of a section


def takes_uniform_branches(cubin: bytes) -> bool:
    """Whether a kernel in an ELF file (64 bits, little endian) that copies boxes has a conditional branch
    of whole warps."""
    words = [word for code in _sections(cubin) for word in _words(code)]
    return any(word & OPCODE in COPIES for word in words) and any(
        word & OPCODE == BRANCH and word & UNIFORM and word >> 12 & 7 != ALWAYS for word in words)


def _words(code: bytes) -> Iterator[int]:
    """The first word of each instruction."""
    return (word for word, _ in struct.iter_unpack("<QQ", code[:len(code) // CODE * CODE]))


def _sections(cubin: bytes) -> Iterator[bytes]:
    """The machine code of each function."""
    if cubin[:4] != b"\x7fELF":
        return
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    for n in range(count):
        _, kind, flags, _, begin, length = struct.unpack_from("<IIQQQQ", cubin, table + n * size)
        if kind == PROGBITS and flags & EXECUTABLE:
            yield cubin[begin:begin + length]
