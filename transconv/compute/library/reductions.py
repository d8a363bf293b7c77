"""Reductions over any dims of a tensor, softmax and losses of rows, and products of matrices.

    formula = reduced("sum", Strided.dense((4, 5, 6), f32), dims=(0, 2))
    formula.text                the computation; formula.gradients: those of its gradients

A reduction is one row of a table, a text and the text of its gradient. Results have torch's shapes; values
are computed in f32, or in f64 if a tensor is f64. Rows:
``sum mean prod amax amin max_of_all min_of_all logsumexp var std norm any all``. ``extreme`` gives argmax
and argmin. Products are batched and broadcast, with bias and activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from transconv.compute.elementwise import OPS
from transconv.compute.library.page import (
    WORD,
    Gradient,
    LibraryFormula,
    NamedSpace,
    Placed,
    SizeExpression,
    Strided,
    counted,
    held,
    lines,
)
from transconv.compute.steps import EXTREMA, render
from transconv.ir import DType, Var, boolean, f32, f64, i32

EXTREMUM = """let hit = where({size} == y, 1.0, 0.0)
              let ties = sum(hit; {k})
              store {dX} = hit*g*{slope} / ties"""
OF_VALUES = EXTREMUM.replace("{size}", "x").replace("*{slope}", "")
OF_NAN = EXTREMUM.replace("{size} == y", "x == y or x != x").replace("*{slope}", "")
"""Of torch.max and torch.min without dims: a NaN is the extreme."""


@dataclass(frozen=True, slots=True)
class ReductionRow:
    """A reduction. ``steps``: from x to the store; ``gradient``: from x, y and g to the store of dX, empty
    for none."""

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
    "amax": ReductionRow("store {Y} = max(x; {k})", OF_VALUES),
    "amin": ReductionRow("store {Y} = min(x; {k})", OF_VALUES),
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


def reduced(
    name: str,
    x: Strided,
    dims: Sequence[int],
    keep: bool = False,
    dtype: DType | None = None,
    y: Strided | None = None,
    correction: float = 1.0,
    order: float = 2.0,
    undirected: bool = False,
) -> LibraryFormula:
    """The reduction ``name`` over ``dims`` (each 0 <= d < rank, at least one element), kept as size 1 or
    dropped. ``dtype``: that of the result, by default that of x, boolean for any and all; ``y``: shape,
    strides and type of the result; ``correction``: of var and std; ``undirected``: torch's
    function is given no dims; ``order``: of a norm, a key of NORMS."""
    row = NORMS[order] if name == "norm" else ROWS[name]
    dtype = dtype or (boolean if name in ("any", "all") else x.dtype)
    page = _page(x, dims, keep, dtype, y)
    truth = "where(x, 1.0, 0.0)" if x.dtype is boolean else "where(x == 0.0, 0.0, 1.0)"
    words = {
        "count": counted(page, "k"),
        "truth": truth,
        "freedom": _freedom(page, correction),
        "slope": _slope(page, correction, undirected),
    }
    narrow = dtype.kind == x.dtype.kind == "float" and dtype.bits < x.dtype.bits
    read = ["read a = {X}", f"let x = {dtype}(a)"] if narrow else ["read x = {X}"]
    text = page.sized(name, *read, *lines(row.steps), **words)
    if not row.gradient:
        return LibraryFormula(page, text, ("X",))
    # Several zeros: torch.prod without dims looks at nothing else.
    several = "where(zeros > 1.0, 0.0, y)" if undirected else "y"
    behind = lines(row.gradient.replace("{several}", several))
    used = {word for line in behind for word in WORD.findall(line)}
    back = page.sized(
        f"{name}_gradient",
        *(read if "x" in used else []),
        "read y = {Y}" if "y" in used else "",
        "read g = {G}",
        *behind,
        **words,
    )
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
    return SizeExpression(
        f"d / {left}" if free > 0 else none, f"where({left.names} > 0.0, d / {left.names}, {none})"
    )


def extreme(
    name: str, x: Strided, dims: Sequence[int], at: Strided, keep: bool = False, y: Strided | None = None
) -> LibraryFormula:
    """``name``: argmax or argmin. ``at``: the index of the first extreme over the dims, in row-major
    order; a NaN counts as the extreme. ``y``: the extreme as a second result, which has a gradient.
    ValueError for more elements than an i32 can number."""
    page = _page(x, dims, keep, (y or x).dtype, y or Strided.dense(at.shape, x.dtype), at)
    place, op = page.place("k"), EXTREMA[name]
    first = (
        f"{name}(x; {{k}})"
        if place == page["k"]
        else f"min(where(x == m or x != x, i32({place}), {page.count('k')}); {{k}})"
    )
    if page.count("k") > i32.limits[1]:
        raise ValueError(f"{page.count('k')} places; expected fewer than {i32.limits[1]}")
    text = page.text(
        name,
        "read x = {X}",
        f"let m = {op}(x; {{k}})" if y or place != page["k"] else "",
        "store {Y} = m" if y else "",
        f"store {{I}} = {first}",
    )
    if y is None:
        return LibraryFormula(page, text, ("X",), ("I",))
    back = page.text(
        f"{name}_gradient", "read at = {I}", "read g = {G}", f"store {{dX}} = where(at == {place}, g, 0.0)"
    )
    return LibraryFormula(page, text, ("X",), ("Y", "I"), (Gradient(back, {"dX": "X"}),))


def _page(
    x: Strided, dims: Sequence[int], keep: bool, dtype: DType, y: Strided | None, at: Strided | None = None
) -> NamedSpace:
    rank = len(x.shape)
    left = [d for d in range(rank) if d not in dims]
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims]
    y = y or Strided.dense(shape, dtype)
    of_y: Sequence[int] = range(rank) if keep else left
    return NamedSpace(
        ["k" if d in dims else "n" for d in range(rank)],
        x.shape,
        {
            "X": (x, range(rank)),
            "Y": (y, of_y),
            "G": (y, of_y),
            "dX": (x.like(), range(rank)),
            **({"I": (at, of_y)} if at else {}),
        },
    )


EXPONENTIALS = """read x = {X}
    let top = max(x; {k})
    let total = sum(exp(x - top); {k})"""


def softmax(x: Strided, dim: int, dtype: DType | None = None, y: Strided | None = None) -> LibraryFormula:
    """exp(x) divided by its sum along ``dim``; ``dtype``: that of the result, by default that of x."""
    page = _rows_page(x, [dim], y or x.like(dtype))
    text = page.sized(
        "softmax",
        *lines("""read x = {X}
        let top = max(x; {k})
        let e = exp(x - top)
        let total = sum(e; {k})
        store {Y} = e / total"""),
    )
    back = page.sized(
        "softmax_gradient",
        *lines("""read y = {Y}
        read g = {G}
        let s = sum(y*g; {k})
        store {dX} = y * (g - s)"""),
    )
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def log_softmax(
    x: Strided, dim: int, dtype: DType | None = None, y: Strided | None = None
) -> LibraryFormula:
    """The logarithm of ``softmax``, which never underflows."""
    page = _rows_page(x, [dim], y or x.like(dtype))
    text = page.sized("log_softmax", *lines(EXPONENTIALS), "store {Y} = x - top - log(total)")
    back = page.sized(
        "log_softmax_gradient",
        *lines("""read y = {Y}
        read g = {G}
        let s = sum(g; {k})
        store {dX} = g - exp(y) * s"""),
    )
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def normalize(
    x: Strided, dims: Sequence[int], eps: float = 1e-12, y: Strided | None = None
) -> LibraryFormula:
    """x divided by its Euclidean norm along ``dims``, or by ``eps`` if that is larger."""
    page = _rows_page(x, dims, y or x.like())
    size = ["read x = {X}", "let size = sqrt(sum(x*x; {k}))", "let d = max(size, {eps})"]
    text = page.sized("normalize", *size, "store {Y} = x / d", eps=float(eps))
    back = page.sized(
        "normalize_gradient",
        *size,
        *lines("""read g = {G}
        let unit = x / d
        let s = sum(unit*g; {k})
        let along = where(size >= {eps}, s, 0.0)
        store {dX} = (g - unit * along) / d"""),
        eps=float(eps),
    )
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def _rows_page(x: Strided, dims: Sequence[int], y: Strided) -> NamedSpace:
    whole = range(len(x.shape))
    return NamedSpace(
        ["k" if d in dims else "n" for d in whole],
        x.shape,
        {"X": (x, whole), "Y": (y, whole), "G": (y, whole), "dX": (x.like(), whole)},
    )


LARGEST_CLASS = 1 << 24  # larger integers are not all exact in f32


def cross_entropy(
    x: Strided,
    t: Strided,
    dim: int,
    ignore: int = -100,
    dtype: DType | None = None,
    y: Strided | None = None,
) -> LibraryFormula:
    """``-log_softmax(x)[t]`` along ``dim``, for integers t of the shape of x without ``dim``; 0 where t
    is ``ignore``, infinite where t is no class. The gradient of a row that is ignored is 0, but NaN, as in
    torch, if the row has one. What is kept, the greatest element and the logarithm, would lose digits as
    a sum. ``dtype``: that of the result, by default f32, or f64 for x of f64. ValueError for
    ``LARGEST_CLASS`` or more classes."""
    if x.shape[dim] >= LARGEST_CLASS:
        raise ValueError(f"{x.shape[dim]} classes; expected fewer than {LARGEST_CLASS}")
    whole = range(len(x.shape))
    left = [d for d in whole if d != dim]
    y = y or Strided.dense(t.shape, dtype or held(x.dtype))
    kept = Strided.dense(t.shape, f64 if x.dtype is f64 else f32)
    page = NamedSpace(
        ["k" if d == dim else "n" for d in whole],
        x.shape,
        {
            "X": (x, whole),
            "T": (t, left),
            "Y": (y, left),
            "Z": (kept, left),
            "S": (kept, left),
            "G": (y, left),
            "dX": (x.like(), whole),
            "H": (x, [d if d != dim else "t" for d in whole]),
        },
        {"H": "X"},
        keeps="k",
    )
    words = {"ignore": ignore, "at": "k" if page.classes["k"] else 0}
    text = page.sized(
        "cross_entropy",
        *lines(EXPONENTIALS),
        *lines("""read t = {T}
        read hit = {H} where t != {ignore} else -inf
        store {Y} = where(t == {ignore}, 0.0, log(total) + (top - hit))
        store {Z} = top
        store {S} = log(total)"""),
        **words,
    )
    back = page.sized(
        "cross_entropy_gradient",
        *lines("""read x = {X}
        read t = {T}
        read z = {Z}
        read s = {S}
        read g = {G}
        let d = exp(x - z - s) - where({at} == t, 1.0, 0.0)
        store {dX} = where(t == {ignore}, 0.0, g) * d"""),
        **words,
    )
    return LibraryFormula(page, text, ("X", "T"), gradients=(Gradient(back, {"dX": "X"}),))


def linear(
    x: Strided,
    w: Strided,
    b: Strided | None = None,
    activation: str = "",
    math: str = "ieee",
    saves: bool = False,
    y: Strided | None = None,
) -> LibraryFormula:
    """activation(x w' + b) of x [..., k], w [n, k] and b [n]. ``saves``: the sum before the activation is
    stored as well, as ``Z``. ``math``: the precision of products of f32. ValueError if w has not two
    dims."""
    if len(w.shape) != 2:
        raise ValueError(f"a weight of {len(w.shape)} dims; expected two")
    rank = len(x.shape)
    lead = range(rank - 1)
    y = y or Strided.dense([*x.shape[:-1], w.shape[0]], x.dtype)
    names, sizes = ["m"] * (rank - 1) + ["n", "k"], (*x.shape[:-1], w.shape[0], x.shape[-1])
    return _product(
        "linear",
        names,
        sizes,
        (x, [*lead, rank]),
        (w, [rank - 1, rank]),
        b,
        (y, [*lead, rank - 1]),
        activation,
        math,
        saves,
    )


def matmul(
    x: Strided,
    w: Strided,
    activation: str = "",
    math: str = "ieee",
    saves: bool = False,
    y: Strided | None = None,
) -> LibraryFormula:
    """activation(x w) of x [..., m, k] and w [..., k, n], whose leading dims broadcast; either may be a
    vector of k elements."""
    first, second = x.shape[:-2], w.shape[:-2]
    rank = max(len(first), len(second))
    padded = [(1,) * (rank - len(s)) + s for s in (first, second)]
    batch = tuple(max(a, b) if 1 in (a, b) else a for a, b in zip(*padded, strict=True))
    kinds = ["b" if a == b else "q" if a == 1 else "p" for a, b in zip(*padded, strict=True)]
    at = {"m": rank, "n": rank + 1, "k": rank + 2}
    row, column = len(x.shape) > 1, len(w.shape) > 1
    sizes = (*batch, x.shape[-2] if row else 1, w.shape[-1] if column else 1, x.shape[-1])
    of_x = [*range(rank - len(first), rank), *[at["m"]] * row, at["k"]]
    of_w = [*range(rank - len(second), rank), at["k"], *[at["n"]] * column]
    kept = [*range(rank), *[at["m"]] * row, *[at["n"]] * column]
    y = y or Strided.dense([sizes[d] for d in kept], x.dtype)
    return _product(
        "matmul",
        [*kinds, "m", "n", "k"],
        sizes,
        (x, of_x),
        (w, of_w),
        None,
        (y, kept),
        activation,
        math,
        saves,
    )


def _product(
    name: str,
    names: Sequence[str],
    sizes: Sequence[int],
    x: Placed,
    w: Placed,
    b: Strided | None,
    y: Placed,
    activation: str,
    math: str,
    saves: bool,
) -> LibraryFormula:
    column = list(names).index("n")
    tensors: dict[str, Placed] = {
        "X": x,
        "W": w,
        "Y": y,
        "G": y,
        "Z": y,
        "H": y,
        "dX": (x[0].like(), x[1]),
        "dW": (w[0].like(), w[1]),
    }
    if b:
        tensors |= {"B": (b, [column]), "dB": (b.like(), [column])}
    page = NamedSpace(names, sizes, tensors, keeps="m n k")
    words = {"ahead": _axes(page, "q", "n"), "below": _axes(page, "p", "m"), "rows": _axes(page, "m", "m")}
    whole = f"{name} math={math}"
    value = "s + b" if b else "s"
    text = page.text(
        whole,
        "read x = {X}",
        "read w = {W}",
        "let s = sum(x*w; {k})",
        "read b = {B}" if b else "",
        f"store {{Z}} = {value}" if saves and activation else "",
        f"store {{Y}} = {f'{activation}({value})' if activation else value}",
    )
    g = "H" if activation else "G"
    gradients = []
    if activation:
        derivative = OPS[activation].derivative
        assert derivative is not None, activation
        (slope,) = derivative(Var("z", held(x[0].dtype)))
        assert slope is not None, activation
        gradients.append(
            Gradient(
                page.text(
                    f"{name}_slope", "read z = {Z}", "read g = {G}", f"store {{H}} = g * ({render(slope)})"
                ),
                {},
            )
        )
    gradients += [
        Gradient(
            page.text(
                f"{name}_gradient_x math={math}",
                f"read g = {{{g}}}",
                "read w = {W}",
                "store {dX} = sum(g*w; {ahead})",
                **words,
            ),
            {"dX": "X"},
        ),
        Gradient(
            page.text(
                f"{name}_gradient_w math={math}",
                f"read g = {{{g}}}",
                "read x = {X}",
                "store {dW} = sum(g*x; {below})",
                **words,
            ),
            {"dW": "W"},
        ),
    ]
    if b:
        gradients.append(
            Gradient(
                page.text(
                    f"{name}_gradient_b", f"read g = {{{g}}}", "store {dB} = sum(g; {rows})", **words
                ),
                {"dB": "B"},
            )
        )
    return LibraryFormula(page, text, ("X", "W", *["B"] * bool(b)), gradients=tuple(gradients))


def _axes(page: NamedSpace, *names: str) -> str:
    """The axes of several names; an axis of the last name if none has axes."""
    found = [axis for name in names for axis in page.classes.get(name, ())]
    return " ".join(found) or page[names[-1]]
