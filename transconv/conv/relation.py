"""The relation of a convolution: from a problem and a direction to the axes and views of computations.

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

Batch and image sizes may be arguments of the kernels:

    mb8?ic64ih56?iw56?oc128kh3sh2ph1         in: a problem; a question mark after each size that is any
    sizes  MB=8 in 1..65535, IH=56 in 1..16384, IW=56 in 1..16384          out: its computations

Filter, strides, dilation, padding and channels are numbers. The sizes of dst follow from those of src, as
in torch. The relation is the same; these computations are written as texts."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from transconv import ir
from transconv.compute import ACC, Axis, Compute, Write, of_sizes, parse, product, with_examples
from transconv.conv.compensation import ahead, shifted, shifts, subtracted
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.descriptor import print_descriptor
from transconv.conv.epilogue import Epilogue
from transconv.simplify import Facts, simplify
from transconv.support import ProblemError


@dataclass(frozen=True, slots=True)
class _Spatial:
    """The relation of one spatial dimension: its axes, and the coordinates of src (i), dst (o) and wei
    (k)."""

    outer: Axis  # the axis that C or the sum runs over (o, i or q)
    tap: Axis
    i: ir.ViewDim
    o: ir.ViewDim
    k: ir.ViewDim
    phase: Axis | None = None  # if all stride phases are one computation


def _solve_i(p: ConvProblem, x: int) -> _Spatial:
    n = p.spatial[x]
    o, k = Axis(f"o{n}", p.o[x], "position"), Axis(f"k{n}", p.k[x], "window")
    i = o.var * p.stride[x] + k.var * p.dilation[x] - p.pad_lo[x]
    inside = (i >= 0) & (i < p.i[x])
    return _Spatial(o, k, ir.ViewDim(i, inside), ir.ViewDim(o.var), ir.ViewDim(k.var))


def _solve_o(p: ConvProblem, x: int, phase: int) -> _Spatial:
    n, stride = p.spatial[x], p.stride[x]
    if stride == 1:
        outer, tap = Axis(f"i{n}", p.i[x], "position"), Axis(f"k{n}", p.k[x], "window")
        i: ir.Expr = outer.var
        k: ir.Expr = tap.var
    else:
        first, step, taps = _phase_taps(p, x, phase)
        outer = Axis(f"q{n}", max(0, -(-(p.i[x] - phase) // stride)), "position")
        tap = Axis(f"t{n}", taps, "window")
        i, k = outer.var * stride + phase, tap.var * step + first
    return _Spatial(outer, tap, ir.ViewDim(i), _in_dst(p, x, i, k), ir.ViewDim(k))


def _in_dst(p: ConvProblem, x: int, i: ir.Expr, k: ir.Expr) -> ir.ViewDim:
    """The position of dst that a tap connects with a position of src."""
    stride = p.stride[x]
    t = i + p.pad_lo[x] - k * p.dilation[x]
    o = t // stride if stride > 1 else t
    inside = (o >= 0) & (o < p.o[x])
    return ir.ViewDim(o, ir.eq(t % stride, 0) & inside if stride > 1 else inside)


def reading(p: ConvProblem, prop: Prop, x: int) -> tuple[Axis, Axis, ir.ViewDim]:
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
    exists = (k < p.k[x]) if p.k[x] % stride else ir.TRUE
    return _Spatial(
        q,
        t,
        ir.ViewDim(i, (i < p.i[x]) if p.i[x] % stride else ir.TRUE),
        ir.ViewDim(o, ir.all_of([inside, exists])),
        ir.ViewDim(k, exists),
        r,
    )


MANY_PHASES = 16  # more kernels take longer to compile and launch than they save


def _meets_one(p: ConvProblem, x: int) -> bool:
    """Whether dst has one position along a dimension and every position of src has exactly one tap."""
    return p.o[x] == 1 and p.k[x] > 1 and p.dilation[x] == 1 and 0 <= p.pad_lo[x] <= p.k[x] - p.i[x]


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
    return replace(found, o=ir.ViewDim(simplify(found.o.coord), found.o.mask))


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
        spatial = [
            _solve_all_phases(p, x) if x in (*one, *strided) else _solve_o(p, x, 0) for x in range(p.ndims)
        ]
        return _assemble(p, prop, spatial, epilogue, "_phases" if strided else "")
    phases = itertools.product(
        *(range(min(p.stride[x], p.i[x]) if x in strided else 1) for x in range(p.ndims))
    )
    made: list[Compute] = []
    for phase in phases:
        spatial = [_solve_all_phases(p, x) if x in one else _solve_o(p, x, r) for x, r in enumerate(phase)]
        *before, main = _assemble(p, prop, spatial, epilogue, "".join(f"_{r}" for r in phase))
        made += [*before, replace(main, part=phase)]
    return tuple(made)


def _assemble(
    p: ConvProblem, prop: Prop, spatial: list[_Spatial], epilogue: Epilogue | None, label: str
) -> tuple[Compute, ...]:
    """The product, and before it the computations of zero points."""
    mb, g = Axis("mb", p.mb, "position"), Axis("g", p.g, "batch")
    ic, oc = Axis("ic", p.icg, "feature"), Axis("oc", p.ocg, "feature")
    names = p.spatial
    src = ir.Tensor("src", ("mb", "ic", *(f"i{n}" for n in names)), (p.mb, p.ic, *p.i), p.src.layout)
    wei = ir.Tensor("wei", ("oc", "ic", *(f"k{n}" for n in names)), (p.oc, p.icg, *p.k), p.wei.layout)
    dst = ir.Tensor("dst", ("mb", "oc", *(f"o{n}" for n in names)), (p.mb, p.oc, *p.o), p.dst.layout)
    src_c, dst_c = _channel(g, p.icg, ic), _channel(g, p.ocg, oc)
    views = {
        "src": ir.View(src, (ir.ViewDim(mb.var), ir.ViewDim(src_c), *(s.i for s in spatial))),
        "wei": ir.View(wei, (ir.ViewDim(dst_c), ir.ViewDim(ic.var), *(s.k for s in spatial))),
        "dst": ir.View(dst, (ir.ViewDim(mb.var), ir.ViewDim(dst_c), *(s.o for s in spatial))),
    }
    outer, taps = [s.outer for s in spatial], [s.tap for s in spatial]
    phases = [s.phase for s in spatial if s.phase is not None]
    order = {
        Prop.FWD: (g, mb, *outer, oc, *taps, ic),
        Prop.BWD_D: (g, mb, *outer, *phases, ic, *taps, oc),
        Prop.BWD_W: (g, *taps, ic, oc, mb, *outer),
    }[prop]
    a, b, c = (views[name] for name in prop.roles)
    used = tuple(x for x in order if x is not g or p.g > 1)
    epilogue = epilogue or Epilogue()
    name, zeros = f"{prop.value}{label}", epilogue.zeros
    plain, by = product(name, used, a, b, c, p.acc, math=p.math), shifts(p, prop)
    reads, acc = subtracted(p, zeros, plain, label, ir.Var(ACC, p.acc), by)
    behind = (*reads, *epilogue.steps(acc, c)), str(epilogue)
    main = shifted(product(name, used, a, b, c, p.acc, behind, p.math), by)
    return (*ahead(p, zeros, plain, label, by), main)


def _channel(g: Axis, per_group: int, inner: Axis) -> ir.Expr:
    """The channel of a tensor: its number over all groups."""
    return g.var * per_group + inner.var if g.size > 1 else inner.var


ANY = re.compile(r"(mb|id|ih|iw)(\d+)\?(%\d+)?")
POSITIONS = 2**31 - 2**16  # the most points of a result; with those of the last tile they fit 32 bits
MOST_IMAGES = 65535
LONGEST = {1: 2**24, 2: 16384, 3: 16384}  # the longest side of an image, by its number of sides


def marked(text: str) -> tuple[str, frozenset[str]]:
    """A problem's text without its question marks, and the names before them. A divisor may follow
    (``ih56?%2``): it is a name of its own, ``ih%2``. Raises ProblemError."""
    found = {name: share for name, _, share in ANY.findall(text)}
    for said, follows in (("id", "ih"), ("ih", "iw")):  # in benchdnn a size left out equals the one before
        if said in found and not re.search(rf"{follows}\d", text):
            found[follows] = found[said]
    names = frozenset({*found, *(n + share for n, share in found.items() if int(share[1:] or 1) > 1)})
    plain = ANY.sub(r"\1\2", text)
    if "?" in plain:
        raise ProblemError(
            f"problem '{text}': a question mark stands after mb, id, ih or iw and a "
            "number, such as mb8?; channels and filters are numbers"
        )
    return plain, names


ALL = frozenset({"mb", "id", "ih", "iw"})
"""What may be an argument."""


def every(problem: ConvProblem) -> frozenset[str]:
    """All of a problem's sizes that may be arguments."""
    return frozenset({"mb", *(f"i{n}" for n in problem.spatial)})


def whole(problem: ConvProblem) -> frozenset[str]:
    """The same where each side of src is a multiple of its stride."""
    strides = zip(problem.spatial, problem.stride, strict=True)
    return every(problem) | {f"i{n}%{s}" for n, s in strides if s > 1}


def rows_of(problem: ConvProblem, share: int) -> frozenset[str]:
    """``every`` where rows of src have a multiple of ``share`` elements."""
    return every(problem) | {f"i{problem.spatial[-1]}%{share}"}


def planes_of(problem: ConvProblem, share: int) -> frozenset[str]:
    """``every`` where images of src have a multiple of ``share`` positions, since their last two sides are
    multiples of 2 and of half of it."""
    *_, before, last = problem.spatial
    return every(problem) | {f"i{before}%2", f"i{last}%{share // 2}"}


@lru_cache(maxsize=1024)
def spelled(problem: ConvProblem, names: frozenset[str]) -> str:
    """The text of a problem with its question marks, which ``marked`` reads back."""
    shares = {name: share for name, _, share in (n.partition("%") for n in names) if share}
    alike = len({(f"i{n}" in names, shares.get(f"i{n}")) for n in problem.spatial}) == 1
    problem = replace(problem, name="")

    def said(n: re.Match[str]) -> str:
        share = shares.get(n[1])
        return n[0] + "?" * (n[1] in names) + (f"%{share}" if share else "")

    _, space, rest = str(problem).partition(" ")
    head = print_descriptor(problem.descriptor, each=not alike)
    if not re.match(r"(g\d+)?mb", head):  # 2 images are left out
        head = f"mb{problem.mb}{head}"
    return re.sub(r"(mb|id|ih|iw)\d+", said, head) + space + rest


def any_size(
    problem: ConvProblem, prop: Prop, names: frozenset[str] = ALL, epilogue: Epilogue | None = None
) -> tuple[Compute, ...]:
    """The computations of one direction for any size of ``names``, or any multiple (``ih%2``); the
    problem's sizes are the examples. ``BWD_D`` with strides has one for each stride phase, which may run
    in any order. Raises ProblemError for tensors that are not dense."""
    written = _Written(problem, names)
    made = tuple(written.text(prop, phase) for phase in phases(problem, prop))
    return tuple(_behind(c, epilogue) for c in made) if epilogue else made


def any_tensors(problem: ConvProblem, names: frozenset[str]) -> dict[str, ir.Tensor]:
    """The tensors of these computations by name, without what takes longer."""
    written = _Written(problem, names)
    named = ir.Sizes(tuple(ir.Size(n.upper(), 1) for n in sorted(names) if "%" not in n))
    made = {}
    for name, sizes in written.shapes().items():
        extents = tuple(simplify(of_sizes(str(size), named)) for size in sizes)
        made[name] = ir.Tensor(
            name,
            tuple(f"{name}_{dim}" for dim in range(len(sizes))),
            problem.shapes[name],
            problem.specs[name].layout,
            extents=extents if any(map(ir.free_vars, extents)) else (),
        )
    return made


def _behind(compute: Compute, epilogue: Epilogue) -> Compute:
    """The computation, with what an epilogue does to its sum before it is stored."""
    total = compute.sum
    assert total is not None
    kept = [s for s in compute.steps if not isinstance(s, Write)]
    after = epilogue.steps(ir.Var(total.name, compute.acc), compute.c)
    return replace(compute, steps=(*kept, *after), behind=str(epilogue))


def phases(p: ConvProblem, prop: Prop) -> list[tuple[int, ...]]:
    """The stride phases in which src is written, each by a kernel of its own."""
    found: list[tuple[int, ...]] = [()]
    for stride in p.stride if prop is Prop.BWD_D else ():
        found = [(*before, r) for before in found for r in range(stride)]
    return found


@lru_cache(maxsize=256)
def _parsed(text: str) -> Compute:
    """The computation of a text without examples: it is that of a layer, whatever its images."""
    return parse(text)


class _Written:
    """Writes the text of a computation: its sizes, tensors and steps."""

    def __init__(self, p: ConvProblem, names: frozenset[str]) -> None:
        self.p, self.names = p, names
        self.i = [self.size(f"i{n}", p.i[x]) for x, n in enumerate(p.spatial)]
        self.mb = self.size("mb", p.mb)
        self.o = [self.out(x) for x in range(p.ndims)]

    def size(self, name: str, number: int) -> str:
        return name.upper() if name in self.names else str(number)

    def out(self, x: int) -> str:
        """The size of dst along a dimension, as an expression of that of src."""
        p = self.p
        if self.i[x].isdigit():
            return str(p.o[x])
        high = (p.o[x] - 1) * p.stride[x] + (p.k[x] - 1) * p.dilation[x] + 1 - p.i[x] - p.pad_lo[x]
        pad = p.pad_lo[x] + (p.pad_lo[x] if -p.stride[x] < high - p.pad_lo[x] <= 0 else high)
        free = pad - (p.k[x] - 1) * p.dilation[x] - 1
        if p.stride[x] == 1:
            return _plus(self.i[x], free + 1)
        return f"({_plus(self.i[x], free)})//{p.stride[x]}+1"

    def line(self, points: str, phased: bool) -> str:
        """The ``sizes`` line. The smallest sizes are those for which dst has an element, and if ``phased``
        every stride phase; the product of the axes in ``points`` is at most ``POSITIONS``, and so are the
        elements of src and dst, if the example's are."""
        p, words = self.p, []
        longest = LONGEST[p.ndims]
        if "mb" in self.names:
            words.append(f"MB=1 in 1..{MOST_IMAGES}")
        for x, n in enumerate(p.spatial):
            if f"i{n}" in self.names:
                share = self.share(f"i{n}")
                least = next(
                    i
                    for i in range(share, longest, share)
                    if (i >= p.stride[x] or not phased) and self.length(x, i) >= 1
                )
                words.append(f"I{n.upper()}={least} in {least}..{longest}")
        most = {"*".join(f"({n})" for n in (word.partition("=")[2] for word in points.split())): POSITIONS}
        for name in ("src", "dst") if self.is_narrow() else ():
            images, channels, *sides = self.shapes()[name]
            number = "*".join(f"({n})" for n in (images, *sides))
            most[number] = min(most.get(number, POSITIONS), POSITIONS // int(channels))
        multiples = sorted(f"{n.upper().replace('%', ' % ')} == 0" for n in self.names if "%" in n)
        return ", ".join([*words, *multiples, *(f"{number} <= {limit}" for number, limit in most.items())])

    def share(self, name: str) -> int:
        """What a size is a multiple of."""
        return next((int(n.rpartition("%")[2]) for n in self.names if n.startswith(f"{name}%")), 1)

    def is_narrow(self) -> bool:
        """Whether the example's tensors have at most ``POSITIONS`` elements."""
        p = self.p
        return max(p.mb * p.ic * prod(p.i), p.mb * p.oc * prod(p.o)) <= POSITIONS

    def length(self, x: int, i: int) -> int:
        """The size of dst along dimension ``x`` if that of src is ``i``."""
        return int(eval(self.o[x].replace(self.i[x], str(i)), {"__builtins__": {}}))

    def shapes(self) -> dict[str, list[int | str]]:
        p = self.p
        return {
            "src": [self.mb, p.ic, *self.i],
            "wei": [p.oc, p.icg, *p.k],
            "dst": [self.mb, p.oc, *self.o],
        }

    def tensors(self) -> list[str]:
        p, sizes, lines = self.p, self.shapes(), []
        for name, spec in p.specs.items():
            tag = spec.layout.tag()
            if tag is None:
                raise ProblemError(
                    f"problem '{p}': {name} lies as {spec.layout}; expected a dense tensor "
                    "where sizes are arguments"
                )
            shape = ", ".join(map(str, sizes[name]))
            lines.append(f"tensor {name} {spec.dtype} [{shape}] {tag}")
        return lines

    def text(self, prop: Prop, phase: tuple[int, ...]) -> Compute:
        p = self.p
        around = [solved(p, prop, x, phase[x] if phase else 0) for x in range(p.ndims)]
        group = f"g={p.g} " if p.g > 1 else ""
        ic, oc = (f"g*{n}+{name}" if p.g > 1 else name for n, name in ((p.icg, "ic"), (p.ocg, "oc")))
        at = {
            "src": ["mb", ic, *(_said(s.i.coord) for s in around)],
            "wei": [oc, "ic", *(_said(s.k.coord) for s in around)],
            "dst": ["mb", oc, *(_said(s.o.coord) for s in around)],
        }
        outer = " ".join(
            f"{s.outer.name}={self.outer(x, s.outer.name, phase)}" for x, s in enumerate(around)
        )
        taps = " ".join(f"{s.tap.name}={s.tap.size}" for s in around)
        free, summed = {
            Prop.FWD: (f"mb={self.mb} {outer} oc={p.ocg}", f"{taps} ic={p.icg}"),
            Prop.BWD_D: (f"mb={self.mb} {outer} ic={p.icg}", f"{taps} oc={p.ocg}"),
            Prop.BWD_W: (f"{taps} ic={p.icg} oc={p.ocg}", f"mb={self.mb} {outer}"),
        }[prop]
        over = " ".join(word.partition("=")[0] for word in summed.split())
        a, b, c = (f"{name}[{', '.join(at[name])}]" for name in prop.roles)
        label = "".join(f"_{r}" for r in phase) if any(s > 1 for s in p.stride) else ""
        made = _parsed(
            "\n".join(
                [
                    f"compute {prop}{label} math={p.math}",
                    f"sizes {self.line(f'mb={self.mb} {outer}', bool(phase))}",
                    *self.tensors(),
                    f"axes {group}{free} | {summed}",
                    f"read a = {a}",
                    f"read b = {b}",
                    f"store {c} = sum(a*b; {over})",
                ]
            )
        )
        # A text cannot say that a weight gradient sums over positions.
        roles = {"g": "batch", "ic": "feature", "oc": "feature"} | {s.tap.name: "window" for s in around}
        made = replace(
            made,
            part=phase if label else None,
            axes=tuple(replace(a, role=roles.get(a.name, "position")) for a in made.axes),
        )
        sizes = {"MB": p.mb, **{f"I{n.upper()}": i for n, i in zip(p.spatial, p.i, strict=True)}}
        return with_examples(made, {n: size for n, size in sizes.items() if n.lower() in self.names})

    def outer(self, x: int, axis: str, phase: tuple[int, ...]) -> str:
        """The size of a position axis, of dst or (of one phase) of src."""
        stride = self.p.stride[x]
        if axis.startswith("o"):
            return self.o[x]
        return self.i[x] if stride == 1 else f"({_plus(self.i[x], stride - 1 - phase[x])})//{stride}"


def _plus(name: str, number: int) -> str:
    return f"{name}{number:+d}" if number else name


def _said(coord: ir.Expr) -> str:
    return ir.readable(coord)
