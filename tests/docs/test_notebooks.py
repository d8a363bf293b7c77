"""docs/notebooks: each runs from its first cell to its last, and prints what it has stored.

``pytest tests/docs/test_notebooks.py --update-golden`` stores what they print now.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from transconv.target import TARGETS
from transconv.target.records import CARDS, TOO_OLD

ROOT = Path(__file__).parents[2]
ON_A_CARD = ("on_a_gpu",)
SLOW = re.compile(r"^building a kernel took .*\n", re.MULTILINE)  # said on a busy machine alone
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    return [
        "".join(o.get("text", "") for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    notebook = nbformat.read(path, as_version=4)
    stored = printed(notebook)
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", record_timing=False, coalesce_streams=True
    )
    client.execute()
    told = [o.text for c in notebook.cells for o in c.get("outputs", []) if o.get("name") == "stderr"]
    assert not SLOW.sub("", "".join(told))
    if request.config.getoption("--update-golden"):
        notebook.metadata.pop("language_info", None)  # it names this machine's Python
        nbformat.write(notebook, path)
        return
    if path.stem in ON_A_CARD and torch.cuda.is_available():  # what is stored is of a machine without one
        return
    assert printed(notebook) == stored, "the notebook is stale; --update-golden if that is meant"


def test_there_are_three_and_one_names_the_card_that_it_needs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_steps", "on_a_gpu", "stages"]
    first = nbformat.read(NOTEBOOKS[1], as_version=4).cells[0].source
    assert "needs **an NVIDIA A100, L4, H100 or a later card**" in first
    assert "a T4 or a V100 is older" in first
    old = {card: chip for card, chip in CARDS.items() if card in ("a100", "l4", "h100")}
    assert {*old.values()} <= {*TARGETS} and {"t4", "v100"} <= {*TOO_OLD}, "what kernels are compiled for"
