"""The spot check of a convolution: sampled elements of its result compared with f64 sums.

A point of the result is a group, a column in it (a channel) and a row (positions, or channel and taps).
The operands of the sums are gathered from the tensors, element by element: there is no reference kernel
and no copy of a tensor. With each axis of the result in the rows or the columns,

    FWD    dst[n, oc, o] = sum src[n, ic, o*S + k*D - P] * wei[oc, ic, k]          rows n, o
    BWD_D  src[n, ic, i] = sum dst[n, oc, (i + P - k*D)/S] * wei[oc, ic, k]        rows n, i
    BWD_W  wei[oc, ic, k] = sum src[n, ic, o*S + k*D - P] * dst[n, oc, o]          rows ic, k

each element is a product A[row] . B[column] within a group. Points of short sums are independent; for long
sums all pairs of gathered rows and columns are points, which checks more elements for the same reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TYPE_CHECKING

from transconv.compute import SHORT, SampleOutcome, with_error
from transconv.conv.compensation import without_zeros
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.epilogue import Epilogue
from transconv.ir import EXACT_TERMS, DType, f32, multiplied_as, tf32

if TYPE_CHECKING:
    import torch

MOST_PRODUCTS = 1 << 24  # the most products of independent points
MOST_GATHERED = 1 << 26  # the most elements gathered for batches of rows and columns
WIDEST = 16  # the most rows, and columns, of a batch


@dataclass(frozen=True, slots=True)
class Axes:
    """The sizes of a result: groups, columns in a group, axes of rows; and of the summed axes."""

    groups: int
    columns: int
    rows: tuple[int, ...]
    summed: tuple[int, ...]

    @staticmethod
    def of(p: ConvProblem, prop: Prop) -> Axes:
        if prop is Prop.FWD:
            return Axes(p.g, p.ocg, (p.mb, *p.o), (p.icg, *p.k))
        if prop is Prop.BWD_D:
            return Axes(p.g, p.icg, (p.mb, *p.i), (p.ocg, *p.k))
        return Axes(p.g, p.ocg, (p.icg, *p.k), (p.mb, *p.o))


@dataclass(frozen=True, slots=True)
class SampledBatches:
    """Batches of sampled points, as int64 tensors: ``group`` (batch, 1), ``columns`` (batch, c), and for
    each row axis (batch, r). The points of a batch are all pairs of its rows and columns."""

    group: torch.Tensor
    columns: torch.Tensor
    rows: tuple[torch.Tensor, ...]

    def to(self, device: torch.device) -> SampledBatches:
        import torch

        each = self.group, self.columns, *self.rows
        sent = torch.cat(each, 1).to(device)  # one copy
        ends = itertools.accumulate([t.shape[1] for t in each], initial=0)
        group, columns, *rows = [sent[:, a:b] for a, b in itertools.pairwise(ends)]
        return SampledBatches(group, columns, tuple(rows))

    def batch(self, at: slice) -> SampledBatches:
        return SampledBatches(self.group[at], self.columns[at], tuple(r[at] for r in self.rows))


def choose(axes: Axes, points: int, wide: bool = True) -> SampledBatches:
    """About ``points`` points, the same ones every time: all of a small result, else corners and random
    points, a quarter of them near the ends of tiles and images. ``wide``: batches may have several rows
    and columns."""
    import torch

    sizes = (axes.groups, axes.columns, *axes.rows)
    terms = max(1, prod(axes.summed))
    count = min(points, prod(sizes))
    if count * terms <= MOST_PRODUCTS and count == prod(sizes):
        every = torch.unravel_index(torch.arange(count), sizes)
        return SampledBatches(every[0][:, None], every[1][:, None], tuple(x[:, None] for x in every[2:]))
    generator = torch.Generator().manual_seed(count)
    r = c = 1
    if count * terms > MOST_PRODUCTS:
        width = WIDEST if wide else 1
        r, c = min(width, prod(axes.rows)), min(width, axes.columns)
    afford = (MOST_GATHERED if r * c > 1 else MOST_PRODUCTS) // ((r + c) * terms if r * c > 1 else terms)
    batches = max(1, min(-(-count // (r * c)), afford), -(-min(16, count) // (r * c)))
    if r * c > 1:
        (group,) = _positions([axes.groups], batches, 1, generator)
        (columns,) = _positions([axes.columns], batches, c, generator)
        rows = _positions(axes.rows, batches, r, generator)
        for size, drawn in zip(sizes[1:], (columns, *rows), strict=True):
            drawn[:, 0], drawn[:, -1] = 0, size - 1
        group[0], group[-1] = 0, axes.groups - 1
    else:
        group, columns, *rows = _positions(sizes, batches, 1, generator)
        corners = torch.tensor(list(itertools.product(*(sorted({0, n - 1}) for n in sizes))))
        for drawn, ends in zip((group, columns, *rows), corners.T, strict=True):
            drawn[: len(ends), 0] = ends[:batches]
    return SampledBatches(group, columns, tuple(rows))


def _positions(
    sizes: Sequence[int], batches: int, width: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Random positions below each of ``sizes``, (batches, width). Every fourth batch has the first and
    last two positions and both sides of multiples of 16; the others are uniform."""
    import torch

    shape, size = (len(sizes), batches, width), torch.tensor(sizes)[:, None, None]
    uniform, other = (torch.randint(0, 1 << 62, (2, *shape), generator=generator) % size).unbind()
    kind = torch.randint(0, 6, shape, generator=generator)
    near = torch.where(kind < 2, kind, torch.where(kind < 4, size + 1 - kind, other // 16 * 16 + kind - 5))
    chosen = torch.where(torch.arange(batches)[:, None] % 4 == 0, near, uniform)
    return [*chosen.clamp(torch.zeros_like(size), size - 1).unbind()]


POINTS = 1024
PIECE = 1 << 22  # elements at a time: 32 MiB of f64
LONGEST = 2**27  # terms; a check of longer sums takes gigabytes for one element


# -- expected values -------------------------------------------------------------------------------


def _gather(tensor: torch.Tensor, coordinates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elements at coordinates that broadcast to one another. The offsets are added up first, because torch
    would broadcast the index of every dimension to the full shape."""
    steps = [c * s for c, s in zip(coordinates, tensor.stride(), strict=True)]
    offset = reduce(lambda a, b: a + b, sorted(steps, key=lambda t: t.numel()))
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,), tensor.storage_offset())[offset]


def _factors(
    p: ConvProblem, prop: Prop, tensors: dict[str, torch.Tensor], at: SampledBatches, first: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (batch, r, *summed axes), B (batch, c, *summed axes), both f64, and the mask of A; ``first`` is
    the range of the outermost summed axis (images or channels)."""
    import torch

    depth = 1 + p.ndims

    def across(t: torch.Tensor) -> torch.Tensor:
        return t[(..., *[None] * depth)]

    def along(axis: int, start: int, stop: int) -> torch.Tensor:
        shape = [-1 if x == axis + 2 else 1 for x in range(depth + 2)]
        return torch.arange(start, stop, device=at.group.device).view(shape)

    outer = along(0, first.start, first.stop)
    inner = [along(1 + x, 0, n) for x, n in enumerate(Axes.of(p, prop).summed[1:])]
    group, column = across(at.group), across(at.columns)
    head, *places = map(across, at.rows)
    exists = torch.ones((), dtype=torch.bool, device=at.group.device)
    seen = []
    for x, (place, step) in enumerate(zip(places, inner, strict=True)):
        if prop is Prop.BWD_D:
            ahead = place + p.pad_lo[x] - step * p.dilation[x]
            found = torch.div(ahead, p.stride[x], rounding_mode="floor")
            exists = exists & (found * p.stride[x] == ahead)
            size = p.o[x]
        else:
            o, k = (place, step) if prop is Prop.FWD else (step, place)
            found = o * p.stride[x] + k * p.dilation[x] - p.pad_lo[x]
            size = p.i[x]
        exists = exists & (found >= 0) & (found < size)
        seen.append(found.clamp(0, size - 1))
    src, wei, dst = (tensors[name] for name in ("src", "wei", "dst"))
    if prop is Prop.FWD:
        a = _gather(src, (head, group * p.icg + outer, *seen))
        b = _gather(wei, (group * p.ocg + column, outer, *inner))
    elif prop is Prop.BWD_D:
        a = _gather(dst, (head, group * p.ocg + outer, *seen))
        b = _gather(wei, (group * p.ocg + outer, column, *inner))
    else:
        a = _gather(src, (outer, group * p.icg + head, *seen))
        b = _gather(dst, (outer, group * p.ocg + column, *inner))
    return a.double(), b.double(), exists


def _sums(
    p: ConvProblem, prop: Prop, tensors: dict[str, torch.Tensor], at: SampledBatches
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums of products and of absolute products, f64 (batch, r, c), and whether both operands have
    different values."""
    import torch

    summed = Axes.of(p, prop).summed
    batches, r, c = *at.rows[0].shape, at.columns.shape[1]
    thick = max(1, (r + c) * prod(summed[1:]))
    images = max(1, min(summed[0], PIECE // thick))
    together = max(1, PIECE // (thick * images))
    sums, sizes, varied = [], [], []
    for low in range(0, batches, together):
        part = at.batch(slice(low, low + together))
        total = size = torch.zeros((len(part.group), r, c), dtype=torch.float64, device=at.group.device)
        for start in range(0, summed[0], images):
            a, b, exists = _factors(p, prop, tensors, part, slice(start, min(summed[0], start + images)))
            varied.append(torch.stack([(t != t.flatten()[0]).any() for t in (a, b)]))
            a, b = a.masked_fill_(~exists, 0.0).flatten(2), b.flatten(2)
            if r * c == 1:
                a = a * b
                total, size = total + a.sum(-1)[..., None], size + a.abs_().sum(-1)[..., None]
            else:
                total, size = total + a @ b.mT, size + a.abs_() @ b.abs_().mT
        sums.append(total)
        sizes.append(size)
    both_vary = torch.stack(varied).any(0).all() if varied else torch.ones((), dtype=torch.bool)
    return torch.cat(sums), torch.cat(sizes), both_vary


# -- allowed error ---------------------------------------------------------------------------------


def _allowed(p: ConvProblem, terms: int, short: bool, y: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The allowed error of a sum in the accumulator's type, where ``y`` is the f64 sum of the products and
    ``size`` that of their absolute values.

    It is at most (n+4) eps size. For very long sums that would allow anything, so beyond 256 terms it is
    16 times the deviation of a random walk of n roundings, plus n/8 eps of the sum: matrix units truncate
    towards zero, once for several terms. tf32 operands add a relative error of 2^-11 each. Of ``short``
    operands, 8-bit floats, some matrix units keep 13 bits of a sum (``SHORT``)."""
    import torch

    n = max(1, terms)
    if p.acc.kind == "int":
        return torch.zeros_like(y)
    eps = 2.0 ** -(23 if p.acc.bits == 32 else 52)
    walk = min(1.0, 16 * n**-0.5)
    allowed = eps * torch.minimum((n + 4) * size, 16 * n**0.5 * size + n / 8 * y.abs())
    if p.src.dtype is f32 and p.acc.bits == 32 and p.math != "ieee":
        lost = tf32.spacing if multiplied_as(f32, p.math) is tf32 else 2.0**-19
        allowed = allowed + lost * (walk * size + y.abs())
    if short:
        allowed = allowed + SHORT * max(1.0, (min(n, EXACT_TERMS) if p.math == "ieee" else n) / 32) * size
    return allowed


def _after(
    p: ConvProblem,
    epilogue: Epilogue,
    tensors: dict[str, torch.Tensor],
    where: Sequence[torch.Tensor],
    y: torch.Tensor,
    allowed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and its allowed error after the epilogue in f64, including the error of its
    arithmetic."""
    if not epilogue:
        return y, allowed
    eps = 2.0 ** -(23 if p.acc.bits == 32 else 52)
    given = {"acc": y}
    for operand in epilogue.operands:
        t = tensors[operand.name]
        places = (
            where[1:2]
            if operand.name == "bia"
            else [w if n > 1 else w * 0 for w, n in zip(where, t.shape, strict=True)]
        )
        given[operand.name] = _gather(t, places).double()
    return with_error(epilogue.function, given, {"acc": allowed}, eps)


def _stored(
    result: DType, want: torch.Tensor, allowed: torch.Tensor, acc: DType
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What a type makes of expected values and their errors, and the largest value that is compared:
    beyond the largest float infinity may be correct, also because a sum in f32 can overflow on the way."""
    import torch

    if result.kind == "int":
        return want.clamp(*result.range), allowed + 0.5 + 2.0**-22 * want.abs(), float("inf")
    kind = torch.finfo(getattr(torch, result.torch))
    want = want.clamp(*result.range)
    allowed = allowed + 2 * kind.eps * want.abs() + kind.tiny * kind.eps
    if result.largest < float("inf"):
        return want, allowed, float("inf")
    return want, allowed, min(kind.max, 1e38 if acc.bits == 32 else kind.max)


def _coordinates(p: ConvProblem, prop: Prop, at: SampledBatches) -> list[torch.Tensor]:
    """The coordinates of the sampled elements in the result, which broadcast to one another."""
    column, group = at.columns[:, None, :], at.group[:, None, :]
    head, *rest = [x[:, :, None] for x in at.rows]
    if prop is Prop.BWD_W:
        return [group * p.ocg + column, head, *rest]
    return [head, group * Axes.of(p, prop).columns + column, *rest]


def sampled(
    p: ConvProblem, prop: Prop, tensors: dict[str, torch.Tensor], points: int = POINTS
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The coordinates of sampled elements of a result, which broadcast to one another, and their sums
    in f64, before any epilogue. ``tensors`` by name (src, wei, dst) as for ``examine``."""
    import torch

    with torch.no_grad():
        wide = not torch.are_deterministic_algorithms_enabled()
        at = choose(Axes.of(p, prop), points, wide).to(tensors["wei"].device)
        return _coordinates(p, prop, at), _sums(p, prop, tensors, at)[0]


def examine(
    p: ConvProblem,
    prop: Prop,
    epilogue: Epilogue,
    tensors: dict[str, torch.Tensor],
    result: torch.Tensor,
    points: int = POINTS,
) -> SampleOutcome:
    """Compare sampled elements of a result with f64 sums. ``tensors`` by name (src, wei, dst, bia, res) in
    their logical shapes, with any strides; works on their device and waits for it once."""
    import torch

    tensors = without_zeros(tensors, epilogue.zeros)
    axes = Axes.of(p, prop)
    if not prod((axes.groups, axes.columns, *axes.rows)) or prod(axes.summed) > LONGEST:
        return SampleOutcome(0, 0, True, (), "")
    with torch.no_grad():
        # torch's matrix products may raise an error if deterministic algorithms are required.
        wide = not torch.are_deterministic_algorithms_enabled()
        at = choose(axes, points, wide).to(result.device)
        total, size, varied = _sums(p, prop, tensors, at)
        short = all(p.specs[n].dtype.is_short for n in prop.operands)
        where = _coordinates(p, prop, at)
        got = _gather(result, where).double()
        want, allowed = _after(
            p, epilogue, tensors, where, total, _allowed(p, prod(axes.summed), short, total, size)
        )
        want, allowed, most = _stored(getattr(p, prop.result).dtype, want, allowed, p.acc)
        sure = (want.isnan() | (want.abs() + allowed < most)) & (size < most)
        if not result.is_floating_point():
            sure &= ~want.isnan()  # no integer is right
        bad = sure & ~((got - want).abs() <= allowed) & ~(got.isnan() & want.isnan())
        seen, telling, wrong, several = torch.stack(
            [sure.sum(), (sure & (total != 0)).sum(), bad.sum(), varied]
        ).tolist()
        if not wrong:
            return SampleOutcome(seen, telling, bool(several), (), "")
        places = torch.stack([x.expand(bad.shape)[bad] for x in where], -1).tolist()
        first = tuple(places[0])
        reason = (
            f"{wrong} of {seen} sampled elements are wrong, the first at {first}: "
            f"{float(got[bad][0]):g} instead of {float(want[bad][0]):g}"
        )
        return SampleOutcome(seen, telling, bool(several), tuple(map(tuple, places)), reason)
