"""``python -m bench quantized``: whole models with quantised convolutions beside bf16.

    resnet50   inference, each kind quantised in one line; eager, folded, and compiled
    sdxl       the convolutions of SDXL's U-Net, each once, the same
    train      ResNet-50 trained on one batch in fp8 and in bf16: its losses in quantized_train.csv

Settings: ``eager`` calls the model, ``folded`` what transconv.fold makes of it, ``compiled`` what
torch.compile makes of it: for "torch" by Inductor, for the others by transconv. The kind "torch" is torch
in bf16, "bf16" transconv in bf16. A row is appended to quantized.csv as soon as it is there.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from bench.environment import VERSIONS, versions
from bench.quantized_models import COLUMNS, FUSED, KINDS, SETTINGS, inference, trained
from transconv.cli.arguments.ranges import some_of

PARTS = ("resnet50", "sdxl", "train")
TRAIN = ("step", "fp8", "bf16", *VERSIONS)
STEPS = 50


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", type=some_of(*PARTS), default=",".join(PARTS), help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--kinds", type=some_of(*KINDS), default=",".join(KINDS), help=f"of {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--settings", type=some_of(*SETTINGS), default=",".join(SETTINGS), help=f"of {', '.join(SETTINGS)}"
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, where torch computes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument(
        "--time-budget",
        type=float,
        default=float("inf"),
        metavar="S",
        help="seconds; then no way and no step starts, and what was measured is kept",
    )


def main(options: argparse.Namespace) -> int:
    """Measure; 1 if results of int8 are not the integer reference's, or a loss goes another way."""
    end = time.monotonic() + options.time_budget
    out, parts = Path(options.out), options.only.split(",")
    out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for part in (p for p in parts if p != "train"):
        rows = inference(part, options.small, options.kinds.split(","), options.settings.split(","))
        for row in until(end, rows):
            print(" ".join(f"{k}={v}" for k, v in row.items() if k not in versions()), flush=True)
            append(out / "quantized.csv", row)
            wrong += int(row["other"]) > FUSED * int(row["elements"])  # type: ignore[call-overload]
    if "train" in parts:
        with (out / "quantized_train.csv").open("w", newline="", encoding="utf-8") as file:
            lines = csv.DictWriter(file, TRAIN, lineterminator="\n")
            lines.writeheader()
            losses = []
            for step, (small, plain) in enumerate(until(end, trained(options.small, options.steps))):
                losses.append((small, plain))
                lines.writerow({"step": step, "fp8": f"{small:.4f}", "bf16": f"{plain:.4f}", **versions()})
                file.flush()
            print("losses, fp8 and bf16: " + "; ".join(f"{a:.3f} {b:.3f}" for a, b in losses), flush=True)
            wrong += bool(losses) and max(abs(a - b) for a, b in losses) > 0.15 * losses[0][1]
    return 1 if wrong else 0


def append(path: Path, row: dict[str, object]) -> None:
    """Add a row to a table, which is begun where there is none."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            lines.writeheader()
        lines.writerow(row)


Row = TypeVar("Row")


def until(end: float, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows as long as there is time; the one that is being made is finished."""
    while time.monotonic() < end and (row := next(rows, None)) is not None:
        yield row
