"""The record of what kernels take: a row per chip, Triton, golden problem and kernel, as a CSV file.

The record is a budget. A kernel may use less, and never spills more. While its schedule is the
recorded one it may use a few registers more, because Triton's allocation varies with every change of a
text.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from transconv.backend_triton import Answer, CompileFailure, Resources
from transconv.disk_cache import read_named
from transconv.target import TARGETS
from transconv.verify.matrix.cases import Planned

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
