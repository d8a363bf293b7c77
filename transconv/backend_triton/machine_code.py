"""The machine code of compiled kernels: its instructions, and the memory of a thread that it needs.

An ELF file of 64 bits, little endian, is read without a disassembler where no text is needed.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

LISTED = 1 << 12
"""The most instructions in Triton's listing."""
WORDS = 16  # bytes of an instruction from sm_70 on
PROGBITS, EXECUTABLE = 1, 0x4  # type and flag of a section
_INSTRUCTION = re.compile(r"^\s*(/\*[0-9a-f]{4,}\*/)\s+([^;]*;)", re.MULTILINE)


def listing(asm: Mapping[str, Any]) -> str:
    """The instructions, one a line behind their addresses or, in Triton's listing, what controls them.
    ``asm``: the texts that Triton keeps of a kernel. Raises what the disassembler does."""
    text: str = asm["sass"]
    cubin = asm.get("cubin", b"")
    return _read(cubin) if cubin and text.count("\n") >= LISTED else text


def _read(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        )
    return "\n".join(f"{at}\t{what}" for at, what in _INSTRUCTION.findall(said.stdout))


def instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """The two words of each instruction in an ELF file (64 bits, little endian), without a disassembler;
    none of bytes that are no such file."""
    for kind, flags, part in _sections(cubin):
        if kind == PROGBITS and flags & EXECUTABLE:
            yield from struct.iter_unpack("<QQ", part[: len(part) // WORDS * WORDS])


def _sections(cubin: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and bytes of each section; none of bytes that are no such file."""
    if cubin[:4] != b"\x7fELF":
        return
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    for n in range(count):
        _, kind, flags, _, begin, length = struct.unpack_from("<IIQQQQ", cubin, table + n * size)
        yield kind, flags, cubin[begin : begin + length]


FRAME_SIZE = 0x04, 0x11  # format and attribute in .nv.info: a symbol, and the bytes of its stack
INFO = 0x70000000  # type of the sections .nv.info
_SEGMENT = re.compile(r"\.private_segment_fixed_size:\s*(\d+)")


def stack_bytes(asm: Mapping[str, Any]) -> int:
    """Bytes of memory that a thread of a kernel needs, most of them for values that have no register; 0
    where that is not known. ``asm``: the texts that Triton keeps of a kernel."""
    if found := _SEGMENT.search(asm.get("amdgcn", "")):
        return int(found[1])
    return max(_frames(asm.get("cubin", b"")), default=0)


def _frames(cubin: bytes) -> Iterator[int]:
    """The stack of each function of an ELF file."""
    for kind, _, part in _sections(cubin):
        at = 0
        while kind == INFO and at + 4 <= len(part):
            form, attribute, size = struct.unpack_from("<BBH", part, at)
            if (form, attribute) == FRAME_SIZE and at + 12 <= len(part):
                yield struct.unpack_from("<I", part, at + 8)[0]
            at += 4 + (size if form == FRAME_SIZE[0] else 0)  # other forms have their value in place
