"""Draws a kernel: statements over tiles, or a body of work-items.

Comparisons and indices are of exact values alone, so that engines that round otherwise decide alike, and
values stay small, so that roundings do. Arrays are empty, smaller and larger than tiles; groups reach
beyond the work.
"""

from __future__ import annotations

from random import Random

from transconv.kernel_trials.draw_items import items
from transconv.kernel_trials.draw_sub_groups import sub_groups
from transconv.kernel_trials.draw_tiles import STATEMENTS, begin, stores
from transconv.kernel_trials.draw_whole import wholes
from transconv.kernel_trials.page import TrialPage
from transconv.kernel_trials.trial import Drawn, KernelTrial
from transconv.verify.draw.conv_problems import chance

SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 33)
MOST, MOST_ITEMS = 40, 9  # sizes of the work; the simulator runs items one by one


def draw_trial(seed: int | str, number: int) -> KernelTrial:
    """Trial ``number`` of a seed: the same for everybody."""
    rng = Random(f"transconv kernels {seed} {number}")
    if chance(rng, 9):
        return _of_sub_groups(rng)
    if chance(rng, 4):
        return _of_items(rng)
    return _of_wholes(rng) if chance(rng, 3) else _of_tiles(rng)


def _of_wholes(rng: Random) -> KernelTrial:
    (rows, cols), group = _sizes(rng, 17)
    group = min(group[0], 16), min(group[1], 16)
    page = TrialPage(rng, *group)
    dtype = rng.choice(("i8", "u8", "i8", "u8", "i32"))
    return _trial(rng, (rows, cols), group, wholes(page, rows, cols, dtype), page)


def _sizes(rng: Random, most: int = MOST) -> tuple[tuple[int, int], tuple[int, int]]:
    """The work, and a group of it."""
    group = rng.choice(SIDES), rng.choice(SIDES)
    rows, cols = (max(1, rng.choice((n, 2 * n, rng.randrange(1, 3 * n + 1), n - 1))) for n in group)
    return (min(rows, most), min(cols, most)), group


def _array(rng: Random, work: tuple[int, int], least: int, dtype: str = "f32") -> Drawn:
    """An array about as large as the work."""
    def size(n: int) -> int:
        if chance(rng, 16):
            return rng.choice((least, 1))
        more, less = rng.randrange(4), rng.randrange(4)
        return max(least, rng.choice((n, n, n + more, n + more, n - less)))

    return Drawn(dtype, tuple(size(n) for n in work))


def _of_tiles(rng: Random) -> KernelTrial:
    (rows, cols), (high, wide) = _sizes(rng)
    flat = chance(rng, 4)  # groups of one dimension
    if flat:
        high, rows = min(high, 9), min(high, 9)
    least = 0 if chance(rng, 2) else 1
    arrays = {"X": _array(rng, (rows, cols), least), "Z": _array(rng, (rows, cols), least),
              "K": _array(rng, (rows, cols), least, rng.choice(("i32", "i32", "i8", "u8", "i64", "bool"))),
              "H": _array(rng, (rows, cols), least, "f16")}
    page = TrialPage(rng, high, wide, least == 0)
    begin(page, flat, arrays["K"].dtype)
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 8))):  # most are short: they compile in less time
        rng.choice(STATEMENTS)(page)
    stored = stores(page, rows, cols)
    return _trial(rng, (cols,) if flat else (rows, cols), (wide,) if flat else (high, wide),
                  arrays | stored, page)


def _of_items(rng: Random) -> KernelTrial:
    work, group = _sizes(rng, MOST_ITEMS)
    arrays = {"X": _array(rng, work, 1), "Z": _array(rng, work, 1), "K": Drawn("i32", work)}
    page = TrialPage(rng, *group)
    return _trial(rng, work, group, arrays | items(page, *work), page)


def _of_sub_groups(rng: Random) -> KernelTrial:
    sub = rng.choice((1, 2, 4, 8, 16))
    group = sub * rng.choice((1, 2, 3, 4))
    work = min(MOST, max(1, rng.choice((group, 2 * group, rng.randrange(1, 3 * group + 1), group - 1))))
    shape = max(1, work + rng.choice((0, 0, 3, -2)))
    page = TrialPage(rng, 1, sub)
    stored = sub_groups(page, work)
    arrays = {"X": Drawn("f32", (shape,)), "Z": Drawn("f32", (work,))}
    return _trial(rng, (work,), (group,), arrays | stored, page, sub)


def _trial(rng: Random, work: tuple[int, ...], group: tuple[int, ...], arrays: dict[str, Drawn],
           page: TrialPage, sub: int = 0) -> KernelTrial:
    """With the arrays that statements mention."""
    whole = "\n".join(page.lines)
    kept = tuple((n, a) for n, a in arrays.items() if any(f"{n}{c}" in whole for c in "[.,)"))
    return KernelTrial(work, group, rng.randrange(1000), kept, tuple(page.lines), sub)
