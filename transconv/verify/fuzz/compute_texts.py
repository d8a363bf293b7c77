"""Random small computations as texts, drawn line by line: axes, tensors, coordinates, steps.

Products with any number of batch, row, column and summed axes and with prologues, statistics of their
results, reductions over windows, chains of elementwise operations, rows that are swept several times, rows
so long that they are split into parts, places of extremes, stores that add, gradients of views; everything
that a text can say about where an element lies is drawn: flips, strides, pads of every kind, fused and
divided coordinates, broadcasts, gathers, concatenations, permuted and partial stores, layouts with gaps.
Sizes rarely divide anything.

What is stored goes to a place of its own from every point, unless it adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from random import Random

from transconv.compute import Op, differentiate, parse, table, transposed, why_not_lowered
from transconv.compute.analysis import statistics
from transconv.ir import REDUCERS, Const, Layout, Tensor, f32
from transconv.support import ComputeError
from transconv.verify.fuzz.trial import chance

LONG = (2048, 2100, 2560, 3000, 4096)  # elements of a row that has parts
FILLS = {"max": ("-inf", "-2"), "min": ("inf", "3"), "prod": ("1", "-1"), "sum": ("", "", "", "1")}


def text(rng: Random) -> str:
    """A computation that one kernel can do, or a few; of every eighth one text of its gradients. Every
    fourth product is one that reads boxes in its epilogue."""
    kind = rng.choice(
        (
            _product,
            _product,
            _product,
            _reduction,
            _reduction,
            _chain,
            _chain,
            _rows,
            _rows,
            _extremes,
            _adding,
            _gradient,
            _long,
            _statistics,
        )
    )
    made = kind(TextPage(rng))
    shares = (_adding, _gradient, _statistics)  # places, in ways that no kernel may have
    while kind in shares and why_not_lowered(parse(made)):
        made = kind(TextPage(rng))
    if kind is _product and Random(made).randrange(4) == 1:
        made = _residual(TextPage(Random(made)))
    return _derived(made) if Random(made).randrange(8) == 0 else made


def _derived(text: str) -> str:
    """One text of the gradients of a computation; the text itself if it has none."""
    try:
        found = differentiate(parse(text)).computes
    except ComputeError:
        return text
    return str(Random(text).choice(found)) if found else text


# -- the kinds -------------------------------------------------------------------------------------


def _product(page: TextPage) -> str:
    rng = page.rng
    kinds = {
        letter: page.add_axes(letter, rng.choice(numbers), letter == "k")
        for letter, numbers in (
            ("b", (0, 0, 0, 1, 1, 2)),
            ("m", (1, 1, 1, 2, 0)),
            ("n", (1, 1, 1, 2)),
            ("k", (1, 1, 2, 2)),
        )
    }
    if not page.kept:
        kinds["m"] += page.add_axes("m", 1)
    dtype = page.dtype()
    mixed = chance(rng, 6)
    for name, letters in (("x", "bmk"), ("w", "bnk")):
        axes = [a for letter in letters for a in kinds[letter]]
        if len(kinds["k"]) > 1 and chance(rng, 16):  # an axis that one of the factors does not have
            axes.remove(kinds["k"][0 if name == "x" else 1])
        page.read(name, axes, "2" if chance(rng, 20) else "", "" if mixed else dtype)
    cast = "" if mixed or chance(rng, 3) else dtype
    factors = [_prologue(rng, name, cast) if chance(rng, 6) else name for name in ("x", "w")]
    page.steps.append(f"let s = sum({'*'.join(factors)}; {' '.join(page.summed)})")
    return _finished(page, "product")


def _residual(page: TextPage) -> str:
    """A product of whole boxes, whose epilogue reads boxes as large as its result, or vectors:
    what a warp-specialized kernel fetches (``behind=box``)."""
    rng, dtype = page.rng, page.rng.choice(("f16", "bf16"))
    sizes = {
        "m0": rng.choice((1, 2, 3)),
        "m1": rng.choice((3, 5, 9, 16, 17)),
        "n": rng.choice((16, 24, 64, 72)),
        "k": rng.choice((8, 16)),
    }
    page.axes |= sizes
    page.summed.append("k")
    behind = "rg"[: rng.choice((1, 1, 2))]
    seen = {"x": ["m0", "m1", "k"], "w": ["n", "k"]}
    seen |= {name: ["n"] if chance(rng, 4) else ["m0", "m1", "n"] for name in behind}
    for name, axes in seen.items():
        own = rng.choice((dtype, dtype, "f32")) if name in behind else dtype
        page.tensors.append(f"tensor {name.upper()} {own} [{', '.join(str(sizes[a]) for a in axes)}]")
        page.steps.append(f"read {name} = {name.upper()}[{', '.join(axes)}]")
    page.steps.append("let s = sum(x*w; k)")
    order = rng.choice((["m0", "m1", "n"], ["m0", "n", "m1"]))
    shape = ", ".join(str(sizes[a]) for a in order)
    page.tensors.append(f"tensor C {rng.choice((dtype, 'f32'))} [{shape}]")
    value = value_of(page, ["s", *behind])
    page.steps.append(f"store C[{', '.join(order)}] = {' + '.join([value, *behind])}")
    return page.made("residual")


def _statistics(page: TextPage) -> str:
    """A product, and reductions of its result or of what is computed from it."""
    rng = page.rng
    for letter in "mnk":
        page.add_axes(letter, rng.choice((1, 1, 2)), letter == "k")
    dtype = page.dtype()
    for name, letter in (("x", "n"), ("w", "m")):
        page.read(name, [a for a in page.axes if a[0] != letter], "", dtype)
    page.steps.append(f"let s = sum(x*w; {' '.join(page.summed)})")
    page.steps.append(f"let y = {rng.choice(('s', 's*2 - 1', 'max(s, 0.0)', 'f16(s)', 'bf16(s)'))}")
    page.store("C", "y", page.kept)
    for name in ("M", "D")[: rng.choice((1, 1, 2))]:
        axes = [
            a
            for letter in "mn"
            for own in [[x for x in page.kept if x[0] == letter]]
            for a in rng.choice(([], own[:1], own))
        ]  # tiles reduce what is inside of them
        rng.shuffle(axes)
        coords = [
            rng.choice((a, a, *(f"{a} // {d}" for d in (2, 3, 4) if page.axes[a] % d == 0))) for a in axes
        ]
        place, op, value = ", ".join(coords) or "0", rng.choice(statistics.STATISTICS), rng.choice("sy")
        if op == "squares":
            page.steps.append(f"store {name}0[{place}] sum= {value}")
        page.steps.append(f"store {name}[{place}] {op}= {value}")
    return page.made("statistics")


def _prologue(rng: Random, name: str, cast: str) -> str:
    """A factor that is computed before it is multiplied, in the type of a cast."""
    op = rng.choice([op for op in EXACT.values() if op.arity == 1])
    value = rng.choice((f"{op.name}({name})", f"{op.name}({name})", f"({name}*2 - 1)"))
    return f"{cast}({value})" if cast else value


def _reduction(page: TextPage) -> str:
    rng = page.rng
    page.add_axes("m", rng.choice((1, 1, 2, 3)))
    page.add_axes("k", rng.choice((1, 2, 2, 3)), summed=True)
    op = rng.choice(tuple(REDUCERS))
    names = [page.read("x", list(page.axes), rng.choice(FILLS[op]))]
    if chance(rng, 4):
        names.append(page.read("y", some(rng, list(page.axes)), rng.choice(FILLS[op])))
    term = "x" if len(names) == 1 and rng.randrange(3) else value_of(page, names, exact=True)
    if op == "prod":  # a product of anything else soon leaves the numbers that f32 has
        term = "*".join(names)
    page.steps.append(f"let s = {op}({term}; {' '.join(page.summed)})")
    return _finished(page, f"reduced_{op}")


def _chain(page: TextPage) -> str:
    rng = page.rng
    page.add_axes("m", rng.choice((1, 2, 2, 3, 4)))
    names = [page.read("x", list(page.axes), rng.choice(("", "3")))]
    names += [page.read(n, some(rng, list(page.axes))) for n in ("y", "z")[: rng.randrange(3)]]
    for at in range(rng.randrange(3)):
        page.steps.append(f"let v{at} = {value_of(page, names)}")
        names.append(f"v{at}")
    for at in range(rng.choice((1, 1, 2, 3))):
        value = names[-1] if chance(rng, 2) else value_of(page, names)
        page.store(f"C{at}", value)
    return page.made("chain")


def _rows(page: TextPage) -> str:
    """Elements of rows that are needed again behind reductions; some of these over other axes."""
    rng = page.rng
    page.add_axes("m", rng.choice((1, 1, 2)))
    page.add_axes("k", rng.choice((1, 1, 2)), summed=True)
    axes = list(page.axes)
    names = [page.read("x", axes)]
    if chance(rng, 3):
        names.append(page.read("y", some(rng, axes)))
    own = list(names)
    for at in range(rng.choice((1, 2, 2, 3))):
        op = rng.choice(("sum", "max", "min"))
        over = page.summed if rng.randrange(5) else rng.sample(axes, rng.randint(1, len(axes)))
        first = rng.choice((*own, value_of(page, own, True)))
        term = f"{rng.choice(own)} - {rng.choice(names)}" if at else first
        term = f"({term})**2" if op == "sum" and chance(rng, 3) and at < 2 else term
        page.steps.append(f"let s{at} = {op}({term}; {' '.join(over)})")
        names.append(f"s{at}")
        if chance(rng, 3):
            page.steps.append(f"let d{at} = {rng.choice(own)} - s{at}")
            own.append(f"d{at}")
    page.store("C", " + ".join(dict.fromkeys((own[-1], names[-1], rng.choice(names)))), axes)
    if chance(rng, 4):
        page.store("D", f"{rng.choice(own)} - {names[-1]}", axes)
    return page.made("rows")


def _long(page: TextPage) -> str:
    """Few rows, so long that they may be split into parts, with the reductions whose parts are
    combined in their own ways: extremes, their places, sums of powers, moments."""
    rng = page.rng
    page.axes = {"m": rng.choice((1, 2, 3)), "k": rng.choice(LONG)}
    page.summed = ["k"]
    axes = list(page.axes) if chance(rng, 2) else ["k", "m"]  # neighbours of one row, or of several
    page.tensor("X", [page.axes[a] for a in axes])
    page.steps.append(f"read x = X[{', '.join(axes)}]")
    kind = rng.choice(("softmax", "variance", "place", "both"))
    if kind in ("softmax", "both"):
        page.steps += ["let top = max(x; k)", "let e = exp(x - top)", "let s = sum(e; k)"]
    if kind in ("variance", "both"):
        page.steps += [
            "let t = sum(x; k)",
            f"let mean = t / {page.axes['k']}",
            "let d = x - mean",
            "let v = sum(d*d; k)",
        ]
    if kind == "place":
        page.steps.append(f"let at = arg{rng.choice(('max', 'min'))}(x; k)")
        page.store("I", "at", ["m"], rng.choice(("i32", "i64")))
        return page.made("long")
    value = {"softmax": "e / s", "variance": "d * rsqrt(v + 1)", "both": "d + s + v"}[kind]
    page.tensor("C", [page.axes[a] for a in axes], stored=True)
    page.steps.append(f"store C[{', '.join(axes)}] = {value}")
    return page.made("long")


def _extremes(page: TextPage) -> str:
    """The place of the greatest or the least element, and usually its value."""
    rng = page.rng
    page.add_axes("m", rng.choice((1, 1, 2)))
    page.add_axes("k", rng.choice((1, 1, 2)), summed=True)
    x = page.read("x", list(page.axes), rng.choice(("", "-inf", "inf")))
    op, over = rng.choice(("max", "min")), " ".join(rng.sample(page.summed, len(page.summed)))
    term = rng.choice((x, x, f"abs({x})", f"-{x}"))
    page.steps.append(f"let at = arg{op}({term}; {over})")
    page.store("I", "at", dtype=rng.choice(("i32", "i64")))
    if chance(rng, 2):
        page.store("C", f"{op}({term}; {over})")
    return page.made("extremes")


def _adding(page: TextPage) -> str:
    """Values, or sums, that are added where they share places."""
    rng = page.rng
    page.add_axes("m", rng.choice((1, 2, 2, 3)))
    page.add_axes("k", rng.choice((0, 0, 1)), summed=True)
    x = page.read("x", list(page.axes))
    page.add("C", f"sum({x}; {' '.join(page.summed)})" if page.summed else rng.choice((x, f"{x}*2 - 1")))
    return page.made("adding")


def _gradient(page: TextPage) -> str:
    """The gradient of an operand that was read through a view."""
    page.add_axes("m", page.rng.choice((1, 2, 2, 3)))
    page.readone("x", list(page.axes), "", page.dtype())
    page.store("C", page.rng.choice(("x", "x", "x*2")))
    made = parse(page.made("moved"))
    x, y = made.reads[-1].view.tensor, made.c.tensor
    into = Tensor("dX", x.dims, x.shape, Layout.dense(x.dtype, x.shape))
    given = Tensor("G", y.dims, y.shape, Layout.dense(y.dtype, y.shape))
    return str(transposed(made, x.name, into, given, adds=chance(page.rng, 4)))


def _finished(page: TextPage, name: str) -> str:
    """The operations on a reduced value ``s``, and its store."""
    rng, names = page.rng, ["s"]
    for extra in ("v", "r")[: rng.choice((0, 0, 1, 1, 2))]:
        names.append(page.read(extra, some(rng, page.kept) or page.kept))
    value = "s" if len(names) == 1 and chance(rng, 2) else value_of(page, names)
    page.store("C", value)
    if chance(rng, 5):
        page.store("D", value_of(page, names))
    return page.made(name)


KINDS = (_product, _reduction, _chain, _chain, _rows, _extremes)  # also where sizes are arguments
SIZES = (1, 2, 3, 3, 5, 5, 7, 8, 9, 13, 16, 17, 21, 32, 33)
MOST_POINTS = 1 << 15  # of all axes together


def _is_float(op: Op) -> bool:
    """Whether an operation makes a number, not a condition."""
    return op(*[Const(1.0, f32)] * op.arity).dtype.kind == "float"


# The operations that may be drawn: of integers only exact ones make integers.
EXACT = table(lambda op: op if op.exact and op.arity < 3 and _is_float(op) else None)
DRAWN = table(lambda op: op if (op.activation and op.drawn) or op.name in EXACT else None)
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

    def coordinates(self, axes: list[str], stored: bool) -> tuple[list[str], list[int]]:
        """Coordinates that see the axes, and the sizes of their dimensions."""
        return coordinates(self, axes, stored)

    def tensor(self, name: str, shape: list[int], stored: bool = False, dtype: str = "") -> None:
        sizes = ", ".join(map(str, shape))
        self.tensors.append(
            f"tensor {name} {dtype or self.dtype()} [{sizes}] "
            f"{strides_of(self.rng, shape, stored)}".rstrip()
        )

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
        coords, shape = self.coordinates(axes, stored=False)
        self.tensor(name.upper(), shape, dtype=dtype)
        where = condition(self, axes) if chance(self.rng, 12) else ""
        self.steps.append(
            f"read {name} = {name.upper()}[{', '.join(coords)}]{where}" + (f" else {fill}" if fill else "")
        )
        return name

    def store(self, name: str, value: str, axes: list[str] | None = None, dtype: str = "") -> None:
        """A line that stores a value at every point of some axes, or of those that are left."""
        axes = self.kept if axes is None else axes
        coords, shape = self.coordinates(axes, stored=True)
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
    return {
        "plain": (axis, size),
        "flip": (f"{size - 1} - {axis}", size),
        "shift": (f"{axis} + {by}", size + by + rng.randrange(2)),
        "steps": (f"{axis}*{by + 1}", (size - 1) * (by + 1) + 1 + rng.randrange(2)),
        "pad": (f"{axis} - {by}", max(1, size - by)),
        "short": (axis, max(1, size - by)),
    }[way]


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
    inner = f"{op.name}({', '.join((a, b)[: op.arity])})"
    return rng.choice(
        (
            f"{a} + {b}",
            f"{a}*2 - {b}",
            f"where({a} > {b}, {a}, {b} - 1)",
            inner,
            inner,
            f"{inner} + {b}",
            f"where({axis} < {page.axes[axis] // 2}, {a}, {b} + 1)",
            f"{a} + {axis}",
            f"({a} - 1)**2",
            "*".join(sorted({a, b, names[0]})),
        )
    )
