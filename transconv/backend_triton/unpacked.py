"""Finds 8-bit floats that ptxas unpacks from a number of its own.

Two 8-bit floats at a time become f16, those of the lower or of the upper half of a register. If the
register is known to be 0, as where a step of an unrolled loop reads padding alone, ptxas takes for its
upper half not 0 but 16, the number of bits by which it would be shifted:

    mov.b32 {_, %rs2}, %r17;              ->    F2FP.F16.E5M2.UNPACK_B R2, 2.24e-44    (0x10)
    cvt.rn.f16x2.e5m2x2 %r22, %rs2;

As e5m2 that is 2**-11, and every such step adds 2**-11 times the other factor: on an H100, 8 of 96
elements of a convolution were wrong. Seen with the ptxas of Triton 3.6. The check needs the machine code;
that a kernel unpacks floats at all is told by the PTX text.
"""

from __future__ import annotations

import re

_UNPACKS = re.compile(r"\bcvt\.rn\.f16x2\.e\dm\dx2\b")
_NUMBER = re.compile(r"\bF2FP\.[\w.]*\.UNPACK_B\S*\s+\w+,\s*[+-]?(?:[\d.]|INF|QNAN)")


def may_unpack(ptx: str) -> bool:
    """Whether a kernel converts 8-bit floats."""
    return bool(_UNPACKS.search(ptx))


def unpacks_numbers(sass: str) -> bool:
    """Whether what is unpacked is not a register."""
    return bool(_NUMBER.search(sass))
