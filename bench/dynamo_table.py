"""Rows of ``dynamo.csv`` as Markdown tables: how often each compiler passes, and its speedups."""

from __future__ import annotations

from collections.abc import Iterable

from bench.tables import geometric_mean, markdown, two_digits
from transconv.tuning.table import Row, number

SIDES = ("transconv", "inductor")
PASSES = ("pass", "pass_due_to_skip", "timed")
Subject = tuple[str, str, str, str, str]


def fails(row: Row) -> bool:
    """Whether a compiler failed; a model that eager torch cannot run says nothing of it."""
    return bool(row["status"]) and row["status"] not in PASSES and not without_eager(row)


def without_eager(row: Row) -> bool:
    """Whether the runner had nothing to compare with."""
    return row["status"].startswith(("eager", "model_fail"))


def by_subject(rows: Iterable[Row]) -> dict[Subject, dict[str, Row]]:
    """The rows of each compiler for a model in a suite, phase, type and with flags, for both modes."""
    found: dict[Subject, dict[str, Row]] = {}
    for r in rows:
        subject = (r["suite"], r["model"], r["phase"], r["dtype"], r["flags"])
        found.setdefault(subject, {})[f"{r['side']} {r['mode']}"] = r
    return found


def lost(rows: Iterable[Row]) -> list[Row]:
    """Rows of ours that fail where Inductor's do not."""
    return [
        sides[f"transconv {mode}"]
        for sides in by_subject(rows).values()
        for mode in ("accuracy", "performance")
        if {f"transconv {mode}", f"inductor {mode}"} <= sides.keys()
        and (sides[f"transconv {mode}"]["error"] or fails(sides[f"transconv {mode}"]))
        and sides[f"inductor {mode}"]["status"] in PASSES
    ]


def dynamo_table(rows: list[Row]) -> str:
    """A line for each suite, phase and type, ours / Inductor's: how many models pass, of those that eager
    torch runs; geometric means over the models that both have timed."""
    groups: dict[tuple[str, str], list[dict[str, Row]]] = {}
    for (suite, _, *what), sides in by_subject(rows).items():
        groups.setdefault((suite, " ".join(filter(None, what))), []).append(sides)
    return markdown(
        [
            "suite",
            "what",
            "pass, ours / Inductor's",
            "models timed",
            "speedup over eager",
            "first calls s",
            "eager's peak memory / own",
        ],
        ([*key, *_cells(found)] for key, found in groups.items()),
    )


def _cells(found: list[dict[str, Row]]) -> list[str]:
    passed, both = [], [s for s in found if all(_timed(s, side) for side in SIDES)]
    for side in SIDES:
        judged = [r for s in found if (r := s.get(f"{side} accuracy")) and not without_eager(r)]
        passed.append(f"{sum(r['status'] in PASSES for r in judged)} of {len(judged)}")
    means = (
        [two_digits(geometric_mean(_numbers(both, side, column))) for side in SIDES]
        for column in ("speedup", "compile_s", "compression")
    )
    return [" / ".join(passed), str(len(both)), *map(" / ".join, means)]


def _timed(sides: dict[str, Row], side: str) -> bool:
    return sides.get(f"{side} performance", {}).get("status") == "timed"


def _numbers(found: list[dict[str, Row]], side: str, column: str) -> list[float]:
    return [x for s in found if (x := number(s[f"{side} performance"], column)) and x > 0]


def runner_tables(rows: list[Row]) -> str:
    """Both tables."""
    return f"{dynamo_table(rows)}\n\n{models_table(rows)}"


def models_table(rows: list[Row]) -> str:
    """A line for each model: what the runner says of each compiler; the least gain over Inductor first."""
    lines = []
    for (suite, model, phase, dtype, flags), sides in by_subject(rows).items():
        speeds = [number(sides.get(f"{s} performance", {}), "speedup") or None for s in SIDES]
        ratio = speeds[0] / speeds[1] if speeds[0] and speeds[1] else None
        words = [_word(sides.get(f"{s} accuracy")) for s in SIDES]
        what = " ".join(filter(None, (phase, dtype, flags)))
        lines.append((ratio or 0.0, [model, suite, what, *words, *map(two_digits, (*speeds, ratio))]))
    return markdown(
        [
            "model",
            "suite",
            "what",
            "accuracy, ours",
            "Inductor's",
            "speedup over eager, ours",
            "Inductor's",
            "ours / Inductor's",
        ],
        (cells for _, cells in sorted(lines, key=lambda x: (x[0] == 0.0, x[0]))),
    )


def _word(row: Row | None) -> str:
    return "not run" if row is None else row["status"] or row["error"][:40]
