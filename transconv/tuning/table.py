"""CSV files that grow row by row, so that a repeated run skips the rows they have."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transconv.support import read_named

Row = dict[str, Any]


class CsvTable:
    """A CSV file with fixed columns. Rows are written at once, so an interrupted run keeps them.
    ``former``: the names that columns had in older files, which are rewritten with today's. Raises
    ValueError for a file with other columns, which would be lost."""

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        key: Sequence[str],
        former: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.columns, self.key = path, tuple(columns), tuple(key)
        there = header(path) if path.exists() else ()
        names = renamed(there, former or {})
        found = tuple(names.values())
        if others := [c for c in found if c not in self.columns]:
            raise ValueError(
                f"{path} is another table, with {', '.join(others[:4])} among its columns; "
                f"expected some of {' '.join(self.columns)}"
            )
        self.rows = read(path, former) if found else []
        self.done = {self._key(row) for row in self.rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        if found and there != self.columns:
            self._rewrite()  # made by an older version: missing columns become empty

    def _key(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(k, "")) for k in self.key)

    def has(self, row: Row) -> bool:
        """Whether a row of this key is there already."""
        return self._key(row) in self.done

    def add(self, row: Row) -> None:
        """Append a row; columns it does not have stay empty, others are dropped."""
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        clean = {c: _text(row.get(c, "")) for c in self.columns}
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(clean)
        self.rows.append(clean)
        self.done.add(self._key(row))

    def drop(self, unwanted: Iterable[str], column: str, among: Mapping[str, str] | None = None) -> int:
        """Remove rows whose column starts with one of these words, to run them again. ``among``: what
        other columns have to be."""
        words, more = tuple(unwanted), (among or {}).items()
        kept = [r for r in self.rows if not r[column].startswith(words) or any(r[c] != v for c, v in more)]
        dropped = len(self.rows) - len(kept)
        if dropped:
            self.rows = kept
            self.done = {self._key(row) for row in kept}
            self._rewrite()
        return dropped

    def _rewrite(self) -> None:
        rows, self.rows = self.rows, []
        self.path.unlink()
        for row in rows:
            self.add(row)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def header(path: Path) -> tuple[str, ...]:
    """The columns of a CSV file; none of an empty one. Raises ValueError if it is no text."""
    return tuple(_lines(path).fieldnames or ())


def renamed(header: Sequence[str], former: Mapping[str, str]) -> dict[str, str]:
    """The columns of a file, each with its name of today. ``former``: names of today by those of older
    files; a file with a name that is none of today's is an older one."""
    older = any(c in former and c not in former.values() for c in header)
    return {c: former.get(c, c) if older else c for c in header}


def read(path: Path, former: Mapping[str, str] | None = None) -> list[Row]:
    """The rows of a CSV file, as text, missing cells empty; ``former``: see ``renamed``. Raises ValueError
    if it is no text."""
    try:
        lines = _lines(path)
        names = renamed(lines.fieldnames or (), former or {})
        return [{names[k]: v or "" for k, v in row.items() if k is not None} for row in lines]
    except csv.Error as error:
        raise ValueError(f"{path}: {error}; expected a CSV file") from error


def _lines(path: Path) -> csv.DictReader[str]:
    found = csv.DictReader(io.StringIO(read_named(path, "a CSV file"), newline=""))
    try:
        _ = found.fieldnames  # which reads the first line
    except csv.Error as error:
        raise ValueError(f"{path}: {error}; expected a CSV file") from error
    return found


def number(row: Row, column: str) -> float | None:
    """A cell as a number, None if it is empty or no number."""
    try:
        return float(row.get(column) or "")
    except ValueError:
        return None
