"""The kernels of a graph are compiled by processes, all at once, and its first call waits for them. The
chip is one that is not there: tensors are torch's ``meta``, which no kernel runs on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from tests.graph.test_piece_tiles import _planned
from tests.runtime.test_ready import Processes
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.errors import Unsupported
from transconv.functional.calls import compiled_launch
from transconv.graph import torch_compile
from transconv.graph.regions import graph_wait, region_kernels
from transconv.runtime import BatchCompile, Plan, PlanRequest, begin, compiler, is_ready, plan_cache, steps
from transconv.runtime.compilation import async_compile, batch_compile
from transconv.selection import candidates, choice
from transconv.target import TARGETS


class AtOnce(Processes):
    """Answers every job as soon as it is asked, with ``says``."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.jobs: list[dict[str, Any]] = []
        self.says: dict[str, Any] = {"kernels": 1}

    def submit(self, job, done) -> None:  # type: ignore[no-untyped-def]
        self.asked.append(job["problem"])
        self.jobs.append(job)
        done(self.says)


class Chain(nn.Module):
    """Six softmaxes, of which some are equal kernels, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dim in (1, 2, 1, 2, 1, 2):
            x = torch.softmax(x, dim)
        return self.conv(x)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An H100 with four cores beside it, and an empty cache."""
    for module in (torch_compile, compiled_launch):
        monkeypatch.setattr(module, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(batch_compile, "cores", lambda: 4)
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    transconv.config.fallback = "silent"
    for forget in (
        compiler.forget,
        async_compile.forget,
        candidates.forget,
        compiled_launch._launches.clear,
    ):
        forget()


@pytest.fixture
def processes(chip: None, monkeypatch: pytest.MonkeyPatch) -> AtOnce:
    made = AtOnce()
    monkeypatch.setattr(async_compile, "_pool", None)  # one of another test answers otherwise
    monkeypatch.setattr(async_compile, "Compilers", lambda *_: made)
    return made


def called(model: Any, *shape: int) -> None:
    """A model is compiled and called once; torch computes the tensors."""
    run = torch.compile(model, backend=transconv.graph.backend, options={"rest": "eager"})
    with torch.no_grad():
        run(torch.empty(shape, device="meta"))


def test_each_kernel_is_handed_over_once(processes: AtOnce) -> None:
    called(Chain().to("meta"), 2, 16, 8, 8)
    assert len(processes.asked) == len(set(processes.asked)) == 5


def test_schedules_that_decisions_need_are_ranked_by_processes(
    processes: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of products with statistics and without, of those that see their factors through a norm and of the
    plain ones; before any kernel is compiled."""
    layers = [
        m for n in (16, 32, 48) for m in (nn.Conv2d(16, n, 3), nn.GroupNorm(2, n), nn.Conv2d(n, 16, 1))
    ]
    monkeypatch.setattr(steps, "_made", lambda work, target: 1e3)  # as a process would have left
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")
    monkeypatch.setattr(region_kernels, "why_apart", lambda *_: "")
    monkeypatch.setattr(choice, "ranked", None)  # not by this process
    called(nn.Sequential(*layers).to("meta").eval(), 2, 16, 12, 12)
    kinds = [bool(job.get("rank")) for job in processes.jobs]
    assert kinds == sorted(kinds, reverse=True) and sum(kinds) == 12 < len(kinds)


@pytest.mark.every(2)
@pytest.mark.parametrize(("us", "count"), [(0.5, 1), (1e3, 2)])
def test_a_plain_product_is_not_ranked_where_its_statistics_surely_leave_with_it(
    processes: AtOnce, monkeypatch: pytest.MonkeyPatch, us: float, count: int
) -> None:
    """The product with its statistics is estimated to take no longer than any plain one and a kernel that
    reads it again."""
    made: list[str] = []
    monkeypatch.setattr(steps, "_made", lambda work, target: made.append(work.text) or us)
    steps.estimated.cache_clear()
    with torch.no_grad():
        called(nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)).to("meta"), 2, 16, 150, 150)
    assert len(made) == count


def test_a_plain_product_is_not_ranked_where_its_factor_is_too_dear_to_write(
    processes: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product that computes its factor is estimated to take no longer than to write that: no schedule
    of the plain one is asked for."""
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")
    made: list[str] = []

    counts = []
    for us in (0.5, 1e3):
        monkeypatch.setattr(steps, "_made", lambda work, target, us=us: made.append(work.text) or us)
        steps.estimated.cache_clear()
        monkeypatch.setenv("TRANSCONV_CACHE", os.environ["TRANSCONV_CACHE"] + "_")
        made.clear()
        torch._dynamo.reset()
        called(nn.Sequential(nn.SiLU(), nn.Conv2d(16, 16, 3)).to("meta").eval(), 2, 16, 12, 12)
        counts.append(len(made))
    assert counts == [1, 2]


def test_processes_are_started_before_a_graph_is_traced(
    processes: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    graph = torch_compile._Graph

    def traced(*given: Any) -> Any:
        seen.append("traced")
        return graph(*given)

    monkeypatch.setattr(graph_wait, "MANY", 7)
    monkeypatch.setattr(graph_wait, "cores", lambda: 4)
    monkeypatch.setattr(graph_wait, "begin_processes", lambda target, workers: seen.append(workers))
    monkeypatch.setattr(torch_compile, "_Graph", traced)
    called(lambda x: torch.softmax(x, 1), 4, 16)
    called(Chain().to("meta"), 2, 16, 8, 8)
    assert seen == ["traced", 4, "traced"]


def work_of(blocks: int, monkeypatch: pytest.MonkeyPatch, cache: Path) -> dict[str, int]:
    """How often a step of planning is done for a network of equal blocks, with nothing in any cache."""
    counts: dict[str, int] = {}

    def counted(module: Any, name: str, instead: Any = None) -> None:
        real = instead or getattr(module, name)

        def step(*given: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*given)

        again.setattr(module, name, step)

    monkeypatch.setenv("TRANSCONV_CACHE", str(cache / str(blocks)))
    for known in (compiled_launch.program, steps.estimated, region_kernels._related, region_kernels.plain):
        known.cache_clear()
    layers = [
        m for _ in range(blocks) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    ]
    with monkeypatch.context() as again:
        counted(compiled_launch, "parse")
        counted(region_kernels, "planned")
        counted(region_kernels, "surrounded")
        counted(steps, "_made", lambda work, target: 9.0 if work.computations[0].statistics else 5.0)
        called(nn.Sequential(*layers).to("meta"), 2, 16, 12, 12)
    return counts


@pytest.mark.slow
def test_equal_blocks_are_read_and_estimated_once(
    chip: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first block and others, with statistics that leave with the product and, in the second plan,
    without: each is read and becomes a workload once, and each decision is estimated once."""
    monkeypatch.setattr(batch_compile, "cores", lambda: 1)
    few, many = (work_of(n, monkeypatch, tmp_path) for n in (3, 6))
    assert few == many, "three more blocks are no more work"
    assert many == {"planned": 2, "parse": 7, "surrounded": 4, "_made": 5}


@pytest.mark.parametrize("cores", [1, 4])
def test_few_kernels_or_one_core_start_none(
    processes: AtOnce, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(batch_compile, "cores", lambda: cores)
    if cores > 1:
        called(lambda x: torch.softmax(torch.softmax(x, 1).flip(1), 1), 4, 16)
    else:
        called(Chain().to("meta"), 2, 16, 8, 8)
    assert not processes.asked


def test_a_kernel_of_which_a_process_died_is_refused(processes: AtOnce) -> None:
    processes.says = {"reason": "the compiler's process died (signal 11)", "died": True}
    called(Chain().to("meta"), 2, 16, 8, 8)
    text = next(t for t in processes.asked if t.startswith("compute"))
    with pytest.raises(Unsupported, match=f"{text.split()[1]} for sm_90: .*signal 11") as caught:
        compiled_launch.launch(text, torch.device("meta"), True, "now")
    assert caught.value.reason == "compile:failed"


def test_products_are_begun_first(processes: AtOnce) -> None:
    called(Chain().to("meta"), 2, 16, 8, 8)
    kinds = [text.startswith("compute") for text in processes.asked]
    assert kinds == sorted(kinds) and not all(kinds)


def test_the_backward_graph_is_compiled_before_the_forward_one_runs(
    processes: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both graphs' kernels are handed over while torch traces, and equal ones once."""
    seen: list[list[str]] = []
    real = torch_compile._Graph.__call__

    def call(self: Any, given: list[Any]) -> Any:
        seen.append([*processes.asked])
        return real(self, given)

    monkeypatch.setattr(torch_compile._Graph, "__call__", call)
    model = Chain().to("meta")
    run = torch.compile(model, backend=transconv.graph.backend, options={"rest": "eager"})
    made = run(torch.empty(2, 16, 8, 8, device="meta", requires_grad=True))
    made.sum().backward()
    directions = {job["direction"] for job in processes.jobs}
    assert {"fwd", "bwd_d", "bwd_w"} <= directions
    assert len(seen) == 2 and seen[0] == seen[1] == processes.asked


@pytest.mark.slow
def test_a_backward_graph_that_nothing_hides_is_planned_by_its_first_call(
    processes: AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel of the forward graph has to be compiled, its call does not plan the backward graph,
    which may never run."""
    planned: list[str] = []
    real = torch_compile._Graph.__init__

    def noted(self: Any, *given: Any) -> None:
        planned.append(given[2])
        real(self, *given)

    monkeypatch.setattr(torch_compile._Graph, "__init__", noted)
    monkeypatch.setattr(batch_compile, "cores", lambda: 1)  # no process compiles
    model = Chain().to("meta")
    run = torch.compile(model, backend=transconv.graph.backend, options={"rest": "eager"})
    x = torch.empty(2, 16, 8, 8, device="meta", requires_grad=True)
    made = [run(x) for _ in range(2)]
    assert planned == ["forward"]
    for y in made:
        y.sum().backward()
    assert planned == ["forward", "backward"]


@pytest.mark.slow
def test_processes_choose_and_compile(chip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*_: Any, **__: Any) -> None:
        raise AssertionError("this process chooses no schedule, and compiles nothing")

    asked: list[PlanRequest] = []

    def noted(questions: list[PlanRequest]) -> BatchCompile | None:
        asked.extend(questions)
        return begin(questions)

    monkeypatch.setattr(graph_wait, "begin", noted)
    monkeypatch.setattr(choice, "ranked", here)
    monkeypatch.setattr(TritonKernel, "_compiled", here)
    try:
        called(Chain().to("meta"), 2, 16, 8, 8)
    finally:
        async_compile.close()
    assert len(asked) == 7
    for question in asked:
        compiled_launch.launch(question.workload, torch.device("meta"), True, "now")
        assert is_ready(question)


def test_the_kernels_of_pieces_are_handed_over_as_texts(processes: AtOnce) -> None:
    """Each once, before the first piece runs; who reads a text has the kernel that runs here."""
    run, _ = _planned(128, 24, 5, 1, TARGETS["sm_90"])
    run.arrange()
    here = {digest for launch in run.made.values() for digest in launch.plan.digests}
    assert len(processes.jobs) == len({*map(str, processes.jobs)}) > 2
    there = set[str]()
    for job in processes.jobs:
        asked = PlanRequest.of_job(job)
        read = plan_cache.read(
            job["made"], asked.workload, asked.target, job["deterministic"], Plan, lambda: 1 / 0
        )
        there |= read.digests
    assert there == here


@pytest.mark.slow
def test_processes_compile_the_kernels_of_pieces(chip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*_: Any, **__: Any) -> None:
        raise AssertionError("this process compiles nothing")

    monkeypatch.setattr(TritonKernel, "_compiled", here)
    run, _ = _planned(128, 24, 5, 1, TARGETS["sm_90"])
    try:
        run.arrange()
    finally:
        async_compile.close()
    assert len(run.made) > 2
    assert all(s.triton.is_ready(True) for launch in run.made.values() for s in launch.plan.steps)


@pytest.mark.slow
def test_a_compiled_model_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softmax(1))
    x = torch.randn(1, 3, 6, 6)
    run = torch.compile(model, backend=transconv.graph.backend)
    found = transconv.prepare(run, x, progress=False)
    assert any("weight_gradient" in p for p in found.problems) and not found.failures and not found.left
    monkeypatch.setattr(choice, "ranked", None)  # nothing is left to choose
    y = run(x)
    torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-3)
    y.sum().backward()
    assert transconv.stats(reset=True).fallback == {}
