"""The verb: files or one line on standard error and exit code 2, and nothing half-written."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from transconv.__main__ import main
from transconv.backend_triton import CompileJob, Resources
from transconv.runtime import standalone
from transconv.runtime.standalone import files, kernel_repository, machine_code

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "export.md").read_text()
Output = pytest.CaptureFixture[str]
SMALL = "mb1ic4ih4oc4oh4kh1"


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_files_are_written_and_named(capsys: Output, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "kernels"
    assert main(["export", SMALL, "--prop", "all", "-o", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in said) == [str(out / name) for name in names(out)]
    assert ["_fwd_" in line.split()[0] for line in said] == [True, False, False]
    assert all(line.split()[1] == f"{SMALL}" for line in said)
    assert names(out.parent) == ["kernels"]
    assert main(["export", SMALL, "--epilogue", "relu", "-o", str(out), "--force"]) == 0
    assert len(names(out)) == 4 and names(out.parent) == ["kernels"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([SMALL, "--aot"], "Unsupported: no machine code is made ahead of time for interpreter"),
        ([SMALL, "--target", "sm_1"], "ScheduleError: target 'sm_1' is unknown"),
        (["mb0ic4ih4oc4oh4kh1"], "the result has no elements"),
        (["mb1ic4"], "ProblemError: "),
        ([SMALL, "dt=s8:f8e4m3:f16"], "expected two types of floats or of integers"),
        ([SMALL, "--schedule", "oc:3 | mma"], "ScheduleError: "),
        ([SMALL, "--epilogue", "what"], "epilogue 'what' has 'what'"),
    ],
)
def test_refusals_are_one_line(capsys: Output, tmp_path: Path, words: list[str], says: str) -> None:
    assert main(["export", *words, "-o", str(tmp_path / "kernels")]) == 2
    out, error = capsys.readouterr()
    assert says in error and error.count("\n") == 1 and not out
    assert not names(tmp_path)


def test_folders_that_hold_something_are_left_alone(capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["export", SMALL, "-o", str(tmp_path)]) == 2
    assert main(["export", SMALL, "-o", str(tmp_path / "mine")]) == 2
    error = capsys.readouterr().err
    assert "is not empty" in error and "is no folder" in error and error.count("\n") == 2
    assert names(tmp_path) == ["mine"] and (tmp_path / "mine").read_text() == "mine"
    assert main(["export", SMALL, "-o", str(tmp_path), "--force"]) == 0
    assert len(names(tmp_path)) == 2 and (tmp_path / "mine").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_named(capsys: Output, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "kernels", Path("/proc/kernels")):
        assert main(["export", SMALL, "-o", str(place)]) == 2
        error = capsys.readouterr().err
        assert f"'{place}' cannot be written: " in error and error.count("\n") == 1
    assert names(tmp_path) == ["file"]


def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "second":
            raise OSError(28, "No space left on device")
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        standalone.write(tmp_path / "kernels", {"first": b"1", "second": b"2"})
    assert not names(tmp_path)


def test_an_empty_folder_and_a_link_are_written_into(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    files.write(tmp_path / "link", {"a/b": b"1"})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "a" / "b").read_bytes() == b"1"
    files.write(tmp_path / "new", {"c": b"2"})
    assert names(tmp_path) == ["empty", "link", "new"]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~files._mask()


BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def compiled(jobs: Sequence[CompileJob], *_: object) -> list[Resources]:
    """In place of the compiler, which has its own tests."""
    launch = {"num_warps": 4, "num_ctas": 1, "global_scratch_size": 0}
    return [
        Resources(j.function, j.target, 1, 0, 0, {}, False, (), 0.0, code=b"code", launch=launch)
        for j in jobs
    ]


@pytest.mark.slow
def test_the_page_does_what_it_says(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands and its programs, one after another in one folder, where TRITON_INTERPRET=1 holds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_code, "compile_offline", compiled)
    monkeypatch.setattr(kernel_repository, "compile_offline", compiled)
    monkeypatch.setenv("TRANSCONV_FEATURES", "-box")  # what stands in for the compiler knows no boxes
    ran = 0
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, "docs/export.md", "exec"), {"__name__": "__main__"})
            ran += 1
        for line in text.splitlines() if kind == "sh" else ():
            words = shlex.split(line.partition("  #")[0])
            if words[:1] == ["transconv"]:
                words = [str(ROOT / w) if w.startswith("bench/") else w for w in words]
                assert main(words[1:]) == 0, capsys.readouterr().err
                ran += 1
    assert ran == 7
    assert "src: expected strides (1024, 64, 8, 1), got (1024, 1, 128, 16)" in capsys.readouterr().out
    assert names(tmp_path) == ["ahead", "conv-kernels", "kernels", "model", "sums"]
