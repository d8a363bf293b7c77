"""Folders of ``transconv export --hf-kernel`` in Hugging Face's own loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.standalone.test_kernel_repository import TEXTS, run
from transconv.__main__ import main


@pytest.mark.integrations
def test_the_loader_reads_all_operations(tmp_path: Path) -> None:
    pytest.importorskip("kernels")
    folder = tmp_path / "conv-kernels"
    assert main(["export", "--hf-kernel", str(folder), "--dtype", "f32", "--target", "sm_90"]) == 0
    assert run(folder, "kernels") == "13 compared\n"


@pytest.mark.integrations
def test_the_loader_reads_texts(tmp_path: Path) -> None:
    pytest.importorskip("kernels")
    (tmp_path / "mine.txt").write_text(TEXTS)
    folder = tmp_path / "texts"
    assert (
        main(["export", str(tmp_path / "mine.txt"), "--hf-kernel", str(folder), "--target", "sm_90"]) == 0
    )
    assert run(folder, "kernels") == "3 compared\n"
