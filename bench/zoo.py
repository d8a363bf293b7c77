"""``python -m bench zoo``: convolutional families of torchvision and timm, and models of other libraries,
through ``torch.compile(model, backend="transconv")``, beside torch and torch's own compiler.

Some models at a time are compiled and compared with f32, each by a process of its own with a time limit;
when all of these have done so, each is timed alone. A row is appended to ``zoo.csv`` when it is complete;
what was compiled and not timed is added at the end. A run that is repeated skips the models it has. With
``--kernels`` the time of each kernel goes to ``zoo_kernels.csv``, and its text to ``zoo_texts/``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import waves, zoo_kernels
from bench.environment import VERSIONS, at_hand, versions, worker_environment
from bench.zoo_measures import PHASES, SIDES, Row
from bench.zoo_models import ZOO
from bench.zoo_table import zoo_table
from transconv.cli.arguments import ranges
from transconv.tuning.table import CsvTable
from transconv.verify.machine import Pool

COLUMNS = (
    "model",
    "what",
    "library",
    "verdict",
    "transconv_ms",
    "inductor_ms",
    "eager_ms",
    "transconv_gpu_ms",
    "inductor_gpu_ms",
    "eager_gpu_ms",
    "transconv_peak_mb",
    "inductor_peak_mb",
    "eager_peak_mb",
    "transconv_rmse",
    "inductor_rmse",
    "eager_rmse",
    "transconv_kernels",
    "inductor_kernels",
    "eager_kernels",
    "ours",
    "copies",
    "regions",
    "estimated_ms",
    "transconv_compile_s",
    "inductor_compile_s",
    "note",
    "error",
    *VERSIONS,
)
WORK = "bench.zoo_measures:work"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=ranges.some_of(*ZOO), default=",".join(ZOO))
    parser.add_argument("--what", type=ranges.some_of(*PHASES), default=PHASES[0])
    parser.add_argument(
        "--kernels", action="store_true", help="also time each kernel, beside its estimate and limit"
    )
    parser.add_argument(
        "--sides",
        type=ranges.some_of(*SIDES),
        default=",".join(SIDES),
        help="what is timed; without inductor its compiler does not run",
    )
    parser.add_argument("--device", type=at_hand, default=at_hand())
    parser.add_argument("--images", type=ranges.at_least(0), default=0, help="of a batch; 0: 32, clips 4")
    waves.arguments(parser, "model", together=5, limit=120, budget=460)
    parser.add_argument("--retry", default="", help="errors to measure again: timeout,crash,...")


def main(options: argparse.Namespace) -> int:
    """Fill ``zoo.csv``. Returns 1 if a model has an error or results that are wrong."""
    out = Path(options.out)
    table = CsvTable(out / "zoo.csv", COLUMNS, ("model", "what"))
    kernels = CsvTable(out / "zoo_kernels.csv", zoo_kernels.COLUMNS, ("model", "what", "phase", "text"))
    if options.retry:
        table.drop(options.retry.split(","), "error")
    asked = [(name, what) for what in options.what.split(",") for name in options.models.split(",")]
    todo = [pair for pair in asked if not table.has({"model": pair[0], "what": pair[1]})]
    variables = worker_environment(options.cache)
    if options.device == "cpu":
        variables["TRITON_INTERPRET"] = "1"
    about = versions()
    left: dict[str, Row] = {
        key(*pair): {"model": pair[0], "what": pair[1], "library": ZOO[pair[0]].library} | about
        for pair in todo
    }
    pool = Pool(waves.groups(WORK, [*left], options.together, variables, waves.gpus(options.device)))
    payloads = {
        key(name, what): {
            "model": name,
            "phase": what,
            "device": options.device,
            "images": options.images,
            "sides": tuple(options.sides.split(",")),
            "kernels": options.kernels,
        }
        for name, what in todo
    }
    try:
        for name, found in waves.measured(
            pool, payloads, options.together, options.limit, options.time_budget
        ):
            rows = found.pop("rows", ())
            left[name] |= found
            print(line(left[name]), flush=True)
            for row in rows:
                kernels.add(left[name] | about | row | {"text": row.get("text", "")})
                keep_text(out / "zoo_texts", row)
            if "error" in found or f"{options.sides.split(',')[0]}_ms" in found:
                table.add(left.pop(name))
    finally:
        for row in left.values():  # compiled, not timed
            if "verdict" in row:
                table.add(row)
    print(zoo_table(table.rows), flush=True)
    if options.kernels:
        print(zoo_kernels.spread(kernels.rows), flush=True)
    return 1 if any(r["error"] or r["verdict"] == "wrong" for r in table.rows) else 0


def key(model: str, what: str) -> str:
    """The name of a process for a model in one of its phases."""
    return model if what == PHASES[0] else f"{model} {what}"


def keep_text(folder: Path, row: Row) -> None:
    """Write a kernel's computation once, under its digest."""
    if row.get("text"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row['text']}.txt").write_text(row["whole"], encoding="utf-8")


def line(row: Row) -> str:
    """What is known of a model, for people."""
    if row.get("error"):
        return f"{key(row['model'], row['what']):26} {row['error'][:200]}"
    times = ", ".join(f"{side} {row[f'{side}_ms']:.3f} ms" for side in SIDES if f"{side}_ms" in row)
    return (
        f"{key(row['model'], row['what']):26} {row['verdict']}: RMSE {row['transconv_rmse']:.2e}, eager's "
        f"{row['eager_rmse']:.2e}; {row['ours']} kernels, {row['regions']} regions of torch, "
        f"{row['transconv_compile_s']:.0f} s  {times}  {row['note'][:80]}"
    )
