"""How far sums of 8-bit floats on the matrix unit are off, by length, sign and after how many terms they
move to f32: a row each in ``short_sums.csv``. A plain product by Triton, 128 x 128, against f64."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
import triton
import triton.language as tl

from bench.environment import VERSIONS, expect_gpu, versions

LENGTHS = (128, 512, 2048, 8192)
MOVED = (32, 128, 0)  # terms until a sum moves to f32; 0: never
COLUMNS = ("type", "terms", "sign", "moved_after", "rms", "largest", "mean", *VERSIONS)
SIDE = 128


@triton.jit
def product(a, b, c, K: tl.constexpr, MOVED: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.arange(0, 128)
    n = tl.arange(0, 128)
    k = tl.arange(0, 128)
    acc = tl.zeros((128, 128), tl.float32)
    for step in range(0, K // 128):
        x = tl.load(a + m[:, None] * K + (step * 128 + k)[None, :])
        y = tl.load(b + n[None, :] * K + (step * 128 + k)[:, None])
        if MOVED == 0:
            acc = tl.dot(x, y, acc)
        else:
            acc = tl.dot(x, y, acc, max_num_imprecise_acc=MOVED)
    tl.store(c + m[:, None] * 128 + n[None, :], acc)


def arguments(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def main(options: argparse.Namespace) -> int:
    """Measure on the GPU. ``rms`` is relative to the 2-norm of the answer, ``largest`` and ``mean`` to the
    sums of absolute products. Raises ValueError where there is no GPU."""
    expect_gpu("short-sums")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "short_sums.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        lines.writeheader()
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            for sign in ("both", "positive"):
                for terms in LENGTHS:
                    for row in _rows(dtype, sign, terms):
                        print(" ".join(map(str, row.values())), flush=True)
                        lines.writerow(row)
    return 0


def _rows(dtype: torch.dtype, sign: str, terms: int) -> list[dict[str, object]]:
    x, y = (torch.randn(SIDE, terms, device="cuda") for _ in range(2))
    x, y = ((t.abs() if sign == "positive" else t).to(dtype) for t in (x, y))
    want, size = x.double() @ y.double().T, x.double().abs() @ y.double().abs().T
    found: list[dict[str, object]] = []
    for moved in MOVED:
        got = torch.empty(SIDE, SIDE, device="cuda")
        product[(1,)](x, y, got, terms, moved, num_warps=4)
        off = got.double() - want
        found.append(
            {
                "type": str(dtype).removeprefix("torch."),
                "terms": terms,
                "sign": sign,
                "moved_after": moved or "never",
                "rms": f"{float(off.norm() / want.norm()):.2e}",
                "largest": f"{float((off.abs() / size).max()):.2e}",
                "mean": f"{float((off / size).mean()):.2e}",
                **versions(),
            }
        )
    return found
