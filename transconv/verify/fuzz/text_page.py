"""A computation's text as it is drawn: axes, tensors, coordinates, and the lines of its steps.

Coordinates are flips, steps, pads of every kind, fused and divided axes, windows, gathers; layouts have
any order, gaps and repeats. What is stored goes to a place of its own from every point, unless it adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from random import Random

from transconv.compute import Op, table
from transconv.ir import Const, f32
from transconv.verify.fuzz.trial import chance

SIZES = (1, 2, 3, 3, 5, 5, 7, 8, 9, 13, 16, 17, 21, 32, 33)
MOST_POINTS = 1 << 15  # of all axes together


def _is_float(op: Op) -> bool:
    """Whether an operation makes a number, not a condition."""
    return op(*[Const(1.0, f32)] * op.arity).dtype.kind == "float"


# The operations that may be drawn: of whole numbers only exact ones make whole numbers.
EXACT = table(lambda op: op if op.exact and op.arity < 3 and _is_float(op) else None)
DRAWN = table(lambda op: op if op.activation and op.drawn or op.name in EXACT else None)
FLOATS = ("f16", "f16", "bf16", "bf16", "f32", "f32")


@dataclass
class TextPage:
    """A text as it is written: axes, tensors, and the lines of its steps."""

    rng: Random
    axes: dict[str, int] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    f64: bool = False

    def __post_init__(self) -> None:
        self.f64 = chance(self.rng, 12)

    def add_axes(self, letter: str, number: int, summed: bool = False) -> list[str]:
        """Axes of one kind, small enough that all points together stay few."""
        names = [f"{letter}{i}" if number > 1 else letter for i in range(number)]
        for name in names:
            room = MOST_POINTS // max(1, prod(self.axes.values()))
            self.axes[name] = self.rng.choice([n for n in SIZES if n <= max(1, room)])
        self.summed += names if summed else []
        return names

    @property
    def kept(self) -> list[str]:
        return [a for a in self.axes if a not in self.summed]

    def dtype(self) -> str:
        return "f64" if self.f64 and chance(self.rng, 2) else self.rng.choice(FLOATS)

    def tensor(self, name: str, shape: list[int], stored: bool = False, dtype: str = "") -> None:
        sizes = ", ".join(map(str, shape))
        self.tensors.append(f"tensor {name} {dtype or self.dtype()} [{sizes}] "
                            f"{strides_of(self.rng, shape, stored)}".rstrip())

    def read(self, name: str, axes: list[str], fill: str = "", dtype: str = "") -> str:
        """Lines that read a tensor of these axes in any order, or either of two."""
        if not chance(self.rng, 10):
            return self.readone(name, axes, fill, dtype)
        dtype, axis = dtype or self.dtype(), self.rng.choice(axes)
        parts = [self.readone(f"{name}{i}", axes, fill, dtype) for i in (1, 2)]
        cut = self.rng.randint(1, max(1, self.axes[axis] - 1))
        self.steps.append(f"let {name} = where({axis} < {cut}, {', '.join(parts)})")
        return name

    def index(self, axis: str) -> str:
        """A line that reads which position is meant at each point of an axis."""
        name = f"at{len(self.steps)}"
        self.tensor(name.upper(), [self.axes[axis]], dtype=self.rng.choice(("i32", "i64")))
        self.steps.append(f"read {name} = {name.upper()}[{axis}]")
        return name

    def readone(self, name: str, axes: list[str], fill: str, dtype: str) -> str:
        coords, shape = coordinates(self, axes, stored=False)
        self.tensor(name.upper(), shape, dtype=dtype)
        where = condition(self, axes) if chance(self.rng, 12) else ""
        self.steps.append(f"read {name} = {name.upper()}[{', '.join(coords)}]{where}"
                          + (f" else {fill}" if fill else ""))
        return name

    def store(self, name: str, value: str, axes: list[str] | None = None, dtype: str = "") -> None:
        """A line that stores a value at every point of some axes, or of those that are left."""
        axes = self.kept if axes is None else axes
        coords, shape = coordinates(self, axes, stored=True)
        self.tensor(name, shape, stored=True, dtype=dtype)
        where = condition(self, axes) if chance(self.rng, 12) else ""
        self.steps.append(f"store {name}[{', '.join(coords)}]{where} = {value}")

    def add(self, name: str, value: str) -> None:
        """A line that adds a value to a place that several points share."""
        made = [elsewhere(self, a) if chance(self.rng, 2) else one(self, a) for a in self.kept]
        self.tensor(name, [n for _, n in made], stored=True)
        where = condition(self, self.kept) if chance(self.rng, 8) else ""
        self.steps.append(f"store {name}[{', '.join(c for c, _ in made)}]{where} += {value}")

    def made(self, name: str) -> str:
        """The whole text."""
        said = " ".join(f"{a}={n}" for a, n in self.axes.items())
        math = self.rng.choice(("", "", " math=ieee", " math=tf32x3"))
        lines = [f"compute {name}{math}", *(f"    {t}" for t in self.tensors), f"    axes {said}"]
        return "\n".join([*lines, *(f"    {s}" for s in self.steps)])


# -- coordinates -----------------------------------------------------------------------------------


def some(rng: Random, axes: list[str]) -> list[str]:
    return [a for a in axes if rng.randrange(3)] or axes[-1:]


def coordinates(page: TextPage, axes: list[str], stored: bool) -> tuple[list[str], list[int]]:
    """Coordinates that see the axes, in any order, and the sizes of their dimensions. What is stored
    goes to a place of its own from every point."""
    rng = page.rng
    left = rng.sample(axes, len(axes)) if chance(rng, 2) else list(axes)
    made: list[tuple[str, int]] = []
    while left:
        axis = left.pop(0)
        partner = next((a for a in left if (a in page.summed) != (axis in page.summed)), "")
        if partner and not stored and chance(rng, 3):
            left.remove(partner)
            made.append(window(page, axis, partner))
        elif left and chance(rng, 10):  # one dimension that two axes count together
            inner = left.pop(0)
            made.append((f"{axis}*{page.axes[inner]} + {inner}", page.axes[axis] * page.axes[inner]))
        elif page.axes[axis] > 3 and chance(rng, 12):
            cut = rng.choice((2, 3, 4))
            made += [(f"{axis} // {cut}", -(-page.axes[axis] // cut)), (f"{axis} % {cut}", cut)]
        elif not stored and chance(rng, 8):
            made.append(elsewhere(page, axis))
        else:
            made.append(one(page, axis))
    return [c for c, _ in made], [n for _, n in made]


def one(page: TextPage, axis: str) -> tuple[str, int]:
    """The coordinate of one axis, mostly the axis itself."""
    rng, size = page.rng, page.axes[axis]
    way = rng.choice(("plain",) * 8 + ("flip", "shift", "steps", "pad", "short"))
    by = rng.randint(1, 3)
    return {"plain": (axis, size), "flip": (f"{size - 1} - {axis}", size),
            "shift": (f"{axis} + {by}", size + by + rng.randrange(2)),
            "steps": (f"{axis}*{by + 1}", (size - 1) * (by + 1) + 1 + rng.randrange(2)),
            "pad": (f"{axis} - {by}", max(1, size - by)),
            "short": (axis, max(1, size - by))}[way]


def elsewhere(page: TextPage, axis: str) -> tuple[str, int]:
    """A coordinate that several points of an axis may share, and that leaves its tensor or does not."""
    rng, size = page.rng, page.axes[axis]
    by, n = rng.randint(0, 3), max(1, size - rng.randint(0, 4))
    way = rng.choice(("repeat", "gather", "gather", "clamp", "reflect", "symmetric", "wrap"))
    if way == "repeat":
        return f"{axis} // {by + 1}", (size - 1) // (by + 1) + 1
    if way == "gather":
        read = page.index(axis)
        return rng.choice((read, read, f"from_end({read}, {n})", f"wrap({read}, {n})")), n
    return f"{way}({axis} - {by}, {n})", n


def window(page: TextPage, axis: str, tap: str) -> tuple[str, int]:
    """A position of a window: stride, dilation, padding on both sides, flipped or not."""
    rng = page.rng
    stride, dilation, pad = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2)), rng.choice((0, 1, 1, 2))
    axis, tap = (tap, axis) if axis in page.summed else (axis, tap)
    reach = (page.axes[axis] - 1) * stride + (page.axes[tap] - 1) * dilation + 1
    size = max(1, reach - 2 * pad + rng.choice((0, 0, 0, 1, -1)))
    seen = f"{page.axes[tap] - 1} - {tap}" if chance(rng, 5) else tap
    return f"{axis}*{stride} + ({seen})*{dilation} - {pad}", size


def condition(page: TextPage, axes: list[str]) -> str:
    rng = page.rng
    a, b = rng.choice(axes), rng.choice(axes)
    return f" where {rng.choice((f'{a} < {max(1, page.axes[a] - 1)}', f'{a} <= {b}', f'{a} % 2 == 0'))}"


def strides_of(rng: Random, shape: list[int], stored: bool) -> str:
    """Where the elements lie: dense as a rule, or in another order, with gaps, or repeated."""
    if rng.randrange(3):
        return ""
    order, step, strides = rng.sample(range(len(shape)), len(shape)), 1, [0] * len(shape)
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
        if chance(rng, 4):
            step += rng.choice((1, 3, 8)) if chance(rng, 2) else -step % 8
    if not stored and chance(rng, 8):
        strides[rng.randrange(len(shape))] = 0
    return f"strides({','.join(map(str, strides))})"


# -- values ----------------------------------------------------------------------------------------


def value_of(page: TextPage, names: list[str], exact: bool = False) -> str:
    """An expression of some names; operations are those of the table."""
    rng = page.rng
    a, b = rng.choice(names), rng.choice(names)
    axis = rng.choice(list(page.axes) if exact else page.kept)
    op = rng.choice(list((EXACT if exact else DRAWN).values()))
    inner = f"{op.name}({', '.join((a, b)[:op.arity])})"
    return rng.choice((f"{a} + {b}", f"{a}*2 - {b}", f"where({a} > {b}, {a}, {b} - 1)", inner, inner,
                       f"{inner} + {b}", f"where({axis} < {page.axes[axis] // 2}, {a}, {b} + 1)",
                       f"{a} + {axis}", f"({a} - 1)**2", "*".join(sorted({a, b, names[0]}))))
