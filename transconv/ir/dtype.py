"""Scalar types of the IR: one row each, from which all properties of a type are read.

A new type is a row here, and an entry in ``mma_dtypes`` of each chip whose matrix unit multiplies it.

Tables of rows by name, and dicts derived from them that stay up to date."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import numpy as np


class NamedRow(Protocol):
    """A row of a table: anything with a name."""

    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=NamedRow)
T = TypeVar("T")


class RowTable(dict[str, Row]):
    """Rows by name, in the order in which they were added. ``add`` and ``remove`` also update the dicts
    that ``table`` has made."""

    def __init__(self, *rows: Row) -> None:
        super().__init__({row.name: row for row in rows})
        self._first = dict(self)
        self._made: list[tuple[Callable[[Row], Any], Callable[[Row], Any], dict[Any, Any]]] = []

    def add(self, row: Row) -> Row:
        """Add a row and return it. ValueError for a name that is taken."""
        if row.name in self:
            raise ValueError(f"'{row.name}' is taken")
        self[row.name] = row
        for entry, key, made in self._made:
            if (found := entry(row)) is not None:
                made[key(row)] = found
        return row

    def first(self, row: Row) -> Row:
        """The first row of this name that was asked for: this one, unless there was another."""
        return self._first.setdefault(row.name, row)

    def remove(self, name: str) -> None:
        """Remove a row. KeyError for an unknown name."""
        row = self.pop(name)
        for entry, key, made in self._made:
            if entry(row) is not None:
                made.pop(key(row), None)

    def table(
        self,
        entry: Callable[[Row], T | None],
        first: dict[Any, T] | None = None,
        key: Callable[[Row], Any] = attrgetter("name"),
    ) -> dict[Any, T]:
        """``first``, then {key(row): entry(row)} for the rows whose entry is not None: a plain dict that
        rows added or removed later are added to or removed from. ``key`` is called only for rows with an
        entry."""
        made: dict[Any, T] = dict(first or {})
        for row in self.values():
            if (found := entry(row)) is not None:
                made[key(row)] = found
        self._made.append((entry, key, made))
        return made


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How numbers are rounded to a type. ``numpy`` takes and returns the NumPy type that holds it.
    ``helper``: the source of the function ``name``, put at the top of modules that call it; ``{jit}`` is
    the decorator and ``{tl}`` the language."""

    name: str
    numpy: Callable[[Array], Array]
    helper: str


def nearest_tf32(x: Array) -> Array:
    """Round f32 to 10 fraction bits, ties away from zero: add half a unit in the last place, then
    truncate. NaN stays NaN. Subnormal numbers are truncated without rounding."""
    wide = np.ascontiguousarray(x, np.float32)
    place = (wide.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    with np.errstate(over="ignore"):
        near = np.ascontiguousarray(wide + place * np.float32(2.0**-11))
    return (near.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


NEAREST_TF32 = Rounding(
    "nearest_tf32",
    nearest_tf32,
    '''
@{jit}
def nearest_tf32(x):
    """x with 10 bits behind the point, halves away from zero; NaN stays NaN."""
    place = (x.to({tl}.int32, bitcast=True) & -8388608).to({tl}.float32, bitcast=True)  # 1.0 * 2**exponent
    near = x + place * 2**-11
    return (near.to({tl}.int32, bitcast=True) & -8192).to({tl}.float32, bitcast=True)
''',
)


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """A scalar type. ``numpy`` is the type that the interpreter computes in. NumPy has neither bf16
    nor 8-bit floats: float32 holds them, and casts and stores round.

    ``torch``, ``triton`` and ``signature`` are its names in torch, in Triton and in the signature of a
    compiled kernel. ``digits``: bits of the significand with the leading one; integers up to 2**digits are
    exact. ``operand``: convolutions may have operands of it; ``result``: results of it.
    ``aliases``: other names in the text of problems.

    ``within``: the type that holds these numbers in memory (f32 holds tf32), or None. ``rounding``: how
    numbers are rounded to this type, if the languages have no cast to it. ``largest``: the value that
    greater numbers saturate to, if not infinity."""

    name: str
    kind: str  # "index", "int", "float" or "bool"
    bits: int
    numpy: str
    triton: str
    torch: str = ""
    signature: str = ""
    digits: int = 0
    operand: bool = False
    result: bool = False
    aliases: tuple[str, ...] = ()
    within: DType | None = None
    rounding: Rounding | None = None
    largest: float = inf

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, tuple[str]]:
        # By name, so that an unpickled type is the same object and ``is`` compares it.
        return type_named, (self.name,)

    @property
    def memory(self) -> DType:
        """The type in memory and registers: f32 for tf32, otherwise the type itself."""
        return self.within or self

    @property
    def boxed(self) -> DType:
        """The type as which copy engines move these elements: whole bytes for truth values."""
        return u8 if self.kind == "bool" else self

    @property
    def bytes(self) -> int:
        """Bytes of one number in memory."""
        return max(1, self.bits // 8)

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest integer. A type with as many digits as bits is unsigned."""
        return (0 if self.digits == self.bits else -(2**self.digits)), 2**self.digits - 1

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest number: what is stored of values beyond them."""
        return self.limits if self.kind == "int" else (-self.largest, self.largest)

    @property
    def spacing(self) -> float:
        """The distance from 1 to the next larger number."""
        return float(2.0 ** (1 - self.digits))

    @property
    def tiny(self) -> float:
        """Half the distance between the smallest floats: the largest rounding error near zero."""
        halves = 2 - 2 ** (self.bits - self.digits - 1) - self.digits
        return float(2.0**halves) if self.kind == "float" else 0.0

    @property
    def is_short(self) -> bool:
        """Whether these are floats of 8 bits."""
        return self.kind == "float" and self.bits == 8

    @property
    def is_integer(self) -> bool:
        """Whether these are integers: positions, or elements of a tensor."""
        return self.kind in ("index", "int")


# Positions and counts: loop counters, lanes, addresses. No tensor has elements of this kind. Integers in
# memory wrap around at their width and need a cast before they are an address; positions never overflow,
# because the `narrow` pass gives 64 bits to those that could.
index = DType("index", "index", 32, "int64", "int32", digits=31)
"""Positions, of 32 bits unless the `narrow` pass widens them."""
index64 = DType("index64", "index", 64, "int64", "int64", digits=63)
"""Positions of 64 bits."""
i8 = DType("i8", "int", 8, "int8", "int8", "int8", "i8", 7, operand=True, result=True, aliases=("s8",))
"""8-bit integers."""
u8 = DType("u8", "int", 8, "uint8", "uint8", "uint8", "u8", 8, operand=True, result=True)
"""8-bit integers without a sign."""
i32 = DType("i32", "int", 32, "int32", "int32", "int32", "i32", 31, result=True, aliases=("s32",))
"""32-bit integers."""
i64 = DType("i64", "int", 64, "int64", "int64", "int64", "i64", 63)
"""64-bit integers."""
boolean = DType("boolean", "bool", 1, "bool", "int1", "bool", "i1", 1)
"""True or false."""
# Numbers beyond the largest finite one saturate, as on the chips.
f8e4m3 = DType(
    "f8e4m3",
    "float",
    8,
    "float32",
    "float8e4nv",
    "float8_e4m3fn",
    "fp8e4nv",
    4,
    operand=True,
    result=True,
    aliases=("f8_e4m3",),
    largest=448.0,
)
"""8-bit floats, 4 bits of exponent; finite."""
f8e5m2 = DType(
    "f8e5m2",
    "float",
    8,
    "float32",
    "float8e5",
    "float8_e5m2",
    "fp8e5",
    3,
    operand=True,
    result=True,
    aliases=("f8_e5m2",),
    largest=57344.0,
)
"""8-bit floats, 5 bits of exponent."""
f16 = DType("f16", "float", 16, "float16", "float16", "float16", "fp16", 11, operand=True, result=True)
"""16-bit floats."""
bf16 = DType("bf16", "float", 16, "float32", "bfloat16", "bfloat16", "bf16", 8, operand=True, result=True)
"""16-bit floats with the exponents of f32."""
f32 = DType("f32", "float", 32, "float32", "float32", "float32", "fp32", 24, operand=True, result=True)
"""32-bit floats."""
f64 = DType("f64", "float", 64, "float64", "float64", "float64", "fp64", 53, operand=True, result=True)
"""64-bit floats."""
# The matrix unit's format of f32: the exponents of f32, the significand of f16.
tf32 = DType(
    "tf32", "float", 32, "float32", "float32", "float32", "fp32", 11, within=f32, rounding=NEAREST_TF32
)
"""f32 with the significand of f16, as matrix units multiply it."""

# Hopper's matrix unit cuts what it adds to a sum of 8-bit floats to some 13 bits, so that a long sum of
# one sign is too small: measured on an H200 (bench/results/h200_short_sums.csv) by 6e-4 of it after 128
# terms, 6e-3 after 512, 3e-2 after 2048, about as the power 1.65 of the terms. 128 terms keep that below
# the rounding of a bf16 result, 2e-3; so would 256, with nothing to spare.
EXACT_TERMS = 128
"""With precision ``ieee``, sums of products of 8-bit floats move to f32 after so many terms."""

DTYPES = RowTable(index, index64, i8, u8, i32, i64, boolean, f8e4m3, f8e5m2, f16, bf16, f32, f64, tf32)
"""Every type, by name."""


def type_named(name: str) -> DType:
    """The type of this name or alias. KeyError where there is none."""
    found = next((t for t in DTYPES.values() if name in t.aliases), None)
    return found or DTYPES[name]


def multiplied(kind: str = "") -> tuple[DType, ...]:
    """The types that may be operands (of one ``kind``, if given): floats, then integers."""
    found = [t for t in DTYPES.values() if t.operand and kind in ("", t.kind)]
    return tuple(sorted(found, key=lambda t: t.kind))


def multiplied_as(dtype: DType, precision: str) -> DType:
    """The type that a matrix unit reads operands of ``dtype`` as: tf32 for f32 with precision "tf32"."""
    return tf32 if dtype.memory is f32 and precision == tf32.name else dtype


def promote(a: DType, b: DType) -> DType:
    """The type of an arithmetic result: float before int before index before bool, then the wider type;
    f32 for f16 with bf16, and for tf32. (The verifier refuses an index with an int.)"""
    a, b = a.memory, b.memory
    rank = {"bool": 0, "index": 1, "int": 2, "float": 3}
    if rank[a.kind] != rank[b.kind]:
        return a if rank[a.kind] > rank[b.kind] else b
    if a.bits == b.bits and a is not b:
        return f32 if a.kind == "float" else a
    return a if a.bits >= b.bits else b


ELSEWHERE = {
    "float32": "f32",
    "float": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "double": "f64",
    "int8": "i8",
    "uint8": "u8",
    "byte": "u8",
    "int": "i32",
    "int32": "i32",
    "int64": "i64",
    "long": "i64",
    "bool": "boolean",
}
"""Types by the names that they have in torch, NumPy and C."""
