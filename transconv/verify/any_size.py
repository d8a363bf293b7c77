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

from transconv.compute import Compute
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Prop
from transconv.ir import REDUCERS, Sizes, text_of
from transconv.runtime import plan
from transconv.support import ComputeError, Unsupported
from transconv.target import Target
from transconv.verify.case import ProblemCase
from transconv.verify.fuzz.compute_texts import EXACT, FLOATS, SIZES
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


@dataclass
class _Page:
    rng: random.Random
    axes: dict[str, str] = field(default_factory=dict)  # each with its extent
    likes: dict[str, int] = field(default_factory=dict)  # the examples of sizes
    sizes: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def axis(self, name: str, always: bool = False) -> None:
        """An axis whose size is an argument, or a number."""
        rng = self.rng
        if not always and chance(rng, 3):
            self.axes[name] = str(rng.choice([n for n in SIZES if n <= LARGEST_EXAMPLE]))
            return
        size = self.axes[name] = name.upper()
        by = rng.choice((1, 1, 1, 2, 4, 8))
        least = rng.choice((1, 1, 2, by, 3 * by))
        like = self.likes[size] = -(-max(least, rng.randint(1, LARGEST_EXAMPLE)) // by) * by
        self.sizes.append(f"{size}={like} in {least}..{rng.choice((like, MOST, 4096, 1 << 30))}")
        if by > 1:
            self.where.append(f"{size} % {by} == 0")

    def read(self, name: str, axes: list[str], fill: str = "", dtype: str = "") -> str:
        seen = [self.coordinate(a) for a in self.some_order(axes)]
        self.tensor(name.upper(), [n for _, n in seen], dtype)
        self.steps.append(
            f"read {name} = {name.upper()}[{', '.join(c for c, _ in seen)}]"
            + (f" else {fill}" if fill else "")
        )
        return name

    def store(self, name: str, value: str, axes: list[str]) -> None:
        made = [
            self.rng.choice(
                ((a, self.axes[a]),) * 5
                + ((f"{a} + 1", f"{self.axes[a]} + 2"), (f"{a}*2", f"{self.axes[a]}*2"))
            )
            for a in self.some_order(axes)
        ]
        self.tensor(name, [n for _, n in made] or ["1"])
        self.steps.append(f"store {name}[{', '.join(c for c, _ in made) or '0'}] = {value}")

    def some_order(self, axes: list[str]) -> list[str]:
        return self.rng.sample(axes, len(axes)) if chance(self.rng, 3) else axes

    def coordinate(self, axis: str) -> tuple[str, str]:
        """A coordinate of an axis, and the size of its dimension; some coordinates are out of bounds
        at an end."""
        rng, size, by = self.rng, self.axes[axis], self.rng.randint(1, 3)
        return rng.choice(
            ((axis, size),) * 6
            + (
                (f"{size} - 1 - {axis}", size),
                (f"{axis} + {by}", f"{size} + {by}"),
                (f"{axis} - {by}", size),
                (f"{axis} + {by}", size),
                (f"{axis}*{by + 1}", f"{size}*{by + 1}"),
                (f"{axis} // {by + 1}", size),
            )
        )

    def tensor(self, name: str, sizes: list[str], dtype: str = "") -> None:
        self.tensors.append(f"tensor {name} {dtype or self.rng.choice(FLOATS)} [{', '.join(sizes)}]")

    def made(self, name: str) -> str:
        said = " ".join(f"{a}={n.replace(' ', '')}" for a, n in self.axes.items())
        lines = [
            f"compute {name}",
            f"    sizes {', '.join((*self.sizes, *self.where))}",
            *(f"    {t}" for t in self.tensors),
            f"    axes {said}",
        ]
        return "\n".join([*lines, *(f"    {s}" for s in self.steps)])


def drawn_text(rng: random.Random) -> str:
    """A computation that one kernel can do for all sizes that meet its requirements."""
    return rng.choice((_map, _map, _reduction, _rows, _product, _places))(_Page(rng))


def _axes(page: _Page, kept: int, reduced: int) -> tuple[list[str], list[str]]:
    """Kept and reduced axes, one of which at least has an argument as its size."""
    names = [f"m{i}" for i in range(kept)] + [f"k{i}" for i in range(reduced)]
    one = page.rng.choice(names)
    for name in names:
        page.axis(name, always=name == one)
    return names[:kept], names[kept:]


def _value(page: _Page, names: list[str]) -> str:
    rng = page.rng
    a, b, op = rng.choice(names), rng.choice(names), rng.choice(list(EXACT.values()))
    return rng.choice(
        (
            a,
            f"{a}*2 + {b}",
            f"{op.name}({', '.join((a, b)[: op.arity])})",
            f"where({a} > {b}, {a}, {b} - 1)",
            f"{a} + {rng.choice([*page.axes])}",
        )
    )


def _map(page: _Page) -> str:
    kept, _ = _axes(page, page.rng.choice((1, 2, 2, 3)), 0)
    names = [page.read("x", kept, page.rng.choice(("", "3")))]
    if chance(page.rng, 2):
        names.append(page.read("y", page.rng.sample(kept, page.rng.randint(1, len(kept)))))
    page.store("C", _value(page, names), kept)
    if chance(page.rng, 4):
        page.store("D", _value(page, names), kept)
    return page.made("any_map")


def _reduction(page: _Page) -> str:
    kept, reduced = _axes(page, page.rng.choice((1, 1, 2)), page.rng.choice((1, 1, 2)))
    op = page.rng.choice(tuple(REDUCERS))
    fill = {"max": "-inf", "min": "inf", "prod": "1"}.get(op, "")
    x = page.read("x", [*kept, *reduced], fill)
    page.steps.append(f"let s = {op}({x}; {' '.join(reduced)})")
    if op == "sum" and chance(page.rng, 2):
        page.steps.append(f"let mean = s / ({'*'.join(page.axes[a] for a in reduced)})")
        page.store("C", "mean", kept)
        return page.made("any_mean")
    page.store("C", page.rng.choice(("s", "s*2 - 1", "abs(s)")), kept)
    return page.made("any_reduction")


def _places(page: _Page) -> str:
    kept, reduced = _axes(page, 1, page.rng.choice((1, 1, 2)))
    op = page.rng.choice(("max", "min"))
    x = page.read("x", [*kept, *reduced], {"max": "-inf", "min": "inf"}[op])
    page.steps.append(f"let i = arg{op}({x}; {' '.join(reduced)})")
    page.tensor("C", [page.axes[a] for a in kept], page.rng.choice(("i32", "i64")))
    page.steps.append(f"store C[{', '.join(kept)}] = i")
    if chance(page.rng, 2):
        page.store("D", f"{op}({x}; {' '.join(reduced)})", kept)
    return page.made("any_place")


def _rows(page: _Page) -> str:
    kept, reduced = _axes(page, 1, page.rng.choice((1, 1, 2)))
    over = " ".join(reduced)
    x = page.read("x", [*kept, *reduced])
    page.steps += [
        f"let top = {page.rng.choice(('max', 'min'))}({x}; {over})",
        f"let d = {x} - top",
        f"let s = sum({page.rng.choice(('d', 'abs(d)', 'd*d'))}; {over})",
    ]
    page.store("C", page.rng.choice(("d + s", "d - s*2", "relu(d) + s")), [*kept, *reduced])
    if chance(page.rng, 2):
        page.store("D", "s", kept)
    return page.made("any_rows")


def _product(page: _Page) -> str:
    for name in ("m", "n", "k"):
        page.axis(name, always=name == "m")
    dtype = page.rng.choice(FLOATS)
    for name, axes in (("x", ["m", "k"]), ("w", ["n", "k"])):
        page.read(name, axes, dtype=dtype)
    page.steps.append("let s = sum(x*w; k)")
    page.store("C", page.rng.choice(("s", "s", "relu(s) + 1")), ["m", "n"])
    return page.made("any_product")
