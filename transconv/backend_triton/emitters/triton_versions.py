"""Functions whose names differ between Triton's versions. A Gluon kernel's module looks up those that it
uses, once, above its roles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

LOOKED_UP = {
    "fetch_box": """
fetch_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
""",
    "pile": """
pile = gl.shared_memory_descriptor.reinterpret if hasattr(
    gl.shared_memory_descriptor, "reinterpret") else gl.shared_memory_descriptor._reinterpret
""",
    "send_box": """
send_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
""",
}


def looked_up(lines: Sequence[str]) -> Iterator[str]:
    """The assignments of the names that the lines call."""
    yield "# The same functions under the names of this version of Triton."
    for name, text in LOOKED_UP.items():
        if any(re.search(rf"(?<![\w.]){name}\(", line) for line in lines):
            yield from text.strip().splitlines()
