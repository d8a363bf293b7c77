"""What the compiling children of ``python -m bench sizes`` do. They import no torch and touch no GPU."""

from __future__ import annotations

from typing import Any

from transconv.runtime.compilation import compile_child
from transconv.tuning.table import Row


def compiled(job: dict[str, Any], name: str, direction: str) -> Row:
    """Compile the plan of a question (``Question.job``) into the caches; which pair it is for."""
    return compile_child.answer(job)
