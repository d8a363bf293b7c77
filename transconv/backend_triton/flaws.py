"""Stage 11b'. In: what a compiler made. Out: why it cannot be right, if it shows a mistake that is known.

Some kernels are translated wrongly by the assembler that comes with a release of Triton. Where the
mistake can be seen in the text, no result has to be waited for, nor an illegal access be risked.

**Packed additions that lose a constant.** LLVM adds two 16-bit halves of a register at once where index
arithmetic is known to be small, often with a constant for the lower half and nothing for the upper:

    mov.b32    %r82, 50;
    add.s16x2  %r83, %r81, %r82;     ->      VIADD.16x2 R6, R6, 0x0;

The ptxas of Triton 3.6 (PTX 8.7 and 8.8, sm_90 and later) encodes 0 where the upper half is 0, also for
constants that only it finds; that of Triton 3.9 (PTX 9.4) encodes 0x32. Seen on an H200: of 43 kernels
that differ in a word or two, the 20 with such an addition were wrong and the 23 without were right
(bench/results/h200_lost_constant.csv).

**Registers that are written while they are read.** Where the left side of an asynchronous product lies in
registers, Triton 3.6 waits for all but the last three products and goes on to the next step, which loads
into the same registers:

    ldmatrix {%r56, %r57, ..}; ldmatrix {%r62, ..}; ..
    wgmma.mma_async .. {%r56, %r57, ..}, %rd5, ..;  wgmma.wait_group 3;  ..  bra next

Of 24 runs of two such kernels on an H200, 16 were wrong, each time in other elements (192 to 1,367 of
3 million; bench/results/h200_register_products.csv): a first result that is right says nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transconv.errors import Unsupported

RIGHT_SINCE = (9, 4)  # the oldest PTX whose assembler was seen to keep the constant

_REGISTERS = re.compile(r"\bwgmma\.mma_async\.\S+\s+\{[^}]*\},\s*\{")
_UNWAITED = re.compile(r"\bwgmma\.wait_group\.sync\.aligned\s+[1-9]")
_VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_PACKED = re.compile(r"\badd\.[su]16x2\b")
_LOST = re.compile(r"\bVIADD\.\w*16x2\s+\w+,\s*-?[\w.]+,\s*0x0\b")


def flaw(asm: Mapping[str, Any]) -> str:
    """What is known to be wrong with a kernel, in a sentence; empty if nothing is. ``asm``: the texts
    that Triton keeps of it. Machine code is only looked at where the PTX gives a reason, or where
    Triton keeps no PTX (TRITON_STORE_BINARY_ONLY)."""
    ptx = asm.get("ptx", "")
    if _UNWAITED.search(ptx) and _REGISTERS.search(ptx):
        return ("products may read registers that the next step writes "
                "(see transconv/backend_triton/flaws.py)")
    version = _VERSION.search(ptx)
    packed = _PACKED.search(ptx) if ptx else "cubin" in asm
    if not packed or (version and (int(version[1]), int(version[2])) >= RIGHT_SINCE):
        return ""
    try:
        sass = asm["sass"]
    except Exception as error:  # no disassembler: what cannot be looked at is not believed
        return f"it may have packed 16-bit additions, and the machine code cannot be read ({error})"
    if _LOST.search(sass):
        return ("ptxas lost the constant of a packed 16-bit addition "
                "(see transconv/backend_triton/flaws.py)")
    return ""


class Miscompiled(Unsupported):
    """A kernel whose machine code is known to be wrong; ``function`` is its name."""

    def __init__(self, function: str, why: str) -> None:
        super().__init__("miscompiled", f"{function}: {why}")
        self.function, self.why = function, why

    def __reduce__(self) -> tuple[type[Miscompiled], tuple[str, str]]:
        return type(self), (self.function, self.why)


def refuse(kernel: Any, function: str) -> None:
    """Raise Miscompiled if a compiled kernel shows a known mistake."""
    if why := flaw(getattr(kernel, "asm", {})):
        raise Miscompiled(function, why)
