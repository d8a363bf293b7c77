"""Scalar types of the IR: one row each, from which all properties of a type are read.

A new type is a row here and, where a chip's matrix unit multiplies it, a word in the chip's record.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from transconv.ir.rounding import NEAREST_TF32, Rounding
from transconv.ir.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """A scalar type. ``numpy`` is the type that the interpreter computes in (bf16 has none of its
    own there: it is held in float32, which has as large exponents, and rounded when it is stored).

    ``torch``, ``triton`` and ``signature`` (in the types of a kernel's arguments) are its names there.
    ``digits``: bits of the significand, with the leading one: integers up to 2**digits are exact.
    ``operand``: convolutions multiply it; ``result``: they may store their results in it. ``aliases``:
    other names under which problems are written.

    ``within``: the type whose memory these numbers lie in, some of its own; empty for a type that has
    memory of its own. ``rounding``: how numbers become this type, if not as the languages cast them.
    ``largest``: what greater numbers become, if not infinity."""

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
        # By name, so that a copy read back in another process is still compared with ``is``.
        return type_named, (self.name,)

    @property
    def memory(self) -> DType:
        """The type that memory and registers have: of tf32, f32."""
        return self.within or self

    @property
    def bytes(self) -> int:
        """Bytes of one number in memory."""
        return max(1, self.bits // 8)

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the largest integer; one with as many digits as bits has no sign."""
        return (0 if self.digits == self.bits else -2**self.digits), 2**self.digits - 1

    @property
    def spacing(self) -> float:
        """The distance from 1 to the next larger number."""
        return float(2.0**(1 - self.digits))

    @property
    def tiny(self) -> float:
        """Half the distance between the smallest floats: what rounding adds near zero."""
        halves = 2 - 2**(self.bits - self.digits - 1) - self.digits
        return float(2.0**halves) if self.kind == "float" else 0.0

    @property
    def is_integer(self) -> bool:
        """Whether these are whole numbers: addresses, or what a tensor holds."""
        return self.kind in ("index", "int")


# Positions and counts: loop counters, lanes, addresses. No tensor has elements of this kind: integers in
# memory wrap around at their width and are cast to be an address, while these are never too large, for
# the `narrow` pass makes those wide that could be.
index = DType("index", "index", 32, "int64", "int32", digits=31)
"""Positions, of 32 bits where nothing else is said."""
index64 = DType("index64", "index", 64, "int64", "int64", digits=63)
"""Positions of 64 bits."""
i8 = DType("i8", "int", 8, "int8", "int8", "int8", "i8", 7, operand=True, result=True, aliases=("s8",))
"""8-bit integers."""
u8 = DType("u8", "int", 8, "uint8", "uint8", "uint8", "u8", 8)
"""8-bit integers without a sign."""
i32 = DType("i32", "int", 32, "int32", "int32", "int32", "i32", 31, result=True, aliases=("s32",))
"""32-bit integers."""
i64 = DType("i64", "int", 64, "int64", "int64", "int64", "i64", 63)
"""64-bit integers."""
boolean = DType("boolean", "bool", 1, "bool", "int1", "bool", "i1", 1)
"""Truths."""
# Of eight bits: 4 or 5 for the exponent. Numbers beyond the largest become it, as on the chips.
f8e4m3 = DType("f8e4m3", "float", 8, "float16", "float8e4nv", "float8_e4m3fn", "fp8e4nv", 4, largest=448.0)
"""8-bit floats, 4 bits of exponent; finite."""
f8e5m2 = DType("f8e5m2", "float", 8, "float16", "float8e5", "float8_e5m2", "fp8e5", 3, largest=57344.0)
"""8-bit floats, 5 bits of exponent."""
f16 = DType("f16", "float", 16, "float16", "float16", "float16", "fp16", 11, operand=True, result=True)
"""16-bit floats."""
bf16 = DType("bf16", "float", 16, "float32", "bfloat16", "bfloat16", "bf16", 8, operand=True, result=True)
"""16-bit floats with the exponents of f32."""
f32 = DType("f32", "float", 32, "float32", "float32", "float32", "fp32", 24, operand=True, result=True)
"""32-bit floats."""
f64 = DType("f64", "float", 64, "float64", "float64", "float64", "fp64", 53, operand=True, result=True)
"""64-bit floats."""
# What a matrix unit makes of f32: as large exponents, and the digits of f16.
tf32 = DType("tf32", "float", 32, "float32", "float32", "float32", "fp32", 11, within=f32,
             rounding=NEAREST_TF32)
"""f32 with the digits of f16, as matrix units multiply it."""

DTYPES = Rows(index, index64, i8, u8, i32, i64, boolean, f8e4m3, f8e5m2, f16, bf16, f32, f64, tf32)
"""Every type, by name."""


def type_named(name: str) -> DType:
    """The type of this name or alias. KeyError where there is none."""
    found = next((t for t in DTYPES.values() if name in t.aliases), None)
    return found or DTYPES[name]


def multiplied(kind: str = "") -> tuple[DType, ...]:
    """The types that kernels multiply (of one kind), floats by width before integers."""
    found = [t for t in DTYPES.values() if t.operand and kind in ("", t.kind)]
    return tuple(sorted(found, key=lambda t: t.kind))


def multiplied_as(dtype: DType, precision: str) -> DType:
    """What a matrix unit takes numbers of a type for that it multiplies with a precision."""
    return tf32 if dtype.memory is f32 and precision == tf32.name else dtype


def promote(a: DType, b: DType) -> DType:
    """The type of an arithmetic result: float over int over index over bool, then the wider one. What is
    computed has all digits that memory has. (The verifier refuses an index beside an int.)"""
    a, b = a.memory, b.memory
    rank = {"bool": 0, "index": 1, "int": 2, "float": 3}
    if rank[a.kind] != rank[b.kind]:
        return a if rank[a.kind] > rank[b.kind] else b
    if a.bits == b.bits and a is not b:
        return f32 if a.kind == "float" else a
    return a if a.bits >= b.bits else b
