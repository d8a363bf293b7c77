"""Computations whose sizes are arguments: sizes to check a kernel at, and drawn computations.

Sizes come from the edges of a kernel's requirements first, small enough for an interpreter. Drawn are
maps, reductions, rows that are swept several times, and products, with coordinates that one kernel can
have for all sizes."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from transconv.compute import Compute, kernels, parse, why_not_any_size
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Prop
from transconv.ir import Sizes, text_of
from transconv.runtime import plan
from transconv.support import ComputeError, Unsupported
from transconv.target import Target
from transconv.verify.case import ProblemCase
from transconv.verify.fuzz.compute_texts import KINDS, SIZES, TextPage
from transconv.verify.fuzz.trial import chance
from transconv.verify.judgement import answered_by, told_answers

SMALL = 1 << 14  # points of a computation that is interpreted
LONGEST = 70  # of a drawn size
TRIES = 2000


def asked(compute: Compute, text: str | None) -> list[dict[str, int]]:
    """The sizes of a command line's words (``N=8,H=17``; the others are the examples); without words the
    examples and the edges. Raises ComputeError."""
    assert compute.named is not None
    if not text:
        return [compute.named.like, *edges(compute)]
    found = dict(compute.named.like)
    for word in text.split(","):
        told = re.fullmatch(r"\s*(\w+)=(\d+)\s*", word)
        if told is None or told[1] not in found:
            raise ComputeError(
                f"sizes '{text}'; expected some of {' '.join(found)}, such as {compute.named.names[0]}=8"
            )
        found[told[1]] = int(told[2])
    if reason := compute.named.why_not(found):
        raise ComputeError(f"{compute.name}: {reason}; it requires {compute.named}")
    return [found]


def edges(compute: Compute, most: int = 4) -> list[dict[str, int]]:
    """Sizes at the ends of their ranges: all at their least, then each at its largest with the others
    at their least. Largest values are limited to what an interpreter can run."""
    named = compute.named
    assert named is not None
    low = {s.name: _near(named, s.name, s.least, 1) for s in named.each}
    found = [low]
    for s in named.each:
        high = min(s.most, max(s.least, LONGEST))
        found.append(low | {s.name: _near(named, s.name, high, -1)})
    legal = [f for f in found if not named.why_not(f) and _points(compute, f) <= SMALL]
    return list({tuple(f.items()): f for f in legal}.values())[:most]


def drawn(compute: Compute, count: int, seed: int = 0) -> list[dict[str, int]]:
    """Sizes that meet the requirements, the edges first."""
    named = compute.named
    assert named is not None
    rng = random.Random(seed)
    found = edges(compute, count)
    for _ in range(TRIES):
        if len(found) >= count:
            break
        tried = {s.name: rng.randint(s.least, min(s.most, max(s.least, LONGEST))) for s in named.each}
        if not named.why_not(tried) and tried not in found and _points(compute, tried) <= SMALL:
            found.append(tried)
    return found[:count]


def outside(named: Sizes) -> Iterator[dict[str, int]]:
    """Sizes that break one requirement each: beyond the ends of the ranges, and each condition."""
    for s in named.each:
        yield named.like | {s.name: s.least - 1}
        yield named.like | {s.name: s.most + 1}
    values = [range(s.least, min(s.most, s.least + 8) + 1) for s in named.each]
    for condition in named.where:
        for tried in product(*values):
            sizes = dict(zip(named.names, tried, strict=True))
            if named.why_not(sizes).startswith(text_of(condition)):
                yield sizes
                break


def beside_torch(
    problem: ConvProblem,
    names: frozenset[str],
    target: Target,
    text: str | None = None,
    props: Iterable[Prop] = Prop,
) -> Iterator[tuple[str, bool]]:
    """Lines about kernels for any size beside answers that know no text of a computation, and whether they
    are right. ``text``: a command line's sizes."""
    yield f"beside {told_answers(answered_by(problem))}", True
    for prop in props:
        workload = ConvWorkload(problem, prop, open=names)
        try:
            made = plan(workload, target, None, False, CompiledDirection, keeps=False)
        except Unsupported as refused:
            yield f"  not run  {prop}: {refused}", True
            continue
        needs = made.required.sizes if made.required else None
        for sizes in asked(workload.computations[0], text):
            if needs is None or needs.why_not(sizes):
                continue
            i = tuple(sizes.get(f"I{n.upper()}", problem.i[x]) for x, n in enumerate(problem.spatial))
            o = tuple(_out(problem, x, n) for x, n in enumerate(i))
            case = ProblemCase(problem.at(sizes.get("MB", problem.mb), i, o), prop)
            found = case.judge(made.at({n: sizes[n] for n in needs.names}), "exact")
            said = " ".join(f"{n}={v}" for n, v in sizes.items())
            yield (
                f"  {'right' if found.right else 'WRONG'}  {prop}  {said}  {found.reason}".rstrip(),
                found.right,
            )


def _out(p: ConvProblem, x: int, i: int) -> int:
    """The size of dst along a dimension if that of src is ``i``. Padding is that of the call, as much in
    front as behind, where the example's is less behind because positions are left over."""
    same = 0 <= p.pad_lo[x] - p.pad_hi[x] < p.stride[x]
    around = p.pad_lo[x] + (p.pad_lo[x] if same else p.pad_hi[x])
    return (i + around - (p.k[x] - 1) * p.dilation[x] - 1) // p.stride[x] + 1


def _near(named: Sizes, name: str, start: int, step: int) -> int:
    """The first size from ``start`` on, in one direction, with which the other examples meet all
    requirements."""
    tried: Mapping[str, int] = named.like
    return next(
        (
            n
            for n in range(start, start + step * 4096, step)
            if n >= 1 and not named.why_not({**tried, name: n})
        ),
        start,
    )


def _points(compute: Compute, sizes: Mapping[str, int]) -> int:
    return prod(x.size for x in compute.at(**sizes).axes) // max(
        1, max(x.size for x in compute.axes_of("K")) if compute.axes_of("K") else 1
    )


# -- drawn computations -------------------------------------------------------------------------------

MOST = 96  # the largest end of a range that is met by a drawn size
LARGEST_EXAMPLE = 17
FEW_POINTS = 1 << 12  # of all axes of an example together


@dataclass
class SizedPage(TextPage):
    """A page of a text whose sizes are arguments: its tensors are dense, and lie along whole axes.
    ``named``: the axes whose sizes are; ``sizes`` and ``where``: their examples and requirements."""

    named: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """No tensor is of f64."""

    def add_axes(self, letter: str, number: int, summed: bool = False) -> list[str]:
        """Axes of one kind; the first of all has an argument as its size, and most others have."""
        names = [f"{letter}{i}" if number > 1 else letter for i in range(number)]
        for name in names:
            room = min(LARGEST_EXAMPLE, max(1, FEW_POINTS // prod(self.axes.values())))
            if self.named and chance(self.rng, 3):
                self.axes[name] = self.rng.choice([n for n in SIZES if n <= room])
            else:
                self._name(name, room)
        self.summed += names if summed else []
        return names

    def _name(self, axis: str, room: int) -> None:
        by = self.rng.choice([n for n in (1, 1, 1, 2, 4, 8) if n <= room])
        least = self.rng.choice((1, 1, 2, by, 3 * by))
        like = self.axes[axis] = -(-max(least, self.rng.randint(1, room)) // by) * by
        size = axis.upper()
        self.named.append(axis)
        self.sizes.append(f"{size}={like} in {least}..{self.rng.choice((like, MOST, 4096, 1 << 30))}")
        self.where += [f"{size} % {by} == 0"] if by > 1 else []

    def extent(self, axis: str) -> str:
        return axis.upper() if axis in self.named else str(self.axes[axis])

    def coordinates(self, axes: list[str], stored: bool) -> tuple[list[str], list[Any]]:
        order = self.rng.sample(axes, len(axes)) if chance(self.rng, 3) else axes
        made = [(a, self.extent(a)) for a in order]
        if stored:
            moved = [((f"{a} + 1", f"{n} + 2"), (f"{a}*2", f"{n}*2")) for a, n in made]
            made = [self.rng.choice((m,) * 5 + other) for m, other in zip(made, moved, strict=True)]
        return [c for c, _ in made] or ["0"], [n for _, n in made] or ["1"]

    def tensor(self, name: str, shape: list[Any], stored: bool = False, dtype: str = "") -> None:
        self.tensors.append(f"tensor {name} {dtype or self.dtype()} [{', '.join(shape)}]")

    def made(self, name: str) -> str:
        said = " ".join(f"{a}={self.extent(a)}" for a in self.axes)
        sizes = ", ".join((*self.sizes, *self.where))
        lines = [f"compute any_{name}", f"sizes {sizes}", *self.tensors, f"axes {said}", *self.steps]
        return "\n    ".join(lines)


def drawn_text(rng: random.Random) -> str:
    """A computation that one kernel can do for all sizes that meet its requirements."""
    while True:
        text = rng.choice((*KINDS, _mean))(SizedPage(rng))
        made = parse(text)
        if not why_not_any_size(made) and kernels(made) == (made,):
            return text


def _mean(page: SizedPage) -> str:
    page.add_axes("m", page.rng.choice((1, 1, 2)))
    page.add_axes("k", page.rng.choice((1, 1, 2)), summed=True)
    x, over = page.read("x", list(page.axes)), " ".join(page.summed)
    page.steps.append(f"let s = sum({x}; {over}) / ({'*'.join(map(page.extent, page.summed))})")
    page.store("C", "s")
    return page.made("mean")
