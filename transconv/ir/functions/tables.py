"""Tables of rows by name, and dicts derived from them that stay up to date."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Protocol, TypeVar


class NamedRow(Protocol):
    """A row of a table: anything with a name."""

    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=NamedRow)
T = TypeVar("T")


class RowTable(dict[str, Row]):
    """Rows by name, in the order in which they were added. ``add`` and ``remove`` also update the dicts
    that ``table`` has made."""

    def __init__(self, *rows: Row) -> None:
        super().__init__({row.name: row for row in rows})
        self._first = dict(self)
        self._made: list[tuple[Callable[[Row], Any], Callable[[Row], Any], dict[Any, Any]]] = []

    def add(self, row: Row) -> Row:
        """Add a row and return it. ValueError for a name that is taken."""
        if row.name in self:
            raise ValueError(f"'{row.name}' is taken")
        self[row.name] = row
        for entry, key, made in self._made:
            if (found := entry(row)) is not None:
                made[key(row)] = found
        return row

    def first(self, row: Row) -> Row:
        """The first row of this name that was asked for: this one, unless there was another."""
        return self._first.setdefault(row.name, row)

    def remove(self, name: str) -> None:
        """Remove a row. KeyError for an unknown name."""
        row = self.pop(name)
        for entry, key, made in self._made:
            if entry(row) is not None:
                made.pop(key(row), None)

    def table(self, entry: Callable[[Row], T | None], first: dict[Any, T] | None = None,
              key: Callable[[Row], Any] = attrgetter("name")) -> dict[Any, T]:
        """``first``, then {key(row): entry(row)} for the rows whose entry is not None: a plain dict that
        rows added or removed later are added to or removed from. ``key`` is called only for rows with an
        entry."""
        made: dict[Any, T] = dict(first or {})
        for row in self.values():
            if (found := entry(row)) is not None:
                made[key(row)] = found
        self._made.append((entry, key, made))
        return made
