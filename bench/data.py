"""Tensors for a problem: random or exactly summable values, between guard bands full of NaN.

Exact data are small integers, thinned out until sums stay so small that the result's type holds
them exactly: then every order of summation gives the same bits, and a kernel is right or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from transconv.ir import DType, Layout
from transconv.problem import ConvProblem, Prop

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
OPERANDS = {Prop.FWD: ("src", "wei"), Prop.BWD_D: ("dst", "wei"), Prop.BWD_W: ("src", "dst")}
RESULT = {Prop.FWD: "dst", Prop.BWD_D: "src", Prop.BWD_W: "wei"}
GUARD = 1 << 15  # elements on either side: 64 KiB of 16-bit ones
DIGITS = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}  # bits of the significand
MOST = {"f16": 2, "bf16": 2, "f32": 8, "f64": 8}  # largest exact value


def torch_dtype(dtype: DType) -> torch.dtype:
    return TORCH[dtype.name]


def terms(p: ConvProblem, prop: Prop) -> int:
    """How many products one element of the result sums at most."""
    if prop is Prop.BWD_W:
        return p.mb * prod(p.o)
    return prod(p.k) * (p.icg if prop is Prop.FWD else p.ocg)


def density(p: ConvProblem, prop: Prop) -> float:
    """The share of nonzero elements of the first operand that keeps typical sums of absolute
    products within what the result's type (and the accumulator) holds exactly."""
    a, b = (getattr(p, name).dtype.name for name in OPERANDS[prop])
    digits = min(DIGITS[getattr(p, RESULT[prop]).dtype.name], 24 if p.acc.name == "f32" else 53)
    safe = float(2**digits) / (MOST[a] * MOST[b])
    return min(1.0, safe / max(1, terms(p, prop)))


@dataclass(slots=True)
class Guarded:
    """A tensor inside a longer buffer; everything around it, and it itself, starts as NaN."""

    memory: torch.Tensor
    view: torch.Tensor

    @staticmethod
    def make(layout: Layout, shape: tuple[int, ...], device: str) -> Guarded:
        """Raises ValueError for a blocked layout, which torch has no strides for."""
        strides = layout.strides()
        if strides is None:
            raise ValueError(f"the layout {layout} is blocked; expected one with strides")
        memory = torch.full((layout.span + 2 * GUARD,), float("nan"),
                            dtype=torch_dtype(layout.dtype), device=device)
        view = memory.as_strided(shape, strides, GUARD + layout.offset)
        return Guarded(memory, view)

    def poison(self) -> None:
        self.memory.fill_(float("nan"))

    def intact(self) -> bool:
        """Whether the guard bands still hold NaN everywhere."""
        return bool(self.memory[:GUARD].isnan().all() & self.memory[-GUARD:].isnan().all())


def exact_values(shape: tuple[int, ...], dtype: torch.dtype, most: int, share: float,
                 generator: torch.Generator) -> torch.Tensor:
    """Integers up to ``most`` in size, a given share of them kept, the others 0."""
    device = generator.device
    if share < 1:
        # Halves are not wasted on zero: what is kept is nonzero.
        sign = torch.randint(0, 2, shape, device=device, generator=generator, dtype=torch.int8)
        size = torch.randint(1, most + 1, shape, device=device, generator=generator,
                             dtype=torch.int8)
        values = ((2 * sign - 1) * size).to(dtype)
        kept = torch.rand(shape, device=device, generator=generator) < share
        return values * kept
    return torch.randint(-most, most + 1, shape, device=device, generator=generator,
                         dtype=torch.int8).to(dtype)


def fill(tensors: dict[str, Guarded], p: ConvProblem, prop: Prop, mode: str, seed: int) -> None:
    """Fill the operands (``exact`` or ``float``), poison the result."""
    for place, name in enumerate(OPERANDS[prop]):
        view = tensors[name].view
        generator = torch.Generator(view.device)
        generator.manual_seed(seed * 2 + place)
        if mode == "exact":
            most = MOST[getattr(p, name).dtype.name]
            share = density(p, prop) if place == 0 else 1.0
            view.copy_(exact_values(tuple(view.shape), view.dtype, most, share, generator))
        else:
            view.copy_(torch.randn(view.shape, device=view.device, dtype=torch.float32,
                                   generator=generator))
    tensors[RESULT[prop]].poison()


def allocate(p: ConvProblem, device: str) -> dict[str, Guarded]:
    """The three tensors of a problem, poisoned."""
    return {name: Guarded.make(getattr(p, name).layout, shape, device)
            for name, shape in p.shapes.items()}
