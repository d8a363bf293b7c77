"""``python -m bench report``: one report, tables and plots, from the CSV files of a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from bench.environment import VERSIONS
from bench.issue_table import issues_table
from bench.run_tables import check_table, maps_table, networks_table, overhead_table
from bench.tables import counted, cpu_table, layer_table, summary_table
from transconv.tuning.table import Row, read

TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "summary": ("timing", summary_table),
    "layers": ("timing", layer_table),
    "check": ("check", check_table),
    "networks": ("networks", networks_table),
    "overhead": ("overhead", overhead_table),
    "cpu": ("cpu", cpu_table),
    "maps": ("maps", maps_table),
    "issues": ("issues", issues_table),
}


def kind_of(row: Row) -> str:
    """Which of the tables a row is for; empty if it is for none."""
    if row.get("device") == "cpu" and "ours_us" in row:
        return "cpu"  # beside oneDNN; an interpreter's times are compared with nothing
    return next(
        (
            kind
            for column, kind in (
                ("ours_us", "timing"),
                ("model", "networks"),
                ("mode", "overhead"),
                ("of_limit", "maps"),
                ("matter", "issues"),
                ("exact_err", "check"),
            )
            if column in row
        ),
        "",
    )


def main(options: Namespace) -> int:
    """Write ``report.md``, ``ratio.png`` and ``roofline.png`` to --out. Raises ValueError if there is
    nothing to report."""
    by_kind: dict[str, list[Row]] = {
        "timing": [],
        "check": [],
        "networks": [],
        "overhead": [],
        "cpu": [],
        "maps": [],
        "issues": [],
    }
    for source in options.csv:
        for row in read(Path(source)):
            if not kind_of(row):
                raise ValueError(
                    f"{source} is no table of `python -m bench`: it has the columns {' '.join(row)}"
                )
            by_kind[kind_of(row)].append(row)
    tables = {name: make(by_kind[kind]) for name, (kind, make) in TABLES.items() if by_kind[kind]}
    if not tables:
        raise ValueError(f"{', '.join(map(str, options.csv))}: there is no row to report of")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items())
    (out / "report.md").write_text(f"{provenance(by_kind)}\n\n{text}\n", encoding="utf-8")
    if by_kind["timing"]:
        from bench import plots

        plots.ratios(counted(by_kind["timing"]), out / "ratio.png")
        plots.roofline(by_kind["timing"], out / "roofline.png")
    print(tables.get("summary") or tables.get("cpu", ""))
    return 0


def provenance(by_kind: dict[str, list[Row]]) -> str:
    """What the numbers were measured with, one line."""
    rows = [r for rows in by_kind.values() for r in rows]
    versions = [{**r, "torch": r.get("versions_torch", r["torch"])} for r in rows]
    found = [sorted({r[c] for r in versions}) for c in VERSIONS]
    return "Measured on {}, torch {}, Triton {}, commit {}.".format(*(", ".join(f) for f in found))
