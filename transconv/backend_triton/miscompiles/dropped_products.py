"""Finds products that ptxas has dropped.

A sum of the matrix unit begins with 0. Where all that reads it is a choice between it and 0, and the loop
around the products has so few steps that all are written out, the ptxas of CUDA 12.8 takes the sum for 0
and leaves products of nothing in its place:

    mov.b32   %r1267, 0f00000000;
    wgmma.mma_async .. {%r1267, ..}, ..;     ->     HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0;
    selp.b32  %r707, 0, %r1267, %p75;

so that all elements are 0, as those of the gradient of a ReLU behind a product were on an H100. Of 8 to 24
steps all products are dropped, of 36 none. An operation of floats between the sum and the choice, even the
addition of 0, keeps them; an operation of bits does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transconv.backend_triton.offline.machine_code import listing

_SUMS = re.compile(r"\bwgmma\.mma_async\.\S+\s+\{([^}]*)\}")
_CHOICE = re.compile(r"\b(?:selp|and)\.[a-z]\w*\s+%\w+,\s*([^;]*);")
_REGISTER = re.compile(r"%\w+")
_NOTHING = re.compile(r"\b\w?GMMA\.\S+\s+RZ,")


def drops(asm: Mapping[str, Any]) -> bool:
    """Whether the machine code has products whose sums are kept nowhere. It is only read where the PTX
    chooses or masks a sum. Raises what the disassembler does."""
    ptx = asm.get("ptx", "")
    sums = {r for found in _SUMS.findall(ptx) for r in _REGISTER.findall(found)}
    if not sums or not any(sums.intersection(_REGISTER.findall(x)) for x in _CHOICE.findall(ptx)):
        return False
    return bool(_NOTHING.search(listing(asm)))
