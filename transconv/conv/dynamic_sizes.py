"""A convolution whose batch and image sizes are arguments of its kernels.

    mb8?ic64ih56?iw56?oc128kh3sh2ph1         in: a problem; a question mark after each size that is any
    sizes  MB=8 in 1..65535, IH=56 in 1..16384, IW=56 in 1..16384          out: its computations

Filter, strides, dilation, padding and channels are numbers. The sizes of dst follow from those of src, as
in torch. The relation is that of relation.py; the computations are written as texts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from math import prod

from transconv.compute import Compute, Write, of_sizes, parse, with_examples
from transconv.conv.epilogue import Epilogue
from transconv.conv.problem.conv_problem import ConvProblem, Prop
from transconv.conv.problem.descriptor import print_descriptor
from transconv.conv.relation import solved
from transconv.ir import Expr, Size, Sizes, Tensor, Var, free_vars, readable
from transconv.simplify import simplify
from transconv.support import ProblemError

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
        raise ProblemError(f"problem '{text}': a question mark stands behind mb, id, ih or iw and a "
                           "number, such as mb8?; channels and filters are numbers")
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


def any_size(problem: ConvProblem, prop: Prop, names: frozenset[str] = ALL,
             epilogue: Epilogue | None = None) -> tuple[Compute, ...]:
    """The computations of one direction for any size of ``names``, or any multiple (``ih%2``); the
    problem's sizes are the examples.
    ``BWD_D`` with strides has one for each stride phase, which may run in any order. Raises ProblemError
    for tensors that are not dense."""
    written = _Written(problem, names)
    made = tuple(written.text(prop, phase) for phase in phases(problem, prop))
    return tuple(_behind(c, epilogue) for c in made) if epilogue else made


def any_tensors(problem: ConvProblem, names: frozenset[str]) -> dict[str, Tensor]:
    """The tensors of these computations by name, without what takes longer."""
    written = _Written(problem, names)
    named = Sizes(tuple(Size(n.upper(), 1) for n in sorted(names) if "%" not in n))
    made = {}
    for name, sizes in written.shapes().items():
        extents = tuple(simplify(of_sizes(str(size), named)) for size in sizes)
        made[name] = Tensor(
            name, tuple(f"{name}_{dim}" for dim in range(len(sizes))), problem.shapes[name],
            problem.specs[name].layout, extents=extents if any(map(free_vars, extents)) else ())
    return made


def _behind(compute: Compute, epilogue: Epilogue) -> Compute:
    """The computation, with what an epilogue does to its sum before it is stored."""
    total = compute.sum
    assert total is not None
    kept = [s for s in compute.steps if not isinstance(s, Write)]
    after = epilogue.steps(Var(total.name, compute.acc), compute.c)
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
                least = next(i for i in range(share, longest, share)
                             if (i >= p.stride[x] or not phased) and self.length(x, i) >= 1)
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
        return {"src": [self.mb, p.ic, *self.i], "wei": [p.oc, p.icg, *p.k],
                "dst": [self.mb, p.oc, *self.o]}

    def tensors(self) -> list[str]:
        p, sizes, lines = self.p, self.shapes(), []
        for name, spec in p.specs.items():
            tag = spec.layout.tag()
            if tag is None:
                raise ProblemError(f"problem '{p}': {name} lies as {spec.layout}; expected a dense tensor "
                                   "where sizes are arguments")
            shape = ", ".join(map(str, sizes[name]))
            lines.append(f"tensor {name} {spec.dtype} [{shape}] {tag}")
        return lines

    def text(self, prop: Prop, phase: tuple[int, ...]) -> Compute:
        p = self.p
        around = [solved(p, prop, x, phase[x] if phase else 0) for x in range(p.ndims)]
        group = f"g={p.g} " if p.g > 1 else ""
        ic, oc = (f"g*{n}+{name}" if p.g > 1 else name for n, name in ((p.icg, "ic"), (p.ocg, "oc")))
        at = {"src": ["mb", ic, *(_said(s.i.coord) for s in around)],
              "wei": [oc, "ic", *(_said(s.k.coord) for s in around)],
              "dst": ["mb", oc, *(_said(s.o.coord) for s in around)]}
        outer = " ".join(f"{s.outer.name}={self.outer(x, s.outer.name, phase)}"
                         for x, s in enumerate(around))
        taps = " ".join(f"{s.tap.name}={s.tap.size}" for s in around)
        free, summed = {
            Prop.FWD: (f"mb={self.mb} {outer} oc={p.ocg}", f"{taps} ic={p.icg}"),
            Prop.BWD_D: (f"mb={self.mb} {outer} ic={p.icg}", f"{taps} oc={p.ocg}"),
            Prop.BWD_W: (f"{taps} ic={p.icg} oc={p.ocg}", f"mb={self.mb} {outer}")}[prop]
        over = " ".join(word.partition("=")[0] for word in summed.split())
        a, b, c = (f"{name}[{', '.join(at[name])}]" for name in prop.roles)
        label = "".join(f"_{r}" for r in phase) if any(s > 1 for s in p.stride) else ""
        made = _parsed("\n".join([
            f"compute {prop}{label} math={p.math}",
            f"sizes {self.line(f'mb={self.mb} {outer}', bool(phase))}", *self.tensors(),
            f"axes {group}{free} | {summed}", f"read a = {a}", f"read b = {b}",
            f"store {c} = sum(a*b; {over})"]))
        # A text cannot say that a weight gradient sums over positions.
        roles = {"g": "batch", "ic": "feature", "oc": "feature"} | {s.tap.name: "window" for s in around}
        made = replace(made, part=phase if label else None, axes=tuple(
            replace(a, role=roles.get(a.name, "position")) for a in made.axes))
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


def _said(coord: Expr) -> str:
    return readable(coord)
