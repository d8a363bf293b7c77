"""``python -m bench start``: how long a model's first training steps take, cold and warm, beside torch,
and the epochs of models whose inputs vary in size (epochs.py).

Each row is a process of its own, and is written when it ends; a repeated run adds what is missing.
``cold`` begins with empty caches of transconv and Triton, ``warm`` with those that the cold one left,
``prepare`` calls ``transconv.prepare`` with empty caches before the first step, ``prepared`` begins with
what that left; ``background`` is cold with TRANSCONV_COMPILE=background, and its steps go on until no call
waits for a kernel: for ``settled_s`` after the first step, the slowest of them ``handover_ms``. torch runs
with cuDNN's benchmark on and off. Models with varying inputs run with TRANSCONV_SIZES=any.

A process that its share of the time ends, or that fails, leaves what it had measured: its row then says so
in ``stopped``, and a repeated run measures it anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bench import environment, models
from bench.issues import short
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable

if TYPE_CHECKING:
    import torch

COLUMNS = (
    "model",
    "side",
    "start",
    "import_s",
    "prepare_s",
    "forward1_s",
    "step1_s",
    "step2_s",
    "step3_s",
    "settled_s",
    "handover_ms",
    "last_ms",
    "inputs",
    "epoch1_s",
    "worst_ms",
    "later_s",
    "later_worst_ms",
    "busy_ms",
    "elsewhere",
    "stopped",
    "cores",
    *environment.VERSIONS,
)
KEY = ("model", "side", "start", "device")
TORCH = (("torch", "heuristics"), ("torch", "benchmark"))
SIDES = (
    *TORCH,
    ("transconv", "background"),
    ("transconv", "cold"),
    ("transconv", "warm"),
    ("transconv", "prepare"),
    ("transconv", "prepared"),
)
VARYING = (*TORCH, ("transconv", "prepare"), ("transconv", "prepared"), ("transconv", "background"))
STARTS = tuple(s for _, s in SIDES)
EPOCHS = ("audio", "detection")  # models with inputs of varying size
STEPS = 20
WEIGHTS = {"benchmark": 1.5, "prepare": 2.0}  # of rows, by which they share the time; of others 1
LEAST_S = 5.0  # with less time left no row is begun
ENDING_S = 3.0  # a process stops measuring so long before its time is over
Found = dict[str, object]
Tell = Callable[[Found], None]  # what a row has so far


def arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--models", default="resnet50", help=f"of {', '.join((*models.NAMES, *EPOCHS))}")
    to.add_argument(
        "--starts",
        default="",
        help=f"of {', '.join(STARTS)} (default: all); warm and "
        "prepared begin with what cold and prepare left in the same run",
    )
    to.add_argument(
        "--log",
        action="store_true",
        help="also write a file for each row with what the "
        "package logs: what was compiled, waited for and checked, and when",
    )
    to.add_argument("--small", action="store_true", help="sizes for a CPU, where torch computes")
    to.add_argument("--limit", type=ranges.seconds, default=600, help="seconds in all (default: 600)")


def main(options: argparse.Namespace) -> int:
    """Measure every side of every model for which there is time; 1 if one failed. Rows are in
    ``<gpu>_start.csv``."""
    end, failed = time.monotonic() + options.limit, 0
    versions = environment.versions()
    table = CsvTable(Path(options.out) / f"{short(versions['device'])}_start.csv", COLUMNS, KEY)
    table.drop(("after", "the process"), "stopped")  # there may be more time
    names = options.models.split(",")
    starts = options.starts.split(",") if options.starts else STARTS
    if unknown := [s for s in starts if s not in STARTS]:
        raise ValueError(f"start '{unknown[0]}' is unknown; expected one of: {', '.join(STARTS)}")
    for name in names:
        if name not in EPOCHS:
            models.size_of(name, options.small)
    rows = [
        {"model": name, "side": side, "start": start, **versions}
        for name in names
        for side, start in (VARYING if name in EPOCHS else SIDES)
        if start in starts
    ]
    rows = [row for row in rows if not table.has(row)]
    with tempfile.TemporaryDirectory(prefix="bench-start-", ignore_cleanup_errors=True) as place:
        for at, row in enumerate(rows):
            left, weights = end - time.monotonic(), [WEIGHTS.get(r["start"], 1.0) for r in rows[at:]]
            if left < LEAST_S:
                break
            name, log = row["model"], Path(options.out, f"{row['model']}_{row['start']}.log")
            found = one(
                name,
                options.small,
                row["side"],
                row["start"],
                f"{place}/{name}",
                left * weights[0] / sum(weights),
                str(log) if options.log else "",
            )
            failed += "error" in found
            print(
                " ".join(
                    f"{k}={v}" for k, v in {**row, **found}.items() if k in COLUMNS[:21] or k == "error"
                ),
                flush=True,
            )
            if found.keys() - {"error", "stopped"}:
                table.add({**row, **found, "stopped": found.get("stopped", found.get("error", ""))})
    print(f"{len(table.rows)} rows are in {table.path}", flush=True)
    return int(bool(failed))


def one(name: str, small: bool, side: str, start: str, place: str, limit: float, log: str = "") -> Found:
    """A process of its own, with caches in a folder; ``error`` if it fails, ``stopped`` if it takes longer
    than the limit, in seconds: what it told before that is there. ``log``: a file for what it logs."""
    place = f"{place}/{({'warm': 'cold', 'prepare': 'prepared'}).get(start, start)}"
    words = {
        "TRANSCONV_CACHE": f"{place}/ours",
        "TRITON_CACHE_DIR": f"{place}/triton",
        "TRANSCONV_COMPILE": "background" if start == "background" else "now",
        "TRANSCONV_SIZES": "any" if name in EPOCHS else "exact",
    }
    told = (name, str(int(small)), side, start, f"{time.time() + limit:.0f}", log)
    # Modules are compiled to bytecode once, as they are where a package was installed.
    around = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.Popen(
        [sys.executable, "-m", "bench.start", *told],
        env={**around, **words},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    found: Found = {}
    try:
        said, _ = ran.communicate(timeout=limit)
        if ran.returncode:
            found = {"error": f"the process ended with {ran.returncode}"}
    except subprocess.TimeoutExpired:
        found = {"stopped": f"after {limit:.0f} s"}
        _end(ran)
        said, _ = ran.communicate()
    except BaseException:  # Ctrl-C: nothing may go on beside
        _end(ran)
        raise
    for line in said.splitlines():
        if line.startswith("{"):
            with suppress(ValueError):  # it was ended in the middle of a line
                found |= json.loads(line)
    return found


def _end(ran: subprocess.Popen[str]) -> None:
    """End a process and those that compile for it."""
    with suppress(ProcessLookupError):
        os.killpg(ran.pid, signal.SIGKILL)


def measure(name: str, small: bool, side: str, start: str, end: float) -> None:
    """The first steps, or the epochs, of a model in this process; prints each figure once it is there.
    ``end``: when the process is ended, in seconds of the system's clock."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = start == "benchmark"
    torch.empty(1, device=device)  # the driver's own start is the same for all
    begun = time.perf_counter()
    import transconv

    def tell(found: Found) -> None:
        print(json.dumps(found), flush=True)
        logging.getLogger("transconv.bench").info("%s", found)

    def convert(model: torch.nn.Module) -> None:
        if side == "transconv":
            transconv.convert_(model)
        tell({"import_s": round(time.perf_counter() - begun, 3), "cores": _cores()})

    if name not in EPOCHS:
        _steps(name, small, start, device, convert, tell, end - ENDING_S)
    else:
        from bench import epochs

        epochs.measure(
            name,
            small,
            device,
            convert,
            start == "prepare",
            lambda: _wait(device),
            lambda: end - time.time() - ENDING_S,
            tell,
        )
    tell({"elsewhere": sum(transconv.stats().fallback.values()) + transconv.stats().waiting})


def _steps(
    name: str,
    small: bool,
    start: str,
    device: str,
    convert: Callable[[torch.nn.Module], None],
    tell: Tell,
    end: float,
) -> None:
    import torch

    import transconv

    model = models.build(name, small).to(device, memory_format=torch.channels_last)
    convert(model)
    size = models.size_of(name, small)
    image = torch.randn(size.batch, *size.image, device=device)
    if image.dim() == 4:
        image = image.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    seconds: list[float] = []

    def step() -> float:
        _wait(device)
        at = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(image).float().square().mean()
        if not seconds:  # the host's time: the device may still be at work
            tell({"forward1_s": round(time.perf_counter() - at, 4)})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        return time.perf_counter() - at

    if start == "prepare":
        at = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            transconv.prepare(model, image, progress=False)
        tell({"prepare_s": round(time.perf_counter() - at, 3)})
    for number in range(1, STEPS + 1):
        seconds.append(step())
        if number <= 3:
            tell({f"step{number}_s": round(seconds[-1], 4)})
    if start == "background":
        seen = -1
        while (now := _compiling()) != seen and time.time() < end:
            seen = now
            seconds.append(step())
            tell({"handover_ms": round(max(seconds[1:]) * 1e3, 2)})
        if now == seen:
            tell({"settled_s": round(sum(seconds[1:]), 3)})
        seconds += [step() for _ in range(5)]
    tell({"last_ms": round(min(seconds[-5:]) * 1e3, 3)})


def _compiling() -> int:
    """How many results torch has computed because processes compiled their kernels."""
    import transconv

    return transconv.stats().waiting


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[6]:
        logging.basicConfig(
            filename=sys.argv[6], filemode="w", format="%(relativeCreated)7d ms %(name)s: %(message)s"
        )
        logging.getLogger("transconv").setLevel(logging.DEBUG)
    measure(sys.argv[1], sys.argv[2] == "1", sys.argv[3], sys.argv[4], float(sys.argv[5]))
