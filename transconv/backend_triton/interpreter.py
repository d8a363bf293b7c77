"""Prepares Triton's own interpreter to run generated kernels, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np

from transconv import knobs
from transconv.backend_triton.early import INSTRUCTIONS
from transconv.errors import Unsupported
from transconv.ir import bf16, convert

Array = np.ndarray[Any, np.dtype[Any]]


@lru_cache(maxsize=1)
def mend_interpreter() -> None:
    """Let a condition without lanes join a mask, f32 be rounded to bf16, and kernels wait for one another,
    once per process.

    The interpreter labels the result of a comparison with the type of what was compared, and
    spreads a scalar over lanes as what its label says: ``mask & (0 <= i)`` becomes 32-bit integers.
    Triton 3.6 takes them for a mask, 3.9 refuses them ("mask has unsupported dtype").

    It cuts the digits off that bf16 has no place for, where chips round to the nearest.

    It has no meaning for the instructions of ``early.py``. Kernels run one after another here: to wait
    for those before is to do nothing.
    """
    from triton.language import bfloat16, float32, int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread, cast = InterpreterBuilder.create_splat, InterpreterBuilder.cast_impl

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        if value.data.dtype == bool and value.dtype != int1:
            value = TensorHandle(value.data, int1)
        return spread(self, shape, value)

    def cast_impl(self: Any, given: Any, to: Any) -> Any:
        if given.dtype.scalar == float32 and to.scalar == bfloat16:
            return TensorHandle(nearest_bf16(given.data), to.scalar)
        return cast(self, given, to)

    InterpreterBuilder.create_splat, InterpreterBuilder.cast_impl = create_splat, cast_impl
    if knobs.interpret():  # else the compiler is what reads the next kernel
        cuda = import_module(INSTRUCTIONS)
        cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None  # type: ignore[attr-defined]


def nearest_bf16(x: Array) -> Array:
    """The bits of f32 numbers as bf16, ties to even."""
    bits = convert(x, bf16).view(np.uint32) >> 16
    return np.where(np.isnan(x), 0x7FC0, bits).astype(np.uint16)


@contextmanager
def explained() -> Iterator[None]:
    """Triton up to 3.6 makes a number of an array with one element where a loop's bound is not a constant,
    which NumPy refuses since 2.4: what fails then is Unsupported("numpy:new"), with what to install."""
    try:
        yield
    except Exception as error:
        if _release("triton") >= (3, 7) or _release("numpy") < (2, 4):
            raise
        raise Unsupported(
            "numpy:new", f"Triton {version('triton')} cannot interpret this kernel with numpy "
            f"{version('numpy')}; expected numpy below 2.4: pip install 'numpy<2.4'") from error


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version(package))[:2])
