"""Known miscompiles: finds compiler mistakes in Triton's intermediate forms and machine code.

The compilers of some Triton releases miscompile some kernels. Where the mistake shows in the text, the
kernel is refused before it runs, which also avoids an illegal memory access. docs/miscompiles.md has for
each mistake the texts in which it was seen, the compilers that make it, and what was measured.

    PTX                  products overwrite registers; the lower half of a pair runs over; a store converts
    TTGIR                the elements of a sum change rows
    PTX, machine code    a packed addition loses its constant; products are dropped; an absolute value
                         keeps its sign; an upper half is that of another pair
    machine code         the number of a constant is converted

Machine code is read by the disassembler, but for the last two. Triton's own listing ends where addresses
get a fifth digit, after 4,096 instructions; longer code is read with the same disassembler here."""

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
            if sign.shows(asm) and not _is_sanitized(asm):
                return f"{sign.why} (see docs/miscompiles.md)"
        except Exception as error:
            return f"the machine code cannot be read ({error}); it may be that {sign.why}"
    return ""


def _is_sanitized(asm: Mapping[str, Any]) -> bool:
    """Whether a kernel has the checks of ConSan, whose own PTX looks like some signs."""
    return any("consan" in str(asm.get(kind, "")).lower() for kind in ("ttgir", "llir"))


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
    """How a miscompile shows: whether a kernel has it, and the sentence that says what is wrong."""

    shows: Callable[[Mapping[str, Any]], bool]
    why: str


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
