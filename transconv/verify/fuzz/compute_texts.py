"""Draws a small random computation as text.

Products with any number of batch, row, column and summed axes and with prologues, statistics of their
results, reductions over windows, chains of elementwise operations, rows that are swept several times, rows
so long that they are split into parts, places of extremes, stores that add, gradients of views; everything
that a text can say about where an element lies is drawn: flips, strides, pads of every kind, fused and
divided coordinates, broadcasts, gathers, concatenations, permuted and partial stores, layouts with gaps.
Sizes rarely divide anything.
"""

from __future__ import annotations

from random import Random

from transconv.compute import differentiate, parse, transposed, why_not_lowered
from transconv.compute.analysis import statistics
from transconv.ir import REDUCERS, Layout, Tensor
from transconv.support import ComputeError
from transconv.verify.fuzz.text_page import EXACT, TextPage, some, value_of
from transconv.verify.fuzz.trial import chance

LONG = (2048, 2100, 2560, 3000, 4096)  # elements of a row that has parts
FILLS = {"max": ("-inf", "-2"), "min": ("inf", "3"), "prod": ("1", "-1"), "sum": ("", "", "", "1")}


def text(rng: Random) -> str:
    """A computation that one kernel can do, or a few; of every eighth one text of its gradients. Every
    fourth product is one that reads boxes behind its sum."""
    kind = rng.choice((_product, _product, _product, _reduction, _reduction, _chain, _chain, _rows, _rows,
                       _extremes, _adding, _gradient, _long, _statistics))
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
    kinds = {letter: page.add_axes(letter, rng.choice(numbers), letter == "k") for letter, numbers in (
        ("b", (0, 0, 0, 1, 1, 2)), ("m", (1, 1, 1, 2, 0)), ("n", (1, 1, 1, 2)), ("k", (1, 1, 2, 2)))}
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
    """A product of whole boxes, and maps behind it that read boxes as large as its result, or vectors:
    what a warp-specialized kernel fetches (``behind=box``)."""
    rng, dtype = page.rng, page.rng.choice(("f16", "bf16"))
    sizes = {"m0": rng.choice((1, 2, 3)), "m1": rng.choice((3, 5, 9, 16, 17)),
             "n": rng.choice((16, 24, 64, 72)), "k": rng.choice((8, 16))}
    page.axes |= sizes
    page.summed.append("k")
    behind = "rg"[:rng.choice((1, 1, 2))]
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
    for name in ("M", "D")[:rng.choice((1, 1, 2))]:
        axes = [a for letter in "mn" for own in [[x for x in page.kept if x[0] == letter]]
                for a in rng.choice(([], own[:1], own))]  # tiles reduce what is inside of them
        rng.shuffle(axes)
        coords = [rng.choice((a, a, *(f"{a} // {d}" for d in (2, 3, 4) if page.axes[a] % d == 0)))
                  for a in axes]
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
    names += [page.read(n, some(rng, list(page.axes))) for n in ("y", "z")[:rng.randrange(3)]]
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
        page.steps += ["let t = sum(x; k)", f"let mean = t / {page.axes['k']}", "let d = x - mean",
                       "let v = sum(d*d; k)"]
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
    for extra in ("v", "r")[:rng.choice((0, 0, 1, 1, 2))]:
        names.append(page.read(extra, some(rng, page.kept) or page.kept))
    value = "s" if len(names) == 1 and chance(rng, 2) else value_of(page, names)
    page.store("C", value)
    if chance(rng, 5):
        page.store("D", value_of(page, names))
    return page.made(name)
