"""A page of tables in the style of the other pages: one text that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transconv.report.page import environment, template_text
from transconv.version import __version__


@dataclass(frozen=True, slots=True)
class PrintedTable:
    """Cells are texts, or numbers aligned to the right; ``remarks`` are printed above."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    remarks: tuple[str, ...] = ()


def tables_page(title: str, tables: Sequence[PrintedTable], remarks: Sequence[str] = ()) -> str:
    """The page as a text of HTML that needs no other file. Cells are escaped; None is shown as a dash."""
    template = environment().get_template("tables.html.j2")
    return template.render(title=title, tables=tables, remarks=remarks, version=__version__,
                           style=template_text("style.css"), script=template_text("script.js")) + "\n"
