"""The type words of a problem's text: ``dt=`` of src, wei and dst read into element types, and printed.

One word stands for the three tensors (``f16``); three are written ``f16:f16:f32``, as src:wei:dst.
"""

from __future__ import annotations

from collections.abc import Sequence

from transconv.errors import ProblemError
from transconv.ir.dtype import DTYPES, DType, bf16, f16, f32, f64, i8, i32

OPERANDS = (f16, bf16, f32, f64, i8)
RESULTS = (*OPERANDS, i32)
ONEDNN_NAMES = {"s8": "i8", "s32": "i32"}

DTypes = str | DType | Sequence[str | DType]


def read_dtypes(dtype: DTypes) -> tuple[DType, DType, DType]:
    """Element types of src, wei and dst; oneDNN's names are understood too. Raises ProblemError."""
    if isinstance(dtype, DType):
        return dtype, dtype, dtype
    given = dtype.split(":") if isinstance(dtype, str) else list(dtype)
    found = [t if isinstance(t, DType) else DTYPES.get(ONEDNN_NAMES.get(t, t)) for t in given]
    types = [t for t in found if t is not None and t in RESULTS]
    if len(found) not in (1, 3) or len(types) != len(found):
        raise ProblemError(f"dt={':'.join(map(str, given))} is unknown; expected one of "
                           f"{' '.join(map(str, RESULTS))}, or three of them as src:wei:dst")
    return (types[0], types[0], types[0]) if len(types) == 1 else (types[0], types[1], types[2])


def write_dtypes(dtypes: Sequence[DType]) -> str:
    """The word that reads back as these types; empty for f32, which is the default."""
    names = [t.name for t in dtypes]
    if set(names) == {"f32"}:
        return ""
    return names[0] if len(set(names)) == 1 else ":".join(names)
