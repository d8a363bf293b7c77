"""Scalar types of the IR, and how each is spelled by NumPy, Triton and torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """A scalar type. ``numpy`` is the type that the interpreter computes in (bf16 has none of its
    own there: it is held in float32 and rounded when it is stored)."""

    name: str
    kind: str  # "int", "float" or "bool"
    bits: int
    numpy: str
    triton: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        # By name, so that a copy read back in another process is still compared with ``is``.
        return self.name

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)


# A position or a count before the `narrow` pass has chosen between i32 and i64 for it.
index = DType("index", "int", 32, "int64", "int32")
i8 = DType("i8", "int", 8, "int8", "int8")
i32 = DType("i32", "int", 32, "int32", "int32")
i64 = DType("i64", "int", 64, "int64", "int64")
boolean = DType("boolean", "bool", 1, "bool", "int1")
f16 = DType("f16", "float", 16, "float16", "float16")
bf16 = DType("bf16", "float", 16, "float32", "bfloat16")
f32 = DType("f32", "float", 32, "float32", "float32")
f64 = DType("f64", "float", 64, "float64", "float64")

DTYPES = {t.name: t for t in (index, i8, i32, i64, boolean, f16, bf16, f32, f64)}


def promote(a: DType, b: DType) -> DType:
    """The type of an arithmetic result: float over int over bool, then the wider one."""
    rank = {"bool": 0, "int": 1, "float": 2}
    if rank[a.kind] != rank[b.kind]:
        return a if rank[a.kind] > rank[b.kind] else b
    if a.bits == b.bits and a is not b:
        if "index" in (a.name, b.name):
            return b if a is index else a
        return f32 if a.kind == "float" else a
    return a if a.bits >= b.bits else b
