"""``python -m bench graph-checks``: what the first call of a compiled model takes, and what of it are the
comparisons of first results with torch's own operators; beside ``inductor``, torch.compile's own.

Each call is made by a process of its own: with an empty cache, and with the cache that it left. Sides take
turns. Rows are in ``<gpu>_graph_checks.csv``; a repeated run adds what is missing. Seconds of a part are
without those of parts within it:

    plan_s     regions, fusion and texts               rank_s    waiting for schedules that decide these
    wait_s     waiting for kernels that are compiled   load_s    loading and first launches of kernels
    own_s      a kernel's first result, by samples     check_s   results by torch's operators
    rest_s     all else: above all torch's tracing
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from bench import models
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
    "plan_s",
    "rank_s",
    "wait_s",
    "load_s",
    "own_s",
    "check_s",
    "rest_s",
    "second_ms",
    "compared",
    *VERSIONS,
)
KEY = ("model", "what", "cache", "check", "turn", "device", "commit")
MODELS = ("resnet50", "convnext_t", "mobilenetv3", "unet2d")
CHECKS = ("on", "off", "inductor")
PARTS = COLUMNS[6:12]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--models", type=ranges.some_of(*MODELS), default=",".join(MODELS), help="(default: all)"
    )
    parser.add_argument(
        "--what", type=ranges.some_of("inference", "training"), default="inference,training"
    )
    parser.add_argument("--checks", type=ranges.some_of(*CHECKS), default=",".join(CHECKS))
    parser.add_argument(
        "--caches", type=ranges.some_of("empty", "filled"), default="empty,filled", help="filled by empty"
    )
    parser.add_argument("--turns", type=ranges.at_least(1), default=2, help="processes of each kind")
    parser.add_argument("--batch", type=ranges.at_least(1), default=8, help="images (default: 8)")
    parser.add_argument("--side", type=ranges.at_least(32), default=224, help="of an image, in pixels")
    parser.add_argument("--small", action="store_true", help="small models, for a CPU")


def main(options: argparse.Namespace) -> int:
    """Measure every model that has no row; 0."""
    about = versions()
    table = CsvTable(Path(options.out) / f"{short(about['device'])}_graph_checks.csv", COLUMNS, KEY)
    for model in options.models.split(","):
        for what in options.what.split(","):
            for turn in range(options.turns):
                for check in options.checks.split(",")[:: 1 if turn % 2 == 0 else -1]:
                    with tempfile.TemporaryDirectory() as folder:
                        for cache in options.caches.split(","):
                            row = {
                                "model": model,
                                "what": what,
                                "cache": cache,
                                "check": check,
                                "turn": turn,
                                **about,
                            }
                            if not table.has(row):
                                row |= _asked(model, what, check, folder, options)
                                table.add(row)
                                print(" ".join(f"{k}={row[k]}" for k in COLUMNS[:15]), flush=True)
    print(f"{len(table.rows)} rows are in {table.path}", flush=True)
    return 0


def _asked(model: str, what: str, check: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a process measures. RuntimeError if it fails."""
    env = {
        **os.environ,
        "TRANSCONV_CACHE": f"{folder}/ours",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }
    env.pop("TRANSCONV_TRUST", None)
    if check == "off":
        env["TRANSCONV_TRUST"] = "never"
    told = (model, what, check, str(options.batch), str(options.side), str(int(options.small)))
    done = subprocess.run(
        [sys.executable, "-m", "bench.graph_checks", *told],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class PartClock:
    """Seconds of the parts of a call, of whichever thread is at them: autograd has its own."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.inner = threading.local()  # of each part that a thread is in, the seconds of parts within it

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count what a function takes."""
        real = getattr(owner, name)

        @wraps(real)
        def timed(*given: Any, **named: Any) -> Any:
            if not hasattr(self.inner, "seconds"):
                self.inner.seconds = []
            within: list[float] = self.inner.seconds
            within.append(0.0)
            began = time.perf_counter()
            try:
                return real(*given, **named)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - within.pop()
                if within:
                    within[-1] += took

        setattr(owner, name, timed)


def watched() -> PartClock:
    """A clock of the parts of graphs' first calls."""
    from transconv.backend_triton.launch.triton_kernel import TritonKernel
    from transconv.graph import torch_compile
    from transconv.graph.regions import region_kernels
    from transconv.graph.verification.eager_check import WatchedCall
    from transconv.runtime import BatchCompile, first_run_check

    clock = PartClock()
    for owner, name, part in (
        (torch_compile._Graph, "__init__", "plan_s"),
        (region_kernels, "rank", "rank_s"),
        (BatchCompile, "wait", "wait_s"),
        (TritonKernel, "run", "load_s"),
        (first_run_check, "run", "own_s"),
        (WatchedCall, "difference", "check_s"),
    ):
        clock.watch(owner, name, part)
    return clock


def measured(name: str, what: str, check: str, batch: int, side: int, small: bool) -> dict[str, Any]:
    """The first and the second call of a model in this process; of training, with the gradients."""
    import transconv
    from transconv.graph import backend

    device = at_hand()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = models.build(name, small).to(device, dtype, memory_format=torch.channels_last)
    model.train(what == "training")
    x = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    clock = PartClock() if check == "inductor" else watched()
    run = torch.compile(model) if check == "inductor" else torch.compile(model, backend=backend)
    model(x)  # torch's own libraries are loaded
    seconds, parts = list[float](), Counter[str]()
    for _ in range(2):
        begun = _now(device)
        with torch.set_grad_enabled(what == "training"):
            y = run(x)
            if what == "training":
                y.float().square().mean().backward()
        seconds.append(_now(device) - begun)
        parts = parts or Counter(clock.seconds)
    rest = seconds[0] - sum(parts.values())
    return {
        "first_s": round(seconds[0], 3),
        **{part: round(parts[part], 3) for part in PARTS},
        "rest_s": round(rest, 3),
        "second_ms": round(seconds[1] * 1e3, 2),
        "compared": sum(transconv.stats().compared.values()),
    }


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    _name, _what, _check, *_sizes = sys.argv[1:]
    print(json.dumps(measured(_name, _what, _check, *map(int, _sizes[:2]), small=_sizes[2] == "1")))
