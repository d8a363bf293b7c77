"""The machine code of a kernel for NVIDIA's chips as text, all of it.

Triton's own listing ends where addresses get a fifth digit, after 4,096 instructions: kernels with several
stride phases or consumers may be longer. Their code is read with the same disassembler here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

LISTED = 1 << 12
"""The most instructions in Triton's listing."""
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
