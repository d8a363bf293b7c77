"""The tuned rows whose workloads are most similar to a given one, with distances."""

from __future__ import annotations

from collections.abc import Iterable

from transconv.compute import Workload
from transconv.selection.tuning_db.record import TuningRecord

FARTHEST = 6.0  # rows at a greater distance are ignored
OTHER_KIND = 0.5  # the distance to what does something else to its sums


def nearest(workload: Workload, rows: Iterable[TuningRecord],
            most: int = 3) -> list[tuple[float, TuningRecord, Workload]]:
    """The rows about the likest workloads, nearest first: (distance, row, its workload); a distance
    of 0 is this very text and kind.
    ``rows`` are of one group (see ``Workload.group``); those that are not readable are passed over."""
    found: list[tuple[float, TuningRecord, Workload]] = []
    for row in rows:
        other = workload.like(row.problem)
        away = None if other is None else workload.distance(other)
        if other is None or away is None:
            continue
        away += OTHER_KIND if row.kind != workload.kind else 0.0
        if away <= FARTHEST:
            found.append((away, row, other))
    return sorted(found, key=lambda x: (x[0], x[1].us))[:most]
