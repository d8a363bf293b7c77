"""Matrix units: which instruction multiplies given operand types, and what it requires.

Sources: PTX ISA 9 (mma.sync, wgmma.mma_async, tcgen05.mma), AMD's matrix instruction calculator (MFMA,
WMMA), Intel's XMX description (DPAS). Shapes are the smallest of a family that Triton uses; sides of
products in blocks are those below which Triton 3.6 and 3.9 make 16-bit floats of both operands."""

from __future__ import annotations

from dataclasses import dataclass

from transconv.ir import DType, f32, f64, i32


@dataclass(frozen=True, slots=True)
class Mma:
    """A matrix instruction for one pair of operand types: (m, k) times (k, n) is its smallest shape.
    ``asynchronous``: the program issues it and waits for it later. ``a_from`` and ``b_from``: the memories
    that it reads each operand from, ``registers`` or ``shared``."""

    name: str
    m: int
    n: int
    k: int
    asynchronous: bool
    a_from: frozenset[str]
    b_from: frozenset[str]


REGISTERS, SHARED = frozenset({"registers"}), frozenset({"shared"})


@dataclass(frozen=True, slots=True)
class MmaFamily:
    """The instructions of one matrix unit. ``shapes``: (bits of the operands, (m, n, k))."""

    name: str
    shapes: tuple[tuple[int, tuple[int, int, int]], ...]
    asynchronous: bool = False
    a_from: frozenset[str] = REGISTERS
    b_from: frozenset[str] = REGISTERS

    def of(self, bits: int) -> Mma | None:
        """The instruction for operands of ``bits`` bits, or None."""
        found = dict(self.shapes).get(bits)
        return found and Mma(self.name, *found, self.asynchronous, self.a_from, self.b_from)


WGMMA = MmaFamily(
    "wgmma", ((8, (64, 8, 32)), (16, (64, 8, 16)), (32, (64, 8, 8))), True, REGISTERS | SHARED, SHARED
)
TCGEN05 = MmaFamily(
    "tcgen05", ((8, (64, 8, 32)), (16, (64, 8, 16)), (32, (64, 8, 8))), True, SHARED, SHARED
)
MMA_SYNC = MmaFamily("mma.sync", ((8, (16, 8, 32)), (16, (16, 8, 16)), (32, (16, 8, 8)), (64, (8, 8, 4))))
MFMA = MmaFamily("mfma", ((8, (16, 16, 16)), (16, (16, 16, 16)), (32, (16, 16, 4)), (64, (16, 16, 4))))
WMMA = MmaFamily("wmma", ((8, (16, 16, 16)), (16, (16, 16, 16))))
DPAS = MmaFamily("dpas", ((8, (8, 16, 32)), (16, (8, 16, 16)), (32, (8, 16, 8))))
NUMPY = MmaFamily("numpy", ((8, (1, 1, 1)), (16, (1, 1, 1)), (32, (1, 1, 1)), (64, (1, 1, 1))))


Sides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class BlockMma:
    """A matrix instruction that takes elements and the scales of their blocks. ``bits``: those of the left
    and right elements, each way around; ``scales``: the scales' type; ``size``: elements of a block;
    ``least``: the smallest sides (left, right, k) of a tile, any of them; ``rate``: products in the time
    of one of 16 bits."""

    name: str
    bits: tuple[tuple[int, int], ...]
    scales: str
    size: int
    least: tuple[Sides, ...]
    rate: int

    def takes(self, bits: tuple[int, int], scales: str, size: int) -> bool:
        """Whether it multiplies such elements."""
        return bits in self.bits and (scales, size) == (self.scales, self.size)


_F8, _MIXED, _F4 = ((8, 8),), ((8, 4), (4, 8)), ((4, 4),)
BLOCKS: dict[str, tuple[BlockMma, ...]] = {
    "tcgen05": (
        BlockMma("mxf8f6f4", _F8 + _MIXED, "f8e8m0", 32, ((128, 16, 32),), 2),
        BlockMma("mxf4", _F4, "f8e8m0", 32, ((128, 16, 64),), 4),
        BlockMma("mxf4nvf4", _F4, "f8e4m3", 16, ((128, 16, 64),), 4),
    ),
    "mma.sync": (
        BlockMma("mxf8f6f4", _F8, "f8e8m0", 32, ((16, 16, 32),), 2),
        BlockMma("mxf4nvf4", _F4, "f8e8m0", 32, ((16, 16, 64),), 8),
        BlockMma("mxf4nvf4", _F4, "f8e4m3", 16, ((16, 16, 64),), 8),
    ),
    "mfma": (
        BlockMma("mfma_scale", _F8 + _MIXED, "f8e8m0", 32, ((32, 32, 64), (16, 16, 128)), 2),
        BlockMma("mfma_scale", _F4, "f8e8m0", 32, ((32, 32, 64), (16, 16, 128)), 4),
    ),
    # Triton 3.9's interpreter takes scales of f8e4m3 for exponents.
    "numpy": (BlockMma("numpy", _F8 + _MIXED + _F4, "f8e8m0", 32, ((16, 16, 32),), 1),),
}
"""What the matrix units of chips that take scales of blocks multiply, by the unit's name. Rates are those
of data sheets, of sums in f32: B200's, the RTX 5090's and MI355X's."""


def families(backend: str, warp_size: int, features: frozenset[str]) -> tuple[MmaFamily, ...]:
    """The matrix units of a chip, the preferred one first; empty if it has none."""
    if "mma" not in features:
        return ()
    newest = tuple(f for f in (WGMMA, TCGEN05) if f.name in features)
    return (
        newest
        + {
            "cuda": (MMA_SYNC,),
            "xpu": (DPAS,),
            "interpreter": (NUMPY,),
            "hip": (MFMA if warp_size == 64 else WMMA,),
        }[backend]
    )


def sums(a: DType) -> DType:
    """The accumulator's type for operands of this type."""
    return i32 if a.kind == "int" else f64 if a.bits == 64 else f32
