"""Kernels compiled ahead of need: processes get the gradients at the forward call, and the layers behind a
converted one. Kernels are the interpreter's; stand-ins take the place of processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from tests.runtime.test_ready import Processes
from transconv.backend_triton import offline_compilation
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.conv import compiler
from transconv.runtime import compiler as plans
from transconv.runtime import plan_cache
from transconv.runtime.compilation import async_compile, compile_child
from transconv.torch_ops.calls import lower_call, precompile

counted = importlib.import_module("transconv.runtime.compilation.async_compile")
X, W = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Processes]:
    """Eight cores, an empty cache, and no kernel that is compiled."""
    made = Processes()
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(async_compile, "compiles", lambda target: True)
    monkeypatch.setattr(async_compile, "_pool", None)  # one of another test answers otherwise
    monkeypatch.setattr(async_compile, "Compilers", lambda *_: made)
    monkeypatch.setattr(counted, "cores", lambda: 8)
    monkeypatch.setattr(async_compile, "LOOK_S", 0.01)
    monkeypatch.setattr(TritonKernel, "is_ready", lambda self, aligned: False)
    monkeypatch.setattr(TritonKernel, "compile", lambda *_: None)
    monkeypatch.setattr(compile_child, "pretend", lambda *_: None)
    compiler.forget()
    async_compile.forget()
    transconv.config.cpu = "interpret"
    transconv.stats(reset=True)
    yield made
    async_compile.forget()
    compiler.forget()


def directions(processes: Processes) -> list[str]:
    return [job["direction"] for job, _ in processes.jobs]


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return X.clone().requires_grad_(), W.clone().requires_grad_()


def right(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """Whether the gradients, which are computed here, are torch's."""
    far = torch.randn(y.shape)
    found = torch.autograd.grad(y, (x, w), far)
    want = torch.autograd.grad(torch.conv2d(x, w), (x, w), far)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


def used(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with transconv.use("cpu"):
        return torch.conv2d(x, w)


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "call": transconv.conv2d,
    "use": used,
    "fused": lambda x, w: transconv.fused_conv2d(x, w, activation="relu"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CALLS)
def test_the_forward_call_hands_over_its_gradients(processes: Processes, name: str) -> None:
    x, w = leaves()
    CALLS[name](x, w)
    assert directions(processes) == ["bwd_d", "bwd_w"]
    assert all(job["hurried"] for job, _ in processes.jobs), "the backward pass waits for them"
    CALLS[name](x, w)
    assert len(processes.jobs) == 2, "once each"
    processes.jobs.clear()
    CALLS[name](X, torch.cat([w, w]))
    assert directions(processes) == ["bwd_w"], "the input requires none"


def test_training_behind_an_evaluation_hands_over_its_gradients(processes: Processes) -> None:
    x, w = leaves()
    for _ in range(2):
        with torch.no_grad():
            transconv.conv2d(x, w)
    assert not processes.jobs
    for _ in range(3):
        transconv.conv2d(x, w)
        assert directions(processes) == ["bwd_d", "bwd_w"]


def test_the_transposed_layers_gradient_is_a_convolution(processes: Processes) -> None:
    transconv.conv_transpose2d(*leaves())
    assert directions(processes) == ["fwd", "bwd_w"]


def test_autocasts_types_are_those_of_the_gradients(processes: Processes) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        transconv.conv2d(*leaves())
    assert len(processes.jobs) == 2 and all("dt=bf16" in job["problem"] for job, _ in processes.jobs)


def test_the_backward_pass_waits_and_compiles_nothing_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.begun = True
    x, w = leaves()
    y = transconv.conv2d(x, w)
    jobs = list(processes.jobs)
    ended = threading.Event()

    def backward() -> None:
        right(y, x, w)
        ended.set()

    waiting = threading.Thread(target=backward)
    waiting.start()
    assert not ended.wait(0.2)
    answers = [compile_child.answer(job) for job, _ in jobs]  # leaves the plans on disk
    plans._plans.clear()
    monkeypatch.setattr(plans, "build", None)
    for (_, done), answer in zip(jobs, answers, strict=True):
        done(answer)
    waiting.join(60)
    assert ended.is_set() and len(processes.jobs) == 2
    assert transconv.stats(reset=True).native == {"fwd": 1, "bwd_d": 1, "bwd_w": 1}


def test_what_no_process_has_begun_is_compiled_here(processes: Processes) -> None:
    x, w = leaves()
    right(transconv.conv2d(x, w), x, w)
    assert not async_compile._asked
    processes.answer(reason="too late")
    assert transconv.stats(reset=True).native == {"fwd": 1, "bwd_d": 1, "bwd_w": 1}


@pytest.mark.every(3)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("size", [(5, 5), (3, 3)], ids=["image", "pixel"])
def test_what_is_handed_over_is_what_the_backward_pass_asks_for(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], last: bool
) -> None:
    asked, build = set[tuple[str, str]](), plans.build

    def noted(workload: Any, *rest: Any) -> Any:
        asked.add((workload.text, workload.direction))
        return build(workload, *rest)

    form = torch.channels_last if last else torch.contiguous_format
    x, w = (torch.randn(2, 4, *n).to(memory_format=form).requires_grad_() for n in (size, (3, 3)))
    y = transconv.conv2d(x, w)
    monkeypatch.setattr(plans, "build", noted)
    torch.autograd.grad(y.square().sum((2, 3)).sum(), (x, w))
    assert asked == {(job["problem"], job["direction"]) for job, _ in processes.jobs} and len(asked) == 2
    assert transconv.stats(reset=True).native == {"fwd": 1, "bwd_d": 1, "bwd_w": 1}


@pytest.mark.parametrize(
    "end",
    [
        lambda processes: processes.answer(reason="ptxas died"),
        lambda processes: processes.answer(reason="the compiler's process died (signal 9)", died=True),
        lambda processes: async_compile.close(),
    ],
    ids=["failed", "killed", "closed"],
)
def test_without_an_answer_the_kernel_is_compiled_here(
    processes: Processes, end: Callable[[Processes], None]
) -> None:
    processes.begun = True
    x, w = leaves()
    y = transconv.conv2d(x, w)
    timer = threading.Timer(0.1, end, (processes,))
    timer.start()
    right(y, x, w)
    timer.join()
    assert transconv.stats(reset=True).native == {"fwd": 1, "bwd_d": 1, "bwd_w": 1}
    assert not async_compile._asked, "a failure is forgotten"


def test_a_kernel_that_a_process_found_wrong_is_not_used(processes: Processes) -> None:
    processes.begun = True
    x, w = leaves()
    y = transconv.conv2d(x, w)
    (job, done), *others = processes.jobs
    first = compile_child.answer(job)
    question = next(q for q in async_compile._asked if q.workload.direction == job["direction"])
    step = plans.plan(question.workload, question.target, None, False, plans.Plan).steps[0]
    done(
        first
        | {
            "wrong": [
                {
                    "kernel": step.digest,
                    "function": "f",
                    "schedule": str(step.schedule),
                    "reason": "spilt",
                    "keep": False,
                }
            ]
        }
    )
    for _, done in others:
        done({"kernels": 1})
    assert plans.check_records.is_wrong(step.digest)
    right(y, x, w)


def _mode(word: str) -> Callable[[Any], Any]:
    def switch(m: pytest.MonkeyPatch) -> Any:
        transconv.config.compile = word
        return contextlib.nullcontext()

    return switch


def _patched(at: Any, name: str, value: Any) -> Callable[[Any], Any]:
    def switch(m: pytest.MonkeyPatch) -> Any:
        m.setattr(at, name, value)
        return contextlib.nullcontext()

    return switch


def _set(name: str, value: str) -> Callable[[Any], Any]:
    def switch(m: pytest.MonkeyPatch) -> Any:
        m.setenv(name, value)
        return contextlib.nullcontext()

    return switch


STATES: dict[str, Callable[[Any], Any]] = {
    "never": _mode("never"),
    "no_grad": lambda m: torch.no_grad(),
    "inference_mode": lambda m: torch.inference_mode(),
    "capture": _patched(precompile.runtime, "is_capturing", lambda device: True),
    "two cores": _patched(counted, "cores", lambda: 2),
    "no folder": _patched(plan_cache.DRAWER.__class__, "path", lambda self, name: None),
    "verify": _set("TRANSCONV_VERIFY", "1"),
    "a schedule": _set("TRANSCONV_SCHEDULE", "oc:16"),
    "eight processes": _set("LOCAL_WORLD_SIZE", "8"),
    "interpreter": _patched(async_compile, "compiles", lambda target: False),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", STATES)
def test_nothing_is_handed_over(processes: Processes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 6, 3))
    transconv.convert_(model)
    x = X.clone().requires_grad_()
    with STATES[name](monkeypatch):
        model(x)
    assert not processes.jobs


def test_what_is_on_disk_is_not_handed_over(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = leaves()
    right(transconv.conv2d(x, w), x, w)
    processes.jobs.clear()
    transconv.calls.route_cache.forget()
    monkeypatch.setattr(TritonKernel, "is_ready", lambda self, aligned: True)
    transconv.conv2d(x, w)
    assert not processes.jobs


def test_in_the_background_nothing_is_guessed(processes: Processes) -> None:
    transconv.config.compile = "background"
    transconv.conv2d(*leaves())
    assert directions(processes) == ["fwd", "bwd_d", "bwd_w"], "as torch makes the gradients, too"


def test_tensors_on_the_cpu_are_torchs(processes: Processes) -> None:
    transconv.config.cpu = "fallback"
    transconv.conv2d(*leaves())
    assert not processes.jobs


def test_kernels_of_any_size_are_left_alone(processes: Processes) -> None:
    assert precompile.processes(*leaves(), "now") == 7
    transconv.config.sizes = "any"
    assert precompile.processes(*leaves(), "now") == 0


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", None),
        ("900000000 100000", None),
        ("", None),
        (None, None),
    ],
)
def test_a_containers_share_of_time_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, cores: int | None
) -> None:
    monkeypatch.setattr(counted, "QUOTA", tmp_path / "cpu.max")
    if text is not None:
        counted.QUOTA.write_text(text)
    assert counted.cores() == (cores or len(os.sched_getaffinity(0)))


def test_explaining_takes_nothing_back(processes: Processes) -> None:
    x, w = leaves()
    transconv.conv2d(x, w)
    assert transconv.explain(x, w).native and len(async_compile._asked) == 2


def test_processes_start_with_the_conversion_where_nothing_is_on_disk(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(model: nn.Module) -> bool:
        async_compile.forget()
        processes.there = False
        transconv.convert_(model)
        return processes.there

    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    assert starts(model) and not processes.jobs
    assert not starts(nn.Sequential(nn.Conv2d(4, 4, 3)).eval()), "it does not train"
    assert not starts(nn.Sequential(nn.Conv2d(4, 4, 3)).requires_grad_(False))
    with monkeypatch.context() as m:
        m.setattr(async_compile, "compiles", lambda target: False)
        assert not starts(model)
    model(X)
    assert not starts(model), "a plan is on disk"


# -- the layers behind a converted one --------------------------------------------------------------


class Shortcut(nn.Module):
    """Two layers beside one, as in a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.second, self.side = nn.Conv2d(6, 6, 3, padding="same"), nn.Conv2d(4, 6, 1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu()) + self.side(x)


def forwards(processes: Processes) -> list[str]:
    return [job["problem"].split()[0] for job, _ in processes.jobs if job["direction"] == "fwd"]


def test_the_first_layer_hands_over_those_behind_it(processes: Processes) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Shortcut(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(6, 2, 1),
    )
    seen: list[tuple[str, str]] = []
    transconv.convert_(model)
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, n=name: seen.append((n, str(len(processes.jobs)))))
    model(torch.randn(2, 3, 14, 14))
    asked = ["ic4ih6oc6oh3kh3sh2ph1", "ic6ih3oc6oh3kh3ph1", "ic4ih6oc6oh3kh1sh2"]
    assert forwards(processes) == asked, "of one pixel nothing is guessed"
    assert seen[0] == ("0", "10"), "three, their gradients, and one of the first"
    made = [(job["direction"], job["problem"].split()[0]) for job, _ in processes.jobs]
    of_data, of_weight = ([(d, p) for p in reversed(asked)] for d in ("bwd_d", "bwd_w"))
    assert made[3:5] == [of_data[0], of_data[2]], "plans of several kernels first"
    assert made[5:10] == [of_weight[0], of_data[1], *of_weight[1:], ("bwd_w", "ic3ih14oc4oh12kh3")], (
        "then the last layer's"
    )
    assert len(seen) == len({n for n, _ in seen}) == len(list(model.modules())), "each ran once"
    assert model[3].norm.num_batches_tracked == 1
    assert [q for q in async_compile._asked if q.workload.direction == "fwd"] == [], (
        "the calls took them back"
    )


def test_the_memory_order_is_guessed_too(processes: Processes) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 5, 3))
    model.to(memory_format=torch.channels_last)
    transconv.convert_(model)
    processes.begun = True
    timer = threading.Timer(0.2, lambda: [done({"kernels": 1}) for _, done in list(processes.jobs)])
    timer.start()
    model(torch.randn(1, 3, 9, 9).contiguous(memory_format=torch.channels_last))
    timer.join()
    assert sum(job["direction"] == "fwd" for job, _ in processes.jobs) == 2
    assert transconv.stats(reset=True).native == {"fwd": 3}


def test_a_weight_that_is_computed_ends_the_guess(processes: Processes) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), normed, nn.Conv2d(4, 4, 3), nn.Conv2d(4, 5, 3))
    transconv.convert_(model)
    model(torch.randn(1, 3, 14, 14))
    assert forwards(processes) == ["mb1ic4ih8oc5oh6kh3"], "only behind the third"


class Pools(nn.Module):
    """Halves its image where no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.avg_pool2d(layer(x), 2)
        return x


def test_a_wrong_guess_is_taken_back(processes: Processes) -> None:
    model = Pools()
    transconv.convert_(model)
    x = torch.randn(1, 4, 64, 64)
    y = model(x)
    assert forwards(processes) == ["mb1ic4ih64oc4oh64kh3ph1", "mb1ic4ih32oc4oh32kh3ph1"], "two guesses"
    assert [q for q in async_compile._asked if q.workload.direction == "fwd"] == []
    torch.testing.assert_close(y, transconv.revert_(model) and model(x), rtol=1e-3, atol=1e-3)


def test_only_the_first_pass_is_guessed(processes: Processes) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    transconv.convert_(model)
    model(torch.randn(1, 3, 9, 9))
    count = len(forwards(processes))
    model(torch.randn(1, 3, 10, 10))
    assert count == 1 == len(forwards(processes))
    (noted,) = [n for n in precompile._networks.all if n.model() is model]
    assert not noted.leaves
    del model
    transconv.convert_(nn.Conv2d(3, 4, 3))
    assert noted not in precompile._networks.all


def test_where_no_process_starts_the_job_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError("no more processes")

    monkeypatch.setattr(offline_compilation.Child, "ask", refused)
    answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
    pool = offline_compilation.Compilers("m", {}, 1, {"n": 0})
    pool.submit({"n": 1}, answers.put)
    answer = answers.get(timeout=30)
    assert answer["died"] and "no more processes" in answer["reason"]
    pool.close()


# -- jobs that are taken back -----------------------------------------------------------------------


def test_a_child_does_what_is_left_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    started, done = threading.Event(), threading.Semaphore(0)
    asked: list[Any] = []

    class Slow:
        def __init__(self, *_: Any) -> None: ...

        def ask(self, job: dict[str, Any], _: float) -> dict[str, Any]:
            asked.append(job["n"])
            if job["n"] == 0:
                started.wait(30)
            return {}

        def close(self) -> None: ...

        kill = close

    monkeypatch.setattr(offline_compilation, "Child", Slow)
    pool = offline_compilation.Compilers("m", {}, 1, {"n": 0})
    takes = [pool.submit({"n": n}, lambda _: done.release()) for n in (1, 2, 3)]
    assert takes[1]() and not takes[1](), "the first who takes it has it"
    started.set()
    for _ in range(2):
        assert done.acquire(timeout=30)
    assert asked == [0, 1, 3] and not takes[0]()
    pool.close()
    asked.clear()
    early = offline_compilation.Compilers("m", {}, 2, {"n": 0})
    early.begin()
    early.submit({"n": 4}, lambda _: done.release())
    assert done.acquire(timeout=30) and len(early.children) == 2 and asked.count(4) == 1
    early.close()


def test_guesses_end_with_the_second_that_is_wrong(processes: Processes) -> None:
    """The first is taken back, and the layers behind it are guessed anew."""
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(4)))
    network = precompile._Network(model)
    flags, other = lower_call.flags(torch.float32), torch.randn(1, 4, 33, 31)
    ended = []
    for at in (1, 2):
        network.expected[at] = precompile._layer(model[at], precompile.Given.of(X), False, flags)
        network.called(at, precompile.Given.of(other), False, flags, 1)
        ended.append(not network.leaves)
    assert ended == [False, True]
