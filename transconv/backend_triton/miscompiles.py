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

**Upper halves that are taken of another pair.** LLVM computes two 16-bit numbers in one register, takes
them apart, and does so again with what it made of them:

    mov.b32 %r44, {%rs1, %rs1};   and.b32 %r45, %r44, 16711935; mov.b32 {%rs8, %rs9}, %r45;
    mov.b32 %r47, {%rs15, %rs14}; and.b32 %r48, %r47, 1048640;  mov.b32 {%rs16, %rs17}, %r48;

Where all threads of a warp have the same numbers, ptxas (CUDA 12.8, 12.9, 13.0) takes %rs9 for %rs17: the
upper half of the second pair is never read. The place of a TMA box becomes another one, and on an H200 all
of 24 runs of one such kernel ended with "an illegal instruction was encountered". Code with one such pair,
or with pairs that are taken apart as they were put together, is not refused; nor is code without a branch
of whole warps beside copies of boxes whose threads have numbers of their
own. That check reads the machine code, without a disassembler, and decides alone where there is no PTX
text.

**Conversions of a constant's number.** ptxas takes the number of a constant in its own tables. The check
reads the machine code.

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

**Branches of whole warps beside boxes**, on a condition about which threads may disagree:

@P1 BRA.U `(.L_x_17)        P1 = R5 >= 3, and R5 is the row of a thread
    ..
    @P1 BRA `(.L_x_18)          the threads that disagree
    STG.E [R2.64], R25

On an H200 all of 24 runs of one such kernel ended with "an illegal instruction was encountered": a
persistent Gluon kernel whose tile has more rows than the result. compute-sanitizer names the copy of a
box by the warps that load. The branch is not the cause: without it the kernel fails as before, and a
warp takes it only where all of its threads do. The code computes the place of that box wrongly: of two
16-bit values in one register it takes the number of the program instead of the upper one
(see above; it is found in the PTX text). The branch is a sign of such code where
that text is not there: without ``programs`` the same kernel has neither and is right, and none of 91 other
kernels has one. ptxas of CUDA 12.8, 12.9 and 13.0 makes it. Code that copies no box has no place of a box.

**Products that are dropped** by ptxas. The check needs the PTX text.

A sum of the matrix unit begins with 0. Where all that reads it is a choice between it and 0, and the loop
around the products has so few steps that all are written out, the ptxas of CUDA 12.8 takes the sum for 0
and leaves products of nothing in its place:

    mov.b32   %r1267, 0f00000000;
    wgmma.mma_async .. {%r1267, ..}, ..;     ->     HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0;
    selp.b32  %r707, 0, %r1267, %p75;

so that all elements are 0, as those of a product's with the gradient of a ReLU were on an H100. Of 8 to 24
steps all products are dropped, of 36 none. An operation of floats between the sum and the choice, even the
addition of 0, keeps them; an operation of bits does not.

**Absolute values that keep their sign**, by the ptxas of sm_100 and later chips. The check needs the PTX
text, and reads the machine code where that has such a value.

An absolute value of an integer may be spelled as the greater of a number and its opposite. Where a greater
one of it and another number is taken, ptxas joins the three into one instruction and may lose the minus:

    neg.s32 %r2, %r1;   max.s32 %r3, %r1, %r2;   max.s32 %r5, %r3, %r4;
                                            ->      VIMNMX3 R167, R8, R8, R167, !PT;

which is max(x, y) instead of max(abs(x), y). It was seen on a GB200 (triton-lang/triton#11032); of a
kernel that has it a result that is right says nothing about other numbers. No kernel here has shown it.

**Stores that convert.** ptxas makes conversions of stores of a float's lowest bits. The check needs the
PTX text.

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

**Sums whose elements change rows**, by Triton's ``optimize-thread-locality``. The check needs the TTGIR
text.

The pass lets each thread sum its own elements of a row across the steps of a loop. To that end it gives
the tile an axis more, with a reshape that may reorder a thread's registers:

    tt.reshape %x allow_reorder efficient_layout : tensor<64x8xf32, #before> -> tensor<64x1x8xf32, #after>

Register i of the source becomes register i of the destination. Where a thread holds elements of several
rows and those of one row do not lie side by side in its registers, rows exchange elements. Triton mended
the pass in August 2026 (triton-lang/triton#11186); its release 3.6 has the mistake.

Triton's own listing ends where addresses get a fifth digit, after 4,096 instructions: kernels with several
stride phases or consumers may be longer. Their code is read with the same disassembler here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from transconv.backend_triton.machine_code import instructions, listing
from transconv.support import Unsupported

_RESHAPE = re.compile(
    r"tt\.reshape %\S+ allow_reorder efficient_layout : "
    r"tensor<([\dx]+)x\w+, (#\w+)> -> tensor<([\dx]+)x\w+, (#\w+)>"
)
_BLOCKED = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], "
    r"threadsPerWarp = \[([\d, ]+)\], warpsPerCTA = \[([\d, ]+)\], "
    r"order = \[([\d, ]+)\]",
    re.MULTILINE,
)

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A blocked layout: elements of a thread, threads of a warp and warps along each axis; ``order`` lists
    the axes, the fastest first."""

    registers: Place
    threads: Place
    warps: Place
    order: Place

    def held(self, shape: Place, thread: int) -> list[Place]:
        """The places of the elements that a thread of the block holds, by register."""
        lane, warp = thread % prod(self.threads), thread // prod(self.threads)
        at = [0] * len(shape)
        for a in self.order:
            lane, in_warp = divmod(lane, self.threads[a])
            warp, in_block = divmod(warp, self.warps[a])
            at[a] = (in_block * self.threads[a] + in_warp) * self.registers[a]
        tile = [r * t * w for r, t, w in zip(self.registers, self.threads, self.warps, strict=True)]
        slow = self.order[::-1]  # the last range of a product moves fastest
        steps = [range(max(1, shape[a] // tile[a])) for a in slow]
        inner = [range(self.registers[a]) for a in slow]
        found = []
        for step, one in product(product(*steps), product(*inner)):
            place = [0] * len(shape)
            for a, s, i in zip(slow, step, one, strict=True):
                place[a] = (at[a] + s * tile[a] + i) % shape[a]
            found.append(tuple(place))
        return found


def reorders(ttgir: str) -> bool:
    """Whether rows exchange elements in a kernel's TTGIR text; false where a layout is not blocked."""
    layouts = {
        name: Blocked(*(tuple(int(n) for n in part.split(",")) for part in parts))
        for name, *parts in _BLOCKED.findall(ttgir)
    }
    for source, of_source, made, of_made in _RESHAPE.findall(ttgir):
        old, new = layouts.get(of_source), layouts.get(of_made)
        if old is not None and new is not None and _exchanges(old, _shape(source), new, _shape(made)):
            return True
    return False


def _exchanges(old: Blocked, source: Place, new: Blocked, made: Place) -> bool:
    """Whether a register's element belongs to another row after the reshape."""
    rows = len(source) - 1  # axes before the one that is summed
    threads = prod(old.threads) * prod(old.warps)
    return any(
        before[:rows] != after[:rows]
        for thread in range(threads)
        for before, after in zip(old.held(source, thread), new.held(made, thread), strict=False)
    )


def _shape(text: str) -> Place:
    return tuple(int(n) for n in text.split("x"))


_STORE = re.compile(r"\bst\.[\w.:]*\.[bsu](8|16|32)\s+\[[^\]]*\],\s*(\{[^}]*\}|%\w+)")
_TYPED_REGISTER = re.compile(r"%[a-z]+\d+")
_MADE = re.compile(r"\b[a-z]\w*((?:\.\w+)+)\s+(%[a-z]+\d+),")
_TYPE = re.compile(r"\.([a-z]+\d\w*)")
_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def converts(ptx: str) -> bool:
    """Whether a store keeps the lowest bits of a float that an operation of floats makes."""
    stored: dict[str, int] = {}  # registers, and the fewest bits that are stored of them
    for found in _STORE.finditer(ptx):
        bits = int(found[1])
        for register in _TYPED_REGISTER.findall(found[2]):
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


_OPPOSITE = re.compile(r"\bneg\.s32\s+(%r\d+),\s*(%r\d+);")
_GREATER = re.compile(r"\bmax\.s32\s+(%r\d+),\s*(%r\d+),\s*(%r\d+);")
_TWICE = re.compile(r"\bVIMNMX3\S*\s+\w+,\s*(?:PT,\s*)?(R\d+),\s*\1,")


def keeps_sign(asm: Mapping[str, Any]) -> bool:
    """Whether the machine code takes the greatest of a number, itself and another one, where the PTX has
    an absolute value. Raises what the disassembler does."""
    ptx = asm.get("ptx", "")
    opposites = {frozenset(pair) for pair in _OPPOSITE.findall(ptx)}
    taken = _GREATER.findall(ptx) if opposites else []
    absolute = {of for of, *pair in taken if frozenset(pair) in opposites}
    if not any(absolute.intersection(pair) for _, *pair in taken):
        return False
    return bool(_TWICE.search(listing(asm)))


RIGHT_SINCE = (9, 4)  # the oldest PTX version whose assembler kept the constant in tests

_REGISTERS = re.compile(r"\bwgmma\.mma_async\.\S+\s+\{[^}]*\},\s*\{")
_UNWAITED = re.compile(r"\bwgmma\.wait_group\.sync\.aligned\s+[1-9]")
_VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)", re.MULTILINE)
_PACKED = re.compile(r"\badd\.[su]16x2\b")
_PAIR = re.compile(r"\bor\.b64\s+(%rd\d+),\s*(%rd\d+),\s*(%rd\d+);")
_UPPER = re.compile(
    r"\bmov\.b64\s+\{(?:_|%r\d+),\s*%r\d+\},\s*(%rd\d+);"
    r"|\bshr\.u64\s+%rd\d+,\s*(%rd\d+),\s*32;"
)
_WIDE = re.compile(
    r"\bm(?:ul|ad)\.wide\.[us]32\s+(%rd\d+),"
    r"|\bshl\.b64\s+(%rd\d+),\s*%rd\d+,\s*(?:[12]?\d|3[01]);"
)
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
    where: str = "miscompiles.py"


SIGNS = (  # those that need a disassembler come last
    Sign(_overwrites, "products may read registers that the next step writes"),
    Sign(
        lambda asm: _runs_over(asm.get("ptx", "")),
        "the upper half of a pair takes what its lower half runs over by",
    ),
    Sign(
        lambda asm: converts(asm.get("ptx", "")),
        "ptxas converts a float of which the lowest bits are stored",
    ),
    Sign(_takes_numbers, "ptxas converts two 8-bit floats of the number of a constant"),
    Sign(_takes_another_half, "the place of a box may have the upper half of another pair of 16 bits"),
    Sign(lambda asm: reorders(asm.get("ttgir", "")), "a sum in a loop takes elements of other rows"),
    Sign(keeps_sign, "ptxas takes a number for its absolute value"),
    Sign(drops, "ptxas dropped products whose sums are chosen or 0"),
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


OPCODE, OF_CONSTANT = 0xFFF, 0x83E  # the lowest bits of the first word: F2FP of a number
UNPACKS = 1 << 25  # in the second word: to two f16, of two 8-bit floats


def takes_numbers(cubin: bytes) -> bool:
    """Whether a kernel in an ELF file converts 8-bit floats of a constant other than 0."""
    return any(
        word & OPCODE == OF_CONSTANT and more & UNPACKS and word >> 32
        for word, more in instructions(cubin)
    )


BRANCH, OPERATION = 0x947, 0xFFF  # the lowest bits of the first word
COPIES = (0x5B4, 0x3B5)  # of boxes: UTMALDG, UTMASTG
UNIFORM = 1 << 32
ALWAYS = 7  # the predicate of a branch that all threads take, in bits 12 to 14


def takes_uniform_branches(cubin: bytes) -> bool:
    """Whether a kernel in an ELF file (64 bits, little endian) that copies boxes has a conditional branch
    of whole warps."""
    words = [word for word, _ in instructions(cubin)]
    return any(word & OPERATION in COPIES for word in words) and any(
        word & OPERATION == BRANCH and word & UNIFORM and word >> 12 & 7 != ALWAYS for word in words
    )
