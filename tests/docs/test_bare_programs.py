"""Programs of README and of every page as a newcomer runs them: each pasted into a file of its own, in a
folder of a checkout, without a variable of transconv's or Triton's, on a machine that may have no GPU."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests import programs
from tests.shown import ROOT, Block, blocks

RANKS = "distributed.md"  # torchrun starts its programs: tests/distributed has them
RECIPE = re.compile(r"<!-- recipe: [^\n]* -->\n\Z")
PAGES = (ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != RANKS))
CASES = [
    (page, block)
    for page in PAGES
    for text in [page.read_text("utf-8")]
    for block in blocks(text)
    # A recipe is a few lines of a program of another library: tests/integrations has the rest.
    if block.kind == "python" and not block.rule and not RECIPE.search(text[: text.index(block.whole)])
]


def name(case: tuple[Path, Block]) -> str:
    return f"{case[0].stem}: {case[1].body.splitlines()[0][:40]}"


def bare(home: Path) -> dict[str, str]:
    """An environment without what the suite sets."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRANSCONV_", "TRITON_", "XDG_"))}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT)}


def exports(page: str, block: Block) -> list[list[str]]:
    """The commands above a program that leave files for it."""
    above = [b.body for b in blocks(page[: page.index(block.whole)]) if b.kind == "sh"]
    lines = [line for body in above for line in body.splitlines() if line.startswith("transconv export ")]
    return [["-m", *shlex.split(line)] for line in lines]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("newcomer")


@pytest.mark.every(40)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_programs_end_as_pasted(case: tuple[Path, Block], home: Path, tmp_path: Path) -> None:
    page, block = case
    for folder in ("docs", "bench"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    if "kernels" in block.body and page.name == "export.md":
        for words in exports(page.read_text("utf-8"), block):
            programs.run(words, cwd=tmp_path, env=bare(home), check=True)
    named = re.match(r"# (\w+\.py)\n", block.body)
    file = tmp_path / (named[1] if named else "program.py")
    file.write_text(block.body, "utf-8")
    done = programs.run(
        ["-c", f"import runpy; runpy.run_path({file.name!r}, run_name='__main__')"],
        cwd=tmp_path,
        env=bare(home),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "comes too late" not in done.stderr


LATE = """
import triton.language, transconv, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    transconv.config.cpu = "interpret"
print(seen[0].filename, seen[0].lineno, seen[0].message)
"""
AT_ONCE = """
import torch, transconv
transconv.config.cpu = "interpret"
x, w = torch.ones(1, 16, 4, 4), torch.ones(16, 16, 1, 1)
assert transconv.conv2d(x, w).unique().tolist() == [16.0]
print(transconv.stats())
"""


def test_the_interpreter_is_switched_on_or_comes_too_late(home: Path) -> None:
    late = programs.run(["-c", LATE], env=bare(home), check=True).stdout
    assert late.startswith(
        '<string> 5 transconv.config.cpu = "interpret" comes too late: Triton is loaded'
    )
    assert "100.0% native" in programs.run(["-c", AT_ONCE], env=bare(home), check=True).stdout


UNSET = """
import numpy as np
from transconv.kernel import Group, kernel

@kernel
def double(group, X):
    i = group.work_offset()[0]
    group.store(X[i:], group.load(X[i:], shape=group.shape) * 2)

double(Group(work_shape=4), np.ones(4, np.float32))
"""


@pytest.mark.slow
def test_a_kernel_on_arrays_of_the_cpu_names_the_cures(home: Path, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(UNSET)
    done = programs.run(["-c", "import runpy; runpy.run_path('k.py')"], cwd=tmp_path, env=bare(home))
    said = done.stderr.splitlines()[-1]
    assert 'transconv.config.cpu = "interpret"' in said and "double.simulate(..)" in said
