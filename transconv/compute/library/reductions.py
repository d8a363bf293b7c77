"""Reductions over any dims of a tensor: one row each, a text and the text of its gradient.

    formula = reduced("sum", Strided.dense((4, 5, 6), f32), dims=(0, 2))
    formula.text                the computation; formula.gradients: those of its gradients

Results have torch's shapes; values are computed in f32, or in f64 if a tensor is f64. Rows:
``sum mean prod amax amin max_of_all min_of_all logsumexp var std norm any all``. ``extreme`` gives argmax
and argmin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from transconv.compute.extrema import EXTREMA
from transconv.compute.library.any_size import SizeExpression, counted
from transconv.compute.library.formula import Gradient, LibraryFormula, lines
from transconv.compute.library.page import WORD, NamedSpace, Strided
from transconv.ir import DType, boolean, i32

EXTREMUM = """let hit = where({size} == y, 1.0, 0.0)
              let ties = sum(hit; {k})
              store {dX} = hit*g*{slope} / ties"""
OF_NAN = EXTREMUM.replace("{size} == y", "x == y or x != x").replace("*{slope}", "")
"""Of torch.max and torch.min without dims: a NaN is the extreme."""


@dataclass(frozen=True, slots=True)
class ReductionRow:
    """``steps`` from x to the store; ``gradient``: from x, y and g to the store of dX, empty for none."""

    steps: str
    gradient: str = ""


ROWS = {
    "sum": ReductionRow("store {Y} = sum(x; {k})", "store {dX} = g"),
    "mean": ReductionRow("store {Y} = sum(x; {k}) / {count}", "store {dX} = g / {count}"),
    # A product with a zero is y, 0 or NaN, also without an element that is finite and not that zero.
    "prod": ReductionRow(
        "store {Y} = prod(x; {k})",
        """let zeros = sum(where(x == 0.0, 1.0, 0.0); {k})
        let wild = sum(where(abs(x) < inf, 0.0, 1.0); {k})
        let rest = prod(where(x == 0.0, 1.0, x); {k})
        let alone = where(abs(x) < inf, 0.0, wild) == 1.0
        let others = where(zeros == 0.0, rest / x, where(alone, 0.0, {several}))
        store {dX} = g * where(x == 0.0, where(zeros == 1.0, rest, {several}), others)""",
    ),
    "amax": ReductionRow(
        "store {Y} = max(x; {k})", EXTREMUM.replace("{size}", "x").replace("*{slope}", "")
    ),
    "amin": ReductionRow(
        "store {Y} = min(x; {k})", EXTREMUM.replace("{size}", "x").replace("*{slope}", "")
    ),
    "max_of_all": ReductionRow("store {Y} = max(x; {k})", OF_NAN),
    "min_of_all": ReductionRow("store {Y} = min(x; {k})", OF_NAN),
    "logsumexp": ReductionRow(
        """let most = max(x; {k})
        let top = where(abs(most) == inf, 0.0, most)
        store {Y} = log(sum(exp(x - top); {k})) + top""",
        """let most = max(x; {k})
        let top = where(abs(most) == inf, 0.0, most)
        let e = exp(x - top)
        let total = sum(e; {k})
        store {dX} = g * e / total""",
    ),
    "var": ReductionRow(
        """let mean = sum(x; {k}) / {count}
        let d = x - mean
        store {Y} = sum(d*d; {k}) {freedom}""",
        """let mean = sum(x; {k}) / {count}
        let d = x - mean
        store {dX} = g * 2.0 * {slope}""",
    ),
    "std": ReductionRow(
        """let mean = sum(x; {k}) / {count}
        let d = x - mean
        store {Y} = sqrt(sum(d*d; {k}) {freedom})""",
        """let mean = sum(x; {k}) / {count}
        let d = x - mean
        store {dX} = where(y == 0.0, 0.0, g / y) * {slope}""",
    ),
    "any": ReductionRow("store {Y} = max({truth}; {k}) != 0.0"),
    "all": ReductionRow("store {Y} = min({truth}; {k}) != 0.0"),
}
"""The reductions by name."""
SIGN = "where(x > 0.0, 1.0, where(x < 0.0, -1.0, 0.0))"
OF_SIZES = EXTREMUM.replace("{size}", "abs(x)").replace("{slope}", SIGN)
NORMS = {
    0.0: ReductionRow("store {Y} = sum(where(x == 0.0, 0.0, 1.0); {k})", "store {dX} = 0.0 * g"),
    1.0: ReductionRow("store {Y} = sum(abs(x); {k})", f"store {{dX}} = g * {SIGN}"),
    2.0: ReductionRow("store {Y} = sqrt(sum(x*x; {k}))", "store {dX} = where(y == 0.0, 0.0, g * x / y)"),
    inf: ReductionRow("store {Y} = max(abs(x); {k})", OF_SIZES),
    -inf: ReductionRow("store {Y} = min(abs(x); {k})", OF_SIZES),
}
"""The norms that need no power, by their order."""


def reduced(name: str, x: Strided, dims: Sequence[int], keep: bool = False, dtype: DType | None = None,
            y: Strided | None = None, correction: float = 1.0, order: float = 2.0,
            undirected: bool = False) -> LibraryFormula:
    """The reduction ``name`` over ``dims`` (each 0 <= d < rank, at least one element), kept as size 1 or
    dropped. ``dtype``: that of the result, by default that of x, boolean for any and all; ``y``: shape,
    strides and type of the result; ``correction``: of var and std; ``undirected``: torch's
    function is given no dims; ``order``: of a norm, a key of NORMS."""
    row = NORMS[order] if name == "norm" else ROWS[name]
    dtype = dtype or (boolean if name in ("any", "all") else x.dtype)
    page = _page(x, dims, keep, dtype, y)
    truth = "where(x, 1.0, 0.0)" if x.dtype is boolean else "where(x == 0.0, 0.0, 1.0)"
    words = {"count": counted(page, "k"), "truth": truth, "freedom": _freedom(page, correction),
             "slope": _slope(page, correction, undirected)}
    narrow = dtype.kind == x.dtype.kind == "float" and dtype.bits < x.dtype.bits
    read = ["read a = {X}", f"let x = {dtype}(a)"] if narrow else ["read x = {X}"]
    text = page.sized(name, *read, *lines(row.steps), **words)
    if not row.gradient:
        return LibraryFormula(page, text, ("X",))
    # Several zeros: torch.prod without dims looks at nothing else.
    several = "where(zeros > 1.0, 0.0, y)" if undirected else "y"
    behind = lines(row.gradient.replace("{several}", several))
    used = {word for line in behind for word in WORD.findall(line)}
    back = page.sized(f"{name}_gradient", *(read if "x" in used else []),
                     "read y = {Y}" if "y" in used else "", "read g = {G}", *behind, **words)
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def _freedom(page: NamedSpace, correction: float) -> SizeExpression:
    """What the sum of squared deviations is scaled with; infinite where no degree of freedom is left."""
    left = counted(page, "k", less=correction)
    return SizeExpression(
        f"/ {left}" if int(page.count("k")) > correction else "* inf", f"/ max({left.names}, 0.0)"
    )


def _slope(page: NamedSpace, correction: float, undirected: bool) -> SizeExpression:
    """The deviation d over the degrees of freedom, which torch's gradients do not bound by 0; but without
    dims they are infinite, or NaN for no deviation, where none is left."""
    left = counted(page, "k", less=correction)
    free = int(page.count("k")) - correction
    if not undirected:
        return SizeExpression(f"d / {left}" if free > 0 else f"d / (0.0 - {-free})", f"d / {left.names}")
    none = "where(x == mean, 0.0, 1.0) * inf"
    return SizeExpression(f"d / {left}" if free > 0 else none,
                f"where({left.names} > 0.0, d / {left.names}, {none})")


def extreme(name: str, x: Strided, dims: Sequence[int], at: Strided, keep: bool = False,
            y: Strided | None = None) -> LibraryFormula:
    """``name``: argmax or argmin. ``at``: the index of the first extreme over the dims, in row-major
    order; a NaN counts as the extreme. ``y``: the extreme as a second result, which has a gradient.
    ValueError for more elements than an i32 can number."""
    page = _page(x, dims, keep, (y or x).dtype, y or Strided.dense(at.shape, x.dtype), at)
    place, op = page.place("k"), EXTREMA[name]
    first = (f"{name}(x; {{k}})" if place == page["k"] else
             f"min(where(x == m or x != x, i32({place}), {page.count('k')}); {{k}})")
    if page.count("k") > i32.limits[1]:
        raise ValueError(f"{page.count('k')} places; expected fewer than {i32.limits[1]}")
    text = page.text(name, "read x = {X}", f"let m = {op}(x; {{k}})" if y or place != page["k"] else "",
                     "store {Y} = m" if y else "", f"store {{I}} = {first}")
    if y is None:
        return LibraryFormula(page, text, ("X",), ("I",))
    back = page.text(f"{name}_gradient", "read at = {I}", "read g = {G}",
                     f"store {{dX}} = where(at == {place}, g, 0.0)")
    return LibraryFormula(page, text, ("X",), ("Y", "I"), (Gradient(back, {"dX": "X"}),))


def _page(x: Strided, dims: Sequence[int], keep: bool, dtype: DType, y: Strided | None,
          at: Strided | None = None) -> NamedSpace:
    rank = len(x.shape)
    left = [d for d in range(rank) if d not in dims]
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims]
    y = y or Strided.dense(shape, dtype)
    of_y: Sequence[int] = range(rank) if keep else left
    return NamedSpace(["k" if d in dims else "n" for d in range(rank)], x.shape, {
        "X": (x, range(rank)), "Y": (y, of_y), "G": (y, of_y), "dX": (x.like(), range(rank)),
        **({"I": (at, of_y)} if at else {})})
