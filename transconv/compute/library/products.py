"""Products of matrices, batched and broadcast, with bias and activation."""

from __future__ import annotations

from collections.abc import Sequence

from transconv.compute.elementwise import OPS
from transconv.compute.library.page import (
    Gradient,
    LibraryFormula,
    NamedSpace,
    Placed,
    Strided,
    held,
)
from transconv.compute.text.format import SELECTION
from transconv.ir import DType, Var, readable


def linear(x: Strided, w: Strided, b: Strided | None = None, activation: str = "", math: str = "ieee",
           saves: bool = False, y: Strided | None = None) -> LibraryFormula:
    """activation(x w' + b) of x [..., k], w [n, k] and b [n]. ``saves``: the sum before the activation is
    stored as well, as ``Z``. ``math``: the precision of products of f32. ValueError if w has not two
    dims."""
    if len(w.shape) != 2:
        raise ValueError(f"a weight of {len(w.shape)} dims; expected two")
    rank = len(x.shape)
    lead = range(rank - 1)
    y = y or Strided.dense([*x.shape[:-1], w.shape[0]], x.dtype)
    names, sizes = ["m"] * (rank - 1) + ["n", "k"], (*x.shape[:-1], w.shape[0], x.shape[-1])
    return _product("linear", names, sizes, (x, [*lead, rank]), (w, [rank - 1, rank]), b,
                    (y, [*lead, rank - 1]), activation, math, saves)


def matmul(x: Strided, w: Strided, activation: str = "", math: str = "ieee", saves: bool = False,
           y: Strided | None = None) -> LibraryFormula:
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
    return _product("matmul", [*kinds, "m", "n", "k"], sizes, (x, of_x), (w, of_w), None, (y, kept),
                    activation, math, saves)


def _product(name: str, names: Sequence[str], sizes: Sequence[int], x: Placed, w: Placed,
             b: Strided | None, y: Placed, activation: str, math: str, saves: bool) -> LibraryFormula:
    column = list(names).index("n")
    tensors: dict[str, Placed] = {"X": x, "W": w, "Y": y, "G": y, "Z": y, "H": y,
                                  "dX": (x[0].like(), x[1]), "dW": (w[0].like(), w[1])}
    if b:
        tensors |= {"B": (b, [column]), "dB": (b.like(), [column])}
    page = NamedSpace(names, sizes, tensors, keeps="m n k")
    words = {"ahead": _axes(page, "q", "n"), "below": _axes(page, "p", "m"), "rows": _axes(page, "m", "m")}
    whole = f"{name} math={math}"
    value = "s + b" if b else "s"
    text = page.text(whole, "read x = {X}", "read w = {W}", "let s = sum(x*w; {k})",
                     "read b = {B}" if b else "",
                     f"store {{Z}} = {value}" if saves and activation else "",
                     f"store {{Y}} = {f'{activation}({value})' if activation else value}")
    g = "H" if activation else "G"
    gradients = []
    if activation:
        slope = _slope(activation, held(x[0].dtype))
        gradients.append(Gradient(page.text(f"{name}_slope", "read z = {Z}", "read g = {G}",
                                            f"store {{H}} = g * ({slope})"), {}))
    gradients += [
        Gradient(page.text(f"{name}_gradient_x math={math}", f"read g = {{{g}}}", "read w = {W}",
                           "store {dX} = sum(g*w; {ahead})", **words), {"dX": "X"}),
        Gradient(page.text(f"{name}_gradient_w math={math}", f"read g = {{{g}}}", "read x = {X}",
                           "store {dW} = sum(g*x; {below})", **words), {"dW": "W"})]
    if b:
        gradients.append(Gradient(page.text(f"{name}_gradient_b", f"read g = {{{g}}}",
                                            "store {dB} = sum(g; {rows})", **words), {"dB": "B"}))
    return LibraryFormula(page, text, ("X", "W", *["B"] * bool(b)), gradients=tuple(gradients))


def _slope(activation: str, dtype: DType) -> str:
    """The derivative of an activation at z, as text."""
    derivative = OPS[activation].derivative
    assert derivative is not None, activation
    slope, = derivative(Var("z", dtype))
    assert slope is not None, activation
    return SELECTION.sub("where(", readable(slope))


def _axes(page: NamedSpace, *names: str) -> str:
    """The axes of several names; an axis of the last name if none has axes."""
    found = [axis for name in names for axis in page.classes.get(name, ())]
    return " ".join(found) or page[names[-1]]
