"""Stage 11b without a GPU: what Triton's own interpreter has to be told before it runs our kernels."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any

from transconv import knobs
from transconv.backend_triton.early import INSTRUCTIONS


@lru_cache(maxsize=1)
def mend_interpreter() -> None:
    """Let a condition without lanes join a mask, and kernels wait for one another, once per process.

    The interpreter labels the result of a comparison with the type of what was compared, and
    spreads a scalar over lanes as what its label says: ``mask & (0 <= i)`` becomes 32-bit integers.
    Triton 3.6 takes them for a mask, 3.9 refuses them ("mask has unsupported dtype").

    It has no meaning for the instructions of ``early.py``. Kernels run one after another here: to wait
    for those before is to do nothing.
    """
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        if value.data.dtype == bool and value.dtype != int1:
            value = TensorHandle(value.data, int1)
        return spread(self, shape, value)

    InterpreterBuilder.create_splat = create_splat
    if knobs.interpret():  # else the compiler is what reads the next kernel
        cuda = import_module(INSTRUCTIONS)
        cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None  # type: ignore[attr-defined]
