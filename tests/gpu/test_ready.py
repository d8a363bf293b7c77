"""Calls whose kernel is compiled by a process, and plans of another process, on a GPU."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import transconv
from transconv.backend_triton.launch import compile_records
from transconv.conv import compiler
from transconv.runtime import check_records, cores
from transconv.runtime import compiler as plans
from transconv.runtime.compilation import async_compile

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Empty caches, here and in processes."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    for forget in (compiler.forget, compile_records.forget, check_records.forget, async_compile.forget):
        forget()
    yield
    async_compile.forget()


def layer(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 64, size, size, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    return (x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last))


def rmse(made: torch.Tensor, exact: torch.Tensor) -> float:
    return (made.double() - exact).square().mean().sqrt().item()


def test_background_stalls_nobody_and_switches() -> None:
    transconv.config.compile = "background"
    x, w = layer(29)
    torch.conv2d(x, w)
    transconv.stats(reset=True)
    begun, longest = time.monotonic(), 0.0
    while not transconv.stats().native:
        at = time.perf_counter()
        made = transconv.conv2d(x, w, padding=1)
        torch.cuda.synchronize()
        if not transconv.stats().native:
            longest = max(longest, time.perf_counter() - at)
        assert time.monotonic() - begun < LIMIT_S
        time.sleep(0.05)
    torch.testing.assert_close(made, torch.conv2d(x, w, padding=1), rtol=2e-2, atol=1e-1)
    assert transconv.stats().waiting > 0 and longest < 0.5


@pytest.mark.skipif(cores() < 4, reason="needs four cores")
def test_the_backward_pass_of_a_first_step_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(64, 64, 3, bias=False),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 128, 3, stride=2),
        torch.nn.Conv2d(128, 64, 1),
    )
    model.to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    x, _ = layer(31)
    far = torch.randn_like(model(x))
    want = torch.autograd.grad(model(x), [*model.parameters()], far)
    exact = copy.deepcopy(model).double()
    right = torch.autograd.grad(exact(x.double()), [*exact.parameters()], far.double())
    transconv.convert_(model)
    transconv.config.fallback = "error"
    y = model(x)
    begun = time.monotonic()
    while not all(asked.done for asked in list(async_compile._asked.values())):
        assert time.monotonic() - begun < LIMIT_S
        time.sleep(0.05)
    assert len(async_compile._asked) >= 5, "a gradient of the first layer, two of each other"
    monkeypatch.setattr(plans, "build", None)
    found = torch.autograd.grad(y, [*model.parameters()], far)
    for made, theirs, best in zip(found, want, right, strict=True):
        assert rmse(made, best) <= 1.25 * rmse(theirs, best), tuple(best.shape)


def test_a_child_compiles_what_the_launch_looks_for() -> None:
    """Under the same key: the launch finds machine code and compiles nothing."""
    x, w = layer(27)
    report = transconv.prepare(
        torch.nn.Conv2d(64, 64, 3, bias=False).to(
            "cuda", torch.bfloat16, memory_format=torch.channels_last
        ),
        x,
        progress=False,
    )
    assert report.kernels >= 2 and not report.failures
    folders = set(compile_records.folder().iterdir())
    transconv.config.compile = "never"
    y = transconv.conv2d(x, w.requires_grad_())
    y.sum().backward()
    found = {f for f in set(compile_records.folder().iterdir()) - folders if list(f.glob("*.cubin"))}
    assert not found, "a launch compiled what was prepared"


def test_a_capture_replays_what_was_warmed_up() -> None:
    x, w = layer(25)
    transconv.config.compile = "background"
    transconv.conv2d(x, w)  # torch's
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = transconv.conv2d(x, w)
    graph.replay()
    torch.testing.assert_close(y, torch.conv2d(x, w), rtol=2e-2, atol=1e-1)


def test_another_process_runs_no_pass_and_asks_triton_for_no_kernel() -> None:
    text = (
        "import torch, transconv, transconv.runtime.steps as s, triton.runtime.jit as t\n"
        "if {warm}: s.lower = t.JITFunction.run = None\n"
        "x = torch.randn(4, 64, 23, 23, device='cuda').half()\n"
        "w = torch.randn(64, 64, 3, 3, device='cuda').half()\n"
        "transconv.config.fallback = 'error'\n"
        "made, want = transconv.conv2d(x, w), torch.conv2d(x, w)\n"
        "torch.testing.assert_close(made, want, rtol=1e-2, atol=1e-1)\n"
    )
    for warm in (False, True):
        subprocess.run([sys.executable, "-c", text.format(warm=warm)], check=True, cwd=ROOT, timeout=300)


def test_what_prepare_compiled_starts_without_a_c_compiler() -> None:
    """The process that compiles a kernel also builds what starts it."""
    text = (
        "import os, torch, transconv, triton.runtime.build as b\n"
        "torch.zeros(1, device='cuda'); __import__('triton').runtime.driver.active.utils\n"
        "b._build = None\n"
        "x = torch.randn(4, 64, 21, 21, device='cuda').bfloat16()\n"
        "w = torch.randn(64, 64, 3, 3, device='cuda').bfloat16()\n"
        "transconv.config.fallback, transconv.config.compile = 'error', 'never'\n"
        "made, want = transconv.conv2d(x, w), torch.conv2d(x, w)\n"
        "torch.testing.assert_close(made, want, rtol=2e-2, atol=1e-1)\n"
    )
    layer = (
        "import torch, transconv\n"
        "m = torch.nn.Conv2d(64, 64, 3, bias=False).to('cuda', torch.bfloat16)\n"
        "x = torch.randn(4, 64, 21, 21, device='cuda').bfloat16()\n"
        "from transconv.torch_ops.calls import lower_call\n"
        "lower_call.first_result = lambda *_: None\n"  # which would launch them here
        "transconv.prepare(m, x, backward=False, progress=False)\n"
    )
    for code in (layer, text):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)
