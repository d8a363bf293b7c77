"""Compiled graphs whose kernels processes compile: torch answers until all are there. Kernels are the
interpreter's, which count as compiled when a test says so."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from tests.runtime.test_ready import Processes
from tests.runtime.test_rehearsal import done
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.calls import stats
from transconv.functional.calls import compiled_launch
from transconv.graph.graph_report import TorchRow
from transconv.graph.lowerings.table import ROWS
from transconv.graph.regions import cudagraphs, graph_wait
from transconv.graph.regions.graph_parts import RunnableRegion
from transconv.graph.regions.graph_wait import RehearsalWatch
from transconv.graph.regions.region_calls import RegionLaunches
from transconv.graph.regions.region_kernel import compile_mode
from transconv.graph.verification.eager_check import WatchedCall
from transconv.runtime import Plan, PlanRequest, collecting, compiler, torch_internals
from transconv.runtime.compilation import async_compile, batch_compile, rehearsal_thread

CPU = torch.device("cpu")


class Chip:
    """Processes that compile when a test says so, and what they have compiled."""

    def __init__(self) -> None:
        self.processes, self.there = Processes(), set[str]()

    def compile(self, which: Callable[[PlanRequest], bool] = lambda q: True, **said: Any) -> int:
        """Have them answer some of what they were asked for; how much that is."""
        jobs, self.processes.jobs = self.processes.jobs, []
        count = 0
        for job, ended in jobs:
            question = PlanRequest.of_job(job)
            if not which(question):
                self.processes.jobs.append((job, ended))
                continue
            count += 1
            if "reason" not in said:
                plan = compiler.plan(question.workload, question.target, None, False, Plan)
                self.there |= {s.digest for s in plan.steps}
                compiler.forget()  # this process reads it
            ended({"kernels": 1, "seconds": 0.0} | said)
        return count


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Chip]:
    made = Chip()
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")  # plans are kept on disk
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(batch_compile, "cores", lambda: 1)  # calls that wait compile in this process
    monkeypatch.setattr(async_compile, "PAUSE_S", 0.0)
    monkeypatch.setattr(async_compile, "compiles", lambda target: True)
    monkeypatch.setattr(async_compile, "_pool", None)
    monkeypatch.setattr(async_compile, "Compilers", lambda *_: made.processes)
    monkeypatch.setattr(TritonKernel, "is_ready", lambda self, aligned: self.key in made.there)
    compiler.forget()
    async_compile.forget()
    transconv.config.fallback = "silent"
    transconv.config.compile = "background"
    yield made
    async_compile.forget()
    compiled_launch._launches.clear()


@pytest.fixture
def beside(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A thread makes kernels ready."""
    monkeypatch.setattr(rehearsal_thread, "START_S", 0.0)
    monkeypatch.setattr(rehearsal_thread, "thread", rehearsal_thread.RehearsalThread())
    monkeypatch.setattr(rehearsal_thread, "device_of", lambda target: CPU)
    yield
    rehearsal_thread.thread.close()


class Net(nn.Module):
    """With a buffer that training writes, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.drop(torch.relu(self.norm(self.conv(x)))), 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[PlanRequest]]:
    """What each graph asks processes for."""
    found = list[set[PlanRequest]]()

    def noted(questions: Any, *given: Any, **named: Any) -> Any:
        found.append({*questions})
        return async_compile.ahead(found[-1], *given, **named)

    monkeypatch.setattr(graph_wait, "ahead", noted)
    return found


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=transconv.graph.backend, options={"rest": "eager"} | options)


def counts() -> tuple[int, int]:
    """Kernels that answered, and those for which torch did."""
    found = transconv.stats(reset=True)
    assert not found.fallback
    return found.native.get("graph", 0), found.waiting


def near(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def step(run: Any, net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of one seed: the loss, the gradients, the buffers."""
    torch.manual_seed(7)
    net.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [
        y.detach(),
        x.grad,
        *[p.grad for p in net.parameters() if p.grad is not None],
        *[b.clone() for b in net.buffers()],
    ]


def test_torch_answers_until_all_kernels_are_there(chip: Chip) -> None:
    def regions() -> list[RunnableRegion]:
        return [o for o in gc.get_objects() if type(o) is RunnableRegion]

    net, x, others = Net().eval(), torch.randn(2, 3, 6, 6), regions()
    run, want = compiled(net), net(x).detach()
    with torch.no_grad():
        for _ in range(3):
            near(run(x), want)
        assert counts() == (0, 6) and "torch answers while" in str(transconv.graph.report(run))
        assert chip.compile(lambda q: "softmax" not in q.workload.text and "exp" in q.workload.text) == 1
        near(run(x), want)
        assert counts() == (0, 2), "a graph is all torch's, or all of kernels"
        assert chip.compile() == 1
        for _ in range(2):
            near(run(x), want)
    assert counts() == (4, 0) and "torch answers" not in str(transconv.graph.report(run))
    own = [r for r in regions() if all(r is not other for other in others)]
    assert own and not any("gm" in vars(r) for r in own), "torch's graphs of them are let go"


def test_a_thread_looks_at_first_results_before_calls_get_them(
    chip: Chip, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it does, torch answers; the call that takes the kernels over loads and compares nothing."""
    go, began, where = threading.Event(), threading.Event(), list[bool]()
    difference, first = WatchedCall.difference, RegionLaunches.first

    def is_beside() -> bool:
        return threading.current_thread().name == rehearsal_thread.NAME

    def waiting(self: Any, *given: Any) -> str:
        began.set()
        assert go.wait(60.0)
        where.append(is_beside())
        return difference(self, *given)

    def noted(self: Any, *given: Any) -> Any:
        assert is_beside()
        return first(self, *given)

    monkeypatch.setattr(RehearsalWatch, "difference", waiting, raising=False)
    monkeypatch.setattr(RegionLaunches, "first", noted)
    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    run, want = compiled(net), net(x).detach()
    with torch.no_grad():
        run(x)
        chip.compile()
        done(rehearsal_thread.thread)
        near(run(x), want)
        assert began.wait(60.0)
        near(run(x), want)
        assert counts() == (0, 6)
        go.set()
        done(rehearsal_thread.thread)
        near(run(x), want)
    assert counts() == (2, 0) and where == [True, True]
    assert transconv.graph.report(run).graphs[0].compared == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("early", ["forward", "backward", "both"])
def test_training_changes_over_graph_by_graph(
    chip: Chip, asked: list[set[PlanRequest]], early: str
) -> None:
    """Forward by torch and backward by kernels, and the other way round; random numbers and buffers are
    those of a step that waits for its kernels."""
    x = torch.randn(2, 3, 6, 6)
    torch.manual_seed(0)
    net = Net()
    transconv.config.compile = "now"
    start = {k: v.clone() for k, v in net.state_dict().items()}
    run = compiled(net)
    want = [step(run, net, x) for _ in range(4)]
    counts()
    torch._dynamo.reset()
    net.load_state_dict(start)
    compiled_launch._launches.clear()
    transconv.config.compile = "background"
    run = compiled(net)
    near(step(run, net, x), want[0])
    forward, backward = asked
    kernels, waits = counts()
    assert kernels == 0 and waits >= len(forward | backward)
    if early != "both":
        chip.compile(lambda q: q in (forward if early == "forward" else backward))
    else:
        chip.compile()
    near(step(run, net, x), want[1])
    kernels, left = counts()
    assert kernels and (left > 0) == (early != "both") and kernels + left == waits
    chip.compile()
    for n in (2, 3):
        near(step(run, net, x), want[n])
        assert counts() == (waits, 0)


@pytest.mark.slow
def test_sizes_that_change(chip: Chip, beside: None) -> None:
    """The first results are looked at for the sizes of one call; those of others are, as they come."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softmax(1)).eval()
    run = torch.compile(net, backend=transconv.graph.backend, options={"rest": "eager"}, dynamic=True)
    answers = []
    with torch.no_grad():
        for n, side in enumerate((6, 7, 9, 12, 8)):
            if n == 2:
                chip.compile()
                done(rehearsal_thread.thread)
            x = torch.randn(2, 3, side, side)
            near(run(x), net(x))
            done(rehearsal_thread.thread)
            answers.append(counts())
    assert answers == [(0, 2), (0, 2), (0, 2), (2, 0), (2, 0)]
    assert transconv.graph.report(run).graphs[0].compared == 3


@pytest.mark.every(2)
@pytest.mark.parametrize("why", ["memory", "no thread", "wrong"])
def test_what_is_not_looked_at_is_by_the_call(
    chip: Chip, monkeypatch: pytest.MonkeyPatch, why: str, request: pytest.FixtureRequest
) -> None:
    """A wrong result is told by the call that meets it, at the caller's line, and torch's is taken."""
    if why != "no thread":
        request.getfixturevalue("beside")
    if why == "memory":
        monkeypatch.setattr(rehearsal_thread, "room", lambda device: 1)
    if why == "wrong":
        monkeypatch.setitem(ROWS, torch.ops.aten.relu.default, lambda call: call.args[0])
    transconv.config.fallback = "warn"
    stats.forget_warnings()
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(2, 3, 6, 6)
    run = compiled(net)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            near(run(x), net(x))
            chip.compile()
            done(rehearsal_thread.thread)
        found = [w for w in told if w.category is transconv.FallbackWarning]
        assert [w.filename for w in found] == [__file__] * (why == "wrong")
    compared = transconv.stats(reset=True).compared
    assert compared["wrong" if why == "wrong" else "right"] == 1
    assert transconv.graph.report(run).graphs[0].compared == 1


def test_a_kernel_that_does_not_compile_is_told_once(chip: Chip, beside: None) -> None:
    """torch computes its operations from then on, kernels the others."""
    transconv.config.fallback = "warn"
    stats.forget_warnings()
    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    run = compiled(net)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(8):
            near(run(x), net(x))
            chip.compile(lambda q: "kh" in q.workload.text, reason="the compiler died")
            chip.compile()
            done(rehearsal_thread.thread)
    (one,) = (str(w.message) for w in told if w.category is transconv.FallbackWarning)
    assert "the compiler died" in one
    found = transconv.stats(reset=True)
    assert found.native["graph"] > 0 and found.fallback == {"compile:failed": 1}
    rows = transconv.graph.report(run).graphs[0].rows
    assert [isinstance(r, TorchRow) for r in rows].count(True) == 1 and len(rows) > 1


@pytest.mark.every(2)
@pytest.mark.parametrize("why", ["fallback", "steady", "deterministic", "stream"])
def test_calls_wait_where_torch_may_not_answer(
    chip: Chip, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or behind calls that torch answered."""
    net, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 6, 6)
    run = compiled(net)
    with torch.no_grad():
        if why == "stream":  # such as that of a capture: torch answers on the default one
            run(x)
            assert counts() == (0, 1) and chip.processes.jobs
            monkeypatch.setattr(type(transconv.config), "mode", "now")
        elif why == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            setattr(transconv.config, why, "error" if why == "fallback" else True)
        try:
            near(run(x), net(x))
        finally:
            torch.use_deterministic_algorithms(False)
            transconv.config.steady, transconv.config.fallback = False, "silent"
    assert counts() == (1, 0)


@pytest.mark.slow
def test_calls_wait_where_torch_has_too_little_memory(chip: Chip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators hold values that kernels do not."""

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("as on a GPU")

    net, x = Net().eval(), torch.randn(2, 3, 6, 6)
    run = compiled(net)
    monkeypatch.setattr(graph_wait, "by_torch", full)
    with torch.no_grad():
        for _ in range(3):
            near(run(x), net(x))
    assert counts() == (6, 0)


def test_what_is_timed_waits_for_its_kernels(chip: Chip) -> None:
    net, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 6, 6)
    fast = transconv.optimize(net, x, verbose=False)
    assert counts()[1] == 0 and transconv.config.mode == "background"
    with torch.no_grad():
        near(fast(x), net(x))
    assert counts() == (1, 0)


def test_never_compiles_no_kernels(chip: Chip) -> None:
    transconv.config.compile = "never"
    net, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        near(compiled(net)(x), net(x))
    assert transconv.stats(reset=True).fallback == {"compile:never": 1} and not chip.processes.jobs


@pytest.mark.slow
def test_no_cuda_graph_is_recorded_meanwhile(
    chip: Chip, asked: list[set[PlanRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one of a backward graph behind a forward graph that was not."""
    calls = list[str]()

    def record(run: Any, inputs: Any, static: Any, is_backward: bool, **about: Any) -> Any:
        def recorded(given: list[Any]) -> list[Any]:
            calls.append("backward" if is_backward else "forward")
            return run(given)  # type: ignore[no-any-return]

        return recorded

    monkeypatch.setattr(torch_internals, "cudagraphify", record)
    monkeypatch.setattr(torch_internals, "why_no_cudagraph", lambda *_: "")
    monkeypatch.setattr(cudagraphs, "_why_not", lambda inputs: "")
    net, x = Net(), torch.randn(2, 3, 6, 6)
    run = compiled(net, cudagraphs=True)
    seen = []
    for n in range(4):
        step(run, net, x)
        seen.append(calls.copy())
        calls.clear()
        if n < 2:
            chip.compile(lambda q, n=n: q in asked[1 - n])  # type: ignore[misc]
    assert seen == [[], [], ["forward", "backward"], ["forward", "backward"]]


def test_after_prepare_calls_are_compared(chip: Chip) -> None:
    transconv.config.compile = "now"
    net, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 6, 6)
    run = compiled(net)
    with torch.no_grad():
        with collecting() as found:
            run(x)
        near(run(x), net(x))
    assert len(found) == 1 and transconv.stats(reset=True).compared == {"right": 1}


class Mixed(nn.Module):
    """Regions of kernels, and torch's between them: random numbers and a scan."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(torch.cumsum(torch.relu(self.first(x)), 1))
        return torch.softmax(self.last(y), 1)


@pytest.mark.slow
def test_regions_change_over_together(chip: Chip, beside: None) -> None:
    """Each was looked at on what it had in the call that torch answered."""
    net, x = Mixed(), torch.randn(2, 3, 6, 6)
    run, found, answers = compiled(net), [], []
    for n in range(4):
        found.append(step(run, net, x))
        answers.append(counts())
        if n == 0:
            chip.compile()
        done(rehearsal_thread.thread)
    for made in found[1:]:
        near(made, found[0])
    (zero, many), *_ = answers
    assert answers == [(zero, many), (0, many), (many, 0), (many, 0)] and zero == 0 < many
    assert [g.compared for g in transconv.graph.report(run).graphs] == [1, 1]


def test_by_default_a_graph_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where single calls are answered by torch, a graph's first call waits, unless it is asked not to."""
    monkeypatch.setattr("transconv.calls.settings._may_wait", lambda: True)
    monkeypatch.setattr(transconv.config, "compile", "auto")
    monkeypatch.setattr(transconv.config, "fallback", "silent")
    assert transconv.config.mode == "background" and compile_mode() == "now"
    transconv.config.compile = "background"
    assert compile_mode() == "background"
