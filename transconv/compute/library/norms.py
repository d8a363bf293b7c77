"""layer_norm, rms_norm, group_norm, and instance_norm as one group for each feature.

The variance is the mean of squared deviations from the mean: that takes a second sweep, but subtracts no
large numbers. ``W`` and ``B`` scale and shift; either may be missing. Gradients need the mean ``M`` of
each row and ``R``, one over its deviation, which are stored in the type of arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv.compute.library.any_size import counted
from transconv.compute.library.formula import Gradient, LibraryFormula, held, lines
from transconv.compute.library.page import NamedSpace, Placed, Strided

MOMENTS = """read x = {X}
    let mean = sum(x; {k}) / {count}
    let d = x - mean
    let v = sum(d*d; {k}) / {count}
    let r = rsqrt(v + {eps})"""
SAVED = """read x = {X}
    read m = {M}
    read r = {R}
    read g = {G}
    let h = (x - m) * r"""


def layer_norm(x: Strided, count: int, w: Strided | None = None, b: Strided | None = None,
               eps: float = 1e-5, saves: bool = False, y: Strided | None = None) -> LibraryFormula:
    """Over the last ``count`` dims, whose sizes are those of w and b. ``saves``: M and R are stored as
    well."""
    rank = len(x.shape)
    return _norm("layer_norm", ["n"] * (rank - count) + ["k"] * count, x, "k", range(rank - count),
                 range(rank - count, rank), w, b, eps, saves, y)


def group_norm(x: Strided, groups: int, w: Strided | None = None, b: Strided | None = None,
               eps: float = 1e-5, saves: bool = False, y: Strided | None = None) -> LibraryFormula:
    """Of x [n, groups * c, ...] over c and the dims after it; w and b have groups * c elements."""
    size = x.shape[1] // groups
    x, y = x.split(1, groups, size), (y or x.like()).split(1, groups, size)
    w, b = (t and t.split(0, groups, size) for t in (w, b))
    names = ["n", "f", "e", *"k" * (len(x.shape) - 3)] if w or b else ["n", "n", *"k" * (len(x.shape) - 2)]
    return _norm("group_norm", names, x, "e k" if w or b else "k", (0, 1), (1, 2), w, b, eps, saves, y)


def _norm(name: str, names: Sequence[str], x: Strided, row: str, rows: Sequence[int],
          features: Sequence[int], w: Strided | None, b: Strided | None, eps: float, saves: bool,
          y: Strided | None) -> LibraryFormula:
    y = y or x.like()
    page = _page(names, x, rows, features, w, b, y)
    axes = _axes(page, row)
    over = _axes(page, " ".join(c for c in page.classes if all(names[d] != c for d in features)))
    words = {"k": axes, "over": over, "count": counted(page, *row.split()), "eps": float(eps)}
    text = page.sized(name, *lines(MOMENTS), *_affine("d * r", w, b),
                     *(("store {M} = mean", "store {R} = r") if saves else ()), **words)
    by_w = ("read w = {W}", "let u = g*w") if w else ("let u = g",)
    back = [*lines(SAVED), *by_w, *lines("""
        let a = sum(u; {k}) / {count}
        let c = sum(u*h; {k}) / {count}
        store {dX} = (u - a - h*c) * r""")]
    gradients, together = _gradients(page, name, back, lines(SAVED), w, b, words)
    if w and "e" in names and page.classes.get("k"):
        assert together is not None
        together = replace(together, text=_by_features(page, b is not None, words))
    return LibraryFormula(page, text, _given(w, b), gradients=gradients, together=together)


def _by_features(page: NamedSpace, shifted: bool, words: dict[str, object]) -> str:
    """The gradients of a group norm by two sums for each feature of an image, from which the sums of its
    group and those over images follow."""
    group, images = (f"; {page[c]})" if page.classes[c] else "" for c in "en")
    a, c = (f"sum(w*{v}{group}" if group else f"w*{v}" for v in ("s", "t"))
    dw, db = (f"sum({v}{images}" if images else v for v in ("t", "s"))
    return page.sized("group_norm_gradients", *lines(SAVED), "read w = {W}", "let s = sum(g; {inner})",
                     "let t = sum(g*h; {inner})", f"let a = {a} / {{count}}", f"let c = {c} / {{count}}",
                     "store {dX} = (g*w - a - h*c) * r", f"let dw = {dw}", f"let db = {db}" * shifted,
                     "store {dW} = dw", "store {dB} = db" * shifted, **words | {"inner": page["k"]})


def rms_norm(x: Strided, count: int, w: Strided | None = None, eps: float = 1e-6, saves: bool = False,
             y: Strided | None = None) -> LibraryFormula:
    """x divided by its root mean square along the last ``count`` dims, scaled by w."""
    rank = len(x.shape)
    page = _page(["n"] * (rank - count) + ["k"] * count, x, range(rank - count),
                 range(rank - count, rank), w, None, y or x.like())
    words = {"over": page["n"], "count": counted(page, "k"), "eps": float(eps)}
    text = page.sized("rms_norm", *lines("""read x = {X}
        let r = rsqrt(sum(x*x; {k}) / {count} + {eps})"""), *_affine("x * r", w, None),
                     "store {R} = r" if saves else "", **words)
    saved = ["read x = {X}", "read r = {R}", "read g = {G}", "let h = x*r"]
    back = [*saved, "read w = {W}" if w else "", "let u = g*w" if w else "let u = g", *lines("""
        let c = sum(u*h; {k}) / {count}
        store {dX} = (u - h*c) * r""")]
    gradients, together = _gradients(page, "rms_norm", back, saved, w, None, words)
    return LibraryFormula(page, text, _given(w, None), gradients=gradients, together=together)


def _page(names: Sequence[str], x: Strided, rows: Sequence[int], features: Sequence[int],
          w: Strided | None, b: Strided | None, y: Strided) -> NamedSpace:
    whole = range(len(x.shape))
    kept = Strided.dense([x.shape[d] for d in rows], held(x.dtype))
    tensors: dict[str, Placed] = {"X": (x, whole), "Y": (y, whole), "G": (y, whole),
                                  "dX": (x.like(), whole), "M": (kept, rows), "R": (kept, rows)}
    tensors |= {name: (t, features) for name, t in (("W", w), ("B", b)) if t}
    tensors |= {f"d{name}": (t.like(), features) for name, t in (("W", w), ("B", b)) if t}
    return NamedSpace(names, x.shape, tensors)


def _axes(page: NamedSpace, names: str) -> str:
    """The axes of several names; the first name if none has axes."""
    found = " ".join(page[name] for name in names.split() if page.classes.get(name))
    return found or names.partition(" ")[0]


def _given(w: Strided | None, b: Strided | None) -> tuple[str, ...]:
    return ("X", *["W"] * bool(w), *["B"] * bool(b))


def _affine(value: str, w: Strided | None, b: Strided | None) -> list[str]:
    """The steps that scale and shift a value and store it."""
    return ["read w = {W}" if w else "", "read b = {B}" if b else "",
            f"store {{Y}} = {value}{' * w' if w else ''}{' + b' if b else ''}"]


def _gradients(page: NamedSpace, name: str, back: Sequence[str], saved: Sequence[str], w: Strided | None,
               b: Strided | None,
               words: dict[str, object]) -> tuple[tuple[Gradient, ...], Gradient | None]:
    """The gradient of x, that of scale and shift, which are summed over the rows, and all in one text.
    ``back``: the steps of the first; ``saved``: those that both begin with."""
    of_x = Gradient(page.sized(f"{name}_gradient", *back, **words), {"dX": "X"})
    if not (w or b):
        return (of_x,), None
    sums = ["let dw = sum(g*h; {over})" if w else "", "let db = sum(g; {over})" if b else "",
            "store {dW} = dw" if w else "", "store {dB} = db" if b else ""]
    of = {f"d{n}": n for n, t in (("W", w), ("B", b)) if t}
    alone = page.sized(f"{name}_affine_gradient", *(saved if w else ["read g = {G}"]), *sums, **words)
    whole = page.sized(f"{name}_gradients", *back, *sums, **words)
    return (of_x, Gradient(alone, of)), Gradient(whole, {**of_x.of, **of})
