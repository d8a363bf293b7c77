"""Who imports SymPy, which takes 0.3 s: processes that lower, not those that find their kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEP = """if True:
    import sys
    import torch, transconv
    transconv.config.cpu = "interpret"
    x, w = torch.ones(1, 4, 5, 5, requires_grad=True), torch.ones(4, 4, 3, 3, requires_grad=True)
    transconv.conv2d(x, w, padding=1).sum().backward()
    print("sympy" in sys.modules, transconv.stats())
"""


def _said(code: str, cache: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "TRANSCONV_CACHE": str(cache),
            "TRITON_INTERPRET": "1",
            "TRANSCONV_VERIFY": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    return ran.stdout


@pytest.mark.slow
def test_a_first_step_whose_plans_are_on_the_disk_needs_no_sympy(tmp_path: Path) -> None:
    """The cold step lowers three kernels, the warm one reads them; both answer natively."""
    for imported in ("True", "False"):
        said = _said(STEP, tmp_path)
        assert said.startswith(imported), said
        assert "100.0% native" in said, said


def test_a_process_that_compiles_imports_it_before_its_first_task(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from transconv.runtime.compilation.compile_child import answer
        assert "sympy" not in sys.modules
        answer({"start": True})
        print("sympy.polys.rings" in sys.modules)
    """
    assert _said(code, tmp_path) == "True\n"


@pytest.mark.slow
def test_the_simplifier_is_imported_without_it(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from transconv.ir import Var
        from transconv.simplify import simplify
        print("sympy" in sys.modules)
        simplify((Var("x") + 1) * Var("y"))
        print("sympy" in sys.modules)
    """
    assert _said(code, tmp_path) == "False\nTrue\n"
