"""Tensors of a problem: random or exactly summable, between guard zones.

Exact data are small integers, thinned out until sums stay so small that the result's type holds
them exactly: then every order of summation gives the same bits, and a kernel is right or wrong.
What no element maps to, and the result before a run, holds a NaN that no arithmetic makes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from transconv.conv import ConvProblem, Prop
from transconv.ir import DTYPES, DType, Layout

GUARD = 1 << 15  # elements on either side: 64 KiB of 16-bit ones
PAYLOAD = 0x5A5A5A5A5A5A5A5A


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.torch)
    return found


def unset(dtype: DType) -> float | int:
    """What stands for nothing: NaN, or the least integer, which is no index of anything."""
    return dtype.limits[0] if dtype.kind == "int" else float("nan")


def most(dtype: DType) -> int:
    """The largest exact value; of integers, the range is drawn (see ``whole_values``)."""
    return 2 if dtype.bits <= 16 else 8


@functools.cache
def poison(elements: torch.dtype) -> tuple[torch.dtype, int]:
    """What untouched memory of a type holds, as the integers of the same bits and their value: of
    floats a quiet NaN whose payload no arithmetic makes."""
    bits = 8 * elements.itemsize
    as_integer = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    if not elements.is_floating_point:
        return as_integer, PAYLOAD & (1 << bits) - 1
    if bits == 8:  # NaN is one number, or few
        return as_integer, int(torch.tensor(float("nan")).to(elements).view(as_integer))
    fraction = next(t.digits for t in DTYPES.values() if t.torch and torch_dtype(t) is elements) - 1
    exponent = (1 << bits - 1) - (1 << fraction)  # all ones
    quiet = 1 << fraction - 1
    return as_integer, exponent | quiet | PAYLOAD & quiet - 1


def terms(p: ConvProblem, prop: Prop) -> int:
    """How many products one element of the result sums at most."""
    if prop is Prop.BWD_W:
        return p.mb * prod(p.o)
    return prod(p.k) * (p.icg if prop is Prop.FWD else p.ocg)


FEWEST_DIGITS = 8


def density(p: ConvProblem, prop: Prop) -> float:
    """The share of nonzero elements of the first operand that keeps typical sums of absolute
    products within what the result's type (and the accumulator) holds exactly; 8-bit floats round some of
    them once."""
    a, b = (getattr(p, name).dtype for name in prop.operands)
    digits = min(max(FEWEST_DIGITS, getattr(p, prop.result).dtype.digits), p.acc.digits)
    safe = float(2**digits) / (most(a) * most(b))
    return min(1.0, safe / max(1, terms(p, prop)))


@dataclass(slots=True)
class Guarded:
    """A tensor inside a longer buffer. Everything around it, between its elements, and it itself
    starts as poison; ``start`` is where its memory begins in the buffer, in elements."""

    memory: torch.Tensor
    layout: Layout
    shape: tuple[int, ...]
    start: int = GUARD
    sealed: int | None = None  # a sum over the bits of an operand, see ``seal``

    @staticmethod
    def make(
        layout: Layout, shape: Sequence[int], device: str, shift: int = 0, guard: int = GUARD
    ) -> Guarded:
        """``shift`` puts the tensor that many elements off a multiple of 16 bytes; ``guard``: elements on
        either side."""
        memory = torch.empty(
            (max(1, layout.span) + 2 * guard + shift,), dtype=torch_dtype(layout.dtype), device=device
        )
        made = Guarded(memory, layout, tuple(shape), guard + shift)
        made.poison()
        return made

    @property
    def view(self) -> torch.Tensor:
        """The elements in their logical shape; of a blocked layout a copy of them."""
        strides = self.layout.strides()
        if strides is not None:
            return self.memory.as_strided(self.shape, strides, self.start + self.layout.offset)
        whole = self._blocks(self.memory).reshape(self.layout.extents)
        return whole[tuple(slice(n) for n in self.shape)]

    @property
    def span(self) -> torch.Tensor:
        """Memory from the first place of the tensor to its last."""
        return self.memory[self.start : self.start + max(1, self.layout.span)]

    @property
    def argument(self) -> torch.Tensor:
        """What a kernel is given: the view, or where shape and strides do not say it all, memory."""
        return self.span if self.layout.strides() is None or self.layout.offset else self.view

    def _blocks(self, memory: torch.Tensor) -> torch.Tensor:
        """One dimension for each block: dimension by dimension, the outermost block first."""
        blocks = [b for d in range(self.layout.ndims) for b in self.layout.of_dim(d)]
        return memory.as_strided(
            [b.size for b in blocks], [b.stride for b in blocks], self.start + self.layout.offset
        )

    def put(self, values: torch.Tensor) -> None:
        """Lay values out in memory. Padding inside of blocks keeps what is there; of a dimension
        that is expanded (stride 0) the first values count."""
        strides = self.layout.strides()
        if strides is not None:
            view = self.view
            for dim, (size, stride) in enumerate(zip(self.shape, strides, strict=True)):
                if size > 1 and stride == 0:
                    view, values = view.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
            view.copy_(values)
            return
        blocks = self._blocks(self.memory)
        whole = blocks.reshape(self.layout.extents).clone()
        whole[tuple(slice(n) for n in self.shape)] = values.to(whole.dtype)
        blocks.copy_(whole.reshape(blocks.shape))

    @property
    def is_padded_with_zeros(self) -> bool:
        """Whether what the blocks hold beyond the shape is 0, as oneDNN asks of a result."""
        if self.layout.extents == self.shape:
            return True
        blocks = self.memory.as_strided(
            [b.size for b in self.layout.blocks],
            [b.stride for b in self.layout.blocks],
            self.start + self.layout.offset,
        )
        boxes = (blocks[box] for box in self.layout.padding(self.shape))
        return not any(bool((b.float() if b.itemsize == 1 else b).any()) for b in boxes)

    def poison(self) -> None:
        """Fill the whole buffer, the tensor too, and unseal it."""
        bits, pattern = poison(self.memory.dtype)
        self.memory.view(bits).fill_(pattern)
        self.sealed = None

    def seal(self) -> None:
        """Seal the buffer, which must not change afterwards: ``intact`` will compare a sum of bits."""
        self.sealed = self._sum()

    def _sum(self) -> int:
        return int(self.memory.view(poison(self.memory.dtype)[0]).sum(dtype=torch.int64))

    def intact(self, between: bool = True) -> bool:
        """Whether nothing was written but elements of the tensor: before it, after it, and ``between``
        its elements there still is poison; a sealed one holds what it held."""
        bits, pattern = poison(self.memory.dtype)
        memory = self.memory.view(bits)
        end = self.start + max(1, self.layout.span)
        whole = (memory[: self.start] == pattern).all() & (memory[end:] == pattern).all()
        if not bool(whole) or self.sealed not in (None, self._sum()):
            return False
        if self.layout.is_dense or self.sealed is not None or not between:
            return True
        rest = memory.clone()
        self._blocks(rest).fill_(pattern)
        return bool((rest == pattern).all())


def strayed(
    tensors: Mapping[str, Guarded], results: Collection[str], cleared: Collection[str] = ()
) -> list[str]:
    """What was written that is no element of a result, in words; ``cleared``: tensors that a plan fills
    with zeros before, between their elements, too."""
    return [
        f"wrote outside of {name}" if name in results else f"changed {name}"
        for name, t in tensors.items()
        if not t.intact(between=name not in cleared)
    ]


def exact_values(
    shape: Sequence[int], dtype: torch.dtype, most: int, share: float, generator: torch.Generator
) -> torch.Tensor:
    """Integers from 1 to ``most`` of either sign, a given share of them kept, the others 0."""
    device = generator.device
    # Every value that is kept is nonzero.
    sign = torch.randint(0, 2, tuple(shape), device=device, generator=generator, dtype=torch.int8)
    size = torch.randint(1, most + 1, tuple(shape), device=device, generator=generator, dtype=torch.int8)
    values = ((2 * sign - 1) * size).to(torch.float32 if dtype.itemsize == 1 else dtype)
    if share >= 1:
        return values
    return values * (torch.rand(tuple(shape), device=device, generator=generator) < share)


FEW_BITS = 2  # the largest factor of full-range integers where the result is short


def whole_values(
    p: ConvProblem, prop: Prop, name: str, shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """Integers over the whole range of an operand's type. Where the result is short, those of the second
    operand are small; where it has 8 bits, those of the first are thinned out, so that some results
    saturate and some do not."""
    dtype, result = getattr(p, name).dtype, getattr(p, prop.result).dtype
    low, high = dtype.limits
    if result.bits < 32 and name == prop.operands[1]:
        low, high = max(low, -FEW_BITS), FEW_BITS
    values = torch.randint(
        low, high + 1, tuple(shape), device=generator.device, generator=generator, dtype=torch.int16
    )
    if result.bits == 8 and name == prop.operands[0]:
        share = 4 / max(1, terms(p, prop))
        values = values * (torch.rand(tuple(shape), device=generator.device, generator=generator) < share)
    return values


def fill(tensors: dict[str, Guarded], p: ConvProblem, prop: Prop, mode: str, seed: int) -> None:
    """Fill the operands (``exact`` or ``float``) and seal them, poison the result."""
    for place, name in enumerate(prop.operands):
        tensor = tensors[name]
        generator = torch.Generator(tensor.memory.device)
        generator.manual_seed(seed * 2 + place)
        if getattr(p, name).dtype.kind == "int":
            values = whole_values(p, prop, name, tensor.shape, generator)
        elif mode == "exact":
            largest = most(getattr(p, name).dtype)
            share = density(p, prop) if place == 0 else 1.0
            values = exact_values(tensor.shape, tensor.memory.dtype, largest, share, generator)
        else:
            values = torch.randn(
                tensor.shape, device=tensor.memory.device, dtype=torch.float32, generator=generator
            )
        tensor.put(values)
        tensor.seal()
    tensors[prop.result].poison()


def random_tensor(shape: tuple[int, ...], layout: Layout, where: str) -> torch.Tensor:
    """Normally distributed values in a strided layout, of integers a sixteenth of the range wide. Raises
    ValueError for a blocked one."""
    dtype = torch_dtype(layout.dtype)
    made = torch.empty_strided(shape, strides_of(layout), dtype=dtype, device=where)
    if layout.dtype.kind == "int":
        low, high = layout.dtype.limits
        drawn = torch.randn(shape, device=where) * ((high - low) / 16) + (low + high + 1) / 2
        return made.copy_(drawn.clamp_(low, high).round_())
    return made.normal_() if dtype.itemsize > 1 else made.copy_(torch.randn(shape, device=where))


def strides_of(layout: Layout) -> tuple[int, ...]:
    strides = layout.strides()
    if strides is None:
        raise ValueError(f"the layout {layout} is blocked; expected one with strides")
    return strides


def allocate(p: ConvProblem, device: str, shift: int = 0, guard: int = GUARD) -> dict[str, Guarded]:
    """The three tensors of a problem, poisoned, each ``shift`` elements off alignment."""
    return {
        name: Guarded.make(getattr(p, name).layout, shape, device, shift, guard)
        for name, shape in p.shapes.items()
    }
