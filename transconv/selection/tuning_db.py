"""The tuning database: rows, each the fastest schedule that tuning found for one workload, and their
files.

A row is one line of a CSV file, or one object of a record in the user's cache:

    problem,direction,kind,machine,schedule,us,tried,lowering,triton

``problem``, ``direction`` and ``kind`` are a workload's text, direction and kind, ``machine`` is a target
with its number of multiprocessors. The schedule of a row is parsed, checked by ``why_not`` and its result
verified like any other, so a damaged or malicious row can cost speed but not correctness.

Records on disk are found by texts of computations and chips, and a digest of this package. Files are one
that the user names, the user's cache, and the package's own. They are searched in this order, and the
first row of a workload counts. The package's rows are read once per process, when a schedule is first
chosen, the user's when a workload of their group is first looked up. Only the front end that wrote a row's
text can parse it, so each registers a reader. Texts that begin with ``compute`` are computations; they are
parsed here, and only when the group is one of computations."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import math
import os
import re
import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import astuple, dataclass, fields, is_dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from transconv.compute import COMPUTE, Alone, Compute, Reduction, Value, Workload, Write, parse
from transconv.ir import free_vars
from transconv.support import Content, Drawer, TransconvError, knobs, triton_version
from transconv.support import files as keep
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
    return TuningRecord(
        workload.text,
        workload.direction,
        workload.kind,
        machine(target),
        schedule,
        float(DIGITS % us),
        tried,
        LOWERING,
        triton_version(),
    )


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
        numbers = {
            "us": float(texts["us"]),
            "tried": int(texts["tried"]),
            "lowering": int(texts["lowering"]),
        }
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
DIMS, DIM = re.compile(r"^ *tensor .*$", re.MULTILINE), re.compile(r"\b[A-Za-z_]\w*=")
FRACTION = re.compile(r"(?<![\w.])(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+)")
TELLING = ("0.0", "1.0")  # numbers that may stand for nothing to compute


def unnamed(compute: Compute) -> str:
    """A text of all of a computation but its name and those of its tensors and values, and the fractions
    that values are computed with, on which no choice depends: blocks of a network may differ in a
    probability alone. Fractions that decide where elements lie, or whether they are read, stay. Axes keep
    their names, because schedules mention them."""
    named = [t.name for t in compute.tensors]
    named += [s.name for s in compute.steps if not isinstance(s, Write)]
    numbers = {n: f"%{i}" for i, n in enumerate(dict.fromkeys(named)) if n not in compute.sizes}
    placing = _placing(compute)
    text = "\n".join(_without_fractions(line, placing) for line in str(compute).split("\n")[1:])
    text = DIMS.sub(lambda m: DIM.sub("", m[0]), text)
    lines = NAME.sub(lambda m: numbers.get(m[0], m[0]), text)
    rest = (
        compute.math,
        compute.merge,
        compute.behind,
        compute.part,
        compute.does,
        [(x.name, x.role) for x in compute.axes],
        [str(t.layout) for t in compute.tensors],
    )
    return f"{lines}\n{rest}"


def _placing(compute: Compute) -> set[str]:
    """The names of values that coordinates and masks depend on."""
    found = {
        v for view in compute.views() for d in view.dims for e in (d.coord, d.mask) for v in free_vars(e)
    }
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
    root = str(keep.PACKAGE)
    seen = hashlib.blake2b(digest_size=16)
    paths = [
        f"{folder}/{name}"
        for folder, _, names in os.walk(root)
        for name in names
        if name.endswith((".py", ".csv"))
    ]
    for path in sorted(paths):  # os.walk and open: pathlib takes twice as long
        with open(path, "rb", buffering=0) as file:
            data = file.read()
        name = path[len(root) :].replace(os.sep, "/")
        seen.update(f"{name} {len(data)}\n".encode())
        seen.update(data)
    return seen.hexdigest()


SCHEMA = 1
LONGEST_FILE = 8 << 20  # bytes of a file of rows
DRAWER = Drawer("tuned", SCHEMA)

Groups = dict[str, list[TuningRecord]]
Reader = Callable[[str, str, str], Workload | None]


class _Sources:
    """Where rows come from: the readers of front ends, and rows in place of all of the user's."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self.adopted: Groups | None = None


_lock = threading.Lock()
_sources = _Sources()


def register_reader(read: Reader) -> Reader:
    """Register a function from a row's text, direction and epilogue to a workload, or to None if they are
    not those of its front end. Returns the function."""
    with _lock:
        _sources.readers.append(read)
        _of_file.cache_clear()  # they may have rows that only this reader can parse
    return read


def rows_of(name: str) -> list[TuningRecord]:
    """The rows of a group, one per key; none with TRANSCONV_TUNED=0."""
    if knobs.tuned() == "0":
        return []
    with _lock:
        return _first_of_each(_of_user(name) + _of_file("", COMPUTE in name).get(name, []))


def users_rows(name: str) -> list[TuningRecord] | None:
    """The rows of a group but for the package's, none of which is parsed; None with TRANSCONV_TUNED=0."""
    if knobs.tuned() == "0":
        return None
    with _lock:
        return _first_of_each(_of_user(name))


def remember(rows: Iterable[TuningRecord]) -> int:
    """Add rows to the user's cache; other processes may do so at the same time. Returns how many were
    written (none if the cache folder is not trusted)."""
    kept = 0
    for name, news in grouped(rows).items():
        DRAWER.update(name, partial(_with_rows, news))
        on_disk = {r.key: r for r in _read(DRAWER.get(name))}
        kept += sum(on_disk.get(r.key) == r for r in news)
    forget()
    return kept


def _with_rows(news: list[TuningRecord], old: Content | None) -> Content:
    return {"rows": [mapping(r) for r in merged(_read(old), news)]}


def all_of_user() -> list[TuningRecord]:
    """The current rows of the file that the user names and of the user's cache, of all groups, one per
    key. None with TRANSCONV_TUNED=0."""
    switch = knobs.tuned()
    if switch == "0":
        return []
    with _lock:
        if _sources.adopted is not None:
            return [row for group in _sources.adopted.values() for row in group]
        named = [] if switch == "1" else _named(switch)
        kept = [row for _, content in DRAWER.items() for row in _read(content)]
        return _first_of_each(row for row in (*named, *kept) if row.current)


def adopt(rows: Iterable[TuningRecord] | None) -> None:
    """Let this process use these rows in place of those of ``all_of_user``; None ends that."""
    with _lock:
        _sources.adopted = None if rows is None else grouped(rows)


def load(path: Path) -> list[TuningRecord]:
    """The rows of a file, of all versions; none if there is no file. Raises ValueError for a file without
    rows, OSError if it cannot be read."""
    if not path.exists():
        return []
    text = keep.read_named(path, "a table of tuned schedules", LONGEST_FILE)
    found = read_rows(text)
    if text.strip() and not found and text.strip() != write_rows(()).strip():
        raise ValueError(
            f"{path} holds no row of tuned schedules; expected the columns of "
            "transconv/data/tuned_h200.csv"
        )
    return found


def save(path: Path, rows: Iterable[TuningRecord]) -> None:
    """Write a file of rows atomically. Raises OSError."""
    keep.replace_named(path, write_rows(rows))


def forget() -> None:
    """Clear what was read, so that files are read again."""
    with _lock:
        _records.cache_clear()
        _of_file.cache_clear()


def _of_user(name: str) -> list[TuningRecord]:
    """The rows of a group in the file that the user names, then those in the user's cache."""
    if _sources.adopted is not None:
        return _sources.adopted.get(name, [])
    switch = knobs.tuned()
    return ([] if switch == "1" else _of_file(switch, COMPUTE in name).get(name, [])) + _records(name)


@cache
def _records(name: str) -> list[TuningRecord]:
    return [r for r in _read(DRAWER.get(name)) if r.current]


def _first_of_each(rows: Iterable[TuningRecord]) -> list[TuningRecord]:
    """The first row of each key."""
    seen: dict[tuple[str, ...], TuningRecord] = {}
    for row in rows:
        seen.setdefault(row.key, row)
    return list(seen.values())


def _read(content: Content | None) -> list[TuningRecord]:
    """The rows of a record of the user's cache."""
    listed = content.get("rows") if content else None
    return [row for x in listed if (row := of_mapping(x))] if isinstance(listed, list) else []


@cache
def _of_file(path: str, computations: bool) -> Groups:
    """The current rows of a file (the package's, if ``path`` is empty), by group: those of computations,
    or all others."""
    return grouped(
        r
        for r in (_named(path) if path else _package())
        if r.current and _is_compute(r.problem) is computations
    )


def _is_compute(text: str) -> bool:
    return text.startswith("compute ")


def workload_of(text: str, direction: str = "", behind: str = "") -> Workload | None:
    """The workload of a row's texts; None if no front end can parse them."""
    if _is_compute(text):
        try:
            return Alone(parse(text))
        except (TransconvError, ValueError, RecursionError):
            return None
    return next((w for read in _sources.readers if (w := read(text, direction, behind))), None)


def _named(path: str) -> list[TuningRecord]:
    try:
        return load(Path(path))
    except (OSError, ValueError) as error:
        keep.tell(path, f"is not used: {error}")
        return []


def _package() -> list[TuningRecord]:
    found: list[TuningRecord] = []
    for place in sorted(files("transconv").joinpath("data").iterdir(), key=lambda p: p.name):
        if place.name.startswith("tuned_") and place.name.endswith(".csv"):
            found += read_rows(place.read_text(encoding="utf-8"))
    return found


def grouped(rows: Iterable[TuningRecord]) -> Groups:
    """Rows by group, without those that no front end can parse."""
    found: Groups = {}
    for row in rows:
        about = workload_of(row.problem, row.direction)
        if about is not None:
            found.setdefault(about.group(row.machine), []).append(row)
    return found
