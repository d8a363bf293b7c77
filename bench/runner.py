"""``python -m bench time``: problem lists against cuDNN, one CSV row each; on a CPU against oneDNN.

Some processes compile, one uses the GPU. A row is planned, compiled into the shared cache by the
first, then checked on exact data and timed by the second, both sides in turn in the same process.
torch.compile tunes for so long that it is a task of its own, with its own limit, after the others.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import environment, layers
from bench.check import left, verdict
from bench.roofline import ceiling_of, floor_us
from bench.small_types import MIXTURES, mixed
from bench.tables import cpu_table, summary_table
from transconv.conv import ConvProblem, Prop
from transconv.tuning.session import Progress
from transconv.tuning.table import CsvTable, Row, number
from transconv.verify.machine import Pool, Task, WorkerTask

COLUMNS = (
    "layer",
    "kind",
    "problem",
    "direction",
    "prop",
    "dtype",
    "epilogue",
    "layout",
    "ours_us",
    "cudnn_cl_us",
    "cudnn_nchw_us",
    "cudnn_fused_us",
    "inductor_us",
    "gemm_us",
    "onednn_cl_us",
    "onednn_nchw_us",
    "roofline_us",
    "ratio",
    "against",
    "spread",
    "tflops",
    "verdict",
    "reason",
    "max_err",
    "config",
    "why",
    "kernels",
    "rejected",
    "method",
    "host_us",
    "cudnn_host_us",
    "compile_s",
    *environment.VERSIONS,
)
KEY = ("problem", "prop", "dtype", "epilogue", "layout")

# -- in the compiling processes ------------------------------------------------------------------


def prepare(problem: str, prop: str, epilogue: str = "") -> Row:
    """Plan, and compile where there is a GPU."""
    from transconv.verify.case import ProblemCase, warm
    from transconv.verify.machine import device

    start = time.perf_counter()
    case = ProblemCase(ConvProblem.parse(problem), Prop(prop), epilogue)
    compiled = case.plan()
    row: Row = {"config": str(compiled.schedule)}
    if device() == "cuda":
        try:
            warm(compiled)
        except Exception as error:  # the process with the GPU will compile, or say why not
            row["warm_error"] = f"{type(error).__name__}: {error}"[:300]
    row["compile_s"] = time.perf_counter() - start
    return row


# -- in the process that has the GPU -------------------------------------------------------------


def on_gpu(problem: str, **payload: Any) -> Row:
    """``measure``; or, without a problem, the machine's ceilings."""
    from transconv.runtime.timing import Clock
    from transconv.tuning.measure import ceilings
    from transconv.verify.machine import device

    if problem:
        return measure(problem, **payload)
    return dict(ceilings(Clock(device())))


def measure(
    problem: str,
    prop: str,
    epilogue: str = "",
    baselines: str = "",
    budget_ms: float = 120.0,
    ours: bool = True,
    sampled: bool = False,
) -> Row:
    """Check on exact data, or if ``sampled`` at points of random data as every first result is, then time;
    with baselines, both sides in turn. Without ``ours`` the baselines alone."""
    import torch

    from bench.sides import baseline_calls
    from transconv.errors import ScheduleError, Unsupported
    from transconv.runtime.timing import Clock
    from transconv.verify.case import ProblemCase
    from transconv.verify.judgement import Judgement

    case = ProblemCase(ConvProblem.parse(problem), Prop(prop), epilogue)
    found: Row = {}
    calls = {}
    if ours:
        try:
            compiled = case.proven()
        except (Unsupported, ScheduleError) as refusal:
            found = {"verdict": "refused", "reason": f"{type(refusal).__name__}: {refusal}"}
        else:
            judged = Judgement() if sampled else case.judge(compiled, "exact")
            found = {
                "verdict": "right" if judged.right else "wrong",
                "reason": judged.reason,
                "max_err": judged.max_err,
                "config": str(compiled.schedule),
                "why": compiled.why,
                "kernels": len(compiled.steps),
                "rejected": compiled.rejected,
            }
            calls = {"ours": case.make(compiled)}
        case.release()
    calls |= baseline_calls(case, [b for b in baselines.split(",") if b])
    found |= Clock(case.where, budget_ms).compare(calls, case.problem.bytes_moved())
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


# -- in the parent -------------------------------------------------------------------------------


def rows_of(options: Namespace) -> Iterator[Row]:
    """The rows to fill."""
    found = [x for source in options.lists for x in layers.read(source)]
    for layer in layers.select(found, options.match, options.kinds):
        for layout in options.layouts.split(","):
            for dtype in options.dtypes.split(","):
                small = dtype in MIXTURES
                p = layer.reduced(options.mb).problem("bf16" if small else dtype, layout)
                for direction in options.props.split(","):
                    prop = layer.prop(direction)
                    epilogue = layer.epilogue if options.epilogue == "layer" else options.epilogue
                    made = p, epilogue if direction == "fwd" else ""
                    if small and (made := mixed(p, prop, dtype)) is None:
                        continue
                    yield {
                        "layer": layer.name,
                        "kind": layer.kind,
                        "direction": direction,
                        "problem": str(replace(made[0], name="")),
                        "prop": prop.value,
                        "dtype": dtype,
                        "layout": layout,
                        "epilogue": made[1],
                    }


def finish(row: Row, found: Row) -> Row:
    """The columns of a timing row from the workers' results."""
    row = row | verdict({k: v for k, v in found.items() if k != "trace"})
    p = ConvProblem.parse(row["problem"])
    row["roofline_us"] = floor_us(p, ceiling_of(row["device"]))
    library = "onednn" if row["device"] == "cpu" else "cudnn"
    for name, column in (
        ("ours", "ours_us"),
        ("cl", f"{library}_cl_us"),
        ("nchw", f"{library}_nchw_us"),
        ("fused", "cudnn_fused_us"),
        ("inductor", "inductor_us"),
        ("gemm", "gemm_us"),
    ):
        if name in found:
            row[column] = found[name].us
    against = "nchw" if row["layout"] == "nchw" or "cl" not in found else "cl"
    if "ours" in found:
        ours = found["ours"]
        row.update(
            method=ours.method,
            host_us=ours.host_us,
            spread=ours.spread,
            tflops=p.flops(valid=False) / ours.us / 1e6,
        )
        if against in found and library == "cudnn":  # an interpreter is compared with nothing
            theirs = found[against]
            row.update(
                ratio=theirs.us / ours.us,
                against=f"cudnn_{against}",
                spread=ours.spread + theirs.spread,
                cudnn_host_us=theirs.host_us,
            )
    return row


def main(options: Namespace) -> int:
    """Fill ``timing.csv``. Returns 1 if a row failed."""
    out = Path(options.out)
    versions = environment.versions()
    on_cpu = versions["device"] == "cpu"
    options.dtypes = options.dtypes or ("f32" if on_cpu else "bf16")
    if not options.lists:
        options.lists, options.mb = ["resnet50"], options.mb or int(on_cpu)
    table = CsvTable(out / "timing.csv", COLUMNS, KEY)
    rows, todo = left(table, rows_of(options), options)
    run = Run(table, out, options)
    run.go([row | versions for row in todo], versions)
    done_now = [r for r in rows if table.has(r)]
    print(f"{len(done_now)} of {len(rows)} rows are in {table.path}", flush=True)
    print(cpu_table(table.rows) if on_cpu else summary_table(table.rows), flush=True)
    rejected = sum(int(number(r, "rejected") or 0) for r in table.rows)
    print(f"{rejected} better schedules were passed over, their kernels being wrong", flush=True)
    bad = [r for r in table.rows if r["verdict"] not in ("right", "refused")]
    return 1 if bad else 0


class Run:
    """The tasks of the rows: compile, measure, and with ``inductor`` among the baselines a second
    measurement. A row is written when its last task has ended, or at the end of the budget."""

    def __init__(self, table: CsvTable, out: Path, options: Namespace) -> None:
        self.table, self.out, self.options = table, out, options
        names = [b for b in options.baselines.split(",") if b]
        self.inductor = "inductor" in names
        self.baselines = ",".join(b for b in names if b != "inductor")
        self.rows: dict[int, Row] = {}  # by the id of a task, which is alive as long as the run
        self.tasks: list[Task] = []
        self.found: dict[int, Row] = {}  # by the id of a row: results that are not written yet

    def _task(self, group: str, row: Row, limit: float, then: Task | None = None, **more: Any) -> Task:
        base = {k: row[k] for k in ("problem", "prop", "epilogue")}
        made = Task(group, base | more, limit, then=then)
        self.rows[id(made)] = row
        self.tasks.append(made)
        return made

    def _first(self, row: Row) -> Task:
        o = self.options
        last = (
            self._task(
                "gpu", row, o.inductor_limit, baselines="inductor", ours=False, budget_ms=o.budget_ms
            )
            if self.inductor
            else None
        )
        second = self._task(
            "gpu", row, o.limit, last, baselines=self.baselines, budget_ms=o.budget_ms, sampled=o.sampled
        )
        return self._task("compile", row, o.compile_limit, second)

    def go(self, todo: list[Row], versions: Row) -> None:
        o = self.options
        variables = environment.worker_environment(o.cache)
        # torch's libraries may use the whole CPU where the CPU is measured.
        threads = {"OMP_NUM_THREADS": environment.threads()} if versions["device"] == "cpu" else {}
        pool = Pool(
            {
                "compile": WorkerTask("bench.runner:prepare", o.workers, variables),
                "gpu": WorkerTask("bench.runner:on_gpu", 1, variables | threads),
            }
        )
        tasks = [self._first(row) for row in todo]
        if versions["device"] != "cpu":
            tasks.insert(0, Task("gpu", {"problem": ""}, o.limit))
        progress = Progress(len(self.tasks), "step")
        for done, found in pool.run(tasks, o.time_budget):
            progress.step()
            if not done.payload["problem"]:
                (self.out / "ceilings.json").write_text(json.dumps(found | versions) + "\n")
                progress.say(f"ceilings: {found}")
            elif found.get("error") != "out of budget":
                for text in self._take(done, found):
                    progress.say(text)
        for row in todo:  # measured, but torch.compile had no time left
            if id(row) in self.found:
                progress.say(self._write(row, {}))
        progress.close()

    def _take(self, task: Task, found: Row) -> Iterator[str]:
        """What one task found; lines to print."""
        row = self.rows[id(task)]
        if task.group == "compile":
            row["compile_s"] = found.get("compile_s", "")
            if "warm_error" in found:
                yield (f"not compiled ahead: {row['layer']} {row['prop']}: {found['warm_error']}")
            if found.get("error") not in ("timeout", "crash"):
                return  # else it ends here, without a time
        if self.table.has(row):
            return  # it had failed before torch.compile's turn
        if id(row) in self.found:
            if error := found.get("error"):
                yield f"no time of torch.compile: {row['layer']} {row['prop']}: {error[:200]}"
            yield self._write(row, {} if "error" in found else found)
        elif task.then is not None and "error" not in found:
            self.found[id(row)] = found
        else:
            self.found[id(row)] = found
            yield self._write(row, {})

    def _write(self, row: Row, more: Row) -> str:
        first = self.found.pop(id(row))
        complete = finish(row, first | {k: v for k, v in more.items() if k not in first})
        if not self.table.has(complete):
            self.table.add(complete)
        return line(complete)


def line(row: Row) -> str:
    """One row, for people."""

    def us(column: str) -> str:
        value = row.get(column, "")
        return f"{value:9.1f}" if isinstance(value, float) else f"{'-':>9}"

    ratio = row.get("ratio")
    told = f"{ratio:6.2f}x" if isinstance(ratio, float) else "      -"
    theirs = "onednn" if row["device"] == "cpu" else "cudnn"
    return (
        f"{row['layer'][:30]:30} {row['direction']:5} {us('ours_us')} "
        f"{us(f'{theirs}_cl_us')} {us(f'{theirs}_nchw_us')} {us('inductor_us')} "
        f"{us('roofline_us')} {told} "
        f"{row['verdict']} {row['reason'][:60]} {str(row.get('config', ''))[:60]}"
    )
