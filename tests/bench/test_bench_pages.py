"""What the pages show of bench/results: up to date, made from files that exist, and of every file."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import fuzz_runs, layers, pages, plots, tables
from bench.__main__ import main, understood
from bench.chips_table import chips_table
from bench.run_tables import invariance_table
from tests.bench.test_bench_report import ROWS, row
from transconv.__main__ import parser
from transconv.conv import ConvProblem
from transconv.tuning.table import read

ROOT = pages.ROOT
READERS = ("bench/**/*.py", "tests/**/*.py", "transconv/**/*.py", "docs/**/*.md", "README.md")


def test_pages_and_pictures_are_those_of_the_files() -> None:
    """``python -m bench pages`` makes them anew."""
    made = pages.pages()
    assert [p for p, text in made.items() if p.read_text(encoding="utf-8") != text] == []
    assert pages.stale_pictures() == []
    shown = "".join(made.values())
    assert [name for name in pages.TABLES if f"<!-- table:{name} -->" not in shown] == []


def test_every_result_is_read_and_every_result_that_is_named_exists() -> None:
    """By a table, a test, or a sentence that names it; docs/results.md only repeats the tables."""
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for pattern in READERS
        for path in ROOT.glob(pattern)
        if path != ROOT / "docs/results.md"
    )
    there = {p.name for p in pages.RESULTS.iterdir()}
    named = set(
        re.findall(
            r"\b(?:h100_|h200_|interpreted_|index_operations|mutation|opencl_|proofs|triton_)\w*"
            r"\.(?:csv|json|txt)",
            text,
        )
    )
    read = {
        name for chip in pages.CHIPS for table in pages.TABLES.values() for name in table.on(chip).files
    }
    unmeasured, named = read - there, named | read
    assert sorted(there - named) == [] and sorted(named - there - unmeasured) == []


def test_what_was_not_measured_leaves_its_markers_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pages.TABLES, "sizes", replace(pages.TABLES["sizes"], files=("none.csv",)))
    page = (ROOT / "docs" / "any_size.md").read_text(encoding="utf-8")
    shown = pages.fill_markers(page, {"sizes": pages.written(pages.TABLES["sizes"], False)})
    assert page != shown and "<!-- table:sizes -->\n<!-- end:sizes -->" in shown


@pytest.mark.slow
def test_two_gpus_are_compared_over_the_layers_of_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        row("a", "fwd", 10, 12, against="cudnn_cl"),
        row("a", "bwd_d", 10, 15),
        row("bb", "fwd", 10, 30),
        row("ccc", "fwd", 10, 11),
        row("dddd", "fwd", 10, 90, verdict="wrong"),
    ]
    other = [
        {**r, "device": "NVIDIA_H100", "ratio": str(by * float(r["ratio"]))}
        for r, by in zip(rows, (0.5, 1.0, 2.0, 1.0, 1.0), strict=True)
    ]
    text = chips_table([*rows, *other[:3], other[4]])
    assert [line.split(" | ")[1:] for line in text.splitlines()[2:]] == [
        ["2", "1.90", "1.90", "1.00", "0.50 `a` |"],
        ["1", "1.50", "1.50", "1.00", "1.00 `a` |"],
        ["3", "1.75", "1.75", "1.00", "0.50 `a` |"],
    ]
    assert chips_table(rows) == ""
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    table = pages.TABLES["chips"]
    assert pages.written(table, True) == ""
    text = (ROOT / "bench/results/h200_layers_bf16_nhwc.csv").read_text(encoding="utf-8")
    (tmp_path / "h200_layers_bf16_nhwc.csv").write_text(text, encoding="utf-8")
    assert pages.written(table, True) == ""
    (tmp_path / "h100_layers_bf16_nhwc.csv").write_text(
        "\n".join(text.replace("NVIDIA_H200", "NVIDIA_H100_80GB_HBM3").splitlines()[:7]) + "\n",
        encoding="utf-8",
    )
    shown = pages.written(table, True)
    assert "| all | 6 |" in shown and "h100_layers_bf16_nhwc.csv" in shown and "\nOn NVIDIA" not in shown


def test_another_gpu_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They follow those of the first, and name the device; what only it has stands alone."""
    sizes = (pages.RESULTS / "h200_sizes.csv").read_text(encoding="utf-8")
    (tmp_path / "h200_sizes.csv").write_text(sizes, encoding="utf-8")
    (tmp_path / "h100_sizes.csv").write_text(
        "\n".join(sizes.replace("NVIDIA_H200", "NVIDIA_H100_80GB_HBM3").splitlines()[:3]) + "\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    both = pages.written(pages.TABLES["sizes"], True)
    first, second = both.split("\n\nOn NVIDIA_H100_80GB_HBM3:\n\n")
    assert "NVIDIA_H200, torch" in first and "h200_sizes.csv" in first and "H100" not in first
    assert "h100_sizes.csv" in second and second.count("\n| rn50") < first.count("\n| rn50")
    (tmp_path / "h200_sizes.csv").unlink()
    assert pages.written(pages.TABLES["sizes"], True) == f"On NVIDIA_H100_80GB_HBM3:\n\n{second}"
    monkeypatch.setitem(pages.TABLES, "sizes", replace(pages.TABLES["sizes"], files=("one.json",)))
    assert pages.written(pages.TABLES["sizes"], True) == ""


def test_the_commands_under_the_tables_are_understood() -> None:
    commands = {c for table in pages.TABLES.values() for c in table.commands}
    for command in commands:
        words = shlex.split(command.removeprefix("python -m "))
        assert command.startswith(("python -m bench ", "transconv "))
        (understood if words[0] == "bench" else parser().parse_args)(words[1:])
    assert len(commands) > 12


def test_the_list_of_layers_is_the_one_that_was_timed() -> None:
    listed = {(a.name, a.shape) for a in layers.read("layers")}
    rows = pages.TABLES["summary"].rows()
    timed = {(r["layer"], r["problem"].split()[0]) for r in rows}
    assert len(listed) == len({name for name, _ in timed}) == 47
    assert timed == {(name, ConvProblem.parse(str(shape)).shape_text) for name, shape in listed}


def test_markers() -> None:
    page = "x\n<!-- table:summary -->\nold\n<!-- end:summary -->\ny <!-- table:layers -->"
    filled = pages.fill_markers(page, {"summary": r"| \1 |"})
    assert filled == ("x\n<!-- table:summary -->\n| \\1 |\n<!-- end:summary -->\ny <!-- table:layers -->")
    assert pages.fill_markers(filled, {"summary": r"| \1 |"}) == filled
    with pytest.raises(ValueError, match="end:layers"):
        pages.fill_markers(page, {"layers": ""})


@pytest.mark.slow
def test_what_is_stale_is_named_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = {tmp_path / "images" / f"{mode}.svg": mode for mode in plots.THEMES}
    page = tmp_path / "a.md"
    page.write_text("old")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "pages", lambda: {page: "new"})
    monkeypatch.setattr(pages, "pictures", lambda: pictures)
    assert main(["pages", "--check"]) == 1 and page.read_text() == "old"
    assert capsys.readouterr().out.splitlines() == [
        f"{p} is stale" for p in ("a.md:", "images/light.svg:", "images/dark.svg:")
    ]
    assert main(["pages"]) == 0 and page.read_text() == "new" and pages.stale_pictures() == []
    light, dark = (path.read_text() for path in pictures)
    assert light != dark and plots.THEMES["dark"].text in dark
    dots = len(tables.counted(pages.TABLES["ratios"].rows()))
    assert dots < light.count("<use ") < dots + 60  # and those of the legend and the axes


def test_the_short_table_and_the_losses_name_the_slowest() -> None:
    flat = row("flat", "fwd", 10, 10.02)
    line = row("line", "fwd", 10, 80, problem="ic8iw8oc8ow8kw3pw1 dt=bf16 tag=nwc")
    lost = row("lost", "bwd_d", 10, 8, inductor_us=9)
    near = row("near", "bwd_w", 10, 9.9, inductor_us=30)
    short = tables.ratios_table([flat, line, lost, near])
    assert short.splitlines()[2] == (
        "| bf16 nhwc | 2.83 (1.00); 0 of 2 slower; least 1.00 `flat` "
        "| 0.80 (0.80); 1 of 1 slower; least 0.80 `lost` "
        "| 0.99 (0.99); 0 of 1 slower; least 0.99 `near` |"
    )
    assert tables.losses_table([flat, line, lost, near]).splitlines()[2:] == [
        "| `lost` | bf16 nhwc | bwd_d | cuDNN | 0.800 | 2.0% |",
        "| `lost` | bf16 nhwc | bwd_d | torch.compile | 0.900 | 2.0% |",
    ]
    assert plots.digest(ROWS) != plots.digest(ROWS[1:]) == plots.digest(ROWS[:0:-1])


def test_products_stand_beside_convolutions() -> None:
    made = tables.products_table([row("a", "fwd", 10, 20, gemm_us=12), row("b", "fwd", 10, 20)])
    assert made.splitlines()[2:] == ["| `a` | fwd | 10.0 | 12.0 | 1.200 | 10 |"]


def test_summaries_of_the_fuzzer_become_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(
        '{"seed": 3, "asked": 9, "statuses": {"passed": 8, "crash": 1}, "spent": {"kernels": 11},'
        ' "seconds": 1.5, "target": "sm_90", "versions": {"torch": "2.11.0"}}'
    )
    for _ in range(2):
        assert main(["fuzz-runs", str(tmp_path / "a.json"), "--out", str(tmp_path)]) == 0
    (one,) = read(tmp_path / "fuzz.csv")
    assert (one["passed"], one["crash"], one["failed"], one["torch"]) == ("8", "1", "0", "2.11.0")
    assert tuple(one) == fuzz_runs.COLUMNS
    (tmp_path / "b.json").write_text("[]")
    assert main(["fuzz-runs", str(tmp_path / "b.json"), "--out", str(tmp_path)]) == 2
    assert "b.json is no summary of" in capsys.readouterr().err


def test_the_price_of_invariance() -> None:
    """Means and worst cases of the rows of a group, by NumPy; a refusal has its reason and no numbers."""

    def of(what: str, direction: str, batch: int, ratio: str, refused: str = "") -> dict[str, str]:
        return dict(what=what, direction=direction, batch=str(batch), ratio=ratio, refused=refused)

    ratios = [1.1, 2.0, 0.7]
    rows = [of(f"l{i}", "fwd", 128, str(x)) for i, x in enumerate(ratios)]
    rows += [of("l0", "fwd", 1, "1.5"), of("net", "inference", 32, "", "cumsum\nmore")]
    lines = [
        [c.strip() for c in line.split("|")[1:-1]] for line in invariance_table(rows).splitlines()[2:]
    ]
    mean = f"{np.exp(np.mean(np.log(ratios))):.2f}"
    assert lines == [
        ["layers, fwd", "128", "3", mean, "2.00", ""],
        ["layers, fwd", "1", "1", "1.50", "1.50", ""],
        ["net", "", "", "", "", "cumsum"],
    ]
