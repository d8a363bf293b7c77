"""Tuning of kernels: what is offered, what is found fastest, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel.wrong_launches import declared
from transconv.__main__ import main
from transconv.backend_triton import Miscompiled, TritonKernel
from transconv.errors import KernelError
from transconv.kernel import Group, KernelFunction, kernel
from transconv.kernel.launch import tuned_choices
from transconv.kernel.launch.tuned_choices import LaunchWords, TunedChoice, search

EXAMPLE = str(Path(__file__).parents[2] / "docs/examples/scaled_rows.py")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and times by a table instead of a clock."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TRANSCONV_CACHE", str(folder))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("TRANSCONV_TUNED", raising=False)
    monkeypatch.setattr(tuned_choices, "_timed", lambda clock, run, words, arrays: seconds(words))


def seconds(words: LaunchWords) -> float:
    """8 rows are best, with 4 warps and 2 stages."""
    rows = dict(words.numbers).get("ROWS", 4)
    return 10.0 + abs(rows - 8) + abs((words.warps or 1) - 4) + abs((words.stages or 3) - 2)


def test_the_search_finds_the_fastest_that_is_right() -> None:
    tried: list[LaunchWords] = []

    def run(words: LaunchWords, arrays: dict[str, Any]) -> None:
        tried.append(words)
        if words.warps == 4:
            raise KernelError("too many warps")
        arrays["Y"] += 1 if words.stages != 2 else 2  # two stages are wrong

    offered = {"ROWS": (4, 2, 8), "warps": (1, 2, 4), "stages": (3, 2, 1)}
    arrays = {"Y": torch.zeros(4)}
    found = search(run, arrays, offered, 60.0, 100)
    assert found.words == LaunchWords(2, None, (("ROWS", 8),)) and found.us < found.before_us == 18.0
    assert len(tried) == len({*tried}) == found.tried + 1 and not arrays["Y"].any()
    assert search(run, arrays, offered, 60.0, 3).tried == 3
    assert not search(run, arrays, offered, 0.0, 9).tried
    assert search(run, arrays, {}, 60.0, 9) == TunedChoice(LaunchWords(), 18.0, 18.0, 0)


def given(m: int = 12, n: int = 20) -> tuple[Any, ...]:
    draw = np.random.default_rng(m).normal
    return tuple(draw(size=s).astype(np.float32) for s in ((m, n), (m, n), (1, n)))


def test_what_is_found_is_kept_for_calls_of_this_kind() -> None:
    of = KernelFunction(declared.python, work_shape=declared.work_shape, group_shape=declared.group_shape)
    before = [a.copy() for a in given()]
    arrays = given()
    found = of.tune(*arrays, 2, trials=6)
    assert found.words == LaunchWords(4, None, (("ROWS", 8),))
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True))
    new = KernelFunction(of.python, work_shape=of.work_shape, group_shape=of.group_shape)  # a new process
    told = new.explain(*given(9, 25), 2)
    assert "group      8 x 32" in told and "warps      4" in told and f"tuned      {found}" in told
    x, y, scale = given(9, 25)
    new(x, y, scale, 3)
    np.testing.assert_allclose(y, x * scale + 3, 1e-6)  # rounded once
    assert "group      4 x 32" in new.explain(*given(100, 20), 2)  # more binary digits
    assert "group      2 x 32" in new.parametrize(ROWS=2).explain(*given(), 2)
    assert "warps      2 (as hinted)" in new.explain(Group((12, 20), (4, 32), warps_hint=2), *given(), 2)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"warps": 3, "stages": None, "numbers": {}, "us": 1, "before_us": 1, "tried": 1},
        {"warps": 4, "stages": 99, "numbers": {}, "us": 1, "before_us": 1, "tried": 1},
        {"warps": 4, "stages": 2, "numbers": {"ROWS": 1 << 30}, "us": 1, "before_us": 1, "tried": 1},
        {"warps": 4, "stages": 2, "numbers": {"COLS": 8}, "us": 1, "before_us": 1, "tried": 1},
        {"warps": [4], "stages": 2, "numbers": None, "us": "x", "before_us": 1, "tried": 1},
    ],
)
def test_records_that_say_what_is_not_offered_are_ignored(content: dict[str, Any]) -> None:
    tuned_choices.DRAWER.put("name", content)
    assert tuned_choices.recorded("name", declared.tunables) is None


def test_the_verb_tunes_and_sets(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["kernel", f"{EXAMPLE}:scaled", "--args", "f32[8,40]", "f32[8,40]", "f32[40]"]
    assert main([*call, "--set", "ROWS=2", "--tune", "9", "--trials", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 tried" in told and "tunable    ROWS = 2" in told and "group      2 x 128" in told
    for words, said in (
        ("--set ROWS", "expected a name and a whole number"),
        ("--set COLS=2", "has no tunable number COLS; it has: ROWS"),
        ("--warps 2", "--shape, --warps and --stages need --group"),
    ):
        assert main([*call, *words.split(), "--target", "sm_90"]) != 0
        assert said in capsys.readouterr().err


@kernel
def summed(group: Any, X: Any, Y: Any) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) + 1)


@pytest.mark.parametrize("size", [1024, 2048])
def test_other_warps_where_those_of_the_compiler_are_miscompiled(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that says its warps is refused; others find what is compiled right, and keep it."""
    tried: list[int] = []
    wrong: set[int] = set()
    right = TritonKernel.run

    def start(self: TritonKernel, tensors: list[Any], values: Any) -> None:
        tried.append(self.warps)
        if self.warps in wrong:
            raise Miscompiled("summed", "known mistake")
        right(self, tensors, values)

    monkeypatch.setattr(TritonKernel, "run", start)
    of, x, y = KernelFunction(summed.python), np.arange(2000, dtype=np.float32), np.zeros(2000, np.float32)
    of(Group(2000, size), x, y)
    (own,) = tried
    wrong |= {own, 2 * own}
    of, y = KernelFunction(summed.python), np.zeros(2000, np.float32)
    for _ in range(2):
        of(Group(2000, size), x, y)
    assert tried[1:] == [own, 2 * own, own // 2, own // 2] and np.array_equal(y, x + 1)
    told = of.explain(Group(2000, size), x, y)
    assert f"instead    of {own} warps: known mistake" in told and f"warps      {own // 2}" in told
    with pytest.raises(Miscompiled):
        of(Group(2000, size, warps_hint=own), x, y)
    wrong |= {1, 2, 4, 8, 16}
    with pytest.raises(Miscompiled):
        KernelFunction(summed.python)(Group(2000, size), x, y)
