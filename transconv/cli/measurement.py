"""``doctor --measure``: what a chip takes for the package's lists, in minutes, as a file to hand on.

The rates of the machine; the blocks of ``verify/network_blocks.py`` as graphs of torch.compile, beside
torch; every direction of the layers of ``data/layers.txt``, whose results are compared with exact answers
before they are timed (a tuning session of one trial each); and in the time that is left more trials of
each, of which the faster ones are kept as tuned rows. Nothing starts after its part of the time, and what
was not measured is said. A file that is there is continued: the trials are in a log beside it.

The file has versions, the chip's counts, times and verdicts: no paths, no names, no variables."""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from transconv.cli import tune
from transconv.cli.arguments.installation import BAD, NOTE, OK, Finding
from transconv.conv import DIRECTIONS
from transconv.runtime import timing
from transconv.selection import TuningRecord, tuning_db
from transconv.support import __version__, read_named, triton_version
from transconv.target import Target
from transconv.tuning.measure import ceilings
from transconv.tuning.session import Limits, Session, TuningJob, log_of
from transconv.tuning.table import number
from transconv.verify.machine import Pool, Task, WorkerTask, device
from transconv.verify.network_blocks import BLOCKS

Row = dict[str, Any]
FORMAT = 1
SECONDS = 300
GRAPHS, LAYERS, MORE = 0.35, 0.8, 1.0  # until which part of the time each stage begins something new
GRACE_S = 20.0  # that the last one may take longer
BLOCK_S = 60.0  # of a block at most
TRIALS = 4  # schedules of a direction, where there is time for more than one
GAIN = 1.03  # times as fast as the first schedule: a tuned row that is worth keeping
BUDGET_MS = 40.0
TIMED = ("layer", "layer_direction", "problem", "schedule", "estimate", "us", "p20", "p80", "method")
SHOWN = (*TIMED, "verdict", "reason")


@dataclass(slots=True)
class SharedMeasurement:
    """The content of a file. ``about``: the chip and versions; ``checks``: how each check of ``doctor``
    ended; ``ceilings``: see ``tuning.measure``; ``graphs`` and ``layers``: a row for each block, and for
    each direction with the schedule that is chosen; ``tuned``: rows of the tuned table, with ``first_us``,
    the time of that schedule; ``left``: what was not measured, and why."""

    about: Row
    checks: list[Row] = field(default_factory=list)
    ceilings: Row = field(default_factory=dict)
    graphs: list[Row] = field(default_factory=list)
    layers: list[Row] = field(default_factory=list)
    tuned: list[Row] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """The file, a line for each row."""
        parts = []
        for name in self.__slots__:
            found = getattr(self, name)
            lines = ",\n  ".join(json.dumps(x) for x in found) if isinstance(found, list) else ""
            parts.append(f' "{name}": ' + (f"[\n  {lines}\n ]" if lines else json.dumps(found)))
        path.write_text(f'{{\n "format": {FORMAT},\n' + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def read_shared(path: Path) -> SharedMeasurement:
    """The content of a file. Raises ValueError for another one."""
    try:
        found = json.loads(read_named(path, "a file of doctor --share"))
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        made = SharedMeasurement(**found)
        if not all(isinstance(getattr(made, n), list) for n in ("graphs", "layers", "tuned")):
            raise ValueError("no rows")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}; expected a file of transconv doctor --share") from error
    return made


# -- in the process that has the GPU ---------------------------------------------------------------


def on_gpu(block: str = "", small: bool = False) -> Row:
    """What a block takes; without one, the rates of the machine."""
    where = device()
    clock = timing.Clock(where, BUDGET_MS)
    if block:
        return measured_block(block, where, clock, small)
    return ceilings(clock, 64, 1 << 16) if small else ceilings(clock)


def measured_block(name: str, where: str, clock: timing.Clock, small: bool) -> Row:
    """Compile a block, compare it with itself in f64, and time it beside torch. It is right if it is off
    by at most twice as much as torch. ``kernels_us``: its kernels one by one, which no host keeps
    waiting; None on a CPU."""
    import torch

    import transconv
    from transconv.graph import KernelRow, backend, report

    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    module, x = BLOCKS[name].built(where, dtype, small)
    switches = transconv.config
    with torch.no_grad(), switches.waiting(), switches.changed(cpu="interpret"):
        exact = copy.deepcopy(module).double()(x.double())
        run: Any = torch.compile(module, backend=backend)
        off, theirs = (float((y.double() - exact).norm() / exact.norm()) for y in (run(x), module(x)))
        rows = [r for g in report(run).graphs for r in g.rows]
        ours = [r for r in rows if isinstance(r, KernelRow)]
        found: Row = {
            "verdict": "right" if off <= max(2 * theirs, 1e-6) else "wrong",
            "kernels": len(ours),
            "regions": len(rows) - len(ours),
            "estimate_us": sum(r.us for r in ours),
            "off": off,
            "torch_off": theirs,
        }
        if found["verdict"] != "right":
            return found
        if not ours:
            return found | {"verdict": "torch"}

        def made(call: Any) -> timing.Make:
            def of(index: int) -> timing.Call:
                given = x.clone(memory_format=torch.preserve_format)
                return lambda: call(given)

            return of

        held = sum(t.numel() * t.itemsize for t in (x, exact.to(dtype), *module.parameters()))
        took = clock.compare({"us": made(run), "torch_us": made(module)}, held)
        us, each = took["us"], [row.measure(clock) for row in rows]
        return found | {
            "kernels_us": None if None in each else sum(x or 0.0 for x in each),
            "us": us.us,
            "p20": us.p20,
            "p80": us.p80,
            "method": us.method,
            "torch_us": took["torch_us"].us,
        }


# -- in the parent ---------------------------------------------------------------------------------


def said_without_gpu(out: Path | None, seconds: float) -> Finding:
    """What is said where nothing can be measured."""
    where = f", and {out} would have it" if out else ""
    return Finding(
        "measure",
        NOTE,
        "nothing is measured: no GPU of CUDA or ROCm. On one these would be, in at most "
        f"{seconds:.0f} s: the rates of the machine, {len(BLOCKS)} blocks of networks, "
        f"{len(listed())} directions of layers, and more schedules of these{where}",
        "run it where torch finds a GPU",
    )


def listed(source: str = "", **words: str) -> list[TuningJob]:
    """The directions of the layers of a list, by default the package's in bf16 with features last."""
    given = {"mb": 0, "dtype": "", "layout": "", "match": "", "kinds": "", "epilogue": ""}
    path = source or str(files("transconv").joinpath("data", "layers.txt"))
    about = argparse.Namespace(**given | {"problem": [path], "prop": ",".join(DIRECTIONS)} | words)
    return tune.jobs_of(about)


def about_chip(target: Target, versions: Mapping[str, str]) -> Row:
    """What tells one chip, and one version, from another."""
    return {
        **versions,
        "transconv": __version__,
        "triton": triton_version(),
        "lowering": str(tuning_db.LOWERING),
        "machine": tuning_db.machine(target),
        "bandwidth_gbs": target.bandwidth_gbs,
        "tflops": target.tflops,
        "l2_bytes": target.l2_bytes,
    }


class MeasuringSession:
    """A measurement of a target, with a finding for each stage. ``jobs`` makes the directions, for each
    stage anew; ``blocks``: names of graphs; ``small``: these and the rates of the machine in the size for
    a CPU."""

    def __init__(
        self,
        target: Target,
        out: Path | None,
        seconds: float = SECONDS,
        jobs: Callable[[], Sequence[TuningJob]] = listed,
        blocks: Sequence[str] = tuple(BLOCKS),
        small: bool = False,
    ) -> None:
        self.target, self.out, self.jobs, self.blocks, self.small = target, out, jobs, blocks, small
        self.began, self.seconds = time.monotonic(), seconds
        self.versions = tune.versions(target.backend == "interpreter")
        self.made = SharedMeasurement(about_chip(target, self.versions))
        if out is not None and out.exists() and out.stat().st_size:
            before = read_shared(out)
            if others := [k for k, v in self.made.about.items() if before.about.get(k) != v]:
                raise ValueError(
                    f"{out} is of another {others[0]}, {before.about.get(others[0])}; expected a new file"
                )
            self.made.graphs, self.made.ceilings = before.graphs, before.ceilings

    def until(self, part: float) -> float:
        """Seconds that are left until a part of the time has passed."""
        return max(0.0, self.began + part * self.seconds - GRACE_S - time.monotonic())

    def findings(self, checks: Sequence[Finding]) -> Iterator[Finding]:
        """Measure. ``checks``: what ``doctor`` has found; after a failed self-test nothing is measured."""
        self.made.checks = [{"check": f.check, "state": f.state} for f in checks]
        if any(f.check == "self-test" and f.state == BAD for f in checks):
            yield Finding("measure", BAD, "nothing is measured: results are wrong", "see self-test")
            return
        with tempfile.TemporaryDirectory(prefix="transconv-measure-") as folder:
            place = self.out or Path(folder) / "measured.json"
            self.log = log_of(place.with_suffix(".trials.csv"))
            for stage in (self.on_machine, self.first_trials, self.more_trials):
                try:
                    with redirect_stdout(sys.stderr):  # progress: what is printed is findings
                        found = [*stage()]
                finally:  # also of a stage that was stopped
                    self.made.layers = self.timed()
                    self.made.left = [*self.unmeasured()]
                    self.made.write(place)
                yield from found
        if self.out is not None:
            yield Finding("share", OK, f"{self.out} is written; docs/board.md says where to send it")
        for left in self.made.left:
            yield Finding("measure", NOTE, left, "the same command again continues the file")

    def on_machine(self) -> Iterator[Finding]:
        """The rates of the machine, and the blocks."""
        known = {row["block"] for row in self.made.graphs}
        todo = ["" for _ in "1" if not self.made.ceilings] + [b for b in self.blocks if b not in known]
        pool = Pool({"gpu": WorkerTask(f"{__name__}:on_gpu", 1, {"OMP_NUM_THREADS": "1"})})
        tasks = [Task("gpu", {"block": name, "small": self.small}, BLOCK_S) for name in todo]
        for task, row in pool.run(tasks, self.until(GRAPHS), GRACE_S):
            name, error = task.payload["block"], row.pop("error", "")
            row.pop("trace", "")
            if error == "out of budget":
                continue
            if name:
                failed = {"verdict": "failed", "reason": without_paths(error)} if error else {}
                self.made.graphs.append({"block": name} | row | failed)
            elif not error:
                self.made.ceilings = row
        if found := self.made.ceilings:
            yield Finding(
                "ceilings",
                OK,
                f"a product of matrices at {found['gemm_tflops']:.3g} TFLOP/s, a copy at "
                f"{found['copy_tbs']:.3g} TB/s, a launch every {found['launch_us']:.3g} us",
            )
        yield counted("graphs", self.made.graphs, len(self.blocks))

    def first_trials(self) -> Iterator[Finding]:
        """Every direction with the schedule that is chosen for it."""
        asked, _ = self.session(1, LAYERS)
        yield counted("layers", self.timed(), len(asked))

    def more_trials(self) -> Iterator[Finding]:
        """More schedules of each, of which the faster ones are kept."""
        _, found = self.session(TRIALS, MORE)
        first = {(r["problem"], r["direction"]): float(r["us"] or "inf") for r in self.first_rows()}
        for row in found:
            us = first.get((row.problem, row.direction), 0.0)
            if us > GAIN * row.us:
                self.made.tuned.append(tuning_db.mapping(row) | {"first_us": us})
        said = f"{len(self.made.tuned)} of {len(found)} directions have a schedule {GAIN} times as fast"
        yield Finding("tuned", OK, f"{said} as the one that is chosen: rows worth keeping")

    def session(self, trials: int, part: float) -> tuple[list[TuningJob], list[TuningRecord]]:
        """Tune every direction with so many trials; the jobs, and the winners."""
        jobs = [*self.jobs()]
        processes = max(1, (os.cpu_count() or 2) - 2)
        limits = Limits(trials, total_s=self.until(part), budget_ms=BUDGET_MS, jobs=processes)
        made = Session(jobs, self.target, limits, self.log, self.versions, say=lambda _: None)
        return jobs, made.run()

    def first_rows(self) -> list[Row]:
        """The log's first row of each direction."""
        found: dict[tuple[str, str], Row] = {}
        for row in self.log.rows:
            found.setdefault((row["problem"], row["direction"]), row)
        return [*found.values()]

    def timed(self) -> list[Row]:
        """The rows of layers, for the file."""
        return [
            {c: (number(r, c) if c in ("estimate", "us", "p20", "p80") else r[c]) for c in SHOWN}
            | {"reason": without_paths(r["reason"])}
            for r in self.first_rows()
        ]

    def unmeasured(self) -> Iterator[str]:
        """What the file does not have, in words."""
        asked = len(self.jobs())
        for what, rows, whole in (
            ("blocks", self.made.graphs, len(self.blocks)),
            ("directions of layers", self.made.layers, asked),
        ):
            if len(rows) < whole:
                yield f"{whole - len(rows)} of {whole} {what} are not measured: the time was up"
        if not self.made.ceilings:
            yield "the rates of the machine are not measured"


def counted(check: str, rows: Sequence[Row], whole: int) -> Finding:
    """How many are right, and what is wrong."""
    right = sum(row["verdict"] == "right" for row in rows)
    wrong = [row for row in rows if row["verdict"] == "wrong"]
    others = [row for row in rows if row["verdict"] not in ("right", "wrong")]
    said = f"{right} of {whole} right and timed"
    for name, found in (("wrong", wrong), ("failed or refused", others)):
        names = ", ".join(str(r.get("block") or f"{r['layer']} {r['layer_direction']}") for r in found[:3])
        said += f", {len(found)} {name} ({names}{', ...' if len(found) > 3 else ''})" if found else ""
    state = BAD if wrong else NOTE if others else OK
    return Finding(check, state, said, "please report it with the file" if wrong else "")


def without_paths(reason: str) -> str:
    """A reason for the file: one line, no folder of the user's."""
    return re.sub(r"(?<![\w.])(?:[A-Za-z]:)?[/\\][^\s:'\"]+", "(path)", " ".join(reason.split()))[:300]
