"""``python -m bench pages``: every table and picture of README.md and docs/ whose numbers bench/results
holds, written between their markers. With ``--check`` nothing is written, and what is stale is named."""

from __future__ import annotations

import argparse
import json
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench import ablation_table, benchdnn, board, plots
from bench.chips_table import chips_table
from bench.distributed import distributed_table
from bench.dynamo_table import runner_tables
from bench.environment import ROOT, VERSIONS
from bench.gallery import gallery_table
from bench.graph_table import graphs_table, models_table
from bench.issue_table import issues_table
from bench.kernels.kernel_table import kernels_table
from bench.optimized_table import optimized_table
from bench.quantized_table import quantized_table, training_table
from bench.run_tables import (
    check_table,
    computations_table,
    dropin_table,
    fuzz_table,
    invariance_table,
    maps_table,
    networks_table,
    overhead_table,
    samples_table,
)
from bench.size_table import first_calls_table, sizes_table
from bench.size_table import models_table as size_models_table
from bench.slide_table import slide_table
from bench.small_types import small_types_table
from bench.start_table import start_table
from bench.tables import ceilings_table, losses_table, products_table, ratios_table, summary_table
from bench.zoo_kernels import estimates_table
from bench.zoo_table import zoo_table
from transconv.tuning.table import Row, read

RESULTS = ROOT / "bench" / "results"
CHIPS = ("h200", "h100")  # what files of results begin with; the tables of the first are named below
# A table elsewhere stands in a text that says it.
WITH_ORIGIN = (
    "README.md",
    "docs/results.md",
    "docs/checking.md",
    "docs/issues.md",
    "docs/demonstrations.md",
    "docs/any_size.md",
    "docs/graphs.md",
    "docs/functional.md",
    "docs/start.md",
    "docs/kernel_api.md",
    "docs/scaling.md",
    "docs/guide_schedules.md",
    "docs/quantized.md",
    "docs/invariance.md",
)
PLAIN = ("h200_layers_bf16_nhwc.csv", "h200_layers_bf16_nchw.csv", "h200_layers_tf32_nhwc.csv")
LAYERS = (*PLAIN, "h200_layers_bf16_nhwc_bias_relu.csv")
ABLATION, ABLATION_GRAPHS = "h200_ablation.csv", "h200_ablation_graphs.csv"
PLAINLY = (
    "python -m bench time layers --layouts nhwc,nchw --baselines cl,nchw,inductor",
    "python -m bench time layers --dtypes tf32",
)
FUSED = "python -m bench time layers --props fwd --epilogue bias+relu --baselines cl,nchw,fused"


@dataclass(frozen=True, slots=True)
class Table:
    """The files of bench/results that a table is made from, the commands that measure such files, and
    how rows become Markdown. ``always``: it is there without its files, too, and says what is not
    measured."""

    files: tuple[str, ...]
    commands: tuple[str, ...]
    make: Callable[[list[Row]], str]
    always: bool = False

    def rows(self) -> list[Row]:
        return [row for name in self.files for row in rows_of(RESULTS / name)]

    def on(self, chip: str) -> Table:
        """The same of the files of another GPU."""
        return replace(self, files=tuple(re.sub(f"^{CHIPS[0]}_", f"{chip}_", name) for name in self.files))

    def is_there(self) -> bool:
        """Whether its files are: what was not measured has none."""
        return all((RESULTS / name).exists() for name in self.files)


TABLES = {
    "ratios": Table(PLAIN, PLAINLY, ratios_table),
    "summary": Table(LAYERS, (*PLAINLY, FUSED), summary_table),
    "losses": Table(LAYERS, (*PLAINLY, FUSED), losses_table),
    "products": Table(
        ("h200_products.csv",), ("python -m bench time layers --baselines cl,nchw,gemm",), products_table
    ),
    "small-types": Table(
        ("h200_small_types.csv",),
        (
            "python -m bench time layers --kinds dense --dtypes bf16,int8,fp8,fp8_exact --props fwd "
            "--baselines gemm",
        ),
        small_types_table,
    ),
    "ceilings": Table(
        ("h200_ceilings.json", "h200_ceilings_gemm.json"), ("python -m bench time layers",), ceilings_table
    ),
    "networks": Table(
        ("h200_networks.csv",),
        tuple(f"python -m bench networks{way}" for way in ("", " --compiled", " --graphs")),
        networks_table,
    ),
    "overhead": Table(("h200_overhead.csv",), ("python -m bench overhead",), overhead_table),
    "kernels": Table(("h200_kernels.csv",), ("python -m bench kernels",), kernels_table),
    "maps": Table(("h200_maps.csv",), ("python -m bench maps",), maps_table),
    "computations": Table(
        ("h200_computations.csv",), ("python -m bench computations",), computations_table
    ),
    "check": Table(
        ("h200_check.csv",), ("python -m bench check layers --dtypes bf16,f16,f32,tf32",), check_table
    ),
    "dropin": Table(("h200_dropin.json",), ("python -m bench dropin",), dropin_table),
    "samples": Table(("h200_samples.csv",), ("python -m bench samples",), samples_table),
    "fuzz": Table(
        ("h200_fuzz.csv", "interpreted_fuzz.csv"),
        (
            "transconv fuzz --n 20000 --seed 2 --json fuzz.json",
            "transconv fuzz --computes 2000 --seed 27 --interpreter --json fuzz.json",
            "transconv fuzz --kernels 5000 --seed 1 --json fuzz.json",
            "python -m bench fuzz-runs fuzz.json",
        ),
        fuzz_table,
    ),
    "chips": Table(
        ("h200_layers_bf16_nhwc.csv", "h100_layers_bf16_nhwc.csv"),
        ("python -m bench time layers --sampled",),
        chips_table,
    ),
    "gallery": Table(("h200_gallery.csv",), ("python -m bench gallery",), gallery_table, always=True),
    "benchdnn": Table(
        ("h200_benchdnn.csv",), ("python -m bench benchdnn harness_conv_f32",), benchdnn.lists_table
    ),
    "benchdnn-interpreted": Table(
        ("interpreted_benchdnn.csv",),
        ("python -m bench benchdnn harness_conv_f32 '--options=--engine=numpy --mb=1 --shard 0/40'",),
        benchdnn.lists_table,
    ),
    "issues": Table(("h200_issues.csv",), ("python -m bench issues",), issues_table),
    "sizes": Table(("h200_sizes.csv",), ("python -m bench sizes",), sizes_table),
    "quantized": Table(("h200_quantized.csv",), ("python -m bench quantized",), quantized_table),
    "quantized_train": Table(
        ("h200_quantized_train.csv",), ("python -m bench quantized --only train",), training_table
    ),
    "slide": Table(
        ("h200_slide_trials.csv",),
        ("python -m bench schedules bench/problems/slide_trials.csv",),
        slide_table,
    ),
    "size_models": Table(
        ("h200_size_models.csv",), ("python -m bench sizes --only models",), size_models_table
    ),
    "first_calls": Table(("h200_first_calls.csv",), ("python -m bench first-calls",), first_calls_table),
    "start": Table(
        ("h200_start.csv",), ("python -m bench start --models resnet50,audio,detection",), start_table
    ),
    "models": Table(
        ("h100_zoo.csv", "h200_zoo.csv", "h100_graphs.csv", "h200_graphs.csv"),
        ("python -m bench zoo", "python -m bench graphs"),
        models_table,
    ),
    "graphs": Table(("h200_graphs.csv",), ("python -m bench graphs",), graphs_table),
    "distributed": Table(("h200_distributed.csv",), ("python -m bench distributed",), distributed_table),
    "optimized": Table(("h200_optimized.csv",), ("python -m bench optimized",), optimized_table),
    "invariance": Table(
        ("h200_invariance.csv",),
        ("python -m bench invariance resnet50", "python -m bench invariance --models resnet50,convnext_t"),
        invariance_table,
    ),
    "dynamo": Table(
        ("h200_dynamo.csv",),
        ("python -m bench dynamo --pytorch pytorch/benchmarks/dynamo",),
        runner_tables,
    ),
    "zoo": Table(("h200_zoo.csv",), ("python -m bench zoo",), zoo_table),
    "zoo_kernels": Table(
        ("h200_zoo_kernels.csv",), ("python -m bench zoo --kernels --sides transconv",), estimates_table
    ),
}


def rows_of(path: Path) -> list[Row]:
    """The rows of a CSV file; of a JSON summary one, or one for each of its groups."""
    if path.suffix == ".csv":
        return read(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    about = {c: found[c] for c in VERSIONS}
    return [{"group": name, **of, **about} for name, of in found.get("groups", {"": found}).items()]


def origin(table: Table, rows: list[Row]) -> str:
    """Device, versions, commits, files and commands, one line."""

    def all_of(column: str) -> str:
        found = {str(r.get(f"versions_{column}", r.get(column)) or "")[:24] for r in rows} - {""}
        return ", ".join(sorted({x[:7] for x in found} if column == "commit" else found))

    files = ", ".join(f"`bench/results/{name}`" for name in table.files)
    again = ", ".join(f"`{command}`" for command in table.commands)
    return (
        f"{all_of('device')}, torch {all_of('torch')}, Triton {all_of('triton')}, commit "
        f"{all_of('commit')}. From {files}. To measure again: {again}."
    )


def fill_markers(text: str, tables: dict[str, str]) -> str:
    """Put tables between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->``. Raises ValueError if a
    marker has no end; markers without a table stay as they are."""
    for name, table in tables.items():
        start, stop = f"<!-- table:{name} -->", f"<!-- end:{name} -->"
        if start not in text:
            continue
        if text.count(start) != 1 or text.count(stop) != 1:
            raise ValueError(f"'{start}' must occur once and be followed by one '{stop}'")
        pattern = re.escape(start) + ".*?" + re.escape(stop)
        filled = f"{start}\n{table}\n{stop}" if table else f"{start}\n{stop}"
        text = re.sub(pattern, lambda _: filled, text, flags=re.DOTALL)  # noqa: B023
    return text


def parts_of(table: Table) -> list[tuple[str, str]]:
    """The table of each GPU that it was measured on, the further ones named, each with its origin; none
    where nothing was measured."""
    parts = []
    for chip in CHIPS:
        own = table.on(chip)
        beside = any(name.startswith(f"{chip}_") for name in table.files)  # of another chip
        if chip == CHIPS[0] and own.always and not own.is_there():
            parts.append((own.make([]), f"To measure: `{own.commands[0]}`."))
        if not own.is_there() or (chip != CHIPS[0] and (beside or own.files == table.files)):
            continue
        rows = own.rows()
        named = f"On {', '.join(sorted({str(r['device']) for r in rows}))}:\n\n" * (chip != CHIPS[0])
        parts.append((named + own.make(rows), origin(own, rows)))
    return parts


def joined(parts: list[tuple[str, str]], with_origin: bool) -> str:
    """The text of the parts of a table; empty where there is none."""
    return "\n\n".join(f"{text}\n\n{where}" if with_origin else text for text, where in parts)


def written(table: Table, with_origin: bool) -> str:
    """The table of each GPU, as one text."""
    return joined(parts_of(table), with_origin)


def pages() -> dict[Path, str]:
    """Every page that has such a marker, and ``docs/ablation.md``, as they have to be."""
    parts = {name: parts_of(table) for name, table in TABLES.items()}
    bare, whole = (
        {name: joined(made, origins) for name, made in parts.items()} | board.tables()
        for origins in (False, True)
    )
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if "<!-- table:" in text:
            own = str(path.relative_to(ROOT)) in WITH_ORIGIN
            found[path] = fill_markers(text, whole if own else bare)
    found[ROOT / "docs" / "ablation.md"] = ablation_table.document(
        read(RESULTS / ABLATION), read(RESULTS / ABLATION_GRAPHS)
    )
    return found


def stale_pictures() -> list[Path]:
    """The light and the dark picture, where it is not of the rows that there are."""
    rows = TABLES["ratios"].rows()
    mark = plots.digest(rows)
    return [
        path for path in pictures() if not path.exists() or mark not in path.read_text(encoding="utf-8")
    ]


def pictures() -> dict[Path, str]:
    """The two pictures, and for which page each is."""
    return {ROOT / "docs" / "images" / f"ratios_{mode}.svg": mode for mode in ("light", "dark")}


def arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("--check", action="store_true", help="write nothing; exit code 1 if any is stale")


def main(options: Namespace) -> int:
    """Write stale parts of pages, or with --check name them. ValueError for a marker without an end."""
    stale = {p: t for p, t in pages().items() if p.read_text(encoding="utf-8") != t}
    old = stale_pictures() if options.check else list(pictures())
    for path in (*stale, *(old if options.check else ())):
        print(f"{path.relative_to(ROOT)}: {'is stale' if options.check else 'written'}")
    if options.check:
        return 1 if stale or old else 0
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    for path in old:
        path.parent.mkdir(exist_ok=True)
        plots.overview(TABLES["ratios"].rows(), path, pictures()[path])
    return 0
