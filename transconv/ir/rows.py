"""A table that is asked instead of lists by hand: rows by name, and dicts made of them that stay true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar


class Named(Protocol):
    """What a row is."""

    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=Named)
T = TypeVar("T")


class Rows(dict[str, Row]):
    """Rows by name, in the order of their coming; ``add`` and ``remove`` change the made dicts, too."""

    def __init__(self, *rows: Row) -> None:
        super().__init__({row.name: row for row in rows})
        self._made: list[tuple[Callable[[Row], Any], dict[Any, Any]]] = []

    def add(self, row: Row) -> Row:
        """Add a row. ValueError for a name that is taken."""
        if row.name in self:
            raise ValueError(f"'{row.name}' is taken")
        self[row.name] = row
        for entry, made in self._made:
            if (found := entry(row)) is not None:
                made[row.name] = found
        return row

    def remove(self, name: str) -> None:
        """Take a row out. KeyError for a name that is in none."""
        del self[name]
        for _, made in self._made:
            made.pop(name, None)

    def table(self, entry: Callable[[Row], T | None], first: dict[Any, T] | None = None) -> dict[Any, T]:
        """{name: entry(row)} for the rows whose entry is not None, behind ``first``: a plain dict, in
        which rows that come or go later come and go."""
        made: dict[Any, T] = dict(first or {})
        for row in self.values():
            if (found := entry(row)) is not None:
                made[row.name] = found
        self._made.append((entry, made))
        return made
