"""FILE:NAME on the command line: a user's Python file, right and wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from transconv.__main__ import main
from transconv.cli.arguments import options


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef f(:\n", ", line 2: SyntaxError: "),
        ("import transconv\nimport no_such_library\n", ", line 2: ModuleNotFoundError: No module named"),
        ("def half(n):\n    return 1 / n\n\nhalf(0)\n", ", line 2: ZeroDivisionError: division by zero"),
        ("softmax = 3\n", " has no kernel; expected a function below @kernel"),
    ],
)
def test_a_file_that_fails_is_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    assert main(["kernel", f"{path}:softmax", "--group", "1", "--target", "sm_90"]) == 2
    told = capsys.readouterr().err
    assert said in told and str(path) in told and told.count("\n") == 1


def test_a_file_is_read_as_python_reads_it(tmp_path: Path) -> None:
    """Under any name, with others of its folder, and with classes that look for their module."""
    (tmp_path / "beside_the_file.py").write_text("WIDTH = 3\n")
    path = tmp_path / "model.txt"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "from beside_the_file import WIDTH\n\n"
        "@dataclasses.dataclass\nclass Sizes:\n    width: int = WIDTH\n"
    )
    module, name = options.loaded(f"{path}:Sizes")
    assert name == "Sizes" and module.Sizes().width == 3


def test_no_file() -> None:
    with pytest.raises(ValueError, match="'model.py' names no file; expected FILE:NAME"):
        options.loaded("model.py")
