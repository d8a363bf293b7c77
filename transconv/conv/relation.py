"""From a convolution problem and a direction to computations: their axes, views and the sum of products.

One relation makes every convolution. In each spatial dimension

    i = o*S + k*D - P                                   S stride, D dilation, P low padding

and a propagation kind chooses which two of (o, i, k) are loop axes; the third is solved from it:

    FWD, BWD_W   axes o, k;  i = o*S + k*D - P                     inside when 0 <= i < I
    BWD_D        axes i, k;  t = i + P - k*D;  o = t // S          inside when t % S == 0, 0 <= o < O
    BWD_W        as BWD_D if dst has few channels and S is 1: rows of src's channels, columns of taps

    A, B, C  =  FWD: src, wei, dst    BWD_D: dst, wei, src    BWD_W: src, dst, wei        C += A * B

For BWD_D with a stride, i = S*q + r splits the work into phases r, and only the taps
k = k0(r) + S/gcd(S, D) * t occur in a phase. The stride condition then always holds (the simplifier proves
it) and no multiplication is wasted. If all phases have equally many taps, they are one computation, with r
as an axis; otherwise each is a computation of its own. No code after this module knows the direction.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import gcd, prod

from transconv.compute import ACC, Axis, Compute, product
from transconv.conv.compensation import ahead, shifted, shifts, subtracted
from transconv.conv.epilogue import Epilogue
from transconv.conv.problem.conv_problem import ConvProblem, Prop
from transconv.ir import TRUE, Expr, Tensor, Var, View, ViewDim, all_of, eq
from transconv.simplify import Facts, simplify


@dataclass(frozen=True, slots=True)
class _Spatial:
    """The relation of one spatial dimension: its axes, and the coordinates of src (i), dst (o) and wei
    (k)."""

    outer: Axis  # the axis that C or the sum runs over (o, i or q)
    tap: Axis
    i: ViewDim
    o: ViewDim
    k: ViewDim
    phase: Axis | None = None  # if all stride phases are one computation


def _solve_i(p: ConvProblem, x: int) -> _Spatial:
    n = p.spatial[x]
    o, k = Axis(f"o{n}", p.o[x], "position"), Axis(f"k{n}", p.k[x], "window")
    i = o.var * p.stride[x] + k.var * p.dilation[x] - p.pad_lo[x]
    inside = (i >= 0) & (i < p.i[x])
    return _Spatial(o, k, ViewDim(i, inside), ViewDim(o.var), ViewDim(k.var))


def _solve_o(p: ConvProblem, x: int, phase: int) -> _Spatial:
    n, stride = p.spatial[x], p.stride[x]
    if stride == 1:
        outer, tap = Axis(f"i{n}", p.i[x], "position"), Axis(f"k{n}", p.k[x], "window")
        i: Expr = outer.var
        k: Expr = tap.var
    else:
        first, step, taps = _phase_taps(p, x, phase)
        outer = Axis(f"q{n}", max(0, -(-(p.i[x] - phase) // stride)), "position")
        tap = Axis(f"t{n}", taps, "window")
        i, k = outer.var * stride + phase, tap.var * step + first
    return _Spatial(outer, tap, ViewDim(i), _in_dst(p, x, i, k), ViewDim(k))


def _in_dst(p: ConvProblem, x: int, i: Expr, k: Expr) -> ViewDim:
    """The position of dst that a tap connects with a position of src."""
    stride = p.stride[x]
    t = i + p.pad_lo[x] - k * p.dilation[x]
    o = t // stride if stride > 1 else t
    inside = (o >= 0) & (o < p.o[x])
    return ViewDim(o, eq(t % stride, 0) & inside if stride > 1 else inside)


def reading(p: ConvProblem, prop: Prop, x: int) -> tuple[Axis, Axis, ViewDim]:
    """Along spatial axis ``x``: the positions of the result, the taps, and the coordinate that they read
    in the other of src and dst (``FWD``: of src, ``BWD_D``: of dst, all stride phases together)."""
    if prop is not Prop.BWD_D:
        found = _solve_i(p, x)
        return found.outer, found.tap, found.i
    n = p.spatial[x]
    i, k = Axis(f"i{n}", p.i[x], "position"), Axis(f"k{n}", p.k[x], "window")
    return i, k, _in_dst(p, x, i.var, k.var)


def _solve_all_phases(p: ConvProblem, x: int) -> _Spatial:
    """The phase r as an axis, for dilation 1: tap k = (r + P) % S + S*t and position i = S*q + r belong to
    o = q + (r + P)//S - t. If P is a multiple of S, o does not depend on r, and the phases are columns of
    one product, like channels.

    If dst has one position, all strides are equivalent. With a stride of as many positions as there are
    taps, every position is a phase with the one tap k = r + P, and needs no loop over taps."""
    n, pad = p.spatial[x], p.pad_lo[x]
    stride = max(p.stride[x], p.k[x]) if _meets_one(p, x) else p.stride[x]
    q = Axis(f"q{n}", -(-p.i[x] // stride), "position")
    r = Axis(f"r{n}", min(stride, p.i[x]), "window")
    t = Axis(f"t{n}", -(-p.k[x] // stride), "window")
    facts = Facts().with_range(r.var, 0, r.size - 1)
    i = q.var * stride + r.var
    k = simplify((r.var + pad) % stride + t.var * stride, facts)
    o = simplify(q.var - t.var + (r.var + pad) // stride, facts)
    inside = (o >= 0) & (o < p.o[x])
    exists = (k < p.k[x]) if p.k[x] % stride else TRUE
    return _Spatial(q, t, ViewDim(i, (i < p.i[x]) if p.i[x] % stride else TRUE),
                    ViewDim(o, all_of([inside, exists])), ViewDim(k, exists), r)


MANY_PHASES = 16  # more kernels take longer to compile and launch than they save


def _meets_one(p: ConvProblem, x: int) -> bool:
    """Whether dst has one position along a dimension and every position of src has exactly one tap."""
    return (p.o[x] == 1 and p.k[x] > 1 and p.dilation[x] == 1
            and 0 <= p.pad_lo[x] <= p.k[x] - p.i[x])


def _fold_phases(p: ConvProblem, strided: list[int]) -> bool:
    """Whether all stride phases are one kernel: if every phase has equally many taps, so that no work is
    wasted, or if there would be too many kernels."""
    if not strided or any(p.dilation[x] > 1 for x in strided):
        return False
    even = all(p.k[x] % p.stride[x] == 0 for x in strided)
    return even or prod(p.stride) > MANY_PHASES


FEW_CHANNELS = 16  # fewer channels of dst do not fill the matrix unit


def _shifts_dst(p: ConvProblem) -> bool:
    """Whether the weight gradient sums over positions of src, from which those of dst follow. The columns
    then are the taps and the few channels of dst, and src, which has more channels, is read once for
    all."""
    return all(s == 1 for s in p.stride) and p.oc < FEW_CHANNELS and 2 * p.oc <= p.ic


def _phase_taps(p: ConvProblem, x: int, phase: int) -> tuple[int, int, int]:
    """First tap, step and number of the taps k with ``(phase + P - k*D) % S == 0``."""
    stride, dilation = p.stride[x], p.dilation[x]
    step = stride // gcd(stride, dilation)
    for k in range(min(step, p.k[x])):
        if (phase + p.pad_lo[x] - k * dilation) % stride == 0:
            return k, step, -(-(p.k[x] - k) // step)
    return 0, step, 0


def solved(p: ConvProblem, prop: Prop, x: int, phase: int) -> _Spatial:
    """The relation of one dimension for a direction, of one stride phase of src in ``BWD_D``."""
    if prop is not Prop.BWD_D:
        return _solve_i(p, x)
    found = _solve_o(p, x, phase)
    return replace(found, o=ViewDim(simplify(found.o.coord), found.o.mask))


def computes(p: ConvProblem, prop: Prop, epilogue: Epilogue | None = None) -> tuple[Compute, ...]:
    """The computations whose results together are the direction's result: one, or one per stride phase of
    BWD_D, without phases that have no position; before them those of zero points."""
    if prop is Prop.BWD_W and _shifts_dst(p):
        spatial = [_solve_o(p, x, 0) for x in range(p.ndims)]
        return _assemble(p, prop, spatial, epilogue, "_over_src")
    if prop is not Prop.BWD_D:
        return _assemble(p, prop, [_solve_i(p, x) for x in range(p.ndims)], epilogue, "")
    one = [x for x in range(p.ndims) if _meets_one(p, x)]
    strided = [x for x in range(p.ndims) if p.stride[x] > 1 and x not in one]
    if not strided or _fold_phases(p, strided):
        spatial = [_solve_all_phases(p, x) if x in (*one, *strided) else _solve_o(p, x, 0)
                   for x in range(p.ndims)]
        return _assemble(p, prop, spatial, epilogue, "_phases" if strided else "")
    phases = itertools.product(*(range(min(p.stride[x], p.i[x]) if x in strided else 1)
                                 for x in range(p.ndims)))
    made: list[Compute] = []
    for phase in phases:
        spatial = [_solve_all_phases(p, x) if x in one else _solve_o(p, x, r)
                   for x, r in enumerate(phase)]
        *before, main = _assemble(p, prop, spatial, epilogue, "".join(f"_{r}" for r in phase))
        made += [*before, replace(main, part=phase)]
    return tuple(made)


def _assemble(p: ConvProblem, prop: Prop, spatial: list[_Spatial], epilogue: Epilogue | None,
              label: str) -> tuple[Compute, ...]:
    """The product, and before it the computations of zero points."""
    mb, g = Axis("mb", p.mb, "position"), Axis("g", p.g, "batch")
    ic, oc = Axis("ic", p.icg, "feature"), Axis("oc", p.ocg, "feature")
    names = p.spatial
    src = Tensor("src", ("mb", "ic", *(f"i{n}" for n in names)), (p.mb, p.ic, *p.i), p.src.layout)
    wei = Tensor("wei", ("oc", "ic", *(f"k{n}" for n in names)), (p.oc, p.icg, *p.k), p.wei.layout)
    dst = Tensor("dst", ("mb", "oc", *(f"o{n}" for n in names)), (p.mb, p.oc, *p.o), p.dst.layout)
    src_c, dst_c = _channel(g, p.icg, ic), _channel(g, p.ocg, oc)
    views = {
        "src": View(src, (ViewDim(mb.var), ViewDim(src_c), *(s.i for s in spatial))),
        "wei": View(wei, (ViewDim(dst_c), ViewDim(ic.var), *(s.k for s in spatial))),
        "dst": View(dst, (ViewDim(mb.var), ViewDim(dst_c), *(s.o for s in spatial))),
    }
    outer, taps = [s.outer for s in spatial], [s.tap for s in spatial]
    phases = [s.phase for s in spatial if s.phase is not None]
    order = {Prop.FWD: (g, mb, *outer, oc, *taps, ic), Prop.BWD_D: (g, mb, *outer, *phases, ic, *taps, oc),
            Prop.BWD_W: (g, *taps, ic, oc, mb, *outer)}[prop]
    a, b, c = (views[name] for name in prop.roles)
    used = tuple(x for x in order if x is not g or p.g > 1)
    epilogue = epilogue or Epilogue()
    name, zeros = f"{prop.value}{label}", epilogue.zeros
    plain, by = product(name, used, a, b, c, p.acc, math=p.math), shifts(p, prop)
    reads, acc = subtracted(p, zeros, plain, label, Var(ACC, p.acc), by)
    behind = (*reads, *epilogue.steps(acc, c)), str(epilogue)
    main = shifted(product(name, used, a, b, c, p.acc, behind, p.math), by)
    return (*ahead(p, zeros, plain, label, by), main)


def _channel(g: Axis, per_group: int, inner: Axis) -> Expr:
    """The channel of a tensor: its number over all groups."""
    return g.var * per_group + inner.var if g.size > 1 else inner.var
