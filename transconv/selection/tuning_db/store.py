"""The tuning database's files: one that the user names, the user's cache, and the package's own.

Files are searched in this order, and the first row of a workload counts. The package's rows are read once
per process, when a schedule is first chosen, the user's when a workload of their group is first looked up.
Only the front end that wrote a row's text can parse it, so each registers a reader. Texts that begin with
``compute`` are computations; they are parsed here, and only when the group is one of computations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

from transconv.compute import COMPUTE, Alone, Workload, parse
from transconv.selection.tuning_db.record import (
    TuningRecord,
    mapping,
    merged,
    of_mapping,
    read_rows,
    write_rows,
)
from transconv.support import (
    Content,
    Drawer,
    TransconvError,
    knobs,
    read_named,
    replace_named,
)
from transconv.support import (
    files as keep,
)

SCHEMA = 1
LONGEST = 8 << 20  # bytes of a file of rows
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
    text = read_named(path, "a table of tuned schedules", LONGEST)
    found = read_rows(text)
    if text.strip() and not found and text.strip() != write_rows(()).strip():
        raise ValueError(f"{path} holds no row of tuned schedules; expected the columns of "
                         "transconv/data/tuned_h200.csv")
    return found


def save(path: Path, rows: Iterable[TuningRecord]) -> None:
    """Write a file of rows atomically. Raises OSError."""
    replace_named(path, write_rows(rows))


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
    return grouped(r for r in (_named(path) if path else _package())
                   if r.current and _is_compute(r.problem) is computations)


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
