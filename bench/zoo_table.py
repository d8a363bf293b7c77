"""Rows of ``zoo.csv`` as a Markdown table."""

from __future__ import annotations

from bench.tables import geometric_mean, markdown, two_digits
from transconv.tuning.table import Row, number

HEAD = (
    "model",
    "results",
    "RMSE of eager's",
    "torch ms",
    "torch.compile ms",
    "transconv ms",
    "torch.compile / ours",
    "the same of the GPU's time",
    "kernels",
    "torch's",
)


def zoo_table(rows: list[Row]) -> str:
    """A line for each model, the smallest ratio of torch.compile's time to ours first, then what was not
    timed; the geometric means of the ratios last. ``torch's``: regions that torch computes."""
    found = sorted(((_ratio(r, ""), r) for r in rows), key=lambda pair: (pair[0] is None, pair[0] or 0.0))
    cells = [
        [
            r["model"],
            r["error"][:40] or r["verdict"],
            two_digits(_over(r, "transconv_rmse", "eager_rmse")),
            *(_ms(r, side) for side in ("eager", "inductor", "transconv")),
            two_digits(ratio),
            two_digits(_ratio(r, "gpu_")),
            _kernels(r),
            r["regions"] or "-",
        ]
        for ratio, r in found
    ]
    means = []
    for part in ("", "gpu_"):
        ratios = [x for r in rows if (x := _ratio(r, part))]
        means.append(two_digits(geometric_mean(ratios)) if len(ratios) > 1 else "")
    if any(means):
        cells.append(["geometric mean", *[""] * 5, *means, "", ""])
    return markdown([*HEAD], cells)


def _over(row: Row, one: str, other: str) -> float | None:
    a, b = number(row, one), number(row, other)
    return a / b if a is not None and b else None


def _ratio(row: Row, part: str) -> float | None:
    return _over(row, f"inductor_{part}ms", f"transconv_{part}ms")


def _ms(row: Row, side: str) -> str:
    found = number(row, f"{side}_ms")
    return "-" if found is None else f"{found:.3g}"


def _kernels(row: Row) -> str:
    return " → ".join(row[f"{side}_kernels"] or "-" for side in ("eager", "inductor", "transconv"))
