"""``matrix``: the golden problems compiled for every chip, and compared with the recorded resources."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby, product
from pathlib import Path

from tqdm import tqdm

from transconv.backend_triton import Answer, compile_offline, compiles_for, triton_version
from transconv.cli.arguments import options, ranges
from transconv.support import ScheduleError, replace_named
from transconv.target import TARGETS, Target
from transconv.verify import matrix
from transconv.verify.matrix import CASES, MatrixCase, Planned, planned, share

RECORD = Path(__file__).parents[2] / "tests" / "golden" / "resources.csv"
INSTALLED = "installed"


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "matrix",
        "compile a fixed set of problems for every chip, compare with the record",
        "Compiles a fixed set of problems (the golden problems) in child processes, without a GPU, and\n"
        "reads the machine code. Fails if a kernel does not compile, lacks an instruction that its\n"
        "schedule requires, or uses clearly more registers or more spills than recorded.",
        (
            "matrix --targets sm_90,gfx942 --problems dense,depthwise",
            "matrix --triton installed,.newest --share 3/11",
            "matrix --triton .xpu --targets pvc",
            "matrix --update --page docs/targets.md",
        ),
        run,
    )
    made.option("--targets", "T[,T...]", "chips (default: all)", "")
    made.option("--problems", "N[,N...]", f"golden problems (default: all): {' '.join(CASES)}", "")
    made.option(
        "--share", "I/N", "compile only part I of N of all pairs of problem and chip", (0, 1), ranges.part
    )
    made.option(
        "--triton",
        "PATH[,PATH...]",
        "folders with one Triton each (pip install --target), that of Intel GPUs too; 'installed': "
        "the Triton of this environment",
        INSTALLED,
    )
    made.option(
        "--jobs", "N", "child processes (default: one per core)", os.cpu_count() or 1, ranges.processes
    )
    made.option("--timeout", "S", "seconds to compile one kernel (default: 180)", 180, ranges.limit)
    made.option(
        "--record", "FILE", "the CSV file to compare with (default: the repository's)", RECORD, Path
    )
    made.option(
        "--sanitizer",
        "NAME[,NAME...]",
        "compile with Triton's sanitizers consan, gsan, fpsan instead, and compare nothing with the "
        "record; fails where a release has no such sanitizer",
        [""],
        _sanitizers,
    )
    made.flag("--update", "write the results into the record")
    made.option("--json", "FILE", "also write results as JSON", None, ranges.output)
    made.option("--csv", "FILE", "also write results as CSV", None, ranges.output)
    made.option(
        "--page",
        "FILE",
        "write the pages of the documentation from the record, FILE and one beside it "
        "about kernels; nothing is compiled but for --update, --json or --csv",
        None,
        _page,
    )


def _page(text: str) -> Path:
    path = ranges.output(text)
    if path.suffix != ".md":
        raise argparse.ArgumentTypeError(
            f"'{text}' is no Markdown file, such as docs/targets.md: a second page is written beside it"
        )
    ranges.output(str(beside(path)))
    return path


def _sanitizers(text: str) -> list[str]:
    if strange := [n for n in text.split(",") if n not in ("consan", "gsan", "fpsan")]:
        raise argparse.ArgumentTypeError(f"'{strange[0]}' is no sanitizer; expected consan, gsan or fpsan")
    return text.split(",")


def _compiles(name: str, folder: Path | None) -> bool:
    chip = TARGETS[name]
    return compiles_for(chip.backend, chip.arch, folder, chip.compiled_since)


def run(words: argparse.Namespace) -> int:
    if words.page and not (words.update or words.json or words.csv):
        _write_pages(words.page, matrix.read(words.record))
        return 0
    folders = [None if f == INSTALLED else Path(f) for f in words.triton.split(",")]
    versions = [triton_version(f) for f in folders]
    targets = [Target.parse(t) for t in words.targets.split(",") if t] or [
        t for t in TARGETS.values() if any(_compiles(t.name, f) for f in folders)
    ]
    started = time.monotonic()
    every = _planned(share(_names(words.problems), targets, *words.share), words.jobs)
    count = 0
    recorded = matrix.read(words.record)
    rows: list[matrix.ResourceRow] = []
    failures: list[str] = []
    everything: list[dict[str, object]] = []
    recorded_too = recorded if words.sanitizer == [""] and not words.update else None
    for (version, folder), name in product(zip(versions, folders, strict=True), words.sanitizer):
        # Chips of other vendors are for another Triton; those that are asked for by name are told why not.
        kernels = [p for p in every if words.targets or _compiles(p.target, folder)]
        if name:
            version = f"{version} {name}"
            kernels = [
                replace(p, expected=(), job=replace(p.job, sanitizer=name, words=False)) for p in kernels
            ]
        count += len(kernels)
        answers = _compiled(kernels, version, folder, words)
        made = matrix.rows_of(version, kernels, answers)
        rows += made
        failures += _failures(version, kernels, answers, made, recorded_too)
        if name:
            checked = sum(bool(r.words) for r in made)
            print(f"Triton {version}: {checked} of {len(made)} rows have checks")
            failures += [] if checked else [f"Triton {version}: no kernel has checks of this sanitizer"]
        everything += [
            {"triton": version, **asdict(p), **asdict(a), "code": ""}  # bytes, which JSON does not have
            for p, a in zip(kernels, answers, strict=True)
        ]
    if words.update:
        recorded |= {r.key: r for r in rows}
        if words.share == (0, 1) and not words.targets and not words.problems:
            made_now = {r.key for r in rows}  # rows of removed cases leave the record
            recorded = {k: r for k, r in recorded.items() if k in made_now or k[0] not in versions}
        matrix.write(words.record, recorded.values())
    if words.json:
        replace_named(words.json, json.dumps(everything, indent=1))
    if words.csv:
        matrix.write(words.csv, rows)
    if words.page:
        _write_pages(words.page, recorded)
    print(_report(rows, failures, count, time.monotonic() - started))
    return 1 if failures else 0


def _write_pages(path: Path, recorded: dict[matrix.Key, matrix.ResourceRow]) -> None:
    """The page of resources and the page of kernels."""
    if not recorded:
        raise FileNotFoundError("the record has no rows to write pages of; --update makes them")
    kernels = beside(path)
    replace_named(path, page_of_chips(recorded.values(), kernels.name))
    replace_named(kernels, page_of_kernels(recorded.values()))


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


def _compiled(
    kernels: Sequence[Planned], version: str, folder: Path | None, words: argparse.Namespace
) -> list[Answer]:
    with tqdm(total=len(kernels), desc=f"Triton {version}", unit="kernel", disable=None) as bar:
        return compile_offline(
            [p.job for p in kernels], words.timeout, words.jobs, folder, lambda _: bar.update()
        )


def _failures(
    version: str,
    kernels: Sequence[Planned],
    answers: Sequence[Answer],
    rows: Sequence[matrix.ResourceRow],
    recorded: dict[matrix.Key, matrix.ResourceRow] | None,
) -> list[str]:
    """A sentence for each failure, with the command that repeats it."""
    found = [
        (p.target, p.case, text)
        for p, a in zip(kernels, answers, strict=True)
        for text in matrix.flaws(p, a)
    ]
    if recorded is not None and not any(k[0] == version for k in recorded):
        return [f"Triton {version} has no rows in the record; --update makes them"]
    if recorded is not None:
        found += [
            (r.target, r.case, text) for r in rows for text in matrix.overruns(r, recorded.get(r.key))
        ]
    return [
        f"{case} for {target}, Triton {version}: {text}\n    repeat: transconv matrix "
        f"--targets {target} --problems {case}"
        for target, case, text in found
    ]


def _report(
    rows: Sequence[matrix.ResourceRow], failures: Sequence[str], kernels: int, seconds: float
) -> str:
    spilt = sum(1 for r in rows if r.spill_bytes)
    lines = [
        *failures,
        f"{kernels} kernels compiled in {seconds:.0f} s for {len({r.target for r in rows})} chips; "
        f"{spilt} of {len(rows)} rows spill as recorded; {len(failures)} failures",
    ]
    return "\n".join(lines)


# -- the pages of the documentation, from the record alone -----------------------------------------------

KINDS: tuple[tuple[str, str], ...] = (
    ("HGMMA", "asynchronous matrix unit of sm_90"),
    ("UTCHMMA", "asynchronous matrix unit of sm_100"),
    ("HMMA", "matrix unit, 16-bit and tf32 operands"),
    ("IGMMA, QGMMA", "asynchronous matrix unit of sm_90, 8-bit integers and floats"),
    ("IMMA, QMMA", "matrix unit, 8-bit integers and floats"),
    ("UTCQMMA", "asynchronous matrix unit of sm_100, 8-bit floats"),
    ("UTCOMMA, OMMA", "matrix units of sm_100 and sm_120, 4-bit floats in blocks"),
    ("DMMA", "matrix unit, f64 operands"),
    ("v_mfma", "matrix unit of AMD's wave-64 chips"),
    ("v_mfma_scale", "the same, of elements in blocks with their scales"),
    ("v_wmma", "matrix unit of AMD's wave-32 chips"),
    ("FFMA, FFMA2, DFMA, v_fma, v_pk_fma, v_dual_fma", "multiply-add element by element"),
    ("dpas", "matrix unit of Intel's GPUs (XMX)"),
    ("mad.f", "multiply-add element by element on Intel's GPUs"),
    ("UTMALDG, UTMASTG", "boxes loaded and stored by the copy engine"),
    ("LDGSTS, global_load_lds", "copy from memory to shared memory past the registers"),
    ("LDG, STG, global_load, global_store, buffer_load", "loads and stores of each lane"),
    (
        "load.ugm, store.ugm, load_block2d.ugm",
        "messages to memory of Intel's GPUs, by each lane or as a box",
    ),
    ("load.slm, store.slm, sync.bar", "messages to their shared memory, and waiting for the program"),
    ("….128", "those that move 16 bytes per lane"),
    ("LDSM, STSM", "whole matrix fragments from and to shared memory"),
    ("LDL, STL, scratch_load, scratch_store", "registers that were spilt, or an array on the stack"),
)

HEAD = """# What the kernels take of every chip

<!-- Written by `transconv matrix --page docs/targets.md`; change the record or
     transconv/cli/matrix.py instead. -->

Every golden problem is compiled for every chip, without a GPU, by `transconv matrix`: its
machine code is read for registers, spills, shared memory and instructions, which are compared with
the record ([tests/golden/resources.csv](../tests/golden/resources.csv)). A kernel that no longer
compiles, spills more than recorded, takes clearly more registers at the same schedule, or lacks an
instruction that its schedule and its chip ask for (`transconv/verify/expected_instructions.py`) is
a failure with a sentence.

```sh
transconv matrix --targets sm_90,gfx942 --problems dense,depthwise
transconv matrix --update --page docs/targets.md  # after a change that is meant
make matrix  # everything, with the pinned Triton and the newest release
make matrix-xpu  # Intel's GPUs, with Triton's release for them and ocloc (docs/intel.md)
```

**What was run and what was only compiled.** Kernels for sm_90 ran on an H200 and on H100s with Triton
3.6 (see [the results](results.md)). For every other chip on this page, and for any chip with a newer
Triton, they were compiled and never run: that they are right there rests on the IR's and Triton's
interpreters, how fast they are is [predicted](board.md). Of Intel's GPUs the column Triton has two
numbers, those of Triton's release and of `ocloc`, the offline compiler; [what the words of that machine
are](intel.md).

**Records** (`transconv/target/records.py`) have rates of data sheets. Not published, and assumed
there: the 16-bit rate of GB10 (`sm_121`), and of MI455X (`gfx1250`) the compute units, registers
and L2 cache; its 16-bit rate is half of its 8-bit one.

## What needs which Triton

* Kernels **on `sm_100` and `sm_103`** need 3.7.1: before, lanes whose mask does not hold may read
  at a wrong address (pytorch#187081). 3.6 compiles for them; on such a GPU it is refused.
* Kernels **for `gfx1250`** need 3.7.1. 3.6 has none of its matrix instructions: products are
  multiply-adds that spill (2,868 bytes), and one of 8-bit floats did not end in 180 s.
* The instructions of **`sm_103` and `sm_121`** are read by the `cuobjdump` of 3.7 or later. That of
  3.6 is of CUDA 12.8, which knows neither; `TRITON_CUOBJDUMP_PATH` names another one, as `make
  matrix` does.
* **`slide=`** (steps that share boxes) needs 3.6 or 3.7. A step multiplies rows of a ring in shared
  memory by a view that is larger than the eight rows it begins with. 3.8 and later verify that no
  view is larger than its source, and their slices begin at constants alone. There each step fetches
  boxes of its own ([what that costs](guide_schedules.md#shared-boxes)).
* **Boxes that take every so many-th position** (strided convolutions) need 3.6. Triton has no such
  descriptors; they are encoded here, for the launch function of this release.
* **Starts without Triton's wrapper**, and kernels that are read from a cache without it, need 3.6:
  arguments of the launch function differ between releases. Others are started by Triton, which
  takes longer on the host.

Registers and spilt bytes are per thread (AMD: vector and accumulation registers together; Intel: of a
hardware thread, which is a warp), shared memory is per program, in bytes, beside what a program may
use. The row of each chip leads to its kernels.
"""

HEAD_OF_KERNELS = """# Every kernel of every chip

<!-- Written by `transconv matrix --page docs/targets.md`, beside that page. -->

What each kernel of the golden problems takes of each chip. [The page of all chips](targets.md) says
how it was compiled, what was only compiled and never run, and what the words for instructions mean.

Registers and spilt bytes are per thread (AMD: vector and accumulation registers together; Intel: of a
hardware thread, which is a warp), shared memory is per program, in bytes, beside what a program may
use. The stride phases of a data gradient are one row, that of the most of each. `_sum` adds the parts
of a split sum. A chip without a column for a Triton was not compiled with it. Tiles are the heuristics'
for that chip, except where the golden problem names one that is legal there.
"""


def page_of_chips(rows: Iterable[matrix.ResourceRow], kernels: str = "targets_kernels.md") -> str:
    """The page of all chips in Markdown; ``kernels`` is the page of kernels that it leads to."""
    ordered = sorted(rows, key=matrix.place)
    versions = _sorted_versions(ordered)
    parts = [HEAD, _kinds(), _problems(), _in_blocks(ordered), _summary(ordered, versions, kernels)]
    return "\n".join(parts)


def page_of_kernels(rows: Iterable[matrix.ResourceRow]) -> str:
    """The page of every kernel in Markdown, a table for each chip."""
    ordered = sorted(rows, key=matrix.place)
    return "\n".join(
        [
            HEAD_OF_KERNELS,
            *(
                _chip(TARGETS[name], list(group), _sorted_versions(ordered))
                for name, group in groupby(ordered, key=lambda r: r.target)
            ),
        ]
    )


def beside(path: Path) -> Path:
    """Where the page of kernels lies: ``targets.md`` has ``targets_kernels.md`` beside it."""
    return path.with_name(f"{path.stem}_kernels{path.suffix}")


def _sorted_versions(rows: Iterable[matrix.ResourceRow]) -> list[str]:
    return sorted({r.triton for r in rows}, key=lambda v: [int(n) for n in re.findall(r"\d+", v)])


def _table(head: list[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def _kinds() -> str:
    return "## Words\n\n" + _table(["word", "what it is"], [[f"`{w}`", what] for w, what in KINDS])


def _problems() -> str:
    rows = [[c.name, f"`{c.problem}`", c.epilogue, "" if c.boxes else "no boxes"] for c in CASES.values()]
    return "## Golden problems\n\n" + _table(["name", "problem", "forward epilogue", ""], rows)


IN_BLOCKS = """## Products in blocks

What multiplies elements of 8 and 4 bits whose neighbours share a scale
([formats](quantized.md#weights-in-blocks)), as the chip's estimate chooses: a word in bold takes the
scales itself (`scaled=1`, `tl.dot_scaled`), another one multiplies 16-bit floats that the kernel
makes. Of two formats the first is the right factor's.

"""


def _in_blocks(rows: list[matrix.ResourceRow]) -> str:
    """The instruction that multiplies, for each format, chip and Triton."""
    cases = [f"product_{name}" for name in matrix.BLOCKS]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for r in rows:
        if r.case in cases and r.kernel == r.case:
            word = next((w for w in r.words.split() if "MMA" in w), "")
            word = next((w for w in reversed(r.words.split()) if w.startswith(("v_mfma", "v_wmma"))), word)
            shown = f"**{word}**" if "scaled=1" in r.schedule else word
            found.setdefault((r.target, r.triton), {})[r.case] = shown
    table = [[*key, *(made.get(c, "-") for c in cases)] for key, made in found.items()]
    return IN_BLOCKS + _table(["chip", "Triton", *matrix.BLOCKS], table)


def _summary(rows: list[matrix.ResourceRow], versions: list[str], kernels: str) -> str:
    """Per chip and Triton: how many kernels, how many spill, and the most that one takes."""
    made: list[list[object]] = []
    for name, group in groupby(rows, key=lambda r: r.target):
        found = list(group)
        for version in versions:
            of = [r for r in found if r.triton == version]
            if of:
                spilt = [r for r in of if r.spill_bytes]
                made.append(
                    [
                        f"[{name}]({kernels}#{name})",
                        version,
                        len(of),
                        max(r.registers for r in of),
                        len(spilt),
                        max((r.spill_bytes for r in spilt), default=0),
                        sum(r.serialised for r in of),
                        max(r.shared_bytes for r in of),
                        TARGETS[name].shared_bytes,
                    ]
                )
    head = [
        "chip",
        "Triton",
        "kernels",
        "most registers",
        "that spill",
        "most spilt",
        "serialised",
        "most shared",
        "limit",
    ]
    return "## All chips\n\n" + _table(head, made)


def _chip(target: Target, rows: list[matrix.ResourceRow], versions: list[str]) -> str:
    """One line per kernel; what two versions of Triton take stands side by side."""
    shown = [v for v in versions if any(r.triton == v for r in rows)]
    head = [
        "problem",
        "kernel",
        *(f"{what} {v}" for what in ("registers", "spilt", "shared") for v in shown),
        "instructions",
        "schedule",
    ]
    made: list[list[object]] = []
    for (case, kernel), group in groupby(rows, key=lambda r: (r.case, r.kernel)):
        found = {r.triton: r for r in group}
        last = found[max(found, key=shown.index)]
        numbers = [
            _number(found.get(v), what)
            for what in ("registers", "spill_bytes", "shared_bytes")
            for v in shown
        ]
        words = " ".join(dict.fromkeys(w for r in found.values() for w in r.words.split()))
        flaw = " **serialised**" if any(r.serialised for r in found.values()) else ""
        made.append([case, kernel, *numbers, words + flaw, f"`{_short(last.schedule)}`"])
    about = (
        f"{target.shared_bytes} bytes of shared memory for a program, warps of "
        f"{target.warp_size}, features {' '.join(sorted(target.features))}."
    )
    return f"## {target.name}\n\n{about}\n\n" + _table(head, made)


def _short(schedule: str) -> str:
    """Without the words that are the default; a bar would end the table's cell."""
    return schedule.replace(" a=gather b=gather |", "").replace("|", "/").strip("/ ")


def _number(row: matrix.ResourceRow | None, what: str) -> object:
    return "-" if row is None else getattr(row, what)
