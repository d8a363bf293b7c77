"""docs/drop_in.md: every example runs, and every reason in its table is one that the code gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import bench.__main__
import transconv
from tests import programs
from transconv.torch_ops.calls import lower_call

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "drop_in.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: text.strip().splitlines()[-1][:40])
def test_examples(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a namespace of its own, as if it were a file."""
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/drop_in.md", "exec"), {"__name__": "__main__"})
    assert not [*tmp_path.iterdir()]


def test_there_is_an_example_for_every_section() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert len(PROGRAMS) >= 8
    assert all("```" in section for section in sections)


def test_an_example_in_a_process_of_its_own() -> None:
    """Nothing that this suite sets up is needed."""
    programs.run(["-c", PROGRAMS[0]], cwd=ROOT, check=True)


def test_commands_exist() -> None:
    commands = [
        line.split("#")[0].split()
        for kind, text in BLOCKS
        if kind == "sh"
        for line in text.splitlines()
        if "bench" in line
    ]
    assert {words[3] for words in commands} == {"dropin", "networks", "overhead"}
    assert {"dropin", "networks", "overhead"} <= set(bench.__main__.DROP_IN)


def test_reasons_are_those_of_the_code() -> None:
    """Every reason that some file of the package gives is in a table, and the other way round."""
    pages = (TEXT, (ROOT / "docs" / "functional.md").read_text(encoding="utf-8"))
    tables = [page.split("| reason | when |")[1].split("\n\n")[0] for page in pages]
    told = {
        name.split(":")[0]
        for row in "\n".join(tables).splitlines()
        for name in re.findall(r"`([^`]+)`", row.split("|")[1] if "|" in row else "")
    }
    given = set()
    for path in (ROOT / "transconv").rglob("*.py"):
        if (
            path.parent.name == "standalone"
            or path.name in ("torch_text.py", "export.py")
            or path.name.startswith("benchdnn")
            or (path.parent.name == "draw")
        ):
            continue  # they refuse to export, and read and draw options
        text = path.read_text(encoding="utf-8")
        given |= set(re.findall(r'Unsupported\(\s*f?"(\w+)[":]', text))
        given |= set(re.findall(r'(?:append|handed_over|_note_transform)\(f?"(\w+):', text))
    assert told == given - {"export", "kernel", "opencl"}  # refusals to export and to check


def test_supported_types_are_those_of_the_code() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| element types"))
    names = row.split("|")[2]
    assert {str(d).removeprefix("torch.") for d in lower_call.DTYPES} == {
        n.strip() for n in names.split(",")
    }
    row = next(line for line in TEXT.splitlines() if line.startswith("| functions"))
    assert all(callable(getattr(transconv, n.strip())) for n in row.split("|")[2].split(","))
