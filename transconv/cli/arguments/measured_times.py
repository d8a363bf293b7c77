"""Measured times for ``report``: the rows of a CSV file that ``python -m bench time`` wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transconv.conv import ConvProblem, Prop
from transconv.errors import ProblemError, TransconvError
from transconv.report import LabeledTime
from transconv.target import Target
from transconv.tuning.table import Row, header, number, read

NEEDED = ("problem", "prop", "ours_us")
# Other implementations that were timed, by column.
NEIGHBOURS = {"cudnn_cl_us": "cuDNN, channels last", "cudnn_nchw_us": "cuDNN, channels first",
              "cudnn_fused_us": "cuDNN, fused", "inductor_us": "torch.compile",
              "gemm_us": "matrix product of the same size", "onednn_cl_us": "oneDNN, channels last",
              "onednn_nchw_us": "oneDNN, channels first"}
CHIPS = {"H100": "sm_90", "H200": "sm_90", "A100": "sm_80", "A40": "sm_86", "L40S": "sm_89",
         "B200": "sm_100", "RTX_5090": "sm_120", "MI250": "gfx90a", "MI300": "gfx942", "MI350": "gfx950",
         "MI355": "gfx950"}  # by a part of the device's name


@dataclass(frozen=True)
class MeasuredProblem:
    """A direction of a problem, with the row that measured it, if there is one."""

    problem: ConvProblem
    prop: Prop
    row: Row = field(default_factory=dict, hash=False)

    @property
    def epilogue(self) -> str:
        return str(self.row.get("epilogue", ""))

    @property
    def schedule(self) -> str:
        return str(self.row.get("config") or self.row.get("schedule") or "")

    def same(self, other: MeasuredProblem) -> bool:
        return (self.problem, self.prop) == (other.problem, other.prop)


def is_times(path: Path) -> bool:
    """Whether a file is such a table: its name says so, or its first line does."""
    if path.suffix.lower() == ".csv":
        return True
    try:
        return set(NEEDED) <= {*header(path)}
    except ValueError:
        return False


def asked_of(path: Path) -> list[MeasuredProblem]:
    """The rows of a file. Raises ValueError for one that is no such table, OSError."""
    columns = header(path)
    if missing := [c for c in NEEDED if c not in columns]:
        raise ValueError(f"{path} has no column '{missing[0]}'; expected a CSV file of `bench time`")
    return [_asked(row, f"{path}:{n}") for n, row in enumerate(read(path), 2)]


def _asked(row: Row, where: str) -> MeasuredProblem:
    try:
        return MeasuredProblem(ConvProblem.parse(row["problem"]), Prop(row["prop"]), row)
    except (TransconvError, ValueError, OverflowError) as error:
        raise ProblemError(f"{where}: {error}") from error


def times_of(asked: MeasuredProblem, target: Target) -> tuple[tuple[LabeledTime, ...], tuple[str, ...]]:
    """The measured times of a row, ours first, and remarks on them; none where another chip was
    measured."""
    row = asked.row
    if not row:
        return (), ()
    device = str(row.get("device", ""))
    chip = next((c for name, c in CHIPS.items() if name in device), "")
    if chip and chip != target.name:
        return (), (f"The times of this problem are of {device}, not of {target}, and are not shown.",)
    versions = " ".join(f"{name} {row[name]}" for name in ("torch", "triton", "commit") if row.get(name))
    made = []
    for column, name in {"ours_us": "transconv", **NEIGHBOURS}.items():
        us = number(row, column)
        if us is not None and 0 < us < float("inf"):
            own = column == "ours_us"
            made.append(
                LabeledTime(name, us, own, False, f"{device}, {versions}".strip(", ") if own else "")
            )
    wrong = () if row.get("verdict", "right") == "right" else (
        f"The measured kernel was not right: {row.get('verdict')} {row.get('reason', '')}".rstrip(),)
    return tuple(made), wrong
