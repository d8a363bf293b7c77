"""Rows of the tuning database: each is the fastest schedule that tuning found for one workload.

A row is one line of a CSV file, or one object of a record in the user's cache:

    problem,direction,kind,machine,schedule,us,tried,lowering,triton

``problem``, ``direction`` and ``kind`` are a workload's text, direction and kind, ``machine`` is a target
with its number of multiprocessors. The schedule of a row is parsed, checked by ``why_not`` and its result
verified like any other, so a damaged or malicious row can cost speed but not correctness.

Also here: what records on disk are found by: texts of computations and chips, and a digest of this
package.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import math
import os
import re
from collections.abc import Container, Iterable
from dataclasses import astuple, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from transconv.compute import Compute, Reduction, Value, Workload, Write
from transconv.ir import free_vars
from transconv.support import triton_version
from transconv.target import Target

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


NAME = re.compile(r"\b[A-Za-z_]\w*\b(?!\()")  # of no function
FRACTION = re.compile(r"(?<![\w.])(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)")
TELLING = ("0.0", "1.0")  # numbers that may stand for nothing to compute


def unnamed(compute: Compute) -> str:
    """A text of all of a computation but its name and those of its tensors and values, and the fractions
    that values are computed with, on which no choice depends: blocks of a network may differ in a
    probability alone. Fractions that decide where elements lie, or whether they are read, stay. Axes keep
    their names, because schedules mention them."""
    named = [n for t in compute.tensors for n in (t.name, *t.dims)]
    named += [s.name for s in compute.steps if not isinstance(s, Write)]
    numbers = {n: f"%{i}" for i, n in enumerate(dict.fromkeys(named)) if n not in compute.sizes}
    placing = _placing(compute)
    text = "\n".join(_without_fractions(line, placing) for line in str(compute).split("\n")[1:])
    lines = NAME.sub(lambda m: numbers.get(m[0], m[0]), text)
    rest = (compute.math, compute.merge, compute.behind, compute.part, compute.does,
            [(x.name, x.role) for x in compute.axes], [str(t.layout) for t in compute.tensors])
    return f"{lines}\n{rest}"


def _placing(compute: Compute) -> set[str]:
    """The names of values that coordinates and masks depend on."""
    found = {v for view in compute.views() for d in view.dims for e in (d.coord, d.mask)
             for v in free_vars(e)}
    for step in reversed(compute.steps):
        if isinstance(step, (Value, Reduction)) and step.var in found:
            found |= free_vars(step.value)
    return {v.name for v in found}


def _without_fractions(line: str, placing: Container[str]) -> str:
    """A line, with a sign for each fraction if it computes a value that is not ``placing`` others; what a
    read fills with stays."""
    word, *rest = line.split(maxsplit=2)
    if word != "let" or rest[0] in placing:
        return line
    return FRACTION.sub(lambda m: m[0] if m[0] in TELLING else "#", line)


@functools.lru_cache(maxsize=64)
def told_by(record: Target) -> list[str]:
    """The values of a record's fields, with sets sorted, so that their text is reproducible."""
    assert is_dataclass(record)
    values = [getattr(record, f.name) for f in fields(record)]
    return [repr(sorted(map(str, v)) if isinstance(v, frozenset) else v) for v in values]


@functools.cache
def files_digest() -> str:
    """A digest of the package's source files and tables, because another version may choose other
    schedules. It uses their content, not their dates, so that a cache can be moved to another machine."""
    root = str(Path(__file__).parents[2])
    seen = hashlib.blake2b(digest_size=16)
    paths = [f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names
             if name.endswith((".py", ".csv"))]
    for path in sorted(paths):  # os.walk and open: pathlib takes twice as long
        with open(path, "rb", buffering=0) as file:
            data = file.read()
        name = path[len(root):].replace(os.sep, "/")
        seen.update(f"{name} {len(data)}\n".encode())
        seen.update(data)
    return seen.hexdigest()
