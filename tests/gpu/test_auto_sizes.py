"""Default settings on a GPU: a program whose sizes change waits for no kernel, and gets faster ones."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
import transconv.functional as TF
from transconv.backend_triton.launch import compile_records
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.calls import size_policy
from transconv.conv import compiler
from transconv.runtime import check_records, first_run_check, plan_cache
from transconv.runtime import compiler as compiler_
from transconv.runtime.compilation import async_compile, rehearsal_thread
from transconv.runtime.compilation.rehearsal_thread import aside

pytestmark = pytest.mark.gpu

LIMIT_S = 150.0
SIDES = (31, 33, 40, 47)


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Default settings and empty caches, here and in processes."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    for forget in (compiler.forget, compile_records.forget, check_records.forget, async_compile.forget):
        forget()
    transconv.config.compile = transconv.config.sizes = "auto"
    yield
    async_compile.forget()


def weight() -> torch.Tensor:
    w = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    return w.to(memory_format=torch.channels_last).requires_grad_()


def image(side: int) -> torch.Tensor:
    x = torch.randn(8, 64, side, side, device="cuda", dtype=torch.bfloat16)
    return x.to(memory_format=torch.channels_last).requires_grad_()


def step(w: torch.Tensor, side: int) -> tuple[dict[str, int], int, float]:
    """Who answered a forward and a backward pass, whose results are torch's, and how long they took."""
    x = image(side)
    torch.cuda.synchronize()
    start = time.perf_counter()
    y = transconv.conv2d(x, w, padding=1)
    found = torch.autograd.grad(y.sum(), (x, w))
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    seen = transconv.stats(reset=True)
    assert not seen.fallback
    want = torch.conv2d(x, w, padding=1)
    torch.testing.assert_close(y, want, rtol=2e-2, atol=1e-1)
    for made, theirs in zip(found, torch.autograd.grad(want.sum(), (x, w)), strict=True):
        torch.testing.assert_close(made, theirs, rtol=3e-2, atol=0.03 * theirs.abs().max().item())
    return seen.native, seen.waiting, took


def until(w: torch.Tensor, side: int, wanted: set[str]) -> float:
    """Call a size until these answer all of it; the longest step."""
    end, longest = time.monotonic() + LIMIT_S, 0.0
    while True:
        native, waiting, took = step(w, side)
        longest = max(longest, took)
        if native.keys() == wanted and not waiting:
            return longest
        assert time.monotonic() < end, (native, waiting)
        time.sleep(0.02)


OWN = {"fwd", "bwd_d", "bwd_w"}
ANY = {f"{name} any size" for name in OWN}


def test_torch_then_any_size_then_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    often = size_policy.OFTEN
    monkeypatch.setattr(size_policy, "OFTEN", 1 << 30)
    w, (first, second, third, fourth) = weight(), SIDES
    torch.conv2d(image(first), w).sum().backward()  # cuDNN itself
    assert step(w, first)[:2] == ({}, 1), "torch's call, and its gradients"
    longest = until(w, first, OWN)
    assert step(w, second)[1] == 3
    longest = max(longest, until(w, second, ANY))
    assert step(w, third)[0].keys() == step(w, fourth)[0].keys() == ANY, "a new size waits for nothing"
    assert step(w, first)[0].keys() == OWN
    assert longest < 1.0
    # A size that comes often gets kernels of its own, which stay if they are not slower.
    monkeypatch.setattr(size_policy, "OFTEN", often)
    found = [of.of((8, third, third)) for of in list(size_policy.policy._choices.values())]
    end = time.monotonic() + LIMIT_S
    while not all(choice.settled for choice in found):
        assert time.monotonic() < end
        step(w, third)
    seen = [step(w, third)[0] for _ in range(4)]
    own = sum(" any size" not in name for name in seen[-1])
    assert all(s == seen[0] for s in seen) and own == sum(choice.own for choice in found)


WORK = (
    (compiler_, "build"),
    (plan_cache, "read"),
    (TritonKernel, "_compiled"),
    (TritonKernel, "starting"),
    (first_run_check, "_launch_and_look"),
)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """How often each kind of work was done, and whether by the thread that makes kernels ready."""
    seen = Counter[tuple[str, bool]]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            seen[name, threading.current_thread().name == rehearsal_thread.NAME] += 1
            return function(*given, **named)

        return counted

    for home, name in WORK:
        monkeypatch.setattr(home, name, counting(name, getattr(home, name)))
    return seen


def processes_end() -> None:
    """All that was asked for is compiled and made ready."""
    end = time.monotonic() + LIMIT_S
    while not all(asked.done for asked in list(async_compile._asked.values())):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_calls_that_take_kernels_over_read_load_and_check_nothing(
    work: Counter[tuple[str, bool]],
) -> None:
    """Neither those of the first size nor those for any size; what they do takes a few milliseconds."""
    w, (first, second, third, _) = weight(), SIDES
    torch.conv2d(image(first), w).sum().backward()
    for side, wanted in ((first, OWN), (second, ANY)):
        step(w, side)
        step(w, side)  # asks for its gradients, too
        processes_end()
        assert not any(n for (_, beside), n in work.items() if not beside), work
        native, waiting, took = step(w, side)
        assert native.keys() == wanted and not waiting and took < 0.05
        assert not any(n for (_, beside), n in work.items() if not beside), work
    assert step(w, third)[0].keys() == ANY
    assert work["_launch_and_look", True] >= 6 and work["build", True] == 0


def test_kernels_are_made_ready_beside_what_a_program_does() -> None:
    """Its streams, its random numbers, and CUDA graphs that it captures meanwhile are as without."""
    w, x = weight().detach(), image(SIDES[0]).detach()
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    transconv.conv2d(x, w, padding=1)
    fixed, made = torch.zeros(1 << 20, device="cuda"), list[torch.cuda.CUDAGraph]()
    end = time.monotonic() + LIMIT_S
    torch.cuda.synchronize()
    while not all(asked.done for asked in list(async_compile._asked.values())):
        assert time.monotonic() < end
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in the mode that forbids other threads to allocate
            for _ in range(50):
                fixed.add_(1)
        made = [*made[-20:], graph]
        graph.replay()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert (fixed == fixed[0]).all() and fixed[0].item() % 50 == 0 and fixed[0].item() > 0
    torch.testing.assert_close(
        transconv.conv2d(x, w, padding=1), torch.conv2d(x, w, padding=1), rtol=2e-2, atol=1e-1
    )
    assert transconv.stats(reset=True).native == {"fwd": 1}


def test_a_stream_beside_the_programs_waits_for_none() -> None:
    busy = torch.cuda.default_stream()
    torch.ones(8, device="cuda").sum().item()  # loading a kernel may wait for others
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
    with aside(torch.device("cuda", 0)):
        assert torch.cuda.current_stream() != busy and not torch.is_grad_enabled()
        made = torch.ones(8, device="cuda").sum().item()
        assert not busy.query(), "it still works"
    assert made == 8 and torch.cuda.current_stream() == busy and torch.is_grad_enabled()


def test_a_function_follows() -> None:
    end = time.monotonic() + LIMIT_S
    sizes = ((64, 300), (65, 301), (66, 301))
    for rows, columns in sizes:
        native: dict[str, int] = {}
        while not native:
            x = torch.randn(rows, columns, device="cuda")
            torch.testing.assert_close(TF.softmax(x, -1), torch.softmax(x, -1))
            native = transconv.stats(reset=True).native
            assert time.monotonic() < end
            time.sleep(0.02)
        assert native == {"softmax" + " any size" * ((rows, columns) != sizes[0]): 1}


@pytest.mark.parametrize("fixed", ["steady", "deterministic", "stream"])
def test_what_is_fixed_waits_for_its_kernel(fixed: str) -> None:
    w = weight().detach()
    transconv.config.steady = fixed == "steady"
    torch.use_deterministic_algorithms(fixed == "deterministic")
    stream = torch.cuda.Stream() if fixed == "stream" else torch.cuda.default_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for side in SIDES[:2]:
            x = image(side).detach()
            torch.testing.assert_close(transconv.conv2d(x, w), torch.conv2d(x, w), rtol=2e-2, atol=1e-1)
    torch.cuda.synchronize()
    assert transconv.stats(reset=True).native == {"fwd": 2}


def test_a_capture_after_a_warm_up_holds_kernels() -> None:
    x, w = image(SIDES[0]).detach(), weight().detach()
    transconv.conv2d(x, w)  # torch's, while a process compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            transconv.conv2d(x, w)
    torch.cuda.current_stream().wait_stream(stream)
    transconv.stats(reset=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = transconv.conv2d(x, w)
    graph.replay()
    torch.testing.assert_close(y, torch.conv2d(x, w), rtol=2e-2, atol=1e-1)
    seen = transconv.stats(reset=True)
    assert seen.native == {"fwd": 1} and not seen.waiting


@pytest.mark.parametrize("sizes", ["exact", "any"])
@pytest.mark.parametrize("kind", ["bias", "autocast", "no gradients"])
def test_one_entry_for_more_sizes_than_entries(kind: str, sizes: str) -> None:
    """Calls that come back at many sizes, in turn: each has its own result, beside f64's."""
    transconv.config.sizes, transconv.config.compile = sizes, "now"
    conv = torch.nn.Conv2d(16, 24, 3, padding=1, bias=kind != "no gradients", device="cuda")
    wide = copy.deepcopy(conv).double()
    transconv.convert_(conv)
    images = [torch.randn(2, 16, h, w, device="cuda") for h in (7, 16) for w in (5, 12, 33)]
    for turn in range(6):
        for x in images:
            given, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
            with torch.set_grad_enabled(kind != "no gradients"):
                with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
                    y = conv(given)
                want = wide(theirs)
            near = {"rtol": 3e-2, "atol": 6e-2, "check_dtype": False}
            torch.testing.assert_close(y, want, **near)
            if kind == "no gradients":
                continue
            for made, other in zip(
                torch.autograd.grad(y.float().square().sum(), (given, *conv.parameters())),
                torch.autograd.grad(want.square().sum(), (theirs, *wide.parameters())),
                strict=True,
            ):
                scale = other.abs().max()
                torch.testing.assert_close(made / scale, other / scale, **near)
        if turn == 3:
            transconv.stats(reset=True)
    assert not transconv.stats().fallback and transconv.stats().native
