"""Known miscompiles: finds compiler mistakes in Triton's intermediate forms and machine code.

The compilers of some Triton releases miscompile some kernels. Where the mistake shows in the text, the
kernel is refused before it runs, which also avoids an illegal memory access.

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

**Pairs whose lower half runs over.** LLVM computes two 32-bit numbers as a vector, and says of both what
holds for one of them: that nothing is shifted out. The other one, which is never read, is then put into
the lower half of 64 bits as if it fitted:

    shl nuw nsw <2 x i32> {tid, part}, {31, 6}      ->      mul.wide.u32 %rd19, %r1, 2147483648;
                                                            or.b64       %rd22, %rd19, %rd21;
                                                            mov.b64      {_, %r49}, %rd22;

so that the upper half, an offset, gets bits of the thread's number; an offset of a store, too. Triton 3.6
does this for sm_80, 90 and 100 alike. With that register corrected by hand the kernel is right on an H200,
and so is that of Triton 3.9; the assemblers of both make the same wrong kernel of the wrong text
(bench/results/h200_run_over.csv). The check needs the PTX text; a legitimate pair is put together
from halves that are widened (cvt.u64.u32) and shifted by 32.

**Stores that convert.** See miscompiles/narrowed_stores.py; the check needs the PTX text.

**Upper halves that are taken of another pair.** LLVM computes two 16-bit numbers in one register, takes
them apart, and does so again with what it made of them:

    mov.b32 %r44, {%rs1, %rs1};   and.b32 %r45, %r44, 16711935; mov.b32 {%rs8, %rs9}, %r45;
    mov.b32 %r47, {%rs15, %rs14}; and.b32 %r48, %r47, 1048640;  mov.b32 {%rs16, %rs17}, %r48;

Where all threads of a warp have the same numbers, ptxas (CUDA 12.8, 12.9, 13.0) takes %rs9 for %rs17: the
upper half of the second pair is never read. The place of a TMA box becomes another one, and on an H200 all
of 24 runs of one such kernel ended with "an illegal instruction was encountered". Code with one such pair,
or with pairs that are taken apart as they were put together, is not refused; nor is code without a branch
of whole warps beside copies of boxes (miscompiles/box_branches.py), whose threads have numbers of their
own. That check reads the machine code, without a disassembler, and decides alone where there is no PTX
text.

**Conversions of a constant's number.** See miscompiles/fp8_constants.py; the check reads the machine code.

**Sums whose elements change rows.** See miscompiles/reordered_sums.py; the check needs the TTGIR text.

**Products that are dropped.** See miscompiles/dropped_products.py; the check needs the PTX text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transconv.backend_triton.miscompiles.box_branches import takes_uniform_branches
from transconv.backend_triton.miscompiles.dropped_products import drops
from transconv.backend_triton.miscompiles.fp8_constants import takes_numbers
from transconv.backend_triton.miscompiles.narrowed_stores import converts
from transconv.backend_triton.miscompiles.reordered_sums import reorders
from transconv.backend_triton.offline.machine_code import listing
from transconv.errors import Unsupported

RIGHT_SINCE = (9, 4)  # the oldest PTX version whose assembler kept the constant in tests

_REGISTERS = re.compile(r"\bwgmma\.mma_async\.\S+\s+\{[^}]*\},\s*\{")
_UNWAITED = re.compile(r"\bwgmma\.wait_group\.sync\.aligned\s+[1-9]")
_VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_PACKED = re.compile(r"\badd\.[su]16x2\b")
_PAIR = re.compile(r"\bor\.b64\s+(%rd\d+),\s*(%rd\d+),\s*(%rd\d+);")
_UPPER = re.compile(r"\bmov\.b64\s+\{(?:_|%r\d+),\s*%r\d+\},\s*(%rd\d+);"
                    r"|\bshr\.u64\s+%rd\d+,\s*(%rd\d+),\s*32;")
_WIDE = re.compile(r"\bm(?:ul|ad)\.wide\.[us]32\s+(%rd\d+),"
                   r"|\bshl\.b64\s+(%rd\d+),\s*%rd\d+,\s*(?:[12]?\d|3[01]);")
_TOGETHER = re.compile(r"\bmov\.b32\s+(%r\d+),\s*\{%rs\d+,\s*%rs\d+\};")
_CHANGED = re.compile(r"\b(?:and|or|xor|shl|shr|lop3)\.\w+\s+(%r\d+),\s*(%r\d+),")
_APART = re.compile(r"\bmov\.b32\s+\{(?:_|%rs\d+),\s*%rs\d+\},\s*(%r\d+);")
_UNPACKED = re.compile(r"\bcvt\.[\w.]*f16x2\.e[45]m[23]x2\b")
_LOST = re.compile(r"\bVIADD\.\w*16x2\s+\w+,\s*-?[\w.]+,\s*0x0\b")


def flaw(asm: Mapping[str, Any]) -> str:
    """A known miscompile in a kernel, as a sentence; empty if there is none. ``asm``: the texts that
    Triton keeps of it. Machine code is only read where the PTX gives a reason, or where Triton keeps
    no PTX (TRITON_STORE_BINARY_ONLY); what cannot be read, for want of a disassembler, is refused."""
    for sign in SIGNS:
        try:
            if sign.shows(asm):
                return f"{sign.why} (see transconv/backend_triton/{sign.where})"
        except Exception as error:
            return f"the machine code cannot be read ({error}); it may be that {sign.why}"
    return ""


def _overwrites(asm: Mapping[str, Any]) -> bool:
    ptx = asm.get("ptx", "")
    return bool(_UNWAITED.search(ptx) and _REGISTERS.search(ptx))


def _takes_numbers(asm: Mapping[str, Any]) -> bool:
    ptx = asm.get("ptx", "")
    return bool(not ptx or _UNPACKED.search(ptx)) and takes_numbers(asm.get("cubin", b""))


def _takes_another_half(asm: Mapping[str, Any]) -> bool:
    ptx = asm.get("ptx", "")
    return (not ptx or _apart(ptx) > 1) and takes_uniform_branches(asm.get("cubin", b""))


def _loses_constants(asm: Mapping[str, Any]) -> bool:
    ptx = asm.get("ptx", "")
    version = _VERSION.search(ptx)
    packed = _PACKED.search(ptx) if ptx else "cubin" in asm
    if not packed or (version and (int(version[1]), int(version[2])) >= RIGHT_SINCE):
        return False
    return bool(_LOST.search(listing(asm)))


def _apart(ptx: str) -> int:
    """How many pairs of 16 bits are put together, changed as 32 bits, and taken apart, in one function."""
    return max((_apart_in(part) for part in ptx.split(".entry")), default=0)


def _apart_in(ptx: str) -> int:
    made, source, found = {*_TOGETHER.findall(ptx)}, dict(_CHANGED.findall(ptx)), 0
    for pair in _APART.findall(ptx):
        at, changed = pair, False
        while at in source and at not in made:
            at, changed = source[at], True
        found += changed and at in made
    return found


def _runs_over(ptx: str) -> bool:
    """Whether the upper half of a pair is read where the lower half may overflow into it."""
    halved = {a or b for a, b in _UPPER.findall(ptx)}
    pairs = [ends for pair, *ends in _PAIR.findall(ptx) if pair in halved]
    wide = {a or b for a, b in _WIDE.findall(ptx)} if pairs else set()
    return any(wide.intersection(ends) for ends in pairs)


class Sign(NamedTuple):
    """How a miscompile shows: whether a kernel has it, the sentence that says what is wrong, and the file
    that describes it."""

    shows: Callable[[Mapping[str, Any]], bool]
    why: str
    where: str = "miscompiles/signs.py"


SIGNS = (  # those that need a disassembler come last
    Sign(_overwrites, "products may read registers that the next step writes"),
    Sign(
        lambda asm: _runs_over(asm.get("ptx", "")),
        "the upper half of a pair takes what its lower half runs over by",
    ),
    Sign(
        lambda asm: converts(asm.get("ptx", "")),
        "ptxas converts a float of which the lowest bits are stored",
        "miscompiles/narrowed_stores.py",
    ),
    Sign(
        _takes_numbers,
        "ptxas converts two 8-bit floats of the number of a constant",
        "miscompiles/fp8_constants.py",
    ),
    Sign(_takes_another_half, "the place of a box may have the upper half of another pair of 16 bits"),
    Sign(
        lambda asm: reorders(asm.get("ttgir", "")),
        "a sum in a loop takes elements of other rows",
        "miscompiles/reordered_sums.py",
    ),
    Sign(drops, "ptxas dropped products whose sums are chosen or 0", "miscompiles/dropped_products.py"),
    Sign(_loses_constants, "ptxas lost the constant of a packed 16-bit addition"),
)


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
