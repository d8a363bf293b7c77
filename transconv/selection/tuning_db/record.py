"""Rows of the tuning database: each is the fastest schedule that tuning found for one workload.

A row is one line of a CSV file, or one object of a record in the user's cache:

    problem,direction,kind,machine,schedule,us,tried,lowering,triton

``problem``, ``direction`` and ``kind`` are a workload's text, direction and kind, ``machine`` is a target
with its number of multiprocessors. The schedule of a row is parsed, checked by ``why_not`` and its result
verified like any other, so a damaged or malicious row can cost speed but not correctness.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any

from transconv.compute import Workload
from transconv.target import Target, triton_version

# The generation of kernels: raise it when the kernels of schedules change in speed. Rows of other
# generations, and of other minor versions of Triton, are ignored.
LOWERING = 1
LONGEST, PROBLEM = 1000, 1 << 14  # characters of a field, and of a workload's text


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The fastest of ``tried`` schedules for a workload on a machine, which took ``us`` microseconds.
    Texts are parsed when rows of their group are needed."""

    problem: str
    direction: str
    kind: str
    machine: str
    schedule: str
    us: float
    tried: int
    lowering: int
    triton: str

    @property
    def current(self) -> bool:
        """Whether it was measured with kernels of the current generation."""
        return self.lowering == LOWERING and _same_triton(self.triton, triton_version())

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Workload and machine; of two rows with one key the newer one counts."""
        return self.problem, self.direction, self.kind, self.machine


DIGITS = "%.6g"
COLUMNS = tuple(f.name for f in fields(TuningRecord))


def _same_triton(one: str, other: str) -> bool:
    """Whether major and minor versions are equal. True if no Triton is installed: nothing is launched."""
    return not other or one.split(".")[:2] == other.split(".")[:2]


def make(workload: Workload, target: Target, schedule: str, us: float, tried: int) -> TuningRecord:
    """A row of a measurement with this version; the time is rounded to the digits of a file."""
    return TuningRecord(workload.text, workload.direction, workload.kind, machine(target), schedule,
               float(DIGITS % us), tried, LOWERING, triton_version())


def machine(target: Target) -> str:
    """The chip and its number of multiprocessors: ``sm_90x132``."""
    return f"{target.name}x{target.sms}"


# -- text ------------------------------------------------------------------------------------------


def read_rows(text: str) -> list[TuningRecord]:
    """The rows of a CSV text, without invalid lines; none if the header is another."""
    if "\0" in text:
        return []
    try:
        return [row for found in csv.DictReader(io.StringIO(text)) if (row := of_mapping(found))]
    except csv.Error:
        return []


def of_mapping(found: Any) -> TuningRecord | None:
    """A row from a mapping of its columns; None if one is missing or invalid."""
    try:
        if set(found) != {*COLUMNS}:
            return None
        if any(len(str(found[c])) > (PROBLEM if c == "problem" else LONGEST) for c in COLUMNS):
            return None
        texts = {c: str(found[c]) for c in COLUMNS}
        numbers = {"us": float(texts["us"]), "tried": int(texts["tried"]),
                   "lowering": int(texts["lowering"])}
        row = TuningRecord(**{**texts, **numbers})  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError):
        return None
    return row if math.isfinite(row.us) and row.us > 0 else None


def write_rows(rows: Iterable[TuningRecord]) -> str:
    """The CSV text of rows, sorted by key, so that versions of a file can be compared."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=lambda r: r.key):
        writer.writerow(DIGITS % x if isinstance(x, float) else x for x in astuple(row))
    return out.getvalue()


def mapping(row: TuningRecord) -> dict[str, Any]:
    """The row as a JSON object."""
    return dict(zip(COLUMNS, astuple(row), strict=True))


def merged(old: Iterable[TuningRecord], new: Iterable[TuningRecord]) -> list[TuningRecord]:
    """All rows, one per key; new rows replace old ones."""
    return list({row.key: row for row in (*old, *new)}.values())
