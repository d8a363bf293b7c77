"""The record as a budget: kernels within it and beyond it, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from transconv.backend_triton.offline_compilation import CompileFailure, Resources
from transconv.cli.matrix import page_of_kernels
from transconv.target.records import TARGETS
from transconv.verify import matrix
from transconv.verify.matrix import CASES, ResourceRow, planned

SCHEDULE = "mb.oh.ow:128 oc:64 ic:32 | mma | a=gather b=gather | stages=3 warps=4"
ROW = ResourceRow("3.6.0", "sm_80", "dense", "fwd", 128, 16, 49152, False, "HMMA LDGSTS", SCHEDULE)


def test_within_the_budget() -> None:
    assert matrix.overruns(ROW, ROW) == []
    assert matrix.overruns(replace(ROW, registers=100, spill_bytes=0), ROW) == []
    assert matrix.overruns(replace(ROW, registers=144), ROW) == []  # an eighth more
    assert matrix.overruns(replace(ROW, serialised=False), replace(ROW, serialised=True)) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spill_bytes": 24}, "fwd spills 24 bytes, 16 are recorded"),
        ({"registers": 145}, "fwd takes 145 registers, 128 are recorded and up to 144 allowed"),
        ({"serialised": True}, "fwd waits after each product (serialised)"),
    ],
)
def test_over_the_budget(change: dict[str, object], text: str) -> None:
    (found,) = matrix.overruns(replace(ROW, **change), ROW)
    assert text in found and SCHEDULE in found


def test_another_schedule_may_take_other_registers_but_not_spill_more() -> None:
    other = replace(ROW, schedule="mb.oh.ow:64 oc:64 ic:32 | mma", registers=250)
    assert matrix.overruns(other, ROW) == []
    assert len(matrix.overruns(replace(other, spill_bytes=20), ROW)) == 1


def test_a_kernel_that_nobody_recorded() -> None:
    assert "--update" in matrix.overruns(ROW, None)[0]


def taken(**words: int) -> Resources:
    return Resources("k", "sm_90", 100, 0, 1000, words, False, (), 0.1)


def test_flaws_that_no_record_excuses() -> None:
    kernel = planned(replace(CASES["dense_gather"], schedules={}), TARGETS["sm_80"])[0]
    good = taken(HMMA=1, LDGSTS=1, **{"LDGSTS.128": 1})
    assert matrix.flaws(kernel, good) == []
    (missing,) = matrix.flaws(kernel, replace(good, words={"HMMA": 1, "LDGSTS": 1}))
    assert missing.startswith("fwd has no LDGSTS.128")
    (large,) = matrix.flaws(kernel, replace(good, shared_bytes=170000))
    assert "170000 bytes of shared memory, sm_80 has 166912" in large
    (failed,) = matrix.flaws(kernel, CompileFailure("k", "sm_80", "out of registers"))
    assert failed == "fwd does not compile: out of registers"


def test_phases_are_one_row_of_the_most_of_each() -> None:
    kernels = [p for p in planned(CASES["strided"], TARGETS["sm_80"]) if "bwd_d" in p.kernel]
    assert [p.kernel for p in kernels] == ["bwd_d_0_0", "bwd_d_0_1", "bwd_d_1_0", "bwd_d_1_1"]
    answers = [
        replace(taken(HMMA=1), registers=r, spill_bytes=s, shared_bytes=b)
        for r, s, b in ((90, 0, 5), (100, 0, 7), (80, 8, 6), (99, 0, 1))
    ]
    answers[1] = replace(answers[1], words={"LDG": 2, "LDS": 4}, serialised=True)
    (row,) = matrix.rows_of("3.6.0", kernels, answers)
    assert (row.kernel, row.registers, row.spill_bytes, row.shared_bytes) == ("bwd_d", 100, 8, 7)
    assert row.serialised and row.words == "HMMA LDG"


def test_names_without_phases() -> None:
    for name, short in (
        ("bwd_d_0_1", "bwd_d"),
        ("bwd_w_sum", "bwd_w_sum"),
        ("fwd", "fwd"),
        ("bwd_d_1", "bwd_d"),
    ):
        assert matrix.without_phase(name) == short


def test_the_file(tmp_path: Path) -> None:
    rows = [replace(ROW, target="gfx942"), ROW, replace(ROW, triton="3.9.0", serialised=True)]
    path = tmp_path / "record.csv"
    matrix.write(path, rows)
    assert matrix.read(path) == {r.key: r for r in rows}
    assert [line.split(",")[1] for line in path.read_text().splitlines()[1:]] == [
        "sm_80",
        "sm_80",
        "gfx942",
    ]
    assert matrix.read(tmp_path / "none.csv") == {}
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no record: its columns are"):
        matrix.read(path)


def test_the_page_has_a_line_for_each_kernel_and_what_is_wrong_with_it() -> None:
    rows = [
        ROW,
        replace(ROW, kernel="bwd_d", triton="3.9.0", serialised=True, spill_bytes=0),
        replace(ROW, kernel="bwd_d", registers=90),
    ]
    first, second = [line for line in page_of_kernels(rows).splitlines() if line.startswith("| dense |")]
    schedule = "`mb.oh.ow:128 oc:64 ic:32 / mma / stages=3 warps=4` |"
    numbers, others = "90 | 128 | 16 | 0 | 49152 | 49152", "128 | - | 16 | - | 49152 | -"
    assert first == f"| dense | bwd_d | {numbers} | HMMA LDGSTS **serialised** | {schedule}"
    assert second == f"| dense | fwd | {others} | HMMA LDGSTS | {schedule}"
