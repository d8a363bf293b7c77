"""``python -m bench ablation``: every pass and every word of the schedule on and off, and what it earns.

For each layer and direction the schedule that selection chooses is the base. Each variant is checked
on exact data and timed in turn with the base in one process. A pass that leaves the kernel's text as
it is earns nothing, and is not timed. ``--graphs`` times whole models without each pass instead
(bench/ablation_graphs.py). Written are ``ablation.csv``, ``ablation_graphs.csv`` and ``ablation.md``.

Rows are written as they are measured, the passes of all layers before the words, and a row that is there
is not measured again: the same command continues a run that had too little time. The list ``ablation``
has the layers of docs/ablation.md.
"""

from __future__ import annotations

import argparse
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench import ablation_graphs, environment, layers
from bench.ablation_table import SAME, document
from bench.check import verdict
from bench.graph_models import MODELS
from bench.network_setting import TIMING, gpu
from transconv.cli.arguments import ranges
from transconv.conv import ConvProblem, ConvWorkload, Prop
from transconv.passes import passes
from transconv.schedule import Schedule, why_not
from transconv.selection import choice, transfer
from transconv.support import knobs
from transconv.target import Target, detect
from transconv.tuning.session import Progress, TuningJob
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import Pool, Task, WorkerTask

COLUMNS = (
    "layer",
    "kind",
    "problem",
    "direction",
    "prop",
    "dtype",
    "layout",
    "what",
    "variant",
    "config",
    "base",
    "us",
    "base_us",
    "earns",
    "spread",
    "verdict",
    "reason",
    *environment.VERSIONS,
)
KEY = ("problem", "prop", "base", "what", "variant")
STRUCTURE = ("swap", "via", "merge", "pack", "reduce", "consumers")  # they decide which tiles are legal


@dataclass(frozen=True, slots=True)
class Variant:
    """A change of the schedule or the passes: ``what`` is ``pass`` or ``word``; ``refused``: why not."""

    what: str
    name: str
    schedule: Schedule
    passes: str = ""
    refused: str = ""


# -- what to try -----------------------------------------------------------------------------------


def variants(job: TuningJob, base: Schedule, target: Target) -> list[Variant]:
    """Passes switched against their default, and words changed one at a time."""
    found = [
        Variant(
            "pass", f"{'-' if p.default else '+'}{p.name}", base, f"{'-' if p.default else '+'}{p.name}"
        )
        for p in passes()
        if p.optional
    ]
    phases = job.phases()
    ranked = [c.schedule for c in choice.ranked(phases[0], target)]
    for name, wanted in _changes(base, target):
        schedule = replace(base, **wanted)
        if schedule == base:
            continue
        reasons = (why_not(transfer.fitted(schedule, a, target), a, target) for a in phases)
        reason = next((r for r in reasons if r), "")
        if "a" in wanted or (reason and any(w in wanted for w in STRUCTURE)):
            # another tile suits the other word: the first candidate that has it
            others = (
                c
                for c in ranked
                if all(getattr(c, k) == v for k, v in wanted.items())
                and all(why_not(transfer.fitted(c, a, target), a, target) is None for a in phases)
            )
            other = next(others, None)
            if other is not None:
                schedule, reason = other, ""
        found.append(Variant("word", name, schedule, refused=reason))
    return found


def _changes(base: Schedule, target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    """Words to change: every one that is not at its default back to it, the paths of operands
    together; and those at their default that could be on."""
    default = Schedule()
    if "box" in (base.a, base.b):
        yield "a=gather b=gather", {"a": "gather", "b": "gather", "c": "gather"}
    for f in fields(Schedule):
        if f.name in ("blocks", "unit", "a", "b", "stages", "warps", "group_m"):
            continue
        usual = getattr(default, f.name)
        if getattr(base, f.name) != usual:
            yield f"{f.name}={'none' if usual == '' else usual}", {f.name: usual}
    yield "group_m=1", {"group_m": 1}
    yield "stages-1", {"stages": max(1, base.stages - 1)}
    yield "stages+1", {"stages": base.stages + 1}
    yield "warps", {"warps": 4 if base.warps == 8 else 8}
    if not base.programs:
        yield "programs=all", {"programs": target.sms}
    if base.consumers == 1 and base.via == "gluon":
        yield "consumers=2", {"consumers": 2}
    if base.via == "gluon" and base.programs and not base.keep:
        yield "keep=b", {"keep": "b"}
    if base.split_k == 1:
        yield "split_k=2", {"split_k": 2}
    if not base.unroll:
        yield "unroll=1", {"unroll": 1}


# -- in the workers --------------------------------------------------------------------------------


def _build(job: TuningJob, schedule: str, passes: str) -> Any:
    from transconv import runtime
    from transconv.conv import CompiledDirection

    before = ",".join(f"{'+' if on else '-'}{name}" for name, on in knobs.passes())
    knobs.adopt({knobs.passes.name: passes})
    try:
        return runtime.build(
            job.workload, detect(), Schedule.parse(schedule), None, False, CompiledDirection
        )
    finally:
        knobs.adopt({knobs.passes.name: before})


@lru_cache(maxsize=4)  # variants of one base follow each other
def _base(problem: str, prop: str, schedule: str) -> Any:
    return _build(_job(problem, prop), schedule, "")


def _job(problem: str, prop: str) -> TuningJob:
    return TuningJob(ConvWorkload(ConvProblem.parse(problem), Prop(prop)))


def propose(problem: str, prop: str) -> Row:
    """The schedule that selection chooses, and its variants; none where there is nothing to compute."""
    job, target = _job(problem, prop), detect()
    if not job.phases():
        return {"variants": []}
    base = choice.default(job.phases()[0], target, job.workload)
    return {"base": str(base), "variants": variants(job, base, target)}


def prepare(problem: str, prop: str, base: str, schedule: str, passes: str, budget_ms: float) -> Row:
    """Compile a variant; ``same`` if its text is the base's."""
    from transconv.verify.case import warm
    from transconv.verify.machine import device

    made, plain = _build(_job(problem, prop), schedule, passes), _base(problem, prop, base)
    if [s.digest for s in made.steps] == [s.digest for s in plain.steps]:
        return {"same": True}
    if device() == "cuda":
        warm(plain)
        warm(made)
    return {}


def measure(problem: str, prop: str, base: str, schedule: str, passes: str, budget_ms: float) -> Row:
    """Check a variant on exact data, time it in turn with the base. Of several processes that build
    variants one launches kernels at a time."""
    from transconv.errors import ScheduleError, Unsupported
    from transconv.runtime.timing import Clock
    from transconv.tuning.measure import kept

    try:
        plain, made = _base(problem, prop, base), _build(_job(problem, prop), schedule, passes)
    except (ScheduleError, Unsupported) as refusal:
        return {"verdict": "refused", "reason": f"{type(refusal).__name__}: {refusal}"}
    with gpu(TIMING, exclusive=True):
        case = kept.case(problem, prop, "")
        judged = case.same(made)
        if not judged.right:
            return {"verdict": "wrong", "reason": judged.reason}
        times = Clock(case.where, budget_ms).compare(
            {"base": case.make(plain), "variant": case.make(made)}, case.footprint
        )
    us, base_us = times["variant"].us, times["base"].us
    return {
        "verdict": "right",
        "us": us,
        "base_us": base_us,
        "earns": us / base_us,
        "spread": times["variant"].spread + times["base"].spread,
    }


# -- in the parent ---------------------------------------------------------------------------------


def jobs_of(options: Namespace) -> Iterator[Row]:
    """What the rows of a layer and direction begin with."""
    found = [x for source in options.lists for x in layers.read(source)]
    for layer in layers.select(found, options.match, options.kinds):
        p = replace(layer.reduced(options.mb).problem(options.dtype, options.layout), name="")
        for direction in options.props.split(","):
            yield {
                "layer": layer.name,
                "kind": layer.kind,
                "problem": str(p),
                "direction": direction,
                "prop": layer.prop(direction).value,
                "dtype": options.dtype,
                "layout": options.layout,
            }


def arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("lists", nargs="*", default=["resnet50"])
    made.add_argument("--match", default="", help="only layers whose name matches (regex)")
    made.add_argument("--kinds", default="")
    made.add_argument("--props", default="fwd,bwd_d,bwd_w")
    made.add_argument("--dtype", default="bf16")
    made.add_argument("--layout", default="nhwc")
    made.add_argument("--mb", type=ranges.at_least(0), default=0, help="reduce larger batches to this")
    made.add_argument("--variants", default="", help="only variants whose name matches (regex)")
    made.add_argument(
        "--workers", type=ranges.processes, default=max(1, (os.cpu_count() or 2) - 2), help="that compile"
    )
    made.add_argument(
        "--builders", type=ranges.processes, default=3, help="that build what is timed, one at a time"
    )
    made.add_argument("--limit", type=ranges.limit, default=60, help="seconds for one variant")
    made.add_argument("--time-budget", type=ranges.seconds, default=540)
    made.add_argument("--budget-ms", type=ranges.milliseconds, default=60, help="timing of one pair")
    made.add_argument("--graphs", type=ranges.some_of(*MODELS), default=None, help="models")
    optional = [p.name for p in passes() if p.optional]
    made.add_argument(
        "--passes",
        type=ranges.some_of(*optional),
        default=",".join(optional),
        help="those of graphs (default: all that are optional)",
    )
    made.add_argument(
        "--together", type=ranges.processes, default=8, help="graphs that are compiled at the same time"
    )
    made.add_argument("--cache", default="", help="folder of compiled kernels")
    made.add_argument("--docs", type=ranges.output, default=None, help="also write the document here")


def main(options: Namespace) -> int:
    """Fill ``ablation.csv``, write the document. Returns 1 if a variant was wrong."""
    out = Path(options.out)
    table = CsvTable(out / "ablation.csv", COLUMNS, KEY)
    versions = environment.versions()
    if options.graphs:
        graphs = ablation_graphs.run(options)
    else:
        graphs = CsvTable(out / "ablation_graphs.csv", ablation_graphs.COLUMNS, ablation_graphs.KEY)
        if options.lists != ["none"]:
            run(table, options, versions)
    text = document(table.rows, graphs.rows)
    for path in filter(None, (out / "ablation.md", options.docs and Path(options.docs))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(text.split("\n## ")[0])
    return 1 if any(r["verdict"] == "wrong" for r in table.rows) else 0


def lacking(table: CsvTable, job: Row, found: Row, options: Namespace) -> Iterator[tuple[Variant, Row]]:
    """The variants of a layer and direction that the table lacks, with what their rows begin with. Those
    that are refused get their rows here."""
    for variant in found.get("variants", ()):
        changed = "" if variant.what == "pass" or variant.refused else str(variant.schedule)
        about = job | {"base": found["base"], "config": changed}
        about |= {"what": variant.what, "variant": variant.name}
        if not re.search(options.variants, variant.name) or table.has(about):
            continue
        if variant.refused:
            table.add(about | {"verdict": "refused", "reason": variant.refused})
        else:
            yield variant, about


def _payload(about: Row, variant: Variant, options: Namespace) -> Row:
    return {k: about[k] for k in ("problem", "prop", "base")} | {
        "schedule": str(variant.schedule),
        "passes": variant.passes,
        "budget_ms": options.budget_ms,
    }


def run(table: CsvTable, options: Namespace, versions: Row) -> None:
    """Measure the rows that the table lacks."""
    variables = environment.worker_environment(options.cache)
    jobs = list(jobs_of(options))
    pool = Pool(
        {
            "propose": WorkerTask("bench.ablation:propose", options.workers, variables),
            "compile": WorkerTask("bench.ablation:prepare", options.workers, variables),
            "gpu": WorkerTask("bench.ablation:measure", options.builders, variables),
        }
    )
    tasks = [Task("propose", {k: job[k] for k in ("problem", "prop")}, options.limit * 2) for job in jobs]
    rows: dict[int, Row] = {id(t): job for t, job in zip(tasks, jobs, strict=True)}
    kept: list[Task] = [*tasks]
    words: list[Task] = []  # when all passes are queued
    progress = Progress(0, "variant")
    for task, found in pool.run(tasks, options.time_budget):
        row = rows[id(task)]
        if found.get("error") == "out of budget":
            continue
        if task.group == "propose":
            if "error" in found:
                progress.say(f"{row['layer']} {row['direction']}: {found['error']}")
            for variant, about in lacking(table, row | versions, found, options):
                made = Task("compile", _payload(about, variant, options), options.limit)
                rows[id(made)] = about
                progress.total += 1
                kept.append(made)
                if variant.what == "pass":
                    pool.add(made)
                else:
                    words.append(made)
            tasks.remove(task)
            while words and not tasks:
                pool.add(words.pop(0))
            continue
        # A variant with the base's text is not measured.
        if (
            task.group == "compile"
            and not found.get("same")
            and (found.get("error") not in ("timeout", "crash"))
        ):
            follower = Task("gpu", task.payload, options.limit)
            rows[id(follower)] = row
            kept.append(follower)
            pool.add(follower)
            continue
        progress.step()
        if found.get("same"):
            found = {"verdict": "right", "earns": 1.0, "reason": SAME}
        table.add(row | verdict({k: v for k, v in found.items() if k != "trace"}))
        if table.rows[-1]["verdict"] not in ("right", "refused"):
            progress.say(
                f"{table.rows[-1]['verdict']}: {row['layer']} {row['direction']} "
                f"{row['variant']}: {table.rows[-1]['reason'][:200]}"
            )
    progress.close()
