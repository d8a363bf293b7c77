"""Attention of one wide head, as decoders of images have it, beside torch's: a row of ``attention.csv``
for each size and side, with the time, the largest error of some queries against f64, and the memory."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import transconv
from bench.environment import VERSIONS, expect_gpu, versions
from transconv.functional import attention
from transconv.runtime.timing import Clock

COLUMNS = ("heads", "positions", "numbers", "dtype", "side", "us", "error", "mb", *VERSIONS)
# Positions and numbers of a head: SDXL's decoder at 512, 1024 and 2048, a frame of Wan's at 480p, five.
SIZES = ((1, 4096, 512), (1, 16384, 512), (1, 65536, 512), (1, 6240, 384), (5, 6240, 384))
CHECKED = 128  # queries that are computed in f64


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of operands")


def main(options: argparse.Namespace) -> int:
    """Time them; 1 if a result of ours is more than twice as far from f64 as torch's. Raises ValueError
    where there is no GPU."""
    expect_gpu("attention")
    clock, wrong, out = Clock("cuda", 90.0), 0, Path(options.out)
    transconv.config.compile = "now"  # no call is torch's while processes compile
    out.mkdir(parents=True, exist_ok=True)
    with (out / "attention.csv").open("w", newline="", encoding="utf-8") as file, torch.no_grad():
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        lines.writeheader()
        for heads, positions, numbers in SIZES:
            q, k, v = (
                torch.randn(
                    heads, 1, positions, numbers, device="cuda", dtype=getattr(torch, options.dtype)
                )
                for _ in range(3)
            )
            sides: dict[str, Callable[[], torch.Tensor]] = {
                "torch": partial(F.scaled_dot_product_attention, q, k, v),
                "transconv": partial(attention.attention, q, k, v, numbers**-0.5),
            }
            few = (slice(None), slice(None), slice(positions // 2, positions // 2 + CHECKED))
            want = F.scaled_dot_product_attention(q[few].double(), k.double(), v.double())
            errors = {side: float((call()[few] - want).abs().max()) for side, call in sides.items()}
            wrong += errors["transconv"] > 2 * errors["torch"]
            made = {side: (lambda i, call=call: call) for side, call in sides.items()}
            times = clock.compare(made, 4 * q.numel() * q.itemsize)
            for side, call in sides.items():
                row = {
                    "heads": heads,
                    "positions": positions,
                    "numbers": numbers,
                    "dtype": options.dtype,
                    "side": side,
                    "us": f"{times[side].us:.5g}",
                    "error": f"{errors[side]:.3g}",
                    "mb": f"{taken(call) / 1e6:.4g}",
                    **versions(),
                }
                print(" ".join(map(str, row.values())), flush=True)
                lines.writerow(row)
            file.flush()
    return int(wrong > 0)


def taken(call: Callable[[], torch.Tensor]) -> int:
    """Bytes of memory that a call takes beyond what was there, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
