"""``python -m bench check``: every problem of the lists, run and compared with the f64 answer.

A front of ``transconv check`` for lists of layers: what is run, and what is right, is
said in transconv/verify. Here tasks are made of lists (one direction of one problem in one dtype
and layout, on exact and on random data), and rows of a CSV that an interrupted run goes on with.
Several workers share the GPU: right or wrong does not depend on time.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import environment, layers
from transconv.cli.arguments.options import some_computable
from transconv.conv import ConvProblem, Prop
from transconv.tuning.session import Progress
from transconv.tuning.table import CsvTable, Row, number
from transconv.verify.machine import Pool, Task, WorkerTask

COLUMNS = (
    "layer",
    "problem",
    "direction",
    "prop",
    "dtype",
    "layout",
    "epilogue",
    "verdict",
    "reason",
    "exact_err",
    "float_err",
    "of_bound",
    "rms",
    "nonzero",
    "config",
    "kernels",
    "rejected",
    "seconds",
    *environment.VERSIONS,
)
KEY = ("problem", "prop", "epilogue")
# The words of a table for benchdnn's; a kernel that trust.py rejects never reaches a user.
VERDICTS = {
    "PASSED": "right",
    "MISTRUSTED": "right",
    "UNIMPLEMENTED": "refused",
    "INVALID_ARGUMENTS": "refused",
    "SKIPPED": "skipped",
    "FAILED": "wrong",
}


def rows_of(options: Namespace) -> Iterator[Row]:
    """The rows to fill, most wanted combinations first: all problems in the first dtype and layout
    before any in the second. f32 and tf32 take every ``sample``-th problem."""
    found = [x for source in options.lists for x in layers.read(source)]
    found = layers.select(found, options.match, options.kinds)
    seen: set[tuple[str, str]] = set()
    for layout in options.layouts.split(","):
        for dtype in options.dtypes.split(","):
            step = options.sample if dtype in ("f32", "tf32", "f64") else 1
            for layer in found[::step]:
                p = replace(layer.reduced(options.mb).problem(dtype, layout), name="")
                for direction in options.props.split(","):
                    prop = layer.prop(direction).value
                    if (str(p), prop) not in seen:
                        seen.add((str(p), prop))
                        yield {
                            "layer": layer.name,
                            "problem": str(p),
                            "direction": direction,
                            "prop": prop,
                            "dtype": dtype,
                            "layout": layout,
                            "epilogue": options.epilogue if prop != "bwd_w" else "",
                        }


def left(table: CsvTable, asked: Iterable[Row], options: Namespace) -> tuple[list[Row], list[Row]]:
    """The rows of this shard, and those of them that the table lacks or that are to be run again."""
    if options.retry:
        table.drop(options.retry.split(","), "verdict")
    rows = [r for i, r in enumerate(asked) if i % options.shards == options.shard]
    some_computable([(ConvProblem.parse(r["problem"]), Prop(r["prop"])) for r in rows])
    todo = [r for r in rows if not table.has(r)]
    print(f"{len(rows)} rows, {len(rows) - len(todo)} done before", flush=True)
    return rows, todo


def main(options: Namespace) -> int:
    """Returns 1 if anything was wrong, timed out or crashed."""
    from transconv.verify.judgement import weight

    out = Path(options.out)
    table = CsvTable(out / "check.csv", COLUMNS, KEY)
    rows, todo = left(table, rows_of(options), options)
    group = WorkerTask(
        "transconv.verify.benchdnn_run:work",
        options.workers,
        environment.worker_environment(options.cache),
    )
    tasks = []
    for row in todo:
        payload = {k: row[k] for k in ("problem", "prop", "epilogue")} | {
            "data": options.modes.replace(",", "+")
        }
        tasks.append(Task("check", payload, options.limit, weight(ConvProblem.parse(row["problem"]))))
    by_task = {id(task): row for task, row in zip(tasks, todo, strict=True)}
    versions = environment.versions()
    progress = Progress(len(tasks), "task")
    pool = Pool({"check": group}, capacity=options.memory * 1e9)
    for task, found in pool.run(tasks, options.time_budget):
        row = by_task[id(task)] | versions | verdict(found)
        progress.step()
        if row["reason"] == "out of budget":
            continue
        table.add(row)
        if row["verdict"] not in ("right", "refused"):
            progress.say(
                f"{row['verdict']}: {row['layer']} {row['problem']} {row['prop']} "
                f"{row['reason'][:300]} [{row.get('config', '')}]"
            )
    progress.close()
    found_all = summary(table.rows, len(rows))
    (out / "check.json").write_text(json.dumps(found_all, indent=1) + "\n", encoding="utf-8")
    print("\n".join(describe(found_all)), flush=True)
    return 0 if not found_all["not right"] else 1


def verdict(found: Row) -> Row:
    """A worker's answer as columns: errors become ``failed`` (or timeout, crash) with a reason."""
    error = found.get("error")
    if error is None:
        made = {"reason": "", **found}
        if "status" in found:
            rejected = found.get("cause") == "miscompiled"
            made["verdict"] = "refused" if rejected else VERDICTS[found["status"]]
        return made
    word = error if error in ("timeout", "crash") else "failed"
    return {"verdict": word, "reason": " ".join(error.split())[:500]}


def summary(rows: list[Row], wanted: int) -> dict[str, Any]:
    """Counts per dtype and layout, worst errors, reasons of refusals, and everything not right."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(f"{row['dtype']} {row['layout']} {row['prop']}", Counter())[row["verdict"]] += 1
    worst = {
        column: max(
            (
                (number(r, column) or 0.0, f"{r['problem']} {r['prop']}")
                for r in rows
                if r["verdict"] == "right"
            ),
            default=(0.0, ""),
        )
        for column in ("exact_err", "of_bound", "rms", "float_err")
    }
    return {
        "wanted": wanted,
        "ran": len(rows),
        "verdicts": dict(Counter(r["verdict"] for r in rows)),
        "by dtype, layout, prop": {k: dict(v) for k, v in sorted(counts.items())},
        "refusals": dict(Counter(r["reason"][:120] for r in rows if r["verdict"] == "refused")),
        "rejected": sum(int(number(r, "rejected") or 0) for r in rows),
        "under 30% nonzero": sum((number(r, "nonzero") or 1) < 0.3 for r in rows),
        "worst": worst,
        "not right": [
            f"{r['verdict']}: {r['problem']} {r['prop']}: {r['reason'][:300]}"
            for r in rows
            if r["verdict"] not in ("right", "refused")
        ],
    }


def describe(found: dict[str, Any]) -> list[str]:
    """The summary as lines of text."""
    lines = [
        f"{found['ran']} of {found['wanted']} tasks ran: "
        + ", ".join(f"{n} {word}" for word, n in found["verdicts"].items())
    ]
    lines += [
        f"  {k}: " + ", ".join(f"{n} {word}" for word, n in v.items())
        for k, v in found["by dtype, layout, prop"].items()
    ]
    lines += [f"refused {n} times: {reason}" for reason, n in found["refusals"].items()]
    lines += [f"worst {k}: {value:.3g} ({where})" for k, (value, where) in found["worst"].items()]
    lines.append(f"{found['rejected']} better schedules were passed over, their kernels being wrong")
    lines.append(f"{found['under 30% nonzero']} answers have under 30% nonzero elements")
    lines += found["not right"][:40]
    return lines
