"""``python -m bench start``: how long a model's first training steps take, cold and warm, beside torch,
and the epochs of models whose inputs vary in size (epochs.py).

Each row is a process of its own, and is written when it ends; a repeated run adds what is missing.
``cold`` begins with empty caches of transconv and Triton, ``warm`` with those that the cold one left,
``prepared`` with those of ``transconv.prepare``; ``background`` is cold with
TRANSCONV_COMPILE=background. torch runs with cuDNN's benchmark on and off. Models with varying inputs run
with TRANSCONV_SIZES=any; ``warm`` has what ``background`` left there.
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

from bench import environment, models
from bench.issues import short
from transconv.cli import ranges
from transconv.tuning.table import Table

COLUMNS = ("model", "side", "start", "import_s", "prepare_s", "step1_s", "step2_s", "step3_s", "last_ms",
           "inputs", "epoch1_s", "worst_ms", "later_s", "later_worst_ms", "device", "torch", "triton",
           "commit")
KEY = ("model", "side", "start", "device")
SIDES = (("torch", "heuristics"), ("torch", "benchmark"), ("transconv", "cold"), ("transconv", "warm"),
         ("transconv", "prepare"), ("transconv", "prepared"), ("transconv", "background"))
VARYING = (("torch", "heuristics"), ("torch", "benchmark"), ("transconv", "background"),
           ("transconv", "warm"), ("transconv", "cold"))
EPOCHS = ("audio", "detection")  # models with inputs of varying size
STEPS = 20
SHARE = 0.6  # of the time that is left, at most, for one row: the others are to have some


def arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--models", default="resnet50", help=f"of {', '.join((*models.NAMES, *EPOCHS))}")
    to.add_argument("--small", action="store_true", help="sizes for a CPU, where torch computes")
    to.add_argument("--limit", type=ranges.seconds, default=600, help="seconds in all (default: 600)")


def main(options: argparse.Namespace) -> int:
    """Measure every side of every model for which there is time; 1 if one failed. Rows are in
    ``<gpu>_start.csv``."""
    end, failed = time.monotonic() + options.limit, 0
    versions = environment.versions()
    table = Table(Path(options.out) / f"{short(versions['device'])}_start.csv", COLUMNS, KEY)
    names = options.models.split(",")
    for name in names:
        if name not in EPOCHS:
            models.size_of(name, options.small)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="bench-start-") as place:
            for side, start in VARYING if name in EPOCHS else SIDES:
                row = {"model": name, "side": side, "start": start, **versions}
                if table.has(row) or (left := end - time.monotonic()) < 5:
                    continue
                found = one(name, options.small, side, start, place, SHARE * left)
                failed += "error" in found
                print(" ".join(f"{k}={v}" for k, v in {**row, **found}.items() if k in COLUMNS[:14]
                               or k == "error"), flush=True)
                if "error" not in found:
                    table.add({**row, **found})
    print(f"{len(table.rows)} rows are in {table.path}", flush=True)
    return int(bool(failed))


def one(name: str, small: bool, side: str, start: str, place: str, limit: float) -> dict[str, object]:
    """A process of its own, with caches in a folder; ``error`` if it fails or takes longer than the
    limit, in seconds."""
    shares = {"warm": "background" if name in EPOCHS else "cold", "prepare": "prepared"}
    place = f"{place}/{shares.get(start, start)}"
    words = {"TRANSCONV_CACHE": f"{place}/ours", "TRITON_CACHE_DIR": f"{place}/triton",
             "TRANSCONV_COMPILE": "background" if start == "background" else "now",
             "TRANSCONV_SIZES": "any" if name in EPOCHS else "exact"}
    try:
        told = (name, str(int(small)), side, start, f"{limit:.0f}")
        ran = subprocess.run([sys.executable, "-m", "bench.start", *told], env={**os.environ, **words},
                             stdout=subprocess.PIPE, text=True, check=True, timeout=limit)
    except subprocess.SubprocessError as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


def measure(name: str, small: bool, side: str, start: str, limit: float) -> dict[str, object]:
    """The first steps, or the epochs, of a model in this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = start == "benchmark"
    begun = time.perf_counter()
    import transconv

    if name not in EPOCHS:
        return _steps(name, small, side, start, device, begun)
    from bench import epochs

    return epochs.measure(name, small, device,
                          transconv.convert_ if side == "transconv" else lambda model: model,
                          lambda: _wait(device), 0.9 * limit)


def _steps(name: str, small: bool, side: str, start: str, device: str, begun: float) -> dict[str, object]:
    import torch

    import transconv

    found: dict[str, object] = {}
    model = models.build(name, small).to(device, memory_format=torch.channels_last)
    if side == "transconv":
        transconv.convert_(model)
    found["import_s"] = round(time.perf_counter() - begun, 3)
    size = models.size_of(name, small)
    image = torch.randn(size.batch, *size.image, device=device)
    if image.dim() == 4:
        image = image.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        _wait(device)
        at = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(image).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        return time.perf_counter() - at

    if start == "prepare":
        at = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            transconv.prepare(model, image, progress=False)
        found["prepare_s"] = round(time.perf_counter() - at, 3)
    seconds = [step() for _ in range(STEPS)]
    found |= {f"step{i}_s": round(seconds[i - 1], 4) for i in (1, 2, 3)}
    return {**found, "last_ms": round(min(seconds[-5:]) * 1e3, 3)}


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2] == "1", sys.argv[3], sys.argv[4],
                             float(sys.argv[5]))))
