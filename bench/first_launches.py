"""``python -m bench kernels --first``: how long the first launch of a kernel takes in a process, with
empty caches and with those that another process left.

A child process imports torch, starts the GPU, imports the kernel API, and calls an example once and then
again. ``import_s``: of the kernel API; ``first_s``: of the first call, until its results are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

COLUMNS = ("kernel", "start", "import_s", "first_s", "second_us", "device", "torch", "triton", "commit")
KERNELS = ("vector add", "softmax 4096x781", "Black-Scholes", "matmul 4096 f16", "attention f16")
LIMIT_S = 40


def rows(device: str = "cuda") -> Iterator[dict[str, object]]:
    """A row for each kernel with empty caches, and one for a second process."""
    from bench.environment import ROOT  # not in the child, which times what this imports

    for name in KERNELS:
        with tempfile.TemporaryDirectory(prefix="bench-first-") as place:
            caches = {"TRITON_CACHE_DIR": f"{place}/triton", "TRANSCONV_CACHE": f"{place}/transconv"}
            for start in ("cold", "warm"):
                child = subprocess.run(
                    [sys.executable, "-m", "bench.first_launches", name, device],
                    env={**os.environ, **caches},
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                    check=False,
                )
                said = child.stdout.splitlines()[-1:] if child.returncode == 0 else []
                yield {
                    "kernel": name,
                    "start": start,
                    **(json.loads(said[0]) if said else {"error": child.stderr[-600:]}),
                }


def measure(name: str, device: str) -> dict[str, object]:
    """In the child: the times of one example."""
    import torch

    torch.zeros(1, device=device).add_(1)
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    import transconv.kernel  # noqa: F401

    imported = time.perf_counter() - began
    from bench.kernels.cases import cases, drawing
    from bench.kernels.sides import example

    case = next(c for c in cases() if c.name == name)
    given = case.data(drawing(device, 0), *(case.sizes if device == "cuda" else case.small))
    call, spent = getattr(example(case.kernel), case.kernel), []
    for _ in "12":
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call(*given)
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began)
    return {
        "import_s": f"{imported:.2f}",
        "first_s": f"{spent[0]:.3f}",
        "second_us": f"{1e6 * spent[1]:.0f}",
    }


def write(out: Path, versions: dict[str, str]) -> int:
    """Measure and write ``kernels_first.csv``; 1 if a child failed."""
    import csv

    wrong = 0
    with (out / "kernels_first.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for row in rows():
            print(*(f"{k}={v}" for k, v in row.items()), flush=True)
            if "error" in row:
                wrong = 1
                continue
            table.writerow(row | versions)
            file.flush()
    return wrong


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
