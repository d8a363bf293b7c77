"""Functions that only move elements: pads, flips, repetitions, gathers, concatenations, windows. Each is
one read through a view, or a ``where`` of reads; gradients are derived from the views
(autodiff/gradient_stores.py).

Every function takes the operands and the result as ``Strided``, and returns a ``Formula``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transconv.compute.autodiff.gradient_stores import transposed
from transconv.compute.library.page import Dim, Gradient, LibraryFormula, NamedSpace, Placed, Strided
from transconv.compute.parser import parse

MODES = {
    "constant": "{at}",
    "reflect": "reflect({at}, {n})",
    "replicate": "clamp({at}, {n})",
    "circular": "wrap({at}, {n})",
}
MOST_JOINED = 16  # tensors of a concatenation


def pad(
    x: Strided, y: Strided, before: Sequence[int], mode: str = "constant", value: float = 0.0
) -> LibraryFormula:
    """``before``: the number of elements added before each dim, negative to remove some; the shape of y
    gives the number after it. ``mode``: a key of MODES; ``value``: of constant padding."""
    coords: list[Dim] = [
        d if not p and n == size else _padded(mode, f"o{d}", p, n, size - n - p)
        for d, (p, n, size) in enumerate(zip(before, x.shape, y.shape, strict=True))
    ]
    return _viewed(f"pad_{mode}", x, y, coords, f" else {value!r}" if value and mode == "constant" else "")


def _padded(mode: str, at: str, before: int, n: int, behind: int) -> str:
    """The coordinate that a position of the result reads. torch's circular padding repeats the elements
    that are left after negative padding."""
    if mode == "circular" and min(before, behind) < 0:
        first = max(0, -before)
        n -= first + max(0, -behind)
        at = f"wrap({at} - {before}, {n})" if before > 0 else f"wrap({at}, {n})"
        return f"{at} + {first}" if first else at
    return MODES[mode].format(at=f"{at} - {before}" if before else at, n=n)


def flip(x: Strided, y: Strided, dims: Sequence[int]) -> LibraryFormula:
    """Reverses some dims."""
    return _viewed(
        "flip", x, y, [f"{n - 1} - o{d}" if d in dims and n > 1 else d for d, n in enumerate(x.shape)]
    )


def nearest(x: Strided, y: Strided, scales: Sequence[float | None], exact: bool = False) -> LibraryFormula:
    """Nearest upsampling and downsampling of the last dims; ``exact``: nearest to the centre of a
    position, not to its beginning. ``scales``: input elements per position of the result, None for the
    ratio of the sizes. ValueError if torch's arithmetic in f32 selects other elements than exact
    arithmetic."""
    lead = len(x.shape) - len(scales)
    coords: list[Dim] = [
        d if d < lead else _nearest(f"o{d}", x.shape[d], y.shape[d], scales[d - lead], exact, d)
        for d in range(len(x.shape))
    ]
    return _viewed("nearest", x, y, coords)


def _nearest(name: str, size: int, places: int, scale: float | None, exact: bool, dim: int) -> Dim:
    if size == places and (scale is None or scale == 1):
        return dim
    step = np.float32(size / places if scale is None else scale)
    at = np.arange(places, dtype=np.float32) + np.float32(0.5 if exact else 0.0)
    theirs = np.minimum((at * step).astype(np.int64), size - 1)
    whole = np.arange(places)
    ours = (whole * 2 + 1) * size // (places * 2) if exact else whole * size // places
    if not np.array_equal(ours, theirs):
        raise ValueError(f"{places} places of {size} elements are not evenly spaced")
    if places % size == 0:
        return f"{name} // {places // size}"
    if size % places == 0:
        begin = size // places // 2 if exact else 0
        return f"{name}*{size // places} + {begin}" if begin else f"{name}*{size // places}"
    return f"({name}*2 + 1)*{size} // {places * 2}" if exact else f"{name}*{size} // {places}"


def shuffle(x: Strided, y: Strided, factor: int, back: bool = False) -> LibraryFormula:
    """Features become blocks of ``factor`` x ``factor`` positions of the last two dims; ``back``: the
    reverse. (torch calls these a shuffle and an unshuffle.)"""
    image, blocks = (x, y) if back else (y, x)
    rank = len(x.shape)
    split = blocks.split(rank - 3, -(-blocks.shape[-3] // factor**2), factor, factor)
    fine = image.split(rank - 1, image.shape[-1] // factor, factor)
    fine = fine.split(rank - 2, image.shape[-2] // factor, factor)
    lead = range(rank - 3)
    c, a, b, h, w = range(rank - 3, rank + 2)
    of_blocks, of_image = [*lead, c, a, b, h, w], [*lead, c, h, a, w, b]
    names = ["n"] * (rank - 2) + ["a", "b", "h", "w"]
    of_x, of_y = (of_image, of_blocks) if back else (of_blocks, of_image)
    x, y = (fine, split) if back else (split, fine)
    page = NamedSpace(names, split.shape, _placed({"X": (x, of_x)}, y, of_y))
    return _moved("unshuffle" if back else "shuffle", page, ["read x = {X}", "store {Y} = x"], ["X"])


def join(parts: Sequence[Strided], y: Strided, dim: int) -> LibraryFormula:
    """Concatenates tensors along a dim. ValueError for different types, or more than ``MOST_JOINED``."""
    if len(parts) > MOST_JOINED or len({t.dtype for t in (*parts, y)}) > 1:
        raise ValueError(
            f"{len(parts)} tensors of {len({t.dtype for t in parts})} types; expected at "
            f"most {MOST_JOINED} of one type"
        )
    at, placed, lines, chosen, names = 0, {}, [], "", []
    ends: list[int] = []
    for i, t in enumerate(parts):
        name = f"X{i}"
        coords: list[Dim] = [*range(len(t.shape))]
        coords[dim] = f"o - {at}" if at else "o"
        placed[name] = (t, coords)
        lines.append(f"read x{i} = {{{name}}}")
        names.append(name)
        at += t.shape[dim]
        ends.append(at)
    chosen = f"x{len(parts) - 1}"
    for i in reversed(range(len(parts) - 1)):
        chosen = f"where(o < {ends[i]}, x{i}, {chosen})"
    page = NamedSpace(
        ["o" if d == dim else "n" for d in range(len(y.shape))],
        y.shape,
        _placed(placed, y, range(len(y.shape))),
        keeps="o",
    )
    value = [f"let x = {chosen}"] if len(parts) > 1 else ["let x = x0"]
    return _moved("join", page, [*lines, *value, "store {Y} = x"], names)


def take(x: Strided, index: Strided, y: Strided, dim: int) -> LibraryFormula:
    """Slices of a dim, selected by their indices (torch's index_select)."""
    coords: list[Dim] = [*range(len(x.shape))]
    coords[dim] = "i"
    page = NamedSpace(
        ["o" if d == dim else "n" for d in range(len(y.shape))],
        y.shape,
        _placed({"X": (x, coords), "I": (index, [dim])}, y, range(len(y.shape))),
        keeps="o",
    )
    return _moved("take", page, ["read i = {I}", "read x = {X}", "store {Y} = x"], ["X"], ("X", "I"))


def gather(x: Strided, index: Strided, y: Strided, dim: int) -> LibraryFormula:
    """For every position of the result, the element that its index selects along a dim (torch's
    gather)."""
    coords: list[Dim] = [
        d if n == m else f"o{d}" for d, (n, m) in enumerate(zip(x.shape, y.shape, strict=True))
    ]
    coords[dim] = "i"
    names = [f"o{d}" if c == f"o{d}" else "n" if d != dim else "o" for d, c in enumerate(coords)]
    page = NamedSpace(
        names,
        y.shape,
        _placed({"X": (x, coords), "I": (index, range(len(y.shape)))}, y, range(len(y.shape))),
        keeps=" ".join(n for n in names if n != "n"),
    )
    return _moved("gather", page, ["read i = {I}", "read x = {X}", "store {Y} = x"], ["X"], ("X", "I"))


def embedding(index: Strided, table: Strided, y: Strided, left_out: int | None = None) -> LibraryFormula:
    """Rows of a table, selected by their indices; the row ``left_out`` gets no gradient."""
    rank = len(index.shape)
    page = NamedSpace(
        ["n"] * rank + ["k"],
        (*index.shape, table.shape[1]),
        _placed({"I": (index, range(rank)), "W": (table, ["i", rank])}, y, range(rank + 1)),
    )
    where = "" if left_out is None else f" where i != {left_out}"
    made = _moved(
        "embedding", page, ["read i = {I}", f"read w = {{W}}{where}", "store {Y} = w"], ["W"], ("I", "W")
    )
    text = page.text("embedding", "read i = {I}", "read w = {W}", "store {Y} = w")
    return LibraryFormula(page, text, made.given, gradients=made.gradients)


def unfold(
    x: Strided,
    y: Strided,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> LibraryFormula:
    """Every window as a column: x (n, c, h, w), y (n, c*kh*kw, columns)."""
    page = _windows({"X": x, "dX": x.like()}, {"Y": y, "G": y}, window, stride, padding, dilation)
    return _moved("unfold", page, ["read x = {X}", "store {Y} = x"], ["X"])


def fold(
    x: Strided,
    y: Strided,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> LibraryFormula:
    """Adds columns to the windows that they came from: x (n, c*kh*kw, columns), y (n, c, h, w)."""
    page = _windows({"Y": y, "G": y}, {"X": x, "dX": x.like()}, window, stride, padding, dilation)
    columns = parse(page.text("fold", "read y = {Y}", "store {X} = y"))
    text = str(transposed(columns, "Y", page.tensor("Y"), page.tensor("X")))
    back = page.text("fold_gradient", "read g = {G}", "store {dX} = g")
    return LibraryFormula(
        page, text.replace("fold_gradient", "fold", 1), ("X",), gradients=(Gradient(back, {"dX": "X"}),)
    )


def _windows(
    images: Mapping[str, Strided],
    columns: Mapping[str, Strided],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> NamedSpace:
    image = next(iter(images.values()))
    n, c, *sizes = image.shape
    counts = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(sizes, padding, dilation, window, stride, strict=True)
    ]
    ahead: list[Dim] = [
        0,
        1,
        *(
            f"o{a}*{s} + k{a}*{d} - {p}"
            for a, s, d, p in zip("hw", stride, dilation, padding, strict=True)
        ),
    ]
    placed: dict[str, Placed] = {name: (t, ahead) for name, t in images.items()}
    for name, t in columns.items():
        placed[name] = (t.split(2, *counts).split(1, c, *window), range(6))
    return NamedSpace(
        ["n", "c", "kh", "kw", "oh", "ow"], (n, c, *window, *counts), placed, keeps="kh kw oh ow"
    )


def _viewed(name: str, x: Strided, y: Strided, coords: Sequence[Dim], fill: str = "") -> LibraryFormula:
    """One read through a view. ``coords`` of x: each a dim of y, or an expression of their names."""
    names = ["n" if d in coords else f"o{d}" for d in range(len(y.shape))]
    page = NamedSpace(
        names,
        y.shape,
        _placed({"X": (x, coords)}, y, range(len(y.shape))),
        keeps=" ".join(n for n in names if n != "n"),
    )
    return _moved(name, page, [f"read x = {{X}}{fill}", "store {Y} = x"], ["X"])


def _placed(operands: Mapping[str, Placed], y: Strided, dims: Sequence[Dim]) -> dict[str, Placed]:
    """The operands and the result, with their gradients at the same coordinates."""
    made: dict[str, Placed] = {**operands, "Y": (y, dims), "G": (y, dims)}
    return made | {f"d{name}": (t.like(), at) for name, (t, at) in operands.items() if name != "I"}


def _moved(
    name: str, page: NamedSpace, lines: Sequence[str], operands: Sequence[str], given: tuple[str, ...] = ()
) -> LibraryFormula:
    """The formula of these lines, with the gradients of the operands. ValueError if the dims of an operand
    have no order in memory."""
    text = page.text(name, *lines)
    made, g = parse(text), page.tensor("G")
    back = []
    for operand in operands:
        if page.tensors[operand].dtype.kind != "float":
            continue
        into = page.tensor(f"d{operand}")
        if page.seen[operand].coords != page.seen[f"d{operand}"].coords:
            raise ValueError(f"the dims of {operand} have no order in memory")
        back.append(Gradient(str(transposed(made, operand, into, g)), {f"d{operand}": operand}))
    return LibraryFormula(page, text, given or tuple(operands), gradients=tuple(back))
