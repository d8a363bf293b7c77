"""The table of kernels of the kernel API beside Triton written by hand and torch."""

from __future__ import annotations

from bench.tables import geometric_mean, markdown, two_digits
from transconv.tuning.table import Row


def kernels_table(rows: list[Row]) -> str:
    """Microseconds, ratios to ours, lines, masks and the errors of both programs, a line each."""
    cells = [
        [
            r["kernel"],
            r["api_us"],
            r["triton_us"],
            r["torch_us"] or "not run",
            r["ratio"],
            f"{r['api_lines']} / {r['triton_lines']}",
            f"{r['api_masks']} / {r['triton_masks']}",
            f"{r['error']} / {r['triton_error']}",
        ]
        for r in rows
    ]
    sums = [
        f"{sum(int(r[f'api_{c}']) for r in rows)} / {sum(int(r[f'triton_{c}']) for r in rows)}"
        for c in ("lines", "masks")
    ]
    mean = two_digits(geometric_mean(float(r["ratio"]) for r in rows))
    cells.append(["geometric mean of the ratios, and sums", "", "", "", mean, *sums, ""])
    return markdown(
        [
            "kernel",
            "us",
            "Triton by hand",
            "torch",
            "Triton / ours",
            "lines",
            "masks written",
            "error (f64)",
        ],
        cells,
    )
