"""layer_norm, rms_norm, batch_norm, group_norm, and instance_norm as one group for each feature.

The variance is the mean of squared deviations from the mean: that takes a second sweep, but subtracts no
large numbers. ``W`` and ``B`` scale and shift; either may be missing. Gradients need the mean ``M`` of
each row and ``R``, one over its deviation, which are stored in the type of arithmetic.

A norm whose rows are in several places takes ``moments`` of the rows that are here, and makes of each
element what it is once those of all rows are known (``scaled``): x [n, c, ...] is normalised over the dims
after c; moments and factors are [n, c]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv.compute.library.page import (
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


def layer_norm(
    x: Strided,
    count: int,
    w: Strided | None = None,
    b: Strided | None = None,
    eps: float = 1e-5,
    saves: bool = False,
    y: Strided | None = None,
) -> LibraryFormula:
    """Over the last ``count`` dims, whose sizes are those of w and b. ``saves``: M and R are stored as
    well."""
    rank = len(x.shape)
    return _norm(
        "layer_norm",
        ["n"] * (rank - count) + ["k"] * count,
        x,
        "k",
        range(rank - count),
        range(rank - count, rank),
        w,
        b,
        eps,
        saves,
        y,
    )


def group_norm(
    x: Strided,
    groups: int,
    w: Strided | None = None,
    b: Strided | None = None,
    eps: float = 1e-5,
    saves: bool = False,
    y: Strided | None = None,
) -> LibraryFormula:
    """Of x [n, groups * c, ...] over c and the dims after it; w and b have groups * c elements."""
    size = x.shape[1] // groups
    x, y = x.split(1, groups, size), (y or x.like()).split(1, groups, size)
    w, b = (t and t.split(0, groups, size) for t in (w, b))
    names = ["n", "f", "e", *"k" * (len(x.shape) - 3)] if w or b else ["n", "n", *"k" * (len(x.shape) - 2)]
    return _norm("group_norm", names, x, "e k" if w or b else "k", (0, 1), (1, 2), w, b, eps, saves, y)


def _norm(
    name: str,
    names: Sequence[str],
    x: Strided,
    row: str,
    rows: Sequence[int],
    features: Sequence[int],
    w: Strided | None,
    b: Strided | None,
    eps: float,
    saves: bool,
    y: Strided | None,
) -> LibraryFormula:
    y = y or x.like()
    page = _page(names, x, rows, features, w, b, y)
    axes = _axes(page, row)
    over = _axes(page, " ".join(c for c in page.classes if all(names[d] != c for d in features)))
    words = {"k": axes, "over": over, "count": counted(page, *row.split()), "eps": float(eps)}
    text = page.sized(
        name,
        *lines(MOMENTS),
        *_affine(page, "d * r"),
        *(("store {M} = mean", "store {R} = r") if saves else ()),
        **words,
    )
    by_w = ("read w = {W}", "let u = g*w") if w else ("let u = g",)
    back = [
        *lines(SAVED),
        *by_w,
        *lines("""
        let a = sum(u; {k}) / {count}
        let c = sum(u*h; {k}) / {count}
        store {dX} = (u - a - h*c) * r"""),
    ]
    gradients, together = _gradients(page, name, back, lines(SAVED), w, b, words)
    if w and "e" in names and page.classes.get("k"):
        assert together is not None
        together = replace(together, text=_by_features(page, b is not None, words))
    given = ("X", *(name for name in "WB" if name in page.seen))
    return LibraryFormula(page, text, given, gradients=gradients, together=together)


def _by_features(page: NamedSpace, shifted: bool, words: dict[str, object]) -> str:
    """The gradients of a group norm by two sums for each feature of an image, from which the sums of its
    group and those over images follow."""
    group, images = (f"; {page[c]})" if page.classes[c] else "" for c in "en")
    a, c = (f"sum(w*{v}{group}" if group else f"w*{v}" for v in ("s", "t"))
    dw, db = (f"sum({v}{images}" if images else v for v in ("t", "s"))
    return page.sized(
        "group_norm_gradients",
        *lines(SAVED),
        "read w = {W}",
        "let s = sum(g; {inner})",
        "let t = sum(g*h; {inner})",
        f"let a = {a} / {{count}}",
        f"let c = {c} / {{count}}",
        "store {dX} = (g*w - a - h*c) * r",
        f"let dw = {dw}",
        f"let db = {db}" * shifted,
        "store {dW} = dw",
        "store {dB} = db" * shifted,
        **words | {"inner": page["k"]},
    )


def rms_norm(
    x: Strided,
    count: int,
    w: Strided | None = None,
    eps: float = 1e-6,
    saves: bool = False,
    y: Strided | None = None,
) -> LibraryFormula:
    """x divided by its root mean square along the last ``count`` dims, scaled by w."""
    rank = len(x.shape)
    page = _page(
        ["n"] * (rank - count) + ["k"] * count,
        x,
        range(rank - count),
        range(rank - count, rank),
        w,
        None,
        y or x.like(),
    )
    words = {"over": page["n"], "count": counted(page, "k"), "eps": float(eps)}
    text = page.sized(
        "rms_norm",
        *lines("""read x = {X}
        let r = rsqrt(sum(x*x; {k}) / {count} + {eps})"""),
        *_affine(page, "x * r"),
        "store {R} = r" if saves else "",
        **words,
    )
    saved = ["read x = {X}", "read r = {R}", "read g = {G}", "let h = x*r"]
    back = [
        *saved,
        "read w = {W}" if w else "",
        "let u = g*w" if w else "let u = g",
        *lines("""
        let c = sum(u*h; {k}) / {count}
        store {dX} = (u - h*c) * r"""),
    ]
    gradients, together = _gradients(page, "rms_norm", back, saved, w, None, words)
    return LibraryFormula(page, text, ("X", *["W"] * bool(w)), gradients=gradients, together=together)


def _page(
    names: Sequence[str],
    x: Strided,
    rows: Sequence[int],
    features: Sequence[int],
    w: Strided | None,
    b: Strided | None,
    y: Strided,
) -> NamedSpace:
    whole = range(len(x.shape))
    kept = Strided.dense([x.shape[d] for d in rows], held(x.dtype))
    tensors: dict[str, Placed] = {
        "X": (x, whole),
        "Y": (y, whole),
        "G": (y, whole),
        "dX": (x.like(), whole),
        "M": (kept, rows),
        "R": (kept, rows),
    }
    tensors |= {name: (t, features) for name, t in (("W", w), ("B", b)) if t}
    tensors |= {f"d{name}": (t.like(), features) for name, t in (("W", w), ("B", b)) if t}
    return NamedSpace(names, x.shape, tensors)


def _axes(page: NamedSpace, names: str) -> str:
    """The axes of several names; the first name if none has axes."""
    found = " ".join(page[name] for name in names.split() if page.classes.get(name))
    return found or names.partition(" ")[0]


def _affine(page: NamedSpace, value: str) -> list[str]:
    """The steps that scale and shift a value, as far as the page has tensors for it, and store it."""
    w, b = (name in page.seen for name in "WB")
    return [
        "read w = {W}" if w else "",
        "read b = {B}" if b else "",
        f"store {{Y}} = {value}{' * w' if w else ''}{' + b' if b else ''}",
    ]


def _gradients(
    page: NamedSpace,
    name: str,
    back: Sequence[str],
    saved: Sequence[str],
    w: Strided | None,
    b: Strided | None,
    words: dict[str, object],
) -> tuple[tuple[Gradient, ...], Gradient | None]:
    """The gradient of x, that of scale and shift, which are summed over the rows, and all in one text.
    ``back``: the steps of the first; ``saved``: those that both begin with."""
    of_x = Gradient(page.sized(f"{name}_gradient", *back, **words), {"dX": "X"})
    if not (w or b):
        return (of_x,), None
    sums = [
        "let dw = sum(g*h; {over})" if w else "",
        "let db = sum(g; {over})" if b else "",
        "store {dW} = dw" if w else "",
        "store {dB} = db" if b else "",
    ]
    of = {f"d{n}": n for n, t in (("W", w), ("B", b)) if t}
    alone = page.sized(f"{name}_affine_gradient", *(saved if w else ["read g = {G}"]), *sums, **words)
    whole = page.sized(f"{name}_gradients", *back, *sums, **words)
    return (of_x, Gradient(alone, of)), Gradient(whole, {**of_x.of, **of})


def batch_norm(
    x: Strided,
    mean: Strided | None = None,
    variance: Strided | None = None,
    w: Strided | None = None,
    b: Strided | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    saves: bool = False,
    y: Strided | None = None,
) -> LibraryFormula:
    """Of x [n, c, ...] over all dims but c; ``mean`` and ``variance`` are running statistics of c
    elements. In training x is normalised by its own statistics, and the running ones, updated by
    ``momentum`` (with the unbiased variance), are results ``newP`` and ``newQ``. Otherwise x is normalised
    by the running ones. ``saves``: mean and one over the deviation are stored for gradients."""
    page = _batch_page(x, mean, variance, w, b, y or x.like(), saves)
    count, points = int(page.count("k")), counted(page, "k")
    unbiased = SizeExpression(
        f"{count / (count - 1)}" if count > 1 else "inf",
        f"({points.names} / max({counted(page, 'k', less=1.0).names}, 0.0))",
    )
    words: dict[str, object] = {
        "count": points,
        "eps": float(eps),
        "new": float(momentum),
        "old": 1.0 - momentum,
        "unbiased": unbiased,
    }
    given = ("X", *(name for name in "PQWB" if name in page.seen))
    if not training:
        return _inference(page, given, words)
    keeps = (
        [
            "read p = {P}",
            "read q = {Q}",
            "store {newP} = p*{old} + mean*{new}",
            "store {newQ} = q*{old} + v*({new}*{unbiased})",
        ]
        if mean
        else []
    )
    text = page.sized(
        "batch_norm",
        *lines(MOMENTS),
        *_affine(page, "d * r"),
        *keeps,
        *(("store {M} = mean", "store {R} = r") if saves else ()),
        **words,
    )
    sums = ["let a = sum(g; {k})", "let c = sum(g*h; {k})"]
    back = page.sized(
        "batch_norm_gradient",
        *lines(SAVED),
        *sums,
        "read w = {W}" if w else "",
        f"store {{dX}} = (g - a/{{count}} - h*c/{{count}}) * r{' * w' if w else ''}",
        "store {dW} = c" if w else "",
        "store {dB} = a" if b else "",
        **words,
    )
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
    back = page.sized(
        "batch_norm_gradient",
        "read q = {Q}",
        "read g = {G}",
        "read w = {W}" if scaled else "",
        f"store {{dX}} = g * rsqrt(q + {{eps}}){' * w' if scaled else ''}",
        **words,
    )
    gradients = [Gradient(back, {"dX": "X"})]
    of = {f"d{name}": name for name in "WB" if name in page.seen}
    if of:
        steps = [
            "let dw = sum(g * (x - p) * r; {k})",
            "let db = sum(g; {k})",
            "store {dW} = dw" if scaled else "",
            "store {dB} = db" if "B" in page.seen else "",
        ]
        sums = page.sized("batch_norm_affine_gradient", *read, "read g = {G}", *steps, **words)
        gradients.append(Gradient(sums, of))
    return LibraryFormula(page, text, given, gradients=tuple(gradients))


def _batch_page(
    x: Strided,
    mean: Strided | None,
    variance: Strided | None,
    w: Strided | None,
    b: Strided | None,
    y: Strided,
    saves: bool,
) -> NamedSpace:
    whole = range(len(x.shape))
    tensors: dict[str, Placed] = {
        "X": (x, whole),
        "Y": (y, whole),
        "G": (y, whole),
        "dX": (x.like(), whole),
    }
    features = {"P": mean, "Q": variance, "W": w, "B": b}
    for name, t in features.items():
        if t is not None:
            tensors[name] = (t, (1,))
            tensors[f"new{name}" if name in "PQ" else f"d{name}"] = (t.like(), (1,))
    kept = Strided.dense([x.shape[1]], held(x.dtype))
    tensors |= {"M": (kept, (1,)), "R": (kept, (1,))}
    return NamedSpace(["f" if d == 1 else "k" for d in whole], x.shape, tensors)


def moments(x: Strided) -> LibraryFormula:
    """``M``: the mean over the dims after c; ``V``: the sum of squared deviations from it."""
    page = _parts_page(x, ("X",), ("M", "V"))
    text = page.sized(
        "moments",
        *lines("""read x = {X}
        let mean = sum(x; {k}) / {count}
        let d = x - mean
        let v = sum(d*d; {k})
        store {M} = mean
        store {V} = v"""),
        count=counted(page, "k"),
    )
    return LibraryFormula(page, text, ("X",), ("M", "V"))


def sums(x: Strided) -> LibraryFormula:
    """``S``: the sum of g*x over the dims after c; ``T``: that of g."""
    page = _parts_page(x, ("X", "G"), ("S", "T"))
    text = page.sized(
        "sums",
        *lines("""read x = {X}
        read g = {G}
        let s = sum(g*x; {k})
        let t = sum(g; {k})
        store {S} = s
        store {T} = t"""),
    )
    return LibraryFormula(page, text, ("G", "X"), ("S", "T"))


def scaled(x: Strided, y: Strided) -> LibraryFormula:
    """a*x + b."""
    page = _parts_page(x, ("X",), ("A", "B"), y)
    text = page.sized("scaled", "read x = {X}", "read a = {A}", "read b = {B}", "store {Y} = x*a + b")
    return LibraryFormula(page, text, ("X", "A", "B"))


def mixed(x: Strided, y: Strided) -> LibraryFormula:
    """a*g + b*x + c."""
    page = _parts_page(x, ("G", "X"), ("A", "B", "C"), y)
    text = page.sized(
        "mixed",
        "read g = {G}",
        "read x = {X}",
        "read a = {A}",
        "read b = {B}",
        "read c = {C}",
        "store {Y} = g*a + x*b + c",
    )
    return LibraryFormula(page, text, ("G", "X", "A", "B", "C"))


def _parts_page(
    x: Strided, whole: Sequence[str], kept: Sequence[str], y: Strided | None = None
) -> NamedSpace:
    rank = len(x.shape)
    one = Strided.dense(x.shape[:2], held(x.dtype))
    tensors: dict[str, Placed] = {name: (x, range(rank)) for name in whole}
    tensors |= {name: (one, (0, 1)) for name in kept}
    tensors |= {"Y": (y, range(rank))} if y else {}
    return NamedSpace(["n", "n", *"k" * (rank - 2)], x.shape, tensors)
