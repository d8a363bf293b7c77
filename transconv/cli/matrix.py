"""``matrix``: the golden problems compiled for every chip, and compared with the recorded resources."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from transconv.backend_triton import BACKENDS, Answer, compile_offline, triton_version
from transconv.cli.arguments import options, ranges
from transconv.disk_cache import replace_named
from transconv.errors import ScheduleError
from transconv.target import TARGETS, Target
from transconv.verify.matrix import record
from transconv.verify.matrix.cases import CASES, MatrixCase, Planned, planned, share

RECORD = Path(__file__).parents[2] / "tests" / "golden" / "resources.csv"
INSTALLED = "installed"


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs, "matrix", "compile a fixed set of problems for every chip, compare with the record",
        "Compiles a fixed set of problems (the golden problems) in child processes, without a GPU, and\n"
        "reads the machine code. Fails if a kernel does not compile, lacks an instruction that its\n"
        "schedule requires, or uses clearly more registers or more spills than recorded.",
        ("matrix --targets sm_90,gfx942 --problems dense,depthwise",
         "matrix --triton installed,.newest --share 3/11",
         "matrix --update --page docs/targets.md"), run)
    made.add_argument("--targets", default="", metavar="T[,T...]", help="chips (default: all)")
    made.add_argument("--problems", default="", metavar="N[,N...]",
                      help=f"golden problems (default: all): {' '.join(CASES)}")
    made.add_argument("--share", type=ranges.part, default=(0, 1), metavar="I/N",
                      help="compile only part I of N of all pairs of problem and chip")
    made.add_argument("--triton", default=INSTALLED, metavar="PATH[,PATH...]",
                      help="folders with one Triton each (pip install --target); 'installed': the "
                           "Triton of this environment")
    made.add_argument("--jobs", type=ranges.processes, default=os.cpu_count() or 1, metavar="N",
                      help="child processes (default: one per core)")
    made.add_argument("--timeout", type=ranges.limit, default=180, metavar="S",
                      help="seconds to compile one kernel (default: 180)")
    made.add_argument("--record", type=Path, default=RECORD, metavar="FILE",
                      help="the CSV file to compare with (default: the repository's)")
    made.add_argument("--update", action="store_true", help="write the results into the record")
    made.add_argument("--json", type=ranges.output, metavar="FILE", help="also write results as JSON")
    made.add_argument("--csv", type=ranges.output, metavar="FILE", help="also write results as CSV")
    made.add_argument("--page", type=_page, metavar="FILE",
                      help="write the pages of the documentation from the record, FILE and one beside it "
                           "about kernels; nothing is compiled but for --update, --json or --csv")


def _page(text: str) -> Path:
    path = ranges.output(text)
    if path.suffix != ".md":
        raise argparse.ArgumentTypeError(f"'{text}' is no Markdown file, such as docs/targets.md: "
                                         "a second page is written beside it")
    ranges.output(str(record.beside(path)))
    return path


def run(words: argparse.Namespace) -> int:
    if words.page and not (words.update or words.json or words.csv):
        _write_pages(words.page, record.read(words.record))
        return 0
    targets = [Target.parse(t) for t in words.targets.split(",") if t] or [
        t for t in TARGETS.values() if t.backend in BACKENDS]
    folders = [None if f == INSTALLED else Path(f) for f in words.triton.split(",")]
    versions = [triton_version(f) for f in folders]
    started = time.monotonic()
    kernels = _planned(share(_names(words.problems), targets, *words.share), words.jobs)
    recorded = record.read(words.record)
    rows: list[record.ResourceRow] = []
    failures: list[str] = []
    everything: list[dict[str, object]] = []
    for version, folder in zip(versions, folders, strict=True):
        answers = _compiled(kernels, version, folder, words)
        made = record.rows_of(version, kernels, answers)
        rows += made
        failures += _failures(version, kernels, answers, made,
                              None if words.update else recorded)
        everything += [{"triton": version, **asdict(p), **asdict(a)}
                       for p, a in zip(kernels, answers, strict=True)]
    if words.update:
        recorded |= {r.key: r for r in rows}
        if words.share == (0, 1) and not words.targets and not words.problems:
            made_now = {r.key for r in rows}  # rows of removed cases leave the record
            recorded = {k: r for k, r in recorded.items() if k in made_now or k[0] not in versions}
        record.write(words.record, recorded.values())
    if words.json:
        replace_named(words.json, json.dumps(everything, indent=1))
    if words.csv:
        record.write(words.csv, rows)
    if words.page:
        _write_pages(words.page, recorded)
    print(_report(rows, failures, len(kernels) * len(versions), time.monotonic() - started))
    return 1 if failures else 0


def _write_pages(path: Path, recorded: dict[record.Key, record.ResourceRow]) -> None:
    """The page of resources and the page of kernels."""
    if not recorded:
        raise FileNotFoundError("the record has no rows to write pages of; --update makes them")
    beside = record.beside(path)
    replace_named(path, record.page(recorded.values(), beside.name))
    replace_named(beside, record.page_of_kernels(recorded.values()))


def _names(text: str) -> list[str]:
    names = [n for n in text.split(",") if n] or list(CASES)
    for n in names:
        if n not in CASES:
            raise ScheduleError(f"golden problem '{n}' is unknown; expected one of {' '.join(CASES)}")
    return names


def _planned(pairs: Sequence[tuple[MatrixCase, Target]], workers: int) -> list[Planned]:
    """The kernels of all pairs; generating them takes as long as a small part of compiling them."""
    if workers == 1 or len(pairs) < 4:
        return [p for case, target in pairs for p in planned(case, target)]
    # Children start afresh: a fork of a process with threads may hang.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        made = pool.map(planned, *zip(*pairs, strict=True))
        return [p for found in made for p in found]


def _compiled(kernels: Sequence[Planned], version: str, folder: Path | None,
              words: argparse.Namespace) -> list[Answer]:
    with tqdm(total=len(kernels), desc=f"Triton {version}", unit="kernel", disable=None) as bar:
        return compile_offline([p.job for p in kernels], words.timeout, words.jobs, folder,
                               lambda _: bar.update())


def _failures(
    version: str,
    kernels: Sequence[Planned],
    answers: Sequence[Answer],
    rows: Sequence[record.ResourceRow],
    recorded: dict[record.Key, record.ResourceRow] | None,
) -> list[str]:
    """A sentence for each failure, with the command that repeats it."""
    found = [(p.target, p.case, text) for p, a in zip(kernels, answers, strict=True)
             for text in record.flaws(p, a)]
    if recorded is not None and not any(k[0] == version for k in recorded):
        return [f"Triton {version} has no rows in the record; --update makes them"]
    if recorded is not None:
        found += [(r.target, r.case, text) for r in rows
                  for text in record.overruns(r, recorded.get(r.key))]
    return [f"{case} for {target}, Triton {version}: {text}\n    repeat: python -m transconv matrix "
            f"--targets {target} --problems {case}" for target, case, text in found]


def _report(rows: Sequence[record.ResourceRow], failures: Sequence[str], kernels: int,
            seconds: float) -> str:
    spilt = sum(1 for r in rows if r.spill_bytes)
    lines = [*failures, f"{kernels} kernels compiled in {seconds:.0f} s for "
             f"{len({r.target for r in rows})} chips; {spilt} of {len(rows)} rows spill as "
             f"recorded; {len(failures)} failures"]
    return "\n".join(lines)
