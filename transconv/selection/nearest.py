"""The tuned rows whose workloads are most similar to a given one, with distances."""

from __future__ import annotations

from collections.abc import Iterable

from transconv.compute import Workload
from transconv.selection.rows import Row

FARTHEST = 6.0  # rows at a greater distance are ignored
OTHER_EPILOGUE = 0.5  # the distance to another kind of epilogue


def nearest(workload: Workload, rows: Iterable[Row],
            most: int = 3) -> list[tuple[float, Row, Workload]]:
    """The ``most`` rows of the nearest workloads, nearest first: (distance, row, its workload). A distance
    of 0 means the same text and kind of epilogue. ``rows`` are those of one group (see
    ``Workload.group``); unreadable ones are skipped."""
    found: list[tuple[float, Row, Workload]] = []
    for row in rows:
        other = workload.like(row.problem)
        away = None if other is None else workload.distance(other)
        if other is None or away is None:
            continue
        away += OTHER_EPILOGUE if row.epilogue != workload.kind else 0.0
        if away <= FARTHEST:
            found.append((away, row, other))
    return sorted(found, key=lambda x: (x[0], x[1].us))[:most]
