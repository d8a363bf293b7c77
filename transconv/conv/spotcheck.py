"""Compares sampled elements of a convolution's result with f64 sums.

The sums are gathered from the tensors as they lie, element by element: no reference kernel, no copy
of a tensor. With the positions of an axis of the result in the rows or the columns,

    FWD    dst[n, oc, o] = sum src[n, ic, o*S + k*D - P] * wei[oc, ic, k]          rows n, o
    BWD_D  src[n, ic, i] = sum dst[n, oc, (i + P - k*D)/S] * wei[oc, ic, k]        rows n, i
    BWD_W  wei[oc, ic, k] = sum src[n, ic, o*S + k*D - P] * dst[n, oc, o]          rows ic, k

each is a product A[row] . B[column] within a group. Short sums are taken at independent points; of
long ones every gathered row meets every gathered column, so that the same reading checks more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import TYPE_CHECKING

from transconv.compute import OPS, Found
from transconv.conv.epilogue import Epilogue
from transconv.conv.problem import ConvProblem, Prop
from transconv.conv.sampling import Axes, Points, choose
from transconv.ir import f32, multiplied_as, tf32

if TYPE_CHECKING:
    import torch

POINTS = 1024
PIECE = 1 << 22  # elements at a time: 32 MiB of f64


LONGEST = 2**27  # terms of a sum beyond which a single element costs gigabytes to check


# -- what should be there --------------------------------------------------------------------------


def _gather(tensor: torch.Tensor, coordinates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elements at coordinates that broadcast to one another. Offsets are added up before the one
    gather, because torch would spread out the index of every dimension."""
    steps = [c * s for c, s in zip(coordinates, tensor.stride(), strict=True)]
    offset = reduce(lambda a, b: a + b, sorted(steps, key=lambda t: t.numel()))
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,), tensor.storage_offset())[offset]


def _factors(p: ConvProblem, prop: Prop, tensors: dict[str, torch.Tensor], at: Points,
             first: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (batch, r, sum axes), B (batch, c, sum axes) and where A exists; ``first`` cuts the
    outermost axis of the sum, images or channels."""
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


def _sums(p: ConvProblem, prop: Prop, tensors: dict[str, torch.Tensor],
          at: Points) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums of products and of absolute products (batch, r, c), and whether operands vary."""
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
            a, b, exists = _factors(p, prop, tensors, part,
                                    slice(start, min(summed[0], start + images)))
            varied.append(torch.stack([(t != t.flatten()[0]).any() for t in (a, b)]))
            a, b = a.masked_fill_(~exists, 0.0).flatten(2), b.flatten(2)
            if r * c == 1:
                a = a * b
                total, size = total + a.sum(-1)[..., None], size + a.abs_().sum(-1)[..., None]
            else:
                total, size = total + a @ b.mT, size + a.abs_() @ b.abs_().mT
        sums.append(total)
        sizes.append(size)
    alike = torch.stack(varied).any(0).all() if varied else torch.ones((), dtype=torch.bool)
    return torch.cat(sums), torch.cat(sizes), alike


# -- how far off it may be -------------------------------------------------------------------------


def _allowed(p: ConvProblem, terms: int, y: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """How far a sum in the accumulator may be from the f64 sum ``y`` of products whose absolute
    values add up to ``size``.

    Never over (n+4) eps size. That allows anything in very long sums, so over 256 terms: roundings
    are a random walk of n steps, in 16 times its width; and matrix units cut off towards zero, once
    for several terms, which shrinks the sum as a whole. tf32 operands are rounded by 2^-11 each.
    """
    import torch

    n = max(1, terms)
    eps = 2.0 ** -(23 if p.acc.bits == 32 else 52)
    walk = min(1.0, 16 * n**-0.5)
    allowed = eps * torch.minimum((n + 4) * size, 16 * n**0.5 * size + n / 8 * y.abs())
    if p.src.dtype is f32 and p.acc.bits == 32 and p.math != "ieee":
        lost = tf32.spacing if multiplied_as(f32, p.math) is tf32 else 2.0**-19
        allowed = allowed + lost * (walk * size + y.abs())
    return allowed


def _after(p: ConvProblem, epilogue: Epilogue, tensors: dict[str, torch.Tensor],
           where: Sequence[torch.Tensor], y: torch.Tensor,
           allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The epilogue in f64, and what its own arithmetic adds to the error."""
    eps = 2.0 ** -(23 if p.acc.bits == 32 else 52)
    for op in epilogue.ops:
        if op in ("bias", "res"):
            added = (_gather(tensors["bia"], where[1:2]) if op == "bias"
                     else _gather(tensors["res"], where)).double()
            allowed = allowed + 2 * eps * (y.abs() + added.abs())
            y = y + added
        else:
            allowed = OPS[op].steepest * allowed + 32 * eps * (1 + y.abs())
            y = OPS[op].function()(y)
    return y, allowed


def _coordinates(p: ConvProblem, prop: Prop, at: Points) -> list[torch.Tensor]:
    """Where the sampled elements lie in a result; the coordinates broadcast to one another."""
    column, group = at.columns[:, None, :], at.group[:, None, :]
    head, *rest = [x[:, :, None] for x in at.rows]
    if prop is Prop.BWD_W:
        return [group * p.ocg + column, head, *rest]
    return [head, group * Axes.of(p, prop).columns + column, *rest]


def sampled(p: ConvProblem, prop: Prop, tensors: dict[str, torch.Tensor],
            points: int = POINTS) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The coordinates of sampled elements of a result, which broadcast to one another, and their sums
    in f64, before any epilogue. ``tensors`` by name (src, wei, dst) as for ``examine``."""
    import torch

    with torch.no_grad():
        wide = not torch.are_deterministic_algorithms_enabled()
        at = choose(Axes.of(p, prop), points, wide).to(tensors["wei"].device)
        return _coordinates(p, prop, at), _sums(p, prop, tensors, at)[0]


def examine(p: ConvProblem, prop: Prop, epilogue: Epilogue, tensors: dict[str, torch.Tensor],
            result: torch.Tensor, points: int = POINTS) -> Found:
    """Compare sampled elements of a result. ``tensors`` by name (src, wei, dst, bia, res) in their
    logical shapes, strided in any way; works on their device and waits for it once."""
    import torch

    axes = Axes.of(p, prop)
    if not prod((axes.groups, axes.columns, *axes.rows)) or prod(axes.summed) > LONGEST:
        return Found(0, 0, True, (), "")
    with torch.no_grad():
        # Matrix products may refuse to run where the same bits are asked for.
        wide = not torch.are_deterministic_algorithms_enabled()
        at = choose(axes, points, wide).to(result.device)
        total, size, varied = _sums(p, prop, tensors, at)
        where = _coordinates(p, prop, at)
        got = _gather(result, where).double()
        want, allowed = _after(p, epilogue, tensors, where, total,
                               _allowed(p, prod(axes.summed), total, size))
        kind = torch.finfo(result.dtype)
        allowed = allowed + 2 * kind.eps * want.abs() + kind.tiny * kind.eps
        # Beyond the largest number, infinity is as right; sums may pass it on the way in f32.
        most = min(kind.max, 1e38 if p.acc.bits == 32 else kind.max)
        sure = (want.abs() + allowed < most) & (size < most)
        bad = sure & ~((got - want).abs() <= allowed)
        seen, telling, wrong, several = torch.stack(
            [sure.sum(), (sure & (total != 0)).sum(), bad.sum(), varied]).tolist()
        if not wrong:
            return Found(seen, telling, bool(several), (), "")
        places = torch.stack([x.expand(bad.shape)[bad] for x in where], -1).tolist()
        first = tuple(places[0])
        reason = (f"{wrong} of {seen} sampled elements are wrong, the first at {first}: "
                  f"{float(got[bad][0]):g} instead of {float(want[bad][0]):g}")
        return Found(seen, telling, bool(several), tuple(map(tuple, places)), reason)


def spot_check(problem: ConvProblem, prop: Prop, epilogue: Epilogue,
               tensors: dict[str, torch.Tensor], result: torch.Tensor,
               points: int = POINTS) -> str | None:
    """None if sampled elements of a result are right, else what is wrong in a sentence."""
    return examine(problem, prop, epilogue, tensors, result, points).reason or None
