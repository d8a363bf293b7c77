"""``python -m bench start``: how long a model's first training steps take, cold and warm, beside torch.

Each row is a process of its own. ``cold`` begins with empty caches of transconv and Triton, ``warm`` with
those that the cold one left, ``prepared`` with those of ``transconv.prepare``; ``background`` is cold with
TRANSCONV_COMPILE=background. torch runs with cuDNN's benchmark on and off.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import models

COLUMNS = ("model", "side", "start", "import_s", "prepare_s", "step1_s", "step2_s", "step3_s", "last_ms",
           "device", "torch", "triton")
SIDES = (("torch", "heuristics"), ("torch", "benchmark"), ("transconv", "cold"), ("transconv", "warm"),
         ("transconv", "prepare"), ("transconv", "prepared"), ("transconv", "background"))
STEPS = 20


def arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--models", default="resnet50", help=f"of {', '.join(models.NAMES)}")
    to.add_argument("--small", action="store_true", help="sizes for a CPU, where torch computes")


def main(options: argparse.Namespace) -> int:
    """Measure every side of every model, and write ``start.csv``."""
    rows = []
    for name in options.models.split(","):
        models.size_of(name, options.small)
        with tempfile.TemporaryDirectory(prefix="bench-start-") as first, \
                tempfile.TemporaryDirectory(prefix="bench-start-") as second, \
                tempfile.TemporaryDirectory(prefix="bench-start-") as third:
            places = {"cold": first, "warm": first, "prepare": second, "prepared": second,
                      "background": third}
            for side, start in SIDES:
                rows.append(one(name, options.small, side, start, places.get(start, first)))
                print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "start.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return 0


def one(name: str, small: bool, side: str, start: str, place: str) -> dict[str, object]:
    """A process of its own, with caches in a folder."""
    environment = {**os.environ, "TRANSCONV_CACHE": f"{place}/ours", "TRITON_CACHE_DIR": f"{place}/triton",
                   "TRANSCONV_COMPILE": "background" if start == "background" else "now"}
    ran = subprocess.run([sys.executable, "-m", "bench.start", name, str(int(small)), side, start],
                         env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return {"model": name, "side": side, "start": start, **found}


def measure(name: str, small: bool, side: str, start: str) -> dict[str, object]:
    """The first steps of a model in this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = start == "benchmark"
    begun = time.perf_counter()
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
    import triton

    return {**found, "last_ms": round(min(seconds[-5:]) * 1e3, 3), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "triton": triton.__version__}


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2] == "1", sys.argv[3], sys.argv[4])))
