"""The machine code of a kernel for NVIDIA's chips: all of it as text, or its words.

Triton's own listing ends where addresses get a fifth digit, after 4,096 instructions: kernels with several
stride phases or consumers may be longer. Their code is read with the same disassembler here.
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
        said = subprocess.run([knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True,
                              text=True, check=True)
    return "\n".join(f"{at}\t{what}" for at, what in _INSTRUCTION.findall(said.stdout))


def instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """The two words of each instruction in an ELF file (64 bits, little endian), without a disassembler;
    none of bytes that are no such file."""
    for code in _sections(cubin):
        yield from struct.iter_unpack("<QQ", code[:len(code) // WORDS * WORDS])


def _sections(cubin: bytes) -> Iterator[bytes]:
    """The machine code of each function."""
    if cubin[:4] != b"\x7fELF":
        return
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    for n in range(count):
        _, kind, flags, _, begin, length = struct.unpack_from("<IIQQQQ", cubin, table + n * size)
        if kind == PROGBITS and flags & EXECUTABLE:
            yield cubin[begin:begin + length]
