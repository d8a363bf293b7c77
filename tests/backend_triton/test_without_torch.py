"""A process without torch compiles under the keys of one that has tensors."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import programs
from transconv.backend_triton.launch import compile_records, jit_module
from transconv.support import knobs

ROOT = Path(__file__).parents[2]
PROBLEMS = ["mb1ic16ih8oc16oh8kh3ph1 dt=bf16 tag=nhwc", "mb8ic64ih8oc64oh8kh1 dt=bf16 tag=nhwc"]
PROGRAM = f"""
import json, sys
from transconv.backend_triton import pretend
from transconv.backend_triton.launch import triton_kernel
from transconv.backend_triton.launch import jit_module
from transconv.runtime import compiler
from transconv.runtime.plans import Plan
from transconv.selection import workload_of
from transconv.target import Target
import transconv.conv

pretend("cuda", 90, 32)
if sys.argv[1] == "tensors":
    import torch
    jit_module.tensor = lambda name: torch.empty(1, dtype=getattr(torch, name), device="meta")
seen = []
triton_kernel.refuse = lambda kernel, function: seen.append(kernel.hash)
for problem in {PROBLEMS}:
    plan = compiler.plan(workload_of(problem, "fwd", ""), Target.parse("sm_90"), None, False, Plan)
    for step in plan.steps:
        step.triton.compile(True)
boxes = any(s.triton.boxes for s in plan.steps)
print(json.dumps([seen, boxes, "torch" in sys.modules]))
"""


@pytest.mark.slow
def test_the_keys_are_the_same(tmp_path: Path) -> None:
    found = {}
    for word in ("absent", "tensors"):
        environment = knobs.child_environment(
            {
                "TRANSCONV_CACHE": str(tmp_path / word),
                "TRITON_INTERPRET": None,
                "TRITON_CACHE_DIR": str(tmp_path / "triton"),
            },
            str(ROOT),
        )
        command = ["-c", PROGRAM, word]
        ran = (
            programs.run(command, env=environment)
            if word == "tensors"
            else subprocess.run(
                [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120
            )
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        keys, boxes, torch_there = json.loads(ran.stdout.splitlines()[-1])
        found[word] = keys
        assert boxes and torch_there is (word == "tensors")
    assert found["absent"] == found["tensors"] and len(found["absent"]) >= 2


@pytest.mark.parametrize(
    ("types", "others"),
    [
        (("*bf16", "tensordesc<bf16[64, 64],NVMMA(128)>"), ("*fp32", "tensordesc<i8[128, 32],NVMMA(64)>")),
        (("*bf16", "tensordesc<bf16[64, 64]>"), ("tensordesc<bf16[64, 64]>", "*bf16")),
        (("*bf16", "tensordesc<bf16[64, 64]>"), ("*bf16", "tensordesc<bf16[1, 2, 3]>")),
        (("*bf16", "*fp32"), ("*i8", "*bf16")),
        (("*bf16", "*fp32"), ("*bf16", "*fp32", "*fp32")),
        (("*bf16", "i32"), ("*bf16", "i64")),
        (("*bf16", "i32"), ("*i8", "i32")),
    ],
)
def test_what_starts_kernels_is_one_for_as_many_as_triton_says(
    types: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Two names for one text would have two processes build it at once."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")

    def text(each: tuple[str, ...]) -> str:
        boxes = [{"block": 1} for t in each if t.startswith("tensordesc")]
        return str(driver.make_launcher({}, dict(enumerate(each)), boxes or None))

    alike = compile_records._started_like(types) == compile_records._started_like(others)
    assert alike is (text(types) == text(others))


def test_what_starts_plain_kernels_is_built_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of kernels of any types and names, so that Triton finds it in its cache."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    texts: list[str] = []

    def build(src: str, **_: Any) -> Any:
        texts.append(src)
        return SimpleNamespace(launch=None)

    monkeypatch.setattr(driver, "compile_module_from_src", build)
    monkeypatch.setattr(driver, "library_dirs", list)
    for count in compile_records.USUAL:
        compile_records.build_plain(count)
        own = {name: "*bf16" for name in ("src", "wei", "bia", "dst")[:count]}
        assert texts.pop() == driver.make_launcher({}, own, None) and not texts
    made = driver.CudaLauncher(
        compile_records.TextSignature({"x": "*i8"}), compile_records.PLAIN
    )  # it has all fields
    assert not made.global_scratch_size and not made.launch_cooperative_grid


def test_one_process_builds_what_starts_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    with (
        compile_records._only_here("a", False) as first,
        compile_records._only_here("a", False) as second,
        compile_records._only_here("b", False) as other,
    ):
        assert first and other and not second
        seen: list[bool] = []

        def wait() -> None:
            with compile_records._only_here("a", True) as alone:
                seen.append(alone)

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.1)
        assert not seen
    waiting.join(30)
    assert seen == [True]


def test_torch_is_kept_out_only_where_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # type: ignore[arg-type]
    with jit_module.without_torch():
        assert isinstance(sys.modules["torch"], SimpleNamespace)
    assert "torch" in sys.modules
    monkeypatch.delitem(sys.modules, "torch")
    with jit_module.without_torch(), pytest.raises(ImportError):
        importlib.import_module("torch")
    assert "torch" not in sys.modules
