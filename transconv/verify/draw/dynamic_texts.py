"""Draws a computation whose sizes are arguments, as text.

Maps, reductions, rows that are swept several times, products; some axes have names as sizes, with ranges
and conditions. Coordinates are those that one kernel can have for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from transconv.ir import REDUCERS
from transconv.verify.draw.text_page import EXACT, FLOATS, SIZES
from transconv.verify.fuzz.trial import chance

MOST = 96  # the largest end of a range that is met by a drawn size
SMALL = 17  # an example


@dataclass
class _Page:
    rng: Random
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
            self.axes[name] = str(rng.choice([n for n in SIZES if n <= SMALL]))
            return
        size = self.axes[name] = name.upper()
        by = rng.choice((1, 1, 1, 2, 4, 8))
        least = rng.choice((1, 1, 2, by, 3 * by))
        like = self.likes[size] = -(-max(least, rng.randint(1, SMALL)) // by) * by
        self.sizes.append(f"{size}={like} in {least}..{rng.choice((like, MOST, 4096, 1 << 30))}")
        if by > 1:
            self.where.append(f"{size} % {by} == 0")

    def read(self, name: str, axes: list[str], fill: str = "", dtype: str = "") -> str:
        seen = [self.coordinate(a) for a in self.some_order(axes)]
        self.tensor(name.upper(), [n for _, n in seen], dtype)
        self.steps.append(f"read {name} = {name.upper()}[{', '.join(c for c, _ in seen)}]"
                          + (f" else {fill}" if fill else ""))
        return name

    def store(self, name: str, value: str, axes: list[str]) -> None:
        made = [self.rng.choice(((a, self.axes[a]),) * 5 + ((f"{a} + 1", f"{self.axes[a]} + 2"),
                                                            (f"{a}*2", f"{self.axes[a]}*2")))
                for a in self.some_order(axes)]
        self.tensor(name, [n for _, n in made] or ["1"])
        self.steps.append(f"store {name}[{', '.join(c for c, _ in made) or '0'}] = {value}")

    def some_order(self, axes: list[str]) -> list[str]:
        return self.rng.sample(axes, len(axes)) if chance(self.rng, 3) else axes

    def coordinate(self, axis: str) -> tuple[str, str]:
        """A coordinate of an axis, and the size of its dimension; some coordinates are out of bounds
        at an end."""
        rng, size, by = self.rng, self.axes[axis], self.rng.randint(1, 3)
        return rng.choice(((axis, size),) * 6 + (
            (f"{size} - 1 - {axis}", size), (f"{axis} + {by}", f"{size} + {by}"),
            (f"{axis} - {by}", size), (f"{axis} + {by}", size), (f"{axis}*{by + 1}", f"{size}*{by + 1}"),
            (f"{axis} // {by + 1}", size)))

    def tensor(self, name: str, sizes: list[str], dtype: str = "") -> None:
        self.tensors.append(f"tensor {name} {dtype or self.rng.choice(FLOATS)} [{', '.join(sizes)}]")

    def made(self, name: str) -> str:
        said = " ".join(f"{a}={n.replace(' ', '')}" for a, n in self.axes.items())
        lines = [f"compute {name}", f"    sizes {', '.join((*self.sizes, *self.where))}",
                 *(f"    {t}" for t in self.tensors), f"    axes {said}"]
        return "\n".join([*lines, *(f"    {s}" for s in self.steps)])


def text(rng: Random) -> str:
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
    return rng.choice((a, f"{a}*2 + {b}", f"{op.name}({', '.join((a, b)[:op.arity])})",
                       f"where({a} > {b}, {a}, {b} - 1)", f"{a} + {rng.choice([*page.axes])}"))


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
    page.steps += [f"let top = {page.rng.choice(('max', 'min'))}({x}; {over})",
                   f"let d = {x} - top", f"let s = sum({page.rng.choice(('d', 'abs(d)', 'd*d'))}; {over})"]
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
