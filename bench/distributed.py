"""``python -m bench distributed``: networks whose images are split over GPUs, beside one GPU.

A row for each network, number of ranks and side, appended to ``<gpu>_distributed.csv`` as it comes: a run
that is repeated skips the rows that are there. ``plain`` is one process with transconv's convolutions and
torch's other operations; ``sharded`` on one rank shows what DTensors cost. ``captured`` is ``sharded``
with steps recorded as CUDA graphs. Each row has processes of its own and a time limit. ``--small`` has
small sizes, on a CPU with gloo, where nothing is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bench.environment import ROOT, VERSIONS, at_hand, device_name, versions, worker_environment
from bench.tables import markdown, two_digits
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable, Row, number

NAMES = ("unet3d", "wan", "weather", "volume")
SIDES = ("plain", "sharded", "captured")
COLUMNS = (
    "model",
    "side",
    "ranks",
    "ms",
    "host_ms",
    "exchange_ms",
    "received_mb",
    "peak_mb",
    "rmse",
    "gradient_rmse",
    "ours",
    "start_s",
    "says",
    "error",
    *VERSIONS,
)
KEY = ("model", "side", "ranks")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=ranges.some_of(*NAMES), default=",".join(NAMES))
    parser.add_argument("--ranks", type=ranges.at_least(2, 64), default=2, help="of the sharded rows")
    parser.add_argument("--sides", type=ranges.some_of(*SIDES), default=",".join(SIDES))
    parser.add_argument("--mesh-of-one", action="store_true", help="also the sharded sides over one rank")
    parser.add_argument("--small", action="store_true", help="a small size of every network")
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--seconds", type=ranges.seconds, default=3.0, help="timing of one network")
    parser.add_argument("--limit", type=ranges.limit, default=100, help="seconds for one row")
    parser.add_argument(
        "--time-budget", type=ranges.seconds, default=540, help="seconds; then no new row begins"
    )
    parser.add_argument("--cache", default="", help="folder of compiled kernels")


def main(options: argparse.Namespace) -> int:
    """Fill the table. Returns 1 if a row has no time that should have one."""
    device = options.device.partition(":")[0]
    gpu = device_name().lower().replace("nvidia_", "").partition("_")[0] if device == "cuda" else "cpu"
    table = CsvTable(Path(options.out) / f"{gpu}_distributed.csv", COLUMNS, KEY)
    rows: list[Row] = []
    for model in options.models.split(","):
        ways = [("plain", 1), *((side, ranks) for ranks in (1, options.ranks) for side in SIDES[1:])]
        rows += [
            {"model": model, "side": side, "ranks": str(ranks)}
            for side, ranks in ways
            if side in options.sides and (ranks > 1 or side == "plain" or options.mesh_of_one)
        ]
    todo = [r for r in rows if not table.has(r)]
    print(f"{len(rows)} rows, {len(rows) - len(todo)} done before", flush=True)
    end = time.monotonic() + options.time_budget
    for row in todo:
        if time.monotonic() > end:
            print("the time is over; repeat the command for the other rows")
            break
        print(f"{row['model']} {row['side']}, {row['ranks']} ranks", flush=True)
        found = measured(row, options, device)
        table.add(row | versions() | found)
        print(line(row | found), flush=True)
    print(distributed_table(table.rows), flush=True)
    return 1 if any(r["error"] and r["model"] != "volume" for r in table.rows) else 0


def measured(row: Row, options: argparse.Namespace, device: str) -> Row:
    """What the processes of a row found; all of them end at its limit."""
    variables = worker_environment(options.cache) | {"TRANSCONV_VERIFY": "0"}
    folder = Path(variables["TRANSCONV_CACHE"]).parent
    with tempfile.NamedTemporaryFile(suffix=".json") as target:
        payload = json.dumps(
            {
                "model": row["model"],
                "side": row["side"],
                "ranks": int(row["ranks"]),
                "device": device,
                "small": options.small,
                "seconds": options.seconds,
                "folder": str(folder),
                "limit": options.limit,
                "target": target.name,
            }
        )
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            row["ranks"],
            "-m",
            "bench.distributed_measures",
            payload,
        ]
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **variables}, start_new_session=True
        )
        try:
            code = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        text = Path(target.name).read_text()
    if text:
        return dict(json.loads(text))
    return {"error": f"timeout: {options.limit:.0f} s" if code is None else f"crash: exit code {code}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and what it started, each in a session of its own."""
    if process.poll() is not None:
        return
    begun = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for pid in (process.pid, *begun):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process began, and theirs; none where the system does not list them."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(place.parent.name)] = int(place.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for at in found:  # which grows
        found += [child for child, parent in parents.items() if parent == at]
    return found[1:]


def line(row: Row) -> str:
    """One row, for people."""
    if row.get("error"):
        return f"    {row['error'][:200]}"
    more = [f"{row['peak_mb']:.0f} MB"] if row.get("peak_mb") else []
    more += [f"exchange {row['exchange_ms']:.2f} ms"] if "exchange_ms" in row else []
    more += [f"apart from one process {row['rmse']:.1e}"] if "rmse" in row else []
    return f"    {row['ms']:.2f} ms, host {row['host_ms']:.2f} ms, {', '.join(more)}"


def distributed_table(rows: list[Row]) -> str:
    """A line for each network and side: times on one rank and several, how many times as fast the last is,
    megabytes of rows that the rank with the most receives in a step, exchanges that are not hidden, peak
    memory of a rank and its share of one process's, errors against one process."""
    cells = []
    models = list(dict.fromkeys(r["model"] for r in rows))
    for row in sorted((r for r in rows if int(r["ranks"]) > 1), key=lambda r: models.index(r["model"])):
        one, mesh = (
            next(
                (
                    r
                    for r in rows
                    if r["model"] == row["model"] and r["ranks"] == "1" and r["side"] == side
                ),
                {},
            )
            for side in ("plain", row["side"])
        )
        alone, of_mesh, ms = (_of(r, "ms") for r in (one, mesh, row))
        memory = [_of(r, "peak_mb") for r in (one, row)]
        errors = [_of(row, column) for column in ("rmse", "gradient_rmse")]
        cells.append(
            [
                row["model"],
                row["ranks"],
                "recorded" if row["side"] == "captured" else "eager",
                _said(one),
                _said(mesh),
                _said(row),
                *(two_digits(base / ms if base and ms else None) for base in (alone, of_mesh)),
                *(
                    "-" if n is None else f"{n:.{digits}f}"
                    for n, digits in ((_of(row, "received_mb"), 1), (_of(row, "exchange_ms"), 2))
                ),
                " → ".join("-" if m is None else f"{m:.0f}" for m in memory),
                two_digits(memory[1] / memory[0] if memory[0] and memory[1] else None),
                *("-" if e is None else f"{e:.1e}" for e in errors),
            ]
        )
    return markdown(
        [
            "network",
            "ranks",
            "steps",
            "one process ms",
            "mesh of one ms",
            "sharded ms",
            "times one process",
            "times mesh of one",
            "MB received",
            "exchange ms",
            "peak MB",
            "share",
            "RMSE",
            "RMSE of gradients",
        ],
        cells,
        keys=3,
        cuts=(8,),
    )


def _of(row: Row, column: str) -> float | None:
    return number(row, column) if row.get(column) else None


def _said(row: Row) -> str:
    value = _of(row, "ms")
    return f"{value:.4g}" if value is not None else (row.get("error") or "not run")[:40]
