"""Rows of ``graphs.csv`` as a Markdown table."""

from __future__ import annotations

import re

from bench.tables import geometric_mean, markdown, two_digits
from transconv.tuning.table import Row, number

SIDES = ("eager", "inductor", "max-autotune", "transconv", "reduce-overhead", "cudagraphs")
"""The last two are recorded as CUDA graphs: torch's compiler and ours."""
HEAD = (
    "model",
    "torch ms",
    "torch.compile ms",
    "max-autotune ms",
    "transconv ms",
    "reduce-overhead ms",
    "transconv, CUDA graphs ms",
    "torch.compile / ours",
    "kernels",
    "copies",
    "peak of eager's",
    "RMSE of eager's",
    "losses apart",
)


def graphs_table(rows: list[Row]) -> str:
    """A line for each model: torch's and its compiler's times in their better layouts and ours; the ratio
    to the faster of torch's compilers, without CUDA graphs; kernels and copies, eager's then ours; peak
    memory and errors as shares of eager's; how far losses of training are from eager's, torch's
    compiler's then ours."""
    cells, ratios = [], []
    for model in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == model]
        best = {side: _fastest(own, side) for side in SIDES}
        times = {side: number(r, "ms") if r else None for side, r in best.items()}
        others = [t for side in ("inductor", "max-autotune") if (t := times[side])]
        ratio = min(others) / times["transconv"] if others and times["transconv"] else None
        ratios += [ratio] if ratio else []
        eager, ours = best["eager"], best["transconv"]
        apart = " / ".join(_apart(best[side], eager) for side in ("inductor", "transconv"))
        cells.append(
            [
                model,
                *(_time(best[side], own, side) for side in best),
                two_digits(ratio),
                *(f"{_cell(eager, c)} → {_cell(ours, c)}" for c in ("kernels", "copies")),
                *(_share(ours, eager, c) for c in ("peak_mb", "rmse")),
                apart,
            ]
        )
    if len(ratios) > 1:
        cells.append(
            ["geometric mean", *[""] * 6, two_digits(geometric_mean(ratios)), *[""] * (len(HEAD) - 8)]
        )
    return markdown([*HEAD], cells, keys=1, cuts=(8,))


def _fastest(rows: list[Row], side: str) -> Row | None:
    own = [(t, r) for r in rows if r["side"] == side and (t := number(r, "ms"))]
    return min(own, key=lambda x: x[0])[1] if own else None


def _time(row: Row | None, rows: list[Row], side: str) -> str:
    if row is None:
        return next((r["error"][:40] for r in rows if r["side"] == side and r["error"]), "not run")
    return f"{number(row, 'ms'):.4g} ({row['layout']})"


def _cell(row: Row | None, column: str) -> str:
    return "-" if row is None else str(row[column] or "-")


def _share(row: Row | None, of: Row | None, column: str) -> str:
    one, two = (number(r, column) if r else None for r in (row, of))
    return two_digits(one / two) if one is not None and two else "-"


def _apart(row: Row | None, of: Row | None) -> str:
    """The largest difference of losses, relative to the other's."""
    lists = [[float(x) for x in r["losses"].split()] if r else [] for r in (row, of)]
    if not all(lists):
        return "-"
    return f"{max(abs(a - b) / abs(b) for a, b in zip(*lists, strict=True)):.1e}"


def models_table(rows: list[Row]) -> str:
    """A line for each GPU and kind of model: how many, the geometric mean and the least of torch.compile's
    time over ours, by the clock and of the GPU's time. ``rows``: of ``graphs.csv`` and of ``zoo.csv``."""
    found: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for row in rows:
        if "inductor_ms" in row:
            of, sides = "classifiers, segmentation, video: inference", _sides_of_zoo(row)
        else:
            own = [r for r in rows if r["model"] == row["model"] and r["device"] == row["device"]]
            if row is not own[0] or "side" not in row:
                continue
            training = row["what"] == "training"
            of = "training steps" if training else "autoencoders of image and video: inference"
            sides = [
                (number(r, "ms"), number(r, "gpu_ms")) if (r := _fastest(own, side)) else (None, None)
                for side in ("inductor", "transconv")
            ]
        (theirs, their_gpu), (ours, our_gpu) = sides
        if theirs and ours and their_gpu and our_gpu:
            found.setdefault((of, str(row["device"])), []).append(
                (row["model"], theirs / ours, their_gpu / our_gpu)
            )
    cells = []
    for (of, device), ratios in sorted(found.items()):
        least = min(ratios, key=lambda x: x[1])
        cells.append(
            [
                of,
                re.sub(r"^NVIDIA_(\w+?)(_.*)?$", r"\1", device),
                str(len(ratios)),
                two_digits(geometric_mean([x[1] for x in ratios])),
                f"{least[1]:.2f} `{least[0]}`",
                two_digits(geometric_mean([x[2] for x in ratios])),
                str(sum(x[1] < 1 for x in ratios)),
            ]
        )
    return markdown(
        ["models", "GPU", "timed", "torch.compile / ours", "worst case", "on the GPU", "slower"], cells
    )


def _sides_of_zoo(row: Row) -> list[tuple[float | None, float | None]]:
    return [
        (number(row, f"{side}_ms"), number(row, f"{side}_gpu_ms")) for side in ("inductor", "transconv")
    ]
