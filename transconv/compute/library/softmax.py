"""softmax, log_softmax, normalize and cross_entropy of rows."""

from __future__ import annotations

from collections.abc import Sequence

from transconv.compute.library.formula import Gradient, LibraryFormula, held, lines
from transconv.compute.library.page import NamedSpace, Strided
from transconv.ir import DType, f32, f64

EXPONENTIALS = """read x = {X}
    let top = max(x; {k})
    let total = sum(exp(x - top); {k})"""


def softmax(x: Strided, dim: int, dtype: DType | None = None, y: Strided | None = None) -> LibraryFormula:
    """exp(x) divided by its sum along ``dim``; ``dtype``: that of the result, by default that of x."""
    page = _page(x, [dim], y or x.like(dtype))
    text = page.sized("softmax", *lines("""read x = {X}
        let top = max(x; {k})
        let e = exp(x - top)
        let total = sum(e; {k})
        store {Y} = e / total"""))
    back = page.sized("softmax_gradient", *lines("""read y = {Y}
        read g = {G}
        let s = sum(y*g; {k})
        store {dX} = y * (g - s)"""))
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def log_softmax(
    x: Strided, dim: int, dtype: DType | None = None, y: Strided | None = None
) -> LibraryFormula:
    """The logarithm of ``softmax``, which never underflows."""
    page = _page(x, [dim], y or x.like(dtype))
    text = page.sized("log_softmax", *lines(EXPONENTIALS), "store {Y} = x - top - log(total)")
    back = page.sized("log_softmax_gradient", *lines("""read y = {Y}
        read g = {G}
        let s = sum(g; {k})
        store {dX} = g - exp(y) * s"""))
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def normalize(
    x: Strided, dims: Sequence[int], eps: float = 1e-12, y: Strided | None = None
) -> LibraryFormula:
    """x divided by its Euclidean norm along ``dims``, or by ``eps`` if that is larger."""
    page = _page(x, dims, y or x.like())
    size = ["read x = {X}", "let size = sqrt(sum(x*x; {k}))", "let d = max(size, {eps})"]
    text = page.sized("normalize", *size, "store {Y} = x / d", eps=float(eps))
    back = page.sized("normalize_gradient", *size, *lines("""read g = {G}
        let unit = x / d
        let s = sum(unit*g; {k})
        let along = where(size >= {eps}, s, 0.0)
        store {dX} = (g - unit * along) / d"""), eps=float(eps))
    return LibraryFormula(page, text, ("X",), gradients=(Gradient(back, {"dX": "X"}),))


def _page(x: Strided, dims: Sequence[int], y: Strided) -> NamedSpace:
    whole = range(len(x.shape))
    return NamedSpace(["k" if d in dims else "n" for d in whole], x.shape, {
        "X": (x, whole), "Y": (y, whole), "G": (y, whole), "dX": (x.like(), whole)})


LARGEST_CLASS = 1 << 24  # larger integers are not all exact in f32


def cross_entropy(x: Strided, t: Strided, dim: int, ignore: int = -100, dtype: DType | None = None,
                  y: Strided | None = None) -> LibraryFormula:
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
    page = NamedSpace(["k" if d == dim else "n" for d in whole], x.shape, {
        "X": (x, whole), "T": (t, left), "Y": (y, left), "Z": (kept, left), "S": (kept, left),
        "G": (y, left), "dX": (x.like(), whole),
        "H": (x, [d if d != dim else "t" for d in whole])}, {"H": "X"}, keeps="k")
    words = {"ignore": ignore, "at": "k" if page.classes["k"] else 0}
    text = page.sized("cross_entropy", *lines(EXPONENTIALS), *lines("""read t = {T}
        read hit = {H} where t != {ignore} else -inf
        store {Y} = where(t == {ignore}, 0.0, log(total) + (top - hit))
        store {Z} = top
        store {S} = log(total)"""), **words)
    back = page.sized("cross_entropy_gradient", *lines("""read x = {X}
        read t = {T}
        read z = {Z}
        read s = {S}
        read g = {G}
        let d = exp(x - z - s) - where({at} == t, 1.0, 0.0)
        store {dX} = where(t == {ignore}, 0.0, g) * d"""), **words)
    return LibraryFormula(page, text, ("X", "T"), gradients=(Gradient(back, {"dX": "X"}),))
