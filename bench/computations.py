"""The computations of ``bench/computes``: checked on exact and on float data, timed beside torch and
torch.compile. A row each, in ``computations.csv``."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.environment import ROOT, VERSIONS, at_hand, versions
from transconv.compute import parse
from transconv.runtime import build_compute
from transconv.target import detect
from transconv.verify.computation import ComputationCase

FOLDER = ROOT / "bench" / "computes"
COLUMNS = ("compute", "exact", "float", "max_err", "us", "torch_us", "inductor_us", "schedule", *VERSIONS)
Tensors = dict[str, torch.Tensor]

# What a user of torch writes instead.
INSTEAD: dict[str, Callable[[Tensors], object]] = {
    "matmul": lambda t: torch.mm(t["A"], t["B"]),
    "linear_gelu": lambda t: F.gelu(torch.bmm(t["X"], t["W"].transpose(1, 2)).float() + t["V"]).half(),
    "row_sum": lambda t: t["X"].sum(1, dtype=torch.float32),
    "max_pool": lambda t: F.max_pool2d(t["x"], 3, 2, 1),
    "chain": lambda t: _chain(t["X"], t["S"], t["T"]),
}


def _chain(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.silu(x * scale + shift)
    return y, y * y


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--match", default="", help="only computations with this in their name")
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out")


def main(options: argparse.Namespace) -> int:
    """Check and time; 1 if a result is wrong."""
    rows = [row(path, options) for path in sorted(FOLDER.glob("*.txt")) if options.match in path.stem]
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "computations.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)
    return 1 if any(r[k] != "right" for r in rows for k in ("exact", "float")) else 0


def row(path: Path, options: argparse.Namespace) -> dict[str, object]:
    """One computation; on a CPU nothing is timed."""
    compute = parse(path.read_text(encoding="utf-8"))
    plan = build_compute(compute, detect())
    made: dict[str, object] = {"compute": path.stem, "schedule": str(plan.schedule), **versions()}
    for data in ("exact", "float"):
        judged = ComputationCase(compute, data).launched(plan, options.device)
        made |= {data: judged.problem or "right", "max_err": f"{judged.max_error:.3g}"}
    if options.device == "cuda":
        made |= _times(plan.launch, ComputationCase(compute, "float").tensors("cuda"), path.stem, options)
    print(" ".join(f"{k}={v}" for k, v in made.items()), flush=True)
    return made


def _times(
    ours: Callable[..., None], tensors: Tensors, name: str, options: argparse.Namespace
) -> dict[str, object]:
    from triton.testing import do_bench

    sides: dict[str, Callable[[], object]] = {
        "us": lambda: ours(**tensors),
        "torch_us": lambda: INSTEAD[name](tensors),
    }
    if not options.no_inductor:
        compiled = torch.compile(INSTEAD[name], mode="max-autotune-no-cudagraphs")
        sides["inductor_us"] = lambda: compiled(tensors)
    return {side: f"{1e3 * do_bench(call, warmup=50, rep=200):.4g}" for side, call in sides.items()}
