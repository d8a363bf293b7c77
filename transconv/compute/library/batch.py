"""batch_norm: each feature is normalised over all other dims; the statistics are stored for gradients."""

from __future__ import annotations

from transconv.compute.library.any_size import SizeExpression, counted
from transconv.compute.library.formula import Gradient, LibraryFormula, held, lines
from transconv.compute.library.norms import MOMENTS, SAVED
from transconv.compute.library.page import NamedSpace, Placed, Strided


def batch_norm(x: Strided, mean: Strided | None = None, variance: Strided | None = None,
               w: Strided | None = None, b: Strided | None = None, training: bool = True,
               momentum: float = 0.1, eps: float = 1e-5, saves: bool = False,
               y: Strided | None = None) -> LibraryFormula:
    """Of x [n, c, ...] over all dims but c; ``mean`` and ``variance`` are running statistics of c
    elements. In training x is normalised by its own statistics, and the running ones, updated by
    ``momentum`` (with the unbiased variance), are results ``newP`` and ``newQ``. Otherwise x is normalised
    by the running ones. ``saves``: mean and one over the deviation are stored for gradients."""
    page = _page(x, mean, variance, w, b, y or x.like(), saves)
    count, points = int(page.count("k")), counted(page, "k")
    unbiased = SizeExpression(f"{count / (count - 1)}" if count > 1 else "inf",
                    f"({points.names} / max({counted(page, 'k', less=1.0).names}, 0.0))")
    words: dict[str, object] = {"count": points, "eps": float(eps), "new": float(momentum),
                                "old": 1.0 - momentum, "unbiased": unbiased}
    given = ("X", *(name for name in "PQWB" if name in page.seen))
    if not training:
        return _inference(page, given, words)
    keeps = ["read p = {P}", "read q = {Q}", "store {newP} = p*{old} + mean*{new}",
             "store {newQ} = q*{old} + v*({new}*{unbiased})"] if mean else []
    text = page.sized("batch_norm", *lines(MOMENTS), *_affine(page, "d * r"), *keeps,
                     *(("store {M} = mean", "store {R} = r") if saves else ()), **words)
    sums = ["let a = sum(g; {k})", "let c = sum(g*h; {k})"]
    back = page.sized("batch_norm_gradient", *lines(SAVED), *sums, "read w = {W}" if w else "",
                     f"store {{dX}} = (g - a/{{count}} - h*c/{{count}}) * r{' * w' if w else ''}",
                     "store {dW} = c" if w else "", "store {dB} = a" if b else "", **words)
    results = ("Y", "newP", "newQ") if mean else ("Y",)
    of = {f"d{name}": name for name in "XWB" if name in page.seen}
    return LibraryFormula(page, text, given, results, (Gradient(back, of),))


def _inference(page: NamedSpace, given: tuple[str, ...], words: dict[str, object]) -> LibraryFormula:
    read = lines("""read x = {X}
        read p = {P}
        read q = {Q}
        let r = rsqrt(q + {eps})""")
    text = page.sized("batch_norm", *read, *_affine(page, "(x - p) * r"), **words)
    scaled = "W" in page.seen
    back = page.sized("batch_norm_gradient", "read q = {Q}", "read g = {G}",
                     "read w = {W}" if scaled else "",
                     f"store {{dX}} = g * rsqrt(q + {{eps}}){' * w' if scaled else ''}", **words)
    gradients = [Gradient(back, {"dX": "X"})]
    of = {f"d{name}": name for name in "WB" if name in page.seen}
    if of:
        steps = ["let dw = sum(g * (x - p) * r; {k})", "let db = sum(g; {k})",
                 "store {dW} = dw" if scaled else "", "store {dB} = db" if "B" in page.seen else ""]
        sums = page.sized("batch_norm_affine_gradient", *read, "read g = {G}", *steps, **words)
        gradients.append(Gradient(sums, of))
    return LibraryFormula(page, text, given, gradients=tuple(gradients))


def _affine(page: NamedSpace, value: str) -> list[str]:
    w, b = (name in page.seen for name in "WB")
    return ["read w = {W}" if w else "", "read b = {B}" if b else "",
            f"store {{Y}} = {value}{' * w' if w else ''}{' + b' if b else ''}"]


def _page(x: Strided, mean: Strided | None, variance: Strided | None, w: Strided | None, b: Strided | None,
          y: Strided, saves: bool) -> NamedSpace:
    whole = range(len(x.shape))
    tensors: dict[str, Placed] = {"X": (x, whole), "Y": (y, whole), "G": (y, whole),
                                  "dX": (x.like(), whole)}
    features = {"P": mean, "Q": variance, "W": w, "B": b}
    for name, t in features.items():
        if t is not None:
            tensors[name] = (t, (1,))
            tensors[f"new{name}" if name in "PQ" else f"d{name}"] = (t.like(), (1,))
    kept = Strided.dense([x.shape[1]], held(x.dtype))
    tensors |= {"M": (kept, (1,)), "R": (kept, (1,))}
    return NamedSpace(["f" if d == 1 else "k" for d in whole], x.shape, tensors)
