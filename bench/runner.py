"""``python -m bench time``: problem lists against cuDNN, one CSV row each; and candidate sweeps.

Some processes compile, one uses the GPU. A row is planned, compiled into the shared cache by the
first, then checked on exact data and timed by the second, both sides in turn in the same process.
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
from bench.check import verdict
from bench.pool import Group, Pool, Task
from bench.progress import Progress
from bench.report import summary_table
from bench.roofline import ceiling_of, floor_us
from bench.table import Row, Table, number
from transconv.problem import ConvProblem, Prop

COLUMNS = ("layer", "kind", "problem", "direction", "prop", "dtype", "epilogue", "layout",
           "ours_us", "cudnn_cl_us", "cudnn_nchw_us", "cudnn_fused_us", "inductor_us",
           "roofline_us", "ratio", "against", "spread", "tflops", "verdict", "reason", "max_err",
           "config", "kernels", "rejected", "method", "host_us", "cudnn_host_us", "compile_s",
           "device", "torch", "triton", "commit")
KEY = ("problem", "prop", "dtype", "epilogue", "layout")
TUNED = ("layer", "kind", "problem", "direction", "prop", "dtype", "epilogue", "layout", "rank",
         "config", "estimate", "us", "p20", "p80", "ok", "reason", "max_err", "compile_s",
         "device", "torch", "triton", "commit")
TUNED_KEY = (*KEY, "config")


# -- in the compiling processes ------------------------------------------------------------------

def prepare(problem: str, prop: str, epilogue: str = "", config: str = "",
            tune: int = 0) -> Row:
    """Plan and compile; with ``tune`` also name that many candidates and their estimates."""
    from bench.case import Case, device, warm

    start = time.perf_counter()
    case = Case(ConvProblem.parse(problem), Prop(prop), epilogue)
    compiled = case.plan(config)
    row: Row = {"config": str(compiled.config)}
    if tune:
        row["candidates"] = candidates(case.problem, case.prop, tune, epilogue)
    if device() == "cuda":
        try:
            warm(compiled)
        except Exception as error:  # the process with the GPU will compile, or say why not
            row["warm_error"] = f"{type(error).__name__}: {error}"[:300]
    row["compile_s"] = time.perf_counter() - start
    return row


def candidates(p: ConvProblem, prop: Prop, count: int,
               epilogue: str = "") -> list[tuple[int, str, float]]:
    """(rank, config, estimate) of ``count`` configs that are legal for every stride phase: the
    better half of them from the top of the ranking, the others spread over the ranks after it,
    closer together near the top."""
    from transconv.algorithm import algorithms
    from transconv.config import why_not
    from transconv.epilogue import Epilogue
    from transconv.heuristics import candidates as ranked
    from transconv.heuristics import estimate
    from transconv.target import detect

    target = detect()
    phases = [a for a in algorithms(p, prop, Epilogue.parse(epilogue))
              if all(x.size for x in a.axes)]
    if not phases:
        return []
    first, *others = phases
    found = [c for c in ranked(first, target) if not any(why_not(c, a, target) for a in others)]
    top = (count + 1) // 2
    ranks = list(range(min(top, len(found))))
    rest, left = len(found) - top, count - top
    if rest > 0 and left > 0:
        ranks += sorted({top + int(rest * ((i + 1) / (left + 1)) ** 2) for i in range(left)})
    return [(r, str(found[r]), sum(estimate(found[r], a, target) for a in phases))
            for r in ranks]


# -- in the process that has the GPU -------------------------------------------------------------

_kept: dict[str, Any] = {}  # the last case and the clock: candidates of one row share them


def on_gpu(problem: str, **payload: Any) -> Row:
    """``measure``; or, without a problem, what the machine reaches."""
    from bench import ceilings
    from bench.case import device
    from bench.timing import Clock

    if problem:
        return measure(problem, **payload)
    return dict(ceilings.measure(Clock(device())))


def measure(problem: str, prop: str, epilogue: str = "", config: str = "", baselines: str = "",
            budget_ms: float = 120.0) -> Row:
    """Check on exact data, then time; with baselines, both sides in turn."""
    from bench.case import Case, device
    from bench.sides import baseline_calls, our_calls
    from bench.timing import Clock
    from transconv.errors import ConfigError, Unsupported

    key = f"{problem} {prop} {epilogue}"
    if _kept.get("key") != key:
        _forget()
        _kept.update(key=key, case=Case(ConvProblem.parse(problem), Prop(prop), epilogue))
    case: Case = _kept["case"]
    clock: Clock = _kept.setdefault("clock", Clock(device(), budget_ms))
    clock.budget_ms = budget_ms
    try:
        compiled = case.proven(config)
    except (Unsupported, ConfigError) as refusal:
        found: Row = {"verdict": "refused", "reason": f"{type(refusal).__name__}: {refusal}"}
        calls = {}
    else:
        judged = case.same(compiled) if config else case.judge(compiled, "exact")
        found = {"verdict": "right" if judged.right else "wrong", "reason": judged.reason,
                 "max_err": judged.max_err, "config": str(compiled.config),
                 "kernels": len(compiled.steps), "rejected": compiled.rejected}
        calls = {"ours": our_calls(case, compiled)}
    if config:  # one of many candidates: their tensors stay
        times = {"ours": clock.one(calls["ours"], case.problem.bytes_moved())} if calls else {}
    else:
        case.release()
        calls |= baseline_calls(case, [b for b in baselines.split(",") if b])
        times = clock.compare(calls, case.problem.bytes_moved())
    for name, timing in times.items():
        found[name] = timing
    return found


def _forget() -> None:
    import torch

    _kept.pop("case", None)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- in the parent -------------------------------------------------------------------------------

def rows_of(options: Namespace) -> Iterator[Row]:
    """The rows to fill."""
    found = [x for source in options.lists for x in layers.read(source)]
    for layer in layers.select(found, options.match, options.kinds):
        for layout in options.layouts.split(","):
            for dtype in options.dtypes.split(","):
                p = layer.reduced(options.mb).problem(dtype, layout)
                for direction in options.props.split(","):
                    prop = layer.prop(direction).value
                    epilogue = layer.epilogue if options.epilogue == "layer" else options.epilogue
                    yield {"layer": layer.name, "kind": layer.kind, "direction": direction,
                           "problem": str(replace(p, name="")), "prop": prop, "dtype": dtype,
                           "layout": layout, "epilogue": epilogue if direction == "fwd" else ""}


def finish(row: Row, found: Row) -> Row:
    """The columns of a timing row from what the workers found."""
    row = row | verdict({k: v for k, v in found.items() if k != "trace"})
    p = ConvProblem.parse(row["problem"])
    row["roofline_us"] = floor_us(p, ceiling_of(row["device"]))
    for name, column in (("ours", "ours_us"), ("cl", "cudnn_cl_us"), ("nchw", "cudnn_nchw_us"),
                         ("fused", "cudnn_fused_us"), ("inductor", "inductor_us")):
        if name in found:
            row[column] = found[name].us
    against = "nchw" if row["layout"] == "nchw" or "cl" not in found else "cl"
    if "ours" in found:
        ours = found["ours"]
        row.update(method=ours.method, host_us=ours.host_us, spread=ours.spread,
                   tflops=p.flops(valid=False) / ours.us / 1e6)
        if against in found:
            theirs = found[against]
            row.update(ratio=theirs.us / ours.us, against=f"cudnn_{against}",
                       spread=ours.spread + theirs.spread, cudnn_host_us=theirs.host_us)
    return row


def main(options: Namespace) -> int:
    """Fill ``timing.csv``, and ``candidates.csv`` with ``--tune``. Returns 1 if a row failed."""
    out = Path(options.out)
    table = Table(out / "timing.csv", COLUMNS, KEY)
    tuned = Table(out / "candidates.csv", TUNED, TUNED_KEY) if options.tune else None
    if options.retry:
        table.drop(options.retry.split(","), "verdict")
    rows = [r for i, r in enumerate(rows_of(options)) if i % options.shards == options.shard]
    todo = [r for r in rows if options.tune or not table.has(r)]
    print(f"{len(rows)} rows, {len(rows) - len(todo)} done before", flush=True)
    variables = environment.worker_environment(options.cache)
    pool = Pool({"compile": Group("bench.runner:prepare", options.workers, variables),
                 "gpu": Group("bench.runner:on_gpu", 1, variables)})
    versions = environment.versions()
    origin: dict[int, Row] = {}

    def task(row: Row, config: str, tune: int) -> Task:
        base = {k: row[k] for k in ("problem", "prop", "epilogue")} | {"config": config}
        gpu = {"budget_ms": options.budget_ms / (4 if config else 1)}
        gpu |= {} if config else {"baselines": options.baselines}
        second = Task("gpu", base | gpu, options.limit)
        first = Task("compile", base | {"tune": tune}, options.compile_limit, then=second)
        origin[id(first)] = origin[id(second)] = row
        kept.extend((first, second))
        return first

    kept: list[Task] = []  # ids stay unique while tasks are alive
    tasks = [task(row | versions, "", options.tune) for row in todo]
    if versions["device"] != "cpu":
        tasks.insert(0, Task("gpu", {"problem": ""}, options.limit))
    progress = Progress(2 * len(tasks), "step")
    for done, found in pool.run(tasks, options.time_budget):
        progress.step()
        if not done.payload["problem"]:
            (out / "ceilings.json").write_text(json.dumps(found | versions) + "\n")
            progress.say(f"ceilings: {found}")
            continue
        row = origin[id(done)]
        if done.group == "compile":
            row["compile_s"] = found.get("compile_s", "")
            if "warm_error" in found:
                progress.say(f"not compiled ahead: {row['layer']} {row['prop']}: "
                             f"{found['warm_error']}")
            for rank, config, guess in found.get("candidates", ()):
                extra = row | {"rank": rank, "config": config, "estimate": guess}
                if tuned is not None and not tuned.has(extra):
                    pool.add(task(extra, config, 0))
                    progress.total += 2
            if found.get("error") not in ("timeout", "crash"):
                continue  # else it ends here, without a time
        if found.get("error") == "out of budget":
            continue
        if done.payload["config"]:
            assert tuned is not None
            tuned.add(tuned_row(row, found))
        elif not table.has(row):
            complete = finish(row, found)
            table.add(complete)
            progress.say(line(complete))
    progress.close()
    done_now = [r for r in rows if table.has(r)]
    print(f"{len(done_now)} of {len(rows)} rows are in {table.path}", flush=True)
    print(summary_table(table.rows), flush=True)
    rejected = sum(int(number(r, "rejected") or 0) for r in table.rows)
    print(f"{rejected} better configs were passed over, their kernels being wrong", flush=True)
    bad = [r for r in table.rows if r["verdict"] not in ("right", "refused")]
    return 1 if bad else 0


def tuned_row(row: Row, found: Row) -> Row:
    """The columns of a candidate."""
    told = verdict({k: v for k, v in found.items() if k != "trace"})
    made = row | {"ok": told["verdict"], "reason": told["reason"],
                  "max_err": told.get("max_err", "")}
    if "ours" in found:
        ours = found["ours"]
        made.update(us=ours.us, p20=ours.p20, p80=ours.p80)
    return made


def line(row: Row) -> str:
    """One row, for people."""
    def us(column: str) -> str:
        value = row.get(column, "")
        return f"{value:9.1f}" if isinstance(value, float) else f"{'-':>9}"
    ratio = row.get("ratio")
    told = f"{ratio:6.2f}x" if isinstance(ratio, float) else "      -"
    return (f"{row['layer'][:30]:30} {row['direction']:5} {us('ours_us')} "
            f"{us('cudnn_cl_us')} {us('cudnn_nchw_us')} {us('roofline_us')} {told} "
            f"{row['verdict']} {row['reason'][:60]} {str(row.get('config', ''))[:60]}")
