"""The compile matrix: a share of it with both releases of Triton, and that nothing is left out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.backend_triton import test_emit
from transconv.__main__ import main
from transconv.backend_triton.offline_compilation import BACKENDS, triton_version
from transconv.cli import matrix as pages
from transconv.cli.matrix import RECORD
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.schedule.schedule import Schedule
from transconv.support import AddressError
from transconv.target.records import TARGETS
from transconv.verify import matrix
from transconv.verify.matrix import CASES, planned, share

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".newest"
CHIPS = [t for t in TARGETS.values() if t.backend in BACKENDS]


@pytest.mark.parametrize(
    ("triton", "part"), [("installed", "2/132"), pytest.param(".newest", "7/132", marks=pytest.mark.slow)]
)
def test_share(
    triton: str, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every 132nd diagonal of problems and chips; `make matrix` compiles all."""
    if triton != "installed" and not (NEWEST / "ready").exists():
        pytest.skip(
            "the newest Triton is not in .newest, so nothing was compiled with it; "
            "`make .newest/ready` installs it where there is a network"
        )
    monkeypatch.chdir(ROOT)
    code = main(["matrix", "--share", part, "--triton", triton, "--jobs", "2"])
    assert code == 0, capsys.readouterr().out


def test_shares_make_the_whole() -> None:
    whole = {(c.name, t.name) for c, t in share(list(CASES), CHIPS, 0, 1)}
    parts = [[(c.name, t.name) for c, t in share(list(CASES), CHIPS, i, 11)] for i in range(11)]
    assert sorted(pair for part in parts for pair in part) == sorted(whole)
    for part in parts:
        assert {name for name, _ in part} == set(CASES)
        assert {name for _, name in part} == {t.name for t in CHIPS}


def test_every_golden_problem_is_in_it() -> None:
    """Those whose text is kept word for word are compiled as they are there."""
    for name, (text, way, schedule, _, _) in test_emit.CASES.items():
        found = [
            c
            for c in CASES.values()
            if c.compute is None
            and "?" not in c.problem
            and ConvProblem.parse(c.problem) == ConvProblem.parse(text)
        ]
        assert any(c.schedules.get(Prop(way)) == schedule for c in found), name


def test_a_schedule_is_used_where_it_is_legal() -> None:
    """Boxes exist from sm_90 on; an older chip chooses for itself."""
    fixed = Schedule.parse(CASES["dense"].schedules[Prop.FWD])
    for target, same in (("sm_90", True), ("sm_80", False)):
        first = planned(CASES["dense"], TARGETS[target])[0]
        assert (Schedule.parse(first.schedule) == fixed) == same, first.schedule


def test_a_schedule_whose_kernel_strays_is_not_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = matrix.build

    def build(workload: object, target: object, schedule: Schedule | None, *more: object) -> object:
        if schedule is not None:
            raise AddressError("its kernel strays")
        return honest(workload, target, schedule, *more)

    monkeypatch.setattr(matrix, "build", build)
    with pytest.raises(AddressError, match="its kernel strays"):
        planned(CASES["dense"], TARGETS["sm_90"])


def test_the_record_knows_every_pair_and_both_releases() -> None:
    rows = matrix.read(RECORD)
    newest = (ROOT / "constraints-newest.txt").read_text().split("triton==")[1].strip()
    pinned = (ROOT / "constraints.txt").read_text().split("triton==")[1].split()[0]
    for version in (pinned, newest):
        known = {(r.case, r.target) for r in rows.values() if r.triton == version}
        assert known == {
            (c.name, t.name)
            for c in CASES.values()
            for t in CHIPS
            if t.compiled_since <= tuple(map(int, version.split(".")))
            and not any(map(t.why_not_held, c.dtypes))
        }, version


def test_the_page_is_current() -> None:
    """`transconv matrix --share 0/999 --page docs/targets.md` rewrites it."""
    rows = matrix.read(RECORD).values()
    path = ROOT / "docs" / "targets.md"
    assert path.read_text() == pages.page_of_chips(rows)
    assert pages.beside(path).read_text() == pages.page_of_kernels(rows)


@pytest.mark.slow
def test_a_sanitizer_that_the_release_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    """The pinned Triton has ConSan alone; one of four kernels, which adds up parts, shares no memory."""
    words = ["matrix", "--targets", "sm_90", "--problems", "pointwise_nchw", "--jobs", "1", "--timeout"]
    assert main([*words, "600", "--sanitizer", "consan,fpsan"]) == 1
    told = capsys.readouterr().out
    assert "Triton 3.6.0 consan: 3 of 4 rows have checks" in told
    assert "Triton 3.6.0 fpsan: no kernel has checks of this sanitizer" in told and "1 failures" in told


@pytest.mark.slow
def test_a_budget_that_is_too_small_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, then held to a record that allows less, and to one that knows nothing."""
    path, table = tmp_path / "record.csv", tmp_path / "rows.csv"
    words = [
        "matrix",
        "--targets",
        "sm_80",
        "--problems",
        "depthwise",
        "--jobs",
        "1",
        "--record",
        str(path),
    ]
    assert main([*words, "--update", "--csv", str(table)]) == 0
    assert table.read_text() == path.read_text()
    rows = list(csv.DictReader(path.open()))
    rows[0]["registers"] = "8"
    with path.open("w", newline="") as file:
        lines = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        lines.writeheader()
        lines.writerows(rows)
    capsys.readouterr()
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "8 are recorded and up to 16 allowed" in told
    assert "repeat: transconv matrix --targets sm_80 --problems depthwise" in told
    assert main([*words[:-1], str(tmp_path / "none.csv")]) == 1
    assert "has no rows in the record; --update makes them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--problems", "nothing"], "golden problem 'nothing' is unknown; expected one of dense"),
        (["--targets", "sm_20"], "target 'sm_20' is unknown"),
        (["--triton", "/nonexistent"], "there is no Triton in /nonexistent; make it with: pip install"),
    ],
)
def test_what_cannot_be_asked(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "value", "text"),
    [
        ("--share", "3", "'3' is no I/N with I from 0 to N-1"),
        ("--sanitizer", "asan", "'asan' is no sanitizer; expected consan, gsan or fpsan"),
    ],
)
def test_what_a_word_cannot_be(
    word: str, value: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["matrix", word, value])
    assert left.value.code == 2 and text in capsys.readouterr().err


def test_versions() -> None:
    pinned = (ROOT / "constraints.txt").read_text().split("triton==")[1].split()[0]
    assert triton_version() == pinned
