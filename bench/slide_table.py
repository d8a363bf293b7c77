"""The table of shared boxes (``slide=``): the best schedule with them beside the best one without."""

from __future__ import annotations

from math import exp, log

from bench.tables import markdown, two_digits
from transconv.tuning.table import Row, number


def slide_table(rows: list[Row]) -> str:
    """A line for each problem and direction, those that gain most first, and the geometric mean."""
    groups: dict[tuple[str, str], dict[bool, float]] = {}
    for row in rows:
        if row["verdict"] == "right" and (us := number(row, "us")):
            best = groups.setdefault((row["problem"], row["direction"]), {})
            shares = "slide=" in row["schedule"]
            best[shares] = min(us, best.get(shares, us))
    both = {key: best for key, best in groups.items() if len(best) == 2}
    ratios = {key: best[False] / best[True] for key, best in both.items()}
    lines = [
        [
            f"`{problem}`",
            direction,
            f"{best[False]:.4g}",
            f"{best[True]:.4g}",
            two_digits(ratios[problem, direction]),
        ]
        for (problem, direction), best in sorted(both.items(), key=lambda x: -ratios[x[0]])
    ]
    mean = exp(sum(map(log, ratios.values())) / len(ratios)) if ratios else 1.0
    return markdown(
        ["problem", "direction", "boxes for each step [us]", "shared boxes [us]", "ratio"],
        [*lines, ["geometric mean", "", "", "", two_digits(mean)]],
    )
