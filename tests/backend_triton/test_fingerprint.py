"""Triton's fingerprint is computed once for the same files."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from transconv.backend_triton.launch import compile_records


def test_it_is_computed_once_for_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Any = pytest.importorskip("triton.runtime.cache")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    counted: list[int] = []

    def process() -> str:
        """What Triton uses in a new process."""

        @functools.lru_cache
        def triton_key() -> str:
            counted.append(1)
            return f"key {len(counted)}"

        monkeypatch.setattr(cache, "triton_key", triton_key)
        compile_records.remember.cache_clear()
        compile_records.remember()
        return str(cache.triton_key())

    monkeypatch.setattr(compile_records, "_state", lambda _: "one")
    assert [process(), process(), process()] == ["key 1"] * 3
    monkeypatch.setattr(compile_records, "_state", lambda _: "other")
    assert [process(), process()] == ["key 2"] * 2 and len(counted) == 2


def test_the_state_of_files(tmp_path: Path) -> None:
    """It changes with their contents, names and times."""
    (tmp_path / "compiler/deep").mkdir(parents=True)
    (tmp_path / "runtime").mkdir()
    files = [tmp_path / n for n in ("compiler/a.py", "compiler/deep/b.py", "runtime/cache.py")]
    for at, file in enumerate(files):
        file.write_text("x" * at)
    (tmp_path / "compiler/ignored.txt").write_text("")
    seen = {compile_records._state(tmp_path)}
    assert compile_records._state(tmp_path) in seen
    for file in files:
        os.utime(file, ns=(1, 1))
        seen.add(compile_records._state(tmp_path))
    files[1].rename(tmp_path / "compiler/deep/c.py")
    seen.add(compile_records._state(tmp_path))
    (tmp_path / "compiler/ignored.txt").write_text("other")
    assert len(seen) == 5 and compile_records._state(tmp_path) in seen
