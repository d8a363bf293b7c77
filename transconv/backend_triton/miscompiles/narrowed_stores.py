"""Finds stores of the lowest bits of a float that ptxas makes conversions of.

PTX has one kind of registers for numbers of 32 bits, and a store of 8 bits keeps their lowest 8. But ptxas
remembers whether an operation of floats has made the number, and then stores what the number is as an
integer of 8 bits (0 to 255):

    add.f32      %r29, %r28, 0f4B400000;          FADD R0, R2, 12582912;
    st.shared.b8 [%r50], %r29;              ->    F2IP.U8.F32.TRUNC.NTZ R7, RZ, R0, RZ;
                                                  STS.U8 [R9], R7;

The lowest bits of 1.5 * 2**23 + n are those of n; what is stored is 255, as an H100 did. The assemblers of
CUDA 12.8 (sm_80, 89, 90) and 12.9 (sm_100) do so, with floats of 16 bits stored as 8, and with those of 64
as 32 or fewer, too. They do not where an operation of integers or bits stands between, or the number comes
from memory or from two branches.
"""

from __future__ import annotations

import re

_STORE = re.compile(r"\bst\.[\w.:]*\.[bsu](8|16|32)\s+\[[^\]]*\],\s*(\{[^}]*\}|%\w+)")
_REGISTER = re.compile(r"%[a-z]+\d+")
_MADE = re.compile(r"\b[a-z]\w*((?:\.\w+)+)\s+(%[a-z]+\d+),")
_TYPE = re.compile(r"\.([a-z]+\d\w*)")
_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def converts(ptx: str) -> bool:
    """Whether a store keeps the lowest bits of a float that an operation of floats makes."""
    stored: dict[str, int] = {}  # registers, and the fewest bits that are stored of them
    for found in _STORE.finditer(ptx):
        bits = int(found[1])
        for register in _REGISTER.findall(found[2]):
            if bits < _width(register):
                stored[register] = min(bits, stored.get(register, bits))
    if not stored:
        return False
    for made in _MADE.finditer(ptx):
        least = stored.get(made[2])
        if least is not None and (of := _TYPE.search(made[1])):  # the first type is that of the result
            if least < _FLOATS.get(of[1], 0):
                return True
    return False


def _width(register: str) -> int:
    """The bits of a register, by the name that LLVM gives it."""
    return {"%rs": 16, "%h": 16, "%r": 32, "%f": 32}.get(register.rstrip("0123456789"), 64)
