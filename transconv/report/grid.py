"""The grid: how tiles and loop steps are divided among its programs, as numbers and as a picture."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from markupsafe import Markup

from transconv.compute import Compute
from transconv.ir import Array, Evaluator, Fault, For, Kernel, Let, Memory, Seq, Stmt, Var, free_vars
from transconv.report import svg
from transconv.schedule import Schedule, Scheduled, k_steps, programs, tile, tiles_along

MOST_CELLS, MOST_NUMBERED = 4096, 1 << 18
WIDTH = 300.0
WAVES = 6  # shades


@dataclass(frozen=True)
class Dealt:
    """Tiles along the rows, columns and batches of a result, parts of its sum; programs that share them;
    steps of a sum; extents of a tile with the axes of each."""

    rows: int
    columns: int
    batches: int
    parts: int
    programs: int
    slots: int
    steps: int
    extents: dict[str, int]
    axes: dict[str, str]
    product: bool

    @property
    def tiles(self) -> int:
        return self.rows * self.columns * self.batches * self.parts

    @property
    def waves(self) -> int:
        return -(-self.tiles // self.slots)

    @property
    def steps_each(self) -> int:
        """Of one part of a sum."""
        return -(-self.steps // self.parts)


def dealt(whole: Scheduled) -> Dealt:
    """The counts of the main kernel."""
    schedule, compute = whole.schedule, whole.main
    along = {k: tiles_along(schedule, compute, k) for k in "BMN"}
    slots = schedule.programs or whole.target.sms
    started = min(schedule.programs or programs(schedule, compute), programs(schedule, compute))
    return Dealt(
        along["M"],
        along["N"],
        along["B"],
        schedule.split_k,
        started,
        slots,
        k_steps(schedule, compute),
        {k: tile(schedule, compute, k) for k in "BMNK"},
        {k: _axes(schedule, compute, k) for k in "BMNK"},
        compute.b is not None,
    )


def _axes(schedule: Schedule, compute: Compute, kind: str) -> str:
    """The axes of a tile's extent, as the schedule writes them."""
    blocks = [f"{'.'.join(b.axes)}:{b.extent}" for b in schedule.blocks if compute.kind(b.first) == kind]
    return " ".join(blocks)


def draw(whole: Scheduled, kernel: Kernel | None) -> Markup:
    """The grid with its waves, the steps of one program, and the tile that a step multiplies."""
    d = dealt(whole)
    grid, height = _grid(d, kernel)
    loop, below = _loop(d)
    piece, tall = _tile(d)
    return Markup("").join(
        (
            tagged("Grid", _words_of_grid(d), svg.drawing(WIDTH + 4, height, _words_of_grid(d), *grid)),
            tagged("Loop", _words_of_loop(d), svg.drawing(WIDTH + 4, below, _words_of_loop(d), *loop)),
            tagged("Tile", _words_of_tile(d), svg.drawing(WIDTH + 4, tall, _words_of_tile(d), *piece)),
        )
    )


def tagged(title: str, words: str, picture: Markup) -> Markup:
    return svg.tag("figure", picture, svg.tag("figcaption", svg.tag("b", title), " ", words))


def _words_of_grid(d: Dealt) -> str:
    parts = [
        f"{n} {what}"
        for n, what in (
            (d.rows, "along rows"),
            (d.columns, "along columns"),
            (d.batches, "batches"),
            (d.parts, "parts of the sum"),
        )
        if n > 1
    ]
    how = f"{d.programs} persistent programs share them" if d.programs < d.tiles else "one program each"
    said = f"{d.tiles} tiles ({' x '.join(parts)}), {how}" if parts else f"{d.tiles} tile, {how}"
    last = d.tiles - (d.waves - 1) * d.slots
    return (
        f"{said}; {d.slots} run at a time, so {d.waves} wave{'s' * (d.waves > 1)}, "
        f"the last {last / d.slots:.0%} full."
    )


def _words_of_loop(d: Dealt) -> str:
    if d.steps <= 1 and d.parts == 1:
        return "One step: what is summed fits one tile." if d.extents["K"] > 1 else "Nothing is summed."
    split = f", in {d.parts} parts of up to {d.steps_each}" if d.parts > 1 else ""
    size = d.axes["K"] or "one position"
    return f"{d.steps} steps make a sum{split}; each takes {size} of the summed axes."


def _words_of_tile(d: Dealt) -> str:
    m, n, k, batches = (d.extents[x] for x in "MNKB")
    named = ", ".join(
        f"{what} {d.axes[x]}"
        for x, what in (("M", "rows"), ("N", "columns"), ("B", "batches"), ("K", "summed"))
        if d.axes[x]
    )
    results = f"{m} x {n} results" if d.product else f"{m * n} result{'s' * (m * n > 1)}"
    each = f" of each of {batches} batches" if batches > 1 else ""
    deep = f", {k} deep in a step" if d.product or k > 1 else ""
    return f"{results}{each}{deep} ({named or 'single elements'})."


def _order(d: Dealt, kernel: Kernel | None) -> Array:
    """The program number of every (row, column): from the kernel's own arithmetic where it is plain."""
    if d.tiles > MOST_NUMBERED:  # the first ones stand for all
        return np.arange(MOST_CELLS).reshape(-1, 64)
    rows, columns = d.rows, d.columns * d.batches * d.parts
    numbers = np.arange(d.tiles)
    if d.batches == d.parts == 1 and kernel is not None and (found := _places(kernel, d.tiles)):
        m, n = found
        if m.max(initial=0) < rows and n.max(initial=0) < columns:
            made = np.zeros((rows, columns), np.int64)
            made[m, n] = numbers
            return made
    return numbers.reshape(columns, rows).T if d.parts * d.batches > 1 else numbers.reshape(rows, columns)


def _places(kernel: Kernel, tiles: int) -> tuple[Array, Array] | None:
    """Which tile every program has, by the kernel after ``gridwise``."""
    loop: Stmt = kernel.body
    while isinstance(loop, Seq):
        loop = loop.stmts[0]
    if not isinstance(loop, For) or not isinstance(loop.body, Seq):
        return None
    run = Evaluator(Memory({}), {}, 1)
    run.env[loop.var] = np.arange(tiles)
    found: dict[str, Array] = {}
    for s in loop.body.stmts:
        if isinstance(s, Let) and free_vars(s.value) <= set(run.env):
            with suppress(Fault):  # loaded values are unknown here
                run.env[s.var] = found[s.var.name] = np.broadcast_to(run.compute(s.value), (tiles,))
    m, n = (found.get(Var(x).name) for x in ("m_at", "n_at"))
    return (m, n) if m is not None and n is not None else None


def _grid(d: Dealt, kernel: Kernel | None) -> tuple[list[Markup], float]:
    order = _order(d, kernel)
    if order.shape[1] < 8 and order.shape[0] > 24:  # a long column is wrapped
        flat = order.T.ravel()
        wide = max(1, min(len(flat), ceil(sqrt(len(flat) * 2.2))))
        padded = np.full(-(-len(flat) // wide) * wide, -1)
        padded[: len(flat)] = flat
        order = padded.reshape(-1, wide)
    rows = max(1, min(order.shape[0], MOST_CELLS // max(1, min(order.shape[1], 64))))
    shown = order[:rows, :64]
    size = min(26.0, WIDTH / shown.shape[1], 190 / min(shown.shape[0], 60))
    shown = shown[: int(190 // size) + 1]
    gap = min(1.5, size / 5)
    parts = [
        svg.cells((shown >= 0) & (shown // d.slots % WAVES == w), f"wave{w}", size, 1, 1, gap)
        for w in range(min(d.waves, WAVES))
    ]
    mine = (shown >= 0) & (shown % d.programs == 0) if d.programs < d.tiles else shown == 0
    parts.append(svg.cells(mine, "chosen", size, 1, 1, gap))
    height = shown.shape[0] * size + 4
    if shown.size < order.size or order.size < d.tiles:
        drawn = int((shown >= 0).sum())
        parts.append(svg.text(1, height + 12, f"{drawn} of {d.tiles} tiles are drawn", "tick"))
        height += 16
    return parts, height


def _loop(d: Dealt) -> tuple[list[Markup], float]:
    count = min(d.steps, 512)
    wide = max(1, min(count, 64 if count > 96 else 32 if count > 18 else 18))
    size = min(24.0, WIDTH / wide)
    each = np.zeros((-(-count // wide), wide), bool)
    each.ravel()[:count] = True
    number = np.arange(each.size).reshape(each.shape)
    part = number // max(1, d.steps_each)
    parts = [
        svg.cells(each & (part % WAVES == w), f"wave{w}", size, 1, 1, min(1.5, size / 5))
        for w in range(min(WAVES, d.parts))
    ]
    parts.append(svg.cells(each & (number == 0), "chosen", size, 1, 1, min(1.5, size / 5)))
    height = each.shape[0] * size + 4
    if count < d.steps:
        parts.append(svg.text(1, height + 12, f"the first {count} of {d.steps} steps are drawn", "tick"))
        height += 16
    return parts, height


def _tile(d: Dealt) -> tuple[list[Markup], float]:
    m, n, k, batches = (max(1, d.extents[x]) for x in "MNKB")
    product = d.product and batches == 1
    if not d.product:  # what is reduced lies across the results
        n, k = (k if k > 1 else n), 0
    elif not product:
        n, k = n * batches, 0
    scale = min(170 / (n + k), 150 / (m + k), 12.0)
    mm, nn, kk = max(5.0, m * scale), max(5.0, n * scale), max(5.0, k * scale) if k else 0.0
    left, top = 46.0, 18.0
    parts = []
    if product:
        parts += [
            svg.rect(left, top + kk + 6, kk, mm, "slab hue0", f"left operand {m} x {k}", 2),
            svg.rect(left + kk + 6, top, nn, kk, "slab hue1", f"right operand {k} x {n}", 2),
        ]
        parts += [svg.text(left + kk / 2, top + kk + mm + 18, str(k), "tick", "middle")]
    said = "results" if d.product or d.extents["K"] == 1 else "read in a step"
    parts += [
        svg.rect(left + kk + 6, top + kk + 6, nn, mm, "slab hue2", f"{m} x {n}", 2),
        svg.text(left + kk + 6 + nn / 2, top - 5, str(n), "tick", "middle"),
        svg.text(left - 6, top + kk + 6 + mm / 2 + 3, str(m), "tick", "end"),
        svg.text(left + kk + 12 + nn, top + kk + 6 + mm / 2 + 3, said, "tick"),
    ]
    return parts, top + kk + mm + 26
