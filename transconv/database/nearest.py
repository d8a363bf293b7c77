"""The database. In: a problem and rows. Out: the rows about problems most like it, with distances.

Problems are compared when they have the same taps and strides, are both dense or both grouped, and
agree in whether taps are spread out. Their distance adds up how many times each size doubles.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log2, prod

from transconv.database.rows import Row
from transconv.errors import TransconvError
from transconv.problem import ConvProblem

FEW = 16  # channels; fewer need kernels of another kind for each number
FARTHEST = 6.0  # beyond this a neighbour says nothing
OTHER_TYPE, OTHER_EPILOGUE = 0.25, 0.5  # bf16 instead of f16; another kind of epilogue


def kind(p: ConvProblem) -> tuple[object, ...]:
    """What no distance can bridge."""
    groups = "dense" if p.g == 1 else "depthwise" if p.icg == p.ocg == 1 else "grouped"
    spread = tuple(d > 1 for d in p.dilation)
    return p.k, p.stride, spread, groups, min(p.icg, FEW), min(p.ocg, FEW)


def distance(one: ConvProblem, other: ConvProblem) -> float:
    """How unlike two problems of a kind are: images and their points weigh half as much as
    channels, because a tile covers few channels and a small part of all points."""
    def sizes(p: ConvProblem) -> tuple[float, ...]:
        return p.mb * prod(p.o), p.o[-1], p.icg, p.ocg, p.g

    weights = (0.5, 0.5, 1.0, 1.0, 1.0)
    pairs = zip(sizes(one), sizes(other), weights, strict=True)
    found = sum(w * abs(log2(max(a, 1) / max(b, 1))) for a, b, w in pairs)
    return found + (OTHER_TYPE if one.dtypes != other.dtypes else 0.0)


def nearest(problem: ConvProblem, epilogue: str, rows: Iterable[Row],
            most: int = 3) -> list[tuple[float, Row, ConvProblem]]:
    """The rows about the likest problems, nearest first: (distance, row, its problem); a distance
    of 0 is this very problem and epilogue.
    ``rows`` are of one group (see ``rows.group``); those that are not readable are passed over."""
    found: list[tuple[float, Row, ConvProblem]] = []
    wanted = kind(problem)
    for row in rows:
        try:
            other = ConvProblem.parse(row.problem)
        except (TransconvError, ValueError, OverflowError):
            continue
        if kind(other) != wanted:
            continue
        away = 0.0 if other == problem else max(distance(problem, other), 0.01)
        away += OTHER_EPILOGUE if row.epilogue != epilogue else 0.0
        if away <= FARTHEST:
            found.append((away, row, other))
    return sorted(found, key=lambda x: (x[0], x[1].us))[:most]
