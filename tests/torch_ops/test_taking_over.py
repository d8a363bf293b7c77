"""What is left to do for the call that takes over a kernel: nothing that takes long. Kernels are the
interpreter's, which are checked as a GPU's are and count as compiled when a test says so."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
from tests.runtime.test_rehearsal import done
from tests.torch_ops.test_auto_sizes import CALLS, SIDES, answers, auto, image  # noqa: F401  (a fixture)
from tests.torch_ops.test_ready import Machine, machine, sized  # noqa: F401  (fixtures)
from transconv.backend_triton.launch import triton_kernel
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.functional.calls import first_call_check
from transconv.runtime import Plan, PlanRequest, check_records, compiler, first_run_check, plan_cache
from transconv.runtime.compilation import async_compile, rehearsal_thread
from transconv.selection import files_digest

CPU = torch.device("cpu")
Home = tuple[Any, str]
WORK: dict[str, Home] = {
    "lower": (compiler, "lower"),
    "emit": (compiler, "launched"),
    "read": (plan_cache, "read"),
    "load": (triton_kernel, "load"),
    "check": (first_run_check, "_launch_and_look"),
    "compare": (first_call_check, "_hold"),
}


class Work:
    """How often each kind of work was done, in calls and by the thread (``beside``). ``answer``: processes
    have done what they were given, and the thread has made it ready."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self.calls, self.beside = machine, Counter[str](), Counter[str]()
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()
        for name, (home, function) in WORK.items():
            monkeypatch.setattr(home, function, self.counting(name, getattr(home, function)))

    def answer(self, waits: bool = True) -> None:
        before = self.calls.copy()
        for job, _ in self.machine.processes.jobs:
            q = PlanRequest.of_job(job)
            compiler.plan(q.workload, q.target, None, q.deterministic, Plan)
        self.calls = before
        compiler.forget()  # this process has to read it
        self.machine.processes.answer(kernels=1, seconds=0.0)
        if waits:
            done(rehearsal_thread.thread)

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            aside = threading.current_thread().name == rehearsal_thread.NAME
            (self.beside if aside else self.calls)[name] += 1
            if aside and name == "check":
                self.begun.set()
                assert self.go.wait(60.0)
            return function(*given, **named)

        return counted


@pytest.fixture
def work(auto: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Work]:
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")  # plans are kept on disk
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(rehearsal_thread, "START_S", 0.0)
    monkeypatch.setattr(rehearsal_thread, "thread", rehearsal_thread.RehearsalThread())
    monkeypatch.setattr(rehearsal_thread, "device_of", lambda target: CPU)
    check_records.forget()
    files_digest()
    made = Work(auto, monkeypatch)
    yield made
    made.go.set()
    rehearsal_thread.thread.close()
    check_records.forget()


def call(name: str, side: int, times: int = 1) -> dict[str, int]:
    ours, theirs, _ = CALLS[name]
    for _ in range(times):
        x = image(side)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-3)
    return answers()


def compared(name: str, side: int) -> None:
    """A function's first results are compared with torch's by the thread, on what a call has."""
    if name == "softmax":
        assert call(name, side) == {"torch": 1}
        done(rehearsal_thread.thread)


def step(side: int) -> dict[str, int]:
    x, w = image(side).requires_grad_(), torch.ones(4, 4, 3, 3, requires_grad=True)
    found, want = (
        torch.autograd.grad(f(x, w).square().sum(), (x, w)) for f in (transconv.conv2d, torch.conv2d)
    )
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    return answers()


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CALLS)
def test_the_call_that_takes_a_kernel_over_makes_and_checks_nothing(
    auto: Machine, work: Work, name: str
) -> None:
    does = CALLS[name][2]
    first, second, third = SIDES
    assert call(name, first, 2) == {"torch": 2}
    auto.compiled = True
    work.answer()
    assert work.beside["check"] == work.beside["read"] == 1 and not work.calls
    compared(name, first)
    assert call(name, first, 2) == {does: 2}
    auto.compiled = False
    assert call(name, second) == {"torch": 1}
    auto.general = True
    work.answer()
    checked = work.beside["check"]
    assert checked > 1
    compared(name, second)
    assert call(name, second) == call(name, third) == {f"{does} any size": 1}
    assert work.beside["check"] == checked and not work.calls.keys() - {"compare"}
    assert work.beside["compare"] == 2 * (name == "softmax") == 2 * work.calls["compare"]


def test_gradients_are_made_ready_too(auto: Machine, work: Work) -> None:
    assert step(SIDES[0]) == {"torch": 1}
    auto.compiled = True
    work.answer()
    assert work.beside["check"] == 3
    assert step(SIDES[0]) == {"fwd": 1, "bwd_d": 1, "bwd_w": 1} and not work.calls


def test_torch_answers_while_a_kernel_is_made_ready(auto: Machine, work: Work) -> None:
    """However long that takes: no call waits for it, and no kernel answers unchecked."""
    work.go.clear()
    call("conv2d", SIDES[0])
    auto.compiled = True
    work.answer(waits=False)
    assert work.begun.wait(60.0)
    assert call("conv2d", SIDES[0], 3) == {"torch": 3} and not work.calls
    work.go.set()
    done(rehearsal_thread.thread)
    assert call("conv2d", SIDES[0]) == {"fwd": 1} and not work.calls


def test_the_check_is_at_the_sizes_of_the_call(
    auto: Machine, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, start = list[Any](), TritonKernel.run
    monkeypatch.setattr(TritonKernel, "run", lambda s, t, v: (seen.append(dict(v)), start(s, t, v)))
    transconv.config.sizes = "any"
    call("conv2d", SIDES[1])
    auto.general = True
    work.answer()
    assert seen == [{"MB": 1, "IH": SIDES[1], "IW": SIDES[1]}]


@pytest.mark.every(2)
@pytest.mark.parametrize("why", ["wrong", "memory", "error"])
def test_what_could_not_be_made_ready_is_checked_by_its_first_call(
    auto: Machine, work: Work, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "memory":
        monkeypatch.setattr(first_run_check, "ROOM", 0)
    else:
        monkeypatch.setattr(
            first_run_check,
            "_varied",
            lambda plan, *_: (
                {w.name: w.filled(CPU, 0).zero_() for w in plan.operands()} if why == "wrong" else 1 / 0
            ),
        )
    call("conv2d", SIDES[0])
    auto.compiled = True
    work.answer()
    assert call("conv2d", SIDES[0], 2) == {"fwd": 2} and work.calls["check"] == 1


def test_only_what_the_call_has_to_check_itself_begins_a_pause(
    auto: Machine, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_compile, "PAUSE_S", 1000.0)
    weights = [torch.randn(n, 4, 3, 3) for n in (4, 5)]
    for room, taken in ((first_run_check.ROOM, 2), (0, 1)):
        monkeypatch.setattr(first_run_check, "ROOM", room)
        for w in weights:
            transconv.conv2d(image(5), w)
        auto.compiled = True
        work.answer()
        answers()
        for w in weights:
            transconv.conv2d(image(5), w)
        assert answers()["fwd"] == taken
        auto.compiled, weights = False, [torch.randn(n, 4, 3, 3) for n in (6, 7)]


def test_a_process_that_failed_has_nothing_made_ready(auto: Machine, work: Work) -> None:
    call("conv2d", SIDES[0])
    auto.processes.answer(reason="ptxas died")
    assert rehearsal_thread.thread.thread is None
    assert not work.beside
