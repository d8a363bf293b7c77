"""The type words of a problem's text: ``dt=`` of src, wei and dst read into element types, and printed.

One type applies to the three tensors (``f16``); three are written ``f16:f16:f32``, for src:wei:dst.
"""

from __future__ import annotations

from collections.abc import Sequence

from transconv.errors import ProblemError, nearest
from transconv.ir import DTYPES, ELSEWHERE, DType, f32, multiplied, type_named

DTypes = str | DType | Sequence[str | DType]


def results() -> tuple[DType, ...]:
    """The types that a result may have, those of operands first."""
    return (*multiplied(), *(t for t in DTYPES.values() if t.result and not t.operand))


def why_not_multiplied(a: DType, b: DType) -> str | None:
    """None if kernels multiply elements of these types, else the reason."""
    for t in (a, b):
        if not t.operand:
            return f"{t} is the type of results; operands are {' '.join(x.name for x in multiplied())}"
    if a.kind != b.kind:
        whole, real = (a, b) if a.kind == "int" else (b, a)
        if whole.digits > real.digits:
            return (f"{a} is multiplied by {b}, but {real} has not all numbers of {whole}; expected two "
                    "types of floats or of integers, or a wider float")
    return None


def _read(word: str | DType) -> DType | None:
    try:
        return word if isinstance(word, DType) else type_named(word)
    except KeyError:
        return None


def read_dtypes(dtype: DTypes) -> tuple[DType, DType, DType]:
    """Element types of src, wei and dst; oneDNN's names are read as well. Raises ProblemError."""
    if isinstance(dtype, DType):
        return dtype, dtype, dtype
    given = dtype.split(":") if isinstance(dtype, str) else list(dtype)
    found = [_read(t) for t in given]
    types = [t for t in found if t is not None and t.result]
    if len(found) not in (1, 3) or len(types) != len(found):
        raise ProblemError(f"dt={':'.join(map(str, given))} is unknown; expected one of "
                           f"{' '.join(map(str, results()))}, or three of them as src:wei:dst"
                           f"{nearest(str(given[0]), map(str, results()), ELSEWHERE)}")
    return (types[0], types[0], types[0]) if len(types) == 1 else (types[0], types[1], types[2])


def write_dtypes(dtypes: Sequence[DType]) -> str:
    """The text that reads back as these types; empty for f32, the default."""
    names = [t.name for t in dtypes]
    if set(names) == {f32.name}:
        return ""
    return names[0] if len(set(names)) == 1 else ":".join(names)
