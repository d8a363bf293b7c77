"""Folders for Hugging Face's `kernels`: their layout, their functions beside torch's, and what is
refused. The loader itself is in tests/integrations."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transconv.__main__ import main
from transconv.ir import DTYPES
from transconv.runtime.standalone import operation_names, repository_files
from transconv.runtime.standalone.kernel_repository import _package_files
from transconv.support import ComputeError, ProblemError, Unsupported
from transconv.target import TARGETS, Target

SCRIPT = Path(__file__).with_name("hub_operations.py")
TEXTS = """# any size, without gradients
compute twice
    sizes  M=8 in 1..4096, K=300 in 1..8192
    axes   m=M k=K
    read   x = X[m, k]
    store  Y[m, k] = 2*x + 1

compute scaled_norms
    axes   m=8 k=20
    read   x = X[m, k]
    let    s = sum(x*x; k)
    store  Y[m] = sqrt(s)
"""


def run(folder: Path, loader: str) -> str:
    """What the comparison says, in a process without transconv."""
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    made = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), loader],
        capture_output=True,
        text=True,
        env=variables,
        cwd=folder,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout


def test_chips_that_ask_for_a_later_triton() -> None:
    """A folder names those of every maker, by the names that a device gives itself."""
    (line,) = re.findall(r"^RELEASES = (.*)$", _package_files((), ())["_operators.py"], re.MULTILINE)
    assert ast.literal_eval(line) == {name: t.since for name, t in TARGETS.items() if t.since}
    assert {"sm_100", "gfx1250"} <= {*ast.literal_eval(line)}


@pytest.mark.slow
def test_texts_become_functions(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(TEXTS)
    folder = tmp_path / "two_texts"
    assert (
        main(["export", str(tmp_path / "mine.txt"), "--hf-kernel", str(folder), "--target", "sm_90"]) == 0
    )
    assert run(folder, "path").endswith("3 compared\n")
    for variant in ("torch-cuda", "torch-cpu"):
        at = folder / "build" / variant
        told = json.loads((at / "metadata.json").read_text())
        assert told["name"] == "two-texts" and told["id"].startswith("_two_texts_")
        found = {
            p.relative_to(at).as_posix(): base64.b64encode(
                hashlib.sha256(p.read_bytes()).digest()
            ).decode()
            for p in at.rglob("*")
            if p.is_file() and p.name != "metadata.json" and p.suffix != ".pyc"
        }
        assert told["digest"]["files"] == found
        assert "transconv import" not in "".join(p.read_text() for p in at.rglob("*.py"))
    assert told["backend"] == {"type": "cpu"}
    rows = list(csv.DictReader((folder / "compiled.csv").open()))
    assert {r["chip"] for r in rows} == {"sm_90"} and len(rows) == 3  # a gradient among them
    (folder / "build" / "torch-cpu" / "layers.py").write_text("changed")
    checked = subprocess.run([sys.executable, folder / "signature.py"], capture_output=True, text=True)
    assert checked.returncode == 1 and "torch-cpu/layers.py" in checked.stdout


@pytest.mark.parametrize(
    ("name", "text", "error", "said"),
    [
        ("Bad_Name", TEXTS, ProblemError, "is no name of a kernel"),
        ("fine", "no_such_operation", ProblemError, "expected causal_conv1d, group_norm_silu"),
        (
            "fine",
            "compute odd\n sizes M=8\n tensor X f32 [M*2]\n axes m=M\n read x = X[m*2]\n store Y[m] = x",
            Unsupported,
            "the size M is no dim of a tensor that is read",
        ),
        (
            "fine",
            TEXTS.split("\n\n")[0]
            + "\n\ncompute twice_gradient\n sizes M=8\n axes m=M\n read g = dZ[m]\n store dX[m] = g",
            ComputeError,
            "twice_gradient reads dZ",
        ),
    ],
)
def test_refused(tmp_path: Path, name: str, text: str, error: type[Exception], said: str) -> None:
    word = text
    if " " in text:
        word = str(tmp_path / "text.txt")
        Path(word).write_text(text)
    with pytest.raises(error, match=said):
        repository_files(name, [word], [DTYPES["f32"]], [Target.parse("sm_90")])


@pytest.mark.slow
@pytest.mark.parametrize("operation", operation_names())
def test_operations_beside_torch(tmp_path: Path, operation: str) -> None:
    folder = tmp_path / "made"
    words = ["export", operation, "--hf-kernel", str(folder), "--dtype", "f32", "--target", "sm_90"]
    assert main(words) == 0
    assert int(run(folder, "path").split()[0]) >= 2
