"""``python -m bench graph-checks``: what the comparison of a graph's first results with torch's own
operators adds to the first call of a model; ``check_s``: the seconds that the comparisons took in it.

Each call is made by a process of its own: with an empty cache, and with the cache that it left. Sides take
turns. Rows are in ``<gpu>_graph_checks.csv``; a repeated run adds what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.environment import VERSIONS, at_hand, versions
from bench.issues import short
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable

COLUMNS = (
    "model",
    "what",
    "cache",
    "check",
    "turn",
    "first_s",
    "check_s",
    "second_ms",
    "compared",
    *VERSIONS,
)
KEY = ("model", "what", "cache", "check", "turn", "device", "commit")
MODELS = ("resnet50", "convnext_tiny", "mobilenet_v3_large")
CHECKS = {"on": "", "off": "never"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--models", type=ranges.some_of(*MODELS), default=",".join(MODELS), help="torchvision's"
    )
    parser.add_argument(
        "--what", type=ranges.some_of("inference", "training"), default="inference,training"
    )
    parser.add_argument("--turns", type=ranges.at_least(1), default=2, help="processes of each kind")
    parser.add_argument("--side", type=ranges.at_least(32), default=224, help="of an image, in pixels")


def main(options: argparse.Namespace) -> int:
    """Measure every model that has no row; 0."""
    about = versions()
    table = CsvTable(Path(options.out) / f"{short(about['device'])}_graph_checks.csv", COLUMNS, KEY)
    for model in options.models.split(","):
        for what in options.what.split(","):
            for turn in range(options.turns):
                for check in CHECKS if turn % 2 == 0 else reversed(CHECKS):
                    with tempfile.TemporaryDirectory() as folder:
                        for cache in ("empty", "filled"):
                            row = {
                                "model": model,
                                "what": what,
                                "cache": cache,
                                "check": check,
                                "turn": turn,
                                **about,
                            }
                            if not table.has(row):
                                row |= _asked(model, what, check, folder, options.side)
                                table.add(row)
                                print(" ".join(f"{k}={row[k]}" for k in COLUMNS[:9]), flush=True)
    print(f"{len(table.rows)} rows are in {table.path}", flush=True)
    return 0


def _asked(model: str, what: str, check: str, folder: str, side: int) -> dict[str, Any]:
    """What a process measures. RuntimeError if it fails."""
    env = {
        **os.environ,
        "TRANSCONV_CACHE": f"{folder}/ours",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TRANSCONV_TRUST": CHECKS[check],
    }
    if not env["TRANSCONV_TRUST"]:
        del env["TRANSCONV_TRUST"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.graph_checks", model, what, str(side)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(name: str, what: str, side: int) -> dict[str, Any]:
    """The first and the second call of a model in this process; of training, with the gradients."""
    import torchvision

    import transconv
    from transconv.graph import backend

    device = at_hand()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)().to(device, dtype, memory_format=torch.channels_last)
    model.train(what == "training")
    x = torch.randn(8, 3, side, side, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    run = torch.compile(model, backend=backend)
    model(x)  # torch's own libraries are loaded
    seconds, checked = list[float](), list[float]()
    for _ in range(2):
        begun = _now(device)
        with torch.set_grad_enabled(what == "training"):
            y = run(x)
            if what == "training":
                y.float().square().mean().backward()
        seconds.append(_now(device) - begun)
        checked.append(sum(transconv.stats().compared_us.values()) / 1e6)
    return {
        "first_s": round(seconds[0], 3),
        "check_s": round(checked[0], 4),
        "second_ms": round(seconds[1] * 1e3, 2),
        "compared": sum(transconv.stats().compared.values()),
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
