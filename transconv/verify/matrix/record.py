"""The record of what kernels take: a row per chip, Triton, golden problem and kernel, as a CSV file.

The record is a budget. A kernel may use less, and never spills more. While its schedule is the
recorded one it may use a few registers more, because Triton's allocation varies with every change of a
text.

Also here: the pages about chips in the documentation, written from the record alone: one of all chips,
and one of every kernel of each chip beside it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import groupby
from pathlib import Path

from transconv.backend_triton import Answer, CompileFailure, Resources
from transconv.disk_cache import read_named
from transconv.target import TARGETS, Target
from transconv.verify.matrix.cases import CASES, Planned

SLACK = 8  # registers: the granule in which they are handed out
COMMON = ("LDS", "STS", "HFMA2", "ds_read", "ds_load", "ds_write", "ds_store")  # tell nothing

Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """What one kernel takes: ``registers`` and ``spill_bytes`` per thread, ``shared_bytes`` per
    program. The stride phases of a direction are one row, that of the most of each; ``words`` are
    the telling instructions of all."""

    triton: str
    target: str
    case: str
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialised: bool
    words: str
    schedule: str

    @property
    def key(self) -> Key:
        return self.triton, self.target, self.case, self.kernel

    def join(self, other: ResourceRow) -> ResourceRow:
        """The most of two phases."""
        heavier = max(self, other, key=lambda r: (r.spill_bytes, r.registers))
        words = dict.fromkeys([*self.words.split(), *other.words.split()])
        return replace(
            heavier, registers=max(self.registers, other.registers),
            shared_bytes=max(self.shared_bytes, other.shared_bytes),
            serialised=self.serialised or other.serialised, words=" ".join(words))


def rows_of(triton: str, planned: Sequence[Planned], answers: Sequence[Answer]) -> list[ResourceRow]:
    """The rows of what was compiled, in the order of the plan."""
    rows: dict[Key, ResourceRow] = {}
    for p, a in zip(planned, answers, strict=True):
        if isinstance(a, Resources):
            row = ResourceRow(
                triton,
                p.target,
                p.case,
                without_phase(p.kernel),
                a.registers,
                a.spill_bytes,
                a.shared_bytes,
                a.serialised,
                " ".join(w for w in a.words if w not in COMMON),
                p.schedule,
            )
            rows[row.key] = rows[row.key].join(row) if row.key in rows else row
    return list(rows.values())


def without_phase(kernel: str) -> str:
    """``bwd_d_0_1`` is a phase of ``bwd_d``."""
    return re.sub(r"(_\d+)+(?=_|$)", "", kernel)


def flaws(planned: Planned, answer: Answer) -> list[str]:
    """What is wrong with a kernel whatever was recorded, in sentences."""
    if isinstance(answer, CompileFailure):
        return [f"{planned.kernel} does not compile: {answer.reason}"]
    found = [f"{planned.kernel} has {m}" for e in planned.expected if (m := e.missing(answer.words))]
    if answer.flaw:
        found.append(f"{planned.kernel} is miscompiled: {answer.flaw}")
    if answer.shared_bytes > planned.shared_limit:
        found.append(f"{planned.kernel} asks for {answer.shared_bytes} bytes of shared memory, "
                     f"{planned.target} has {planned.shared_limit}")
    return found


def overruns(row: ResourceRow, recorded: ResourceRow | None) -> list[str]:
    """How a kernel exceeds its budget, in sentences."""
    if recorded is None:
        return [f"{row.kernel} is not in the record; --update puts it there"]
    found = []
    if row.spill_bytes > recorded.spill_bytes:
        found.append(f"{row.kernel} spills {row.spill_bytes} bytes, {recorded.spill_bytes} are "
                     f"recorded ({row.schedule})")
    if row.serialised and not recorded.serialised:
        found.append(f"{row.kernel} waits after each product (serialised), as recorded it did not "
                     f"({row.schedule})")
    allowed = recorded.registers + max(SLACK, recorded.registers // 8)
    if row.schedule == recorded.schedule and row.registers > allowed:
        found.append(f"{row.kernel} takes {row.registers} registers, {recorded.registers} are "
                     f"recorded and up to {allowed} allowed ({row.schedule})")
    return found


def read(path: Path) -> dict[Key, ResourceRow]:
    """A record; nothing if there is no such file. Raises ValueError for one of other columns."""
    if not path.exists():
        return {}
    lines = csv.DictReader(io.StringIO(read_named(path, "a record of the compile matrix"), newline=""))
    names = [f.name for f in fields(ResourceRow)]
    if lines.fieldnames != names:
        raise ValueError(f"{path} is no record: its columns are {lines.fieldnames}, expected {names}")
    try:
        rows = [ResourceRow(line["triton"], line["target"], line["case"], line["kernel"],
                    int(line["registers"]), int(line["spill_bytes"]), int(line["shared_bytes"]),
                    line["serialised"] == "1", line["words"], line["schedule"]) for line in lines]
    except (TypeError, ValueError, csv.Error) as error:
        raise ValueError(f"{path}: line {lines.line_num} is no row of a record ({error})") from error
    return {r.key: r for r in rows}


def write(path: Path, rows: Iterable[ResourceRow]) -> None:
    """Write a record, sorted, so that a change of one kernel is a change of one line."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(f.name for f in fields(ResourceRow))
        for row in sorted(rows, key=place):
            lines.writerow(int(v) if isinstance(v, bool) else v for v in astuple(row))


def place(row: ResourceRow) -> tuple[object, ...]:
    """Where a row stands: chips in the order of their records, the rest by name."""
    names = list(TARGETS)
    at = names.index(row.target) if row.target in names else len(names)
    return at, row.target, row.case, row.kernel, row.triton


KINDS: tuple[tuple[str, str], ...] = (
    ("HGMMA", "asynchronous matrix unit of sm_90"),
    ("UTCHMMA", "asynchronous matrix unit of sm_100"),
    ("HMMA", "matrix unit, 16-bit and tf32 operands"),
    ("IGMMA, QGMMA", "asynchronous matrix unit of sm_90, 8-bit integers and floats"),
    ("IMMA, QMMA", "matrix unit, 8-bit integers and floats"),
    ("UTCQMMA", "asynchronous matrix unit of sm_100, 8-bit floats"),
    ("DMMA", "matrix unit, f64 operands"),
    ("v_mfma", "matrix unit of AMD's wave-64 chips"),
    ("v_wmma", "matrix unit of AMD's wave-32 chips"),
    ("FFMA, FFMA2, DFMA, v_fma, v_pk_fma, v_dual_fma", "multiply-add element by element"),
    ("UTMALDG, UTMASTG", "boxes loaded and stored by the copy engine"),
    ("LDGSTS, global_load_lds", "copy from memory to shared memory past the registers"),
    ("LDG, STG, global_load, global_store, buffer_load", "loads and stores of each lane"),
    ("….128", "those that move 16 bytes per lane"),
    ("LDSM, STSM", "whole matrix fragments from and to shared memory"),
    ("LDL, STL, scratch_load, scratch_store", "registers that were spilt, or an array on the stack"),
)

HEAD = """# What the kernels take of every chip

<!-- Written by `python -m transconv matrix --page docs/targets.md`; change the record or
     transconv/verify/matrix/record.py instead. -->

Every golden problem is compiled for every chip, without a GPU, by `python -m transconv matrix`: its
machine code is read for registers, spills, shared memory and instructions, which are compared with
the record ([tests/golden/resources.csv](../tests/golden/resources.csv)). A kernel that no longer
compiles, spills more than recorded, takes clearly more registers at the same schedule, or lacks an
instruction that its schedule and its chip ask for (`transconv/verify/matrix/cases.py`) is
a failure with a sentence.

```sh
python -m transconv matrix --targets sm_90,gfx942 --problems dense,depthwise
python -m transconv matrix --update --page docs/targets.md  # after a change that is meant
make matrix  # everything, with the pinned Triton and the newest release
```

**What was run and what was only compiled.** Kernels for sm_90 ran on an H200 and on H100s with Triton
3.6 (see [the results](results.md)). For every other chip on this page, and for any chip with a newer
Triton, they were compiled and never run: that they are right there rests on the IR's and Triton's
interpreters, how fast they are is not known. Intel GPUs are not on this page, as their compiler
needs the vendor's driver stack.

Registers and spilt bytes are per thread (AMD: vector and accumulation registers together), shared
memory is per program, in bytes, beside what a program may use. The row of each chip leads to its
kernels.
"""

HEAD_OF_KERNELS = """# Every kernel of every chip

<!-- Written by `python -m transconv matrix --page docs/targets.md`, beside that page. -->

What each kernel of the golden problems takes of each chip. [The page of all chips](targets.md) says
how it was compiled, what was only compiled and never run, and what the words for instructions mean.

Registers and spilt bytes are per thread (AMD: vector and accumulation registers together), shared
memory is per program, in bytes, beside what a program may use. The stride phases of a data gradient
are one row, that of the most of each. `_sum` adds the parts of a split sum. A chip without a column
for a Triton was not compiled with it. Tiles are the heuristics' for that chip, except where the
golden problem names one that is legal there.
"""


def page(rows: Iterable[ResourceRow], kernels: str = "targets_kernels.md") -> str:
    """The page of all chips in Markdown; ``kernels`` is the page of kernels that it leads to."""
    ordered = sorted(rows, key=place)
    return "\n".join([HEAD, _kinds(), _problems(), _summary(ordered, _versions(ordered), kernels)])


def page_of_kernels(rows: Iterable[ResourceRow]) -> str:
    """The page of every kernel in Markdown, a table for each chip."""
    ordered = sorted(rows, key=place)
    return "\n".join([HEAD_OF_KERNELS, *(_chip(TARGETS[name], list(group), _versions(ordered))
                                         for name, group in groupby(ordered, key=lambda r: r.target))])


def beside(path: Path) -> Path:
    """Where the page of kernels lies: ``targets.md`` has ``targets_kernels.md`` beside it."""
    return path.with_name(f"{path.stem}_kernels{path.suffix}")


def _versions(rows: Iterable[ResourceRow]) -> list[str]:
    return sorted({r.triton for r in rows}, key=lambda v: [int(n) for n in v.split(".")])


def _table(head: list[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def _kinds() -> str:
    return "## Words\n\n" + _table(["word", "what it is"], [[f"`{w}`", what] for w, what in KINDS])


def _problems() -> str:
    rows = [[c.name, f"`{c.problem}`", c.epilogue, "" if c.boxes else "no boxes"]
            for c in CASES.values()]
    return "## Golden problems\n\n" + _table(["name", "problem", "forward epilogue", ""], rows)


def _summary(rows: list[ResourceRow], versions: list[str], kernels: str) -> str:
    """Per chip and Triton: how many kernels, how many spill, and the most that one takes."""
    made: list[list[object]] = []
    for name, group in groupby(rows, key=lambda r: r.target):
        found = list(group)
        for version in versions:
            of = [r for r in found if r.triton == version]
            if of:
                spilt = [r for r in of if r.spill_bytes]
                made.append([f"[{name}]({kernels}#{name})", version, len(of),
                             max(r.registers for r in of), len(spilt),
                             max((r.spill_bytes for r in spilt), default=0),
                             sum(r.serialised for r in of), max(r.shared_bytes for r in of),
                             TARGETS[name].shared_bytes])
    head = ["chip", "Triton", "kernels", "most registers", "that spill", "most spilt",
            "serialised", "most shared", "limit"]
    return "## All chips\n\n" + _table(head, made)


def _chip(target: Target, rows: list[ResourceRow], versions: list[str]) -> str:
    """One line per kernel; what two versions of Triton take stands side by side."""
    shown = [v for v in versions if any(r.triton == v for r in rows)]
    head = ["problem", "kernel", *(f"{what} {v}" for what in ("registers", "spilt", "shared")
                                   for v in shown), "instructions", "schedule"]
    made: list[list[object]] = []
    for (case, kernel), group in groupby(rows, key=lambda r: (r.case, r.kernel)):
        found = {r.triton: r for r in group}
        last = found[max(found, key=shown.index)]
        numbers = [_number(found.get(v), what) for what in
                   ("registers", "spill_bytes", "shared_bytes") for v in shown]
        words = " ".join(dict.fromkeys(w for r in found.values() for w in r.words.split()))
        flaw = " **serialised**" if any(r.serialised for r in found.values()) else ""
        made.append([case, kernel, *numbers, words + flaw, f"`{_short(last.schedule)}`"])
    about = (f"{target.shared_bytes} bytes of shared memory for a program, warps of "
             f"{target.warp_size}, features {' '.join(sorted(target.features))}.")
    return f"## {target.name}\n\n{about}\n\n" + _table(head, made)


def _short(schedule: str) -> str:
    """Without the words that are the default; a bar would end the table's cell."""
    return schedule.replace(" a=gather b=gather |", "").replace("|", "/").strip("/ ")


def _number(row: ResourceRow | None, what: str) -> object:
    return "-" if row is None else getattr(row, what)
