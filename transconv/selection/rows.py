"""Rows of the tuning database: each is the fastest schedule that tuning found for one workload.

A row is one line of a CSV file, or one object of a record in the user's cache:

    problem,prop,epilogue,machine,schedule,us,tried,lowering,triton

``problem``, ``prop`` and ``epilogue`` are a workload's text, direction and kind, ``machine`` is a target
with its multiprocessors.
Rows are hints: whatever they say, a schedule is parsed, judged by ``why_not`` and proven like any
other, so a damaged or malicious row costs speed and nothing else.
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

# The generation of kernels: raise it when the same schedule text comes to mean kernels of another
# speed. Rows of other generations, and of another minor version of Triton, are not read.
LOWERING = 1
LONGEST, PROBLEM = 1000, 1 << 14  # characters of a field, and of a workload's text


@dataclass(frozen=True, slots=True)
class Row:
    """The fastest of ``tried`` schedules for a workload on a machine; ``us``
    microseconds. All are text, which is parsed when rows of its group are needed."""

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
        """What a row is about; of two rows with one key the newer holds."""
        return self.problem, self.direction, self.kind, self.machine


DIGITS = "%.6g"
HEADINGS = {"direction": "prop", "kind": "epilogue"}  # what files call a field, where they differ
COLUMNS = {HEADINGS.get(f.name, f.name): f.name for f in fields(Row)}
FORMER = {"config": "schedule"}  # columns under the names that older files have


def _same_triton(one: str, other: str) -> bool:
    """Same major and minor version. Where none is installed, nothing is launched either."""
    return not other or one.split(".")[:2] == other.split(".")[:2]


def make(workload: Workload, target: Target, schedule: str, us: float, tried: int) -> Row:
    """A row of what was measured here and now; the time with as many digits as a file keeps."""
    return Row(workload.text, workload.direction, workload.kind, machine(target), schedule,
               float(DIGITS % us), tried, LOWERING, triton_version())


def machine(target: Target) -> str:
    """The chip and how many multiprocessors it has: ``sm_90x132``."""
    return f"{target.name}x{target.sms}"


# -- text ------------------------------------------------------------------------------------------


def read_rows(text: str) -> list[Row]:
    """The rows of a CSV text; lines that are no rows are left out, and of another header all."""
    if "\0" in text:
        return []
    try:
        return [row for found in csv.DictReader(io.StringIO(text)) if (row := of_mapping(found))]
    except csv.Error:
        return []


def of_mapping(found: Any) -> Row | None:
    """A row from a mapping of its columns; None where one is missing or makes no sense."""
    try:
        found = {FORMER.get(name, name): value for name, value in found.items()}
        if set(found) != {*COLUMNS}:
            return None
        if any(len(str(found[c])) > (PROBLEM if c == "problem" else LONGEST) for c in COLUMNS):
            return None
        texts = {field: str(found[c]) for c, field in COLUMNS.items()}
        numbers = {"us": float(texts["us"]), "tried": int(texts["tried"]),
                   "lowering": int(texts["lowering"])}
        row = Row(**{**texts, **numbers})  # type: ignore[arg-type]
    except (AttributeError, TypeError, ValueError):
        return None
    return row if math.isfinite(row.us) and row.us > 0 else None


def write_rows(rows: Iterable[Row]) -> str:
    """The CSV text of rows, sorted, so that two versions of a file can be compared."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in sorted(rows, key=lambda r: r.key):
        writer.writerow(DIGITS % x if isinstance(x, float) else x for x in astuple(row))
    return out.getvalue()


def mapping(row: Row) -> dict[str, Any]:
    """The row as a JSON object."""
    return dict(zip(COLUMNS, astuple(row), strict=True))


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """All rows, each key once: the new where both have it."""
    return list({row.key: row for row in (*old, *new)}.values())
