"""Calls whose kernel is not compiled: in the background, never, prepared. Kernels are the interpreter's,
which count as compiled when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
import transconv.functional as TF
from tests.runtime.test_ready import Processes
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.conv import compiler
from transconv.errors import Unsupported
from transconv.functional.calls import compiled_launch
from transconv.runtime import collecting, plan_cache
from transconv.runtime import registry as registries
from transconv.runtime.compilation import async_compile
from transconv.selection import files_digest, tuning_db
from transconv.torch_ops.calls import select_impl
from transconv.torch_ops.conversion import prepare

X, W, B = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3), torch.randn(4)


class Machine:
    """Whether kernels count as compiled, and the processes that would compile them."""

    def __init__(self) -> None:
        self.compiled, self.general, self.processes = False, False, Processes()

    def finish(self) -> None:
        self.compiled = True
        self.processes.answer(kernels=1, seconds=0.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(compiler, "EXAMPLES", {2: compiler.EXAMPLES[2][:1]})  # plans take a while to make
    monkeypatch.setattr(async_compile, "PAUSE_S", 0.0)
    monkeypatch.setattr(async_compile, "compiles", lambda target: True)
    monkeypatch.setattr(async_compile, "_pool", None)  # one of another test answers otherwise
    monkeypatch.setattr(async_compile, "Compilers", lambda *_: made.processes)
    monkeypatch.setattr(TritonKernel, "is_ready", lambda self, aligned: made.compiled)
    compiler.forget()
    async_compile.forget()
    compiled_launch._launches.clear()
    transconv.config.cpu = "interpret"
    transconv.config.compile = "background"
    yield made
    async_compile.forget()
    compiled_launch._launches.clear()


def counts() -> tuple[dict[str, int], dict[str, int]]:
    found = transconv.stats(reset=True)
    return found.native, found.fallback | ({"compiling": found.waiting} if found.waiting else {})


def converted() -> torch.Tensor:
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, bias=False))
    model[0].weight.data.copy_(W)
    transconv.convert_(model)
    return model(X)


def replaced() -> torch.Tensor:
    with transconv.use("cpu"):
        return torch.nn.functional.conv2d(X, W)


CALLS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "call": (lambda: transconv.conv2d(X, W, B), lambda: torch.conv2d(X, W, B), "fwd"),
    "module": (converted, lambda: torch.conv2d(X, W), "fwd"),
    "use": (replaced, lambda: torch.conv2d(X, W), "fwd"),
    "fused": (
        lambda: transconv.fused_conv2d(X, W, B, activation="relu"),
        lambda: torch.conv2d(X, W, B).relu(),
        "fwd",
    ),
    "functional": (lambda: TF.softmax(X, -1), lambda: torch.softmax(X, -1), "softmax"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CALLS)
def test_torch_answers_until_the_kernel_is_there(
    machine: Machine, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    call, answer, counted = CALLS[name]
    transconv.config.fallback = "warn"
    for _ in range(4):
        torch.testing.assert_close(call(), answer())
    assert counts() == ({}, {"compiling": 4})
    directions = [job["direction"] for job, _ in machine.processes.jobs]
    assert len(directions) == 1 or (name, directions) == ("module", ["fwd", "bwd_w"]), "gradients at once"
    assert not [w for w in recwarn if w.category is transconv.FallbackWarning]
    machine.finish()
    for _ in range(4):
        torch.testing.assert_close(call(), answer(), rtol=1e-3, atol=1e-3)
    assert counts() == ({counted: 4}, {})


def test_a_wait_is_decided_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process compiles, a call costs a look-up; the plan is asked for when it may be there."""
    decided: list[str] = []
    for name in ("make_forward", "make_backward"):
        made = getattr(select_impl, name)
        monkeypatch.setattr(
            select_impl, name, lambda *given, n=name, made=made: (decided.append(n), made(*given))[1]
        )
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

    def step() -> None:
        torch.autograd.grad(transconv.conv2d(x, w).sum(), (x, w))

    for _ in range(5):
        step()
    assert decided == ["make_forward"] and len(machine.processes.jobs) == 3
    assert counts() == ({}, {"compiling": 5})
    machine.finish()
    for _ in range(5):
        step()
    assert decided == ["make_forward"] * 2 + ["make_backward"]
    assert counts() == ({"fwd": 5, "bwd_d": 5, "bwd_w": 5}, {})


def test_one_gradient_does_not_take_the_turn_of_the_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was taken over once waits for no pause, and begins none."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

    def step() -> dict[str, int]:
        y = transconv.conv2d(x, w)
        torch.autograd.grad(y, (x, w), torch.ones_like(y))
        return counts()[0]

    def never(*_: object) -> None:
        raise Unsupported("sizes:refused")

    monkeypatch.setattr(select_impl._SelectedCall, "of_any_size", never)  # none stands in
    step()
    machine.finish()
    monkeypatch.setattr(async_compile, "PAUSE_S", 1000.0)
    found = [step()]
    for _ in range(2):
        monkeypatch.setattr(async_compile, "_next", 0.0)
        found += [step(), step()]
    assert [sum(n.values()) for n in found] == [1, 2, 2, 3, 3]


def test_gradients_switch_too(machine: Machine) -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    for compiled in (False, True):
        if compiled:
            machine.finish()
        for _ in range(3):
            found = torch.autograd.grad(transconv.conv2d(x, w).sum(), (x, w))
            want = torch.autograd.grad(torch.conv2d(x, w).sum(), (x, w))
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
        native, torchs = counts()
        jobs = [job for job, _ in machine.processes.jobs]
        assert compiled or (len(jobs) == 3 and not any("hurried" in job for job in jobs))
        assert (torchs if compiled else native) == {}
        assert native == ({"fwd": 3, "bwd_d": 3, "bwd_w": 3} if compiled else {})
    transconv.stats(reset=True)


@pytest.mark.slow
def test_kernels_are_taken_over_one_by_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a program waits for few of those that became ready at once."""
    weights = [torch.randn(n, 4, 3, 3) for n in (4, 5, 6)]

    def step() -> dict[str, int]:
        for w in weights:
            torch.testing.assert_close(transconv.conv2d(X, w), torch.conv2d(X, w), rtol=1e-3, atol=1e-3)
        return counts()[0]

    step()
    machine.finish()
    monkeypatch.setattr(async_compile, "PAUSE_S", 1000.0)
    assert [step() for _ in range(2)] == [{"fwd": 1}] * 2
    monkeypatch.setattr(async_compile, "_next", 0.0)
    assert [step() for _ in range(2)] == [{"fwd": 2}] * 2
    monkeypatch.setattr(async_compile, "_next", 0.0)
    assert step() == {"fwd": 3}


def test_never_is_the_fallback_policys(machine: Machine) -> None:
    transconv.config.compile, transconv.config.fallback = "never", "warn"
    with pytest.warns(transconv.FallbackWarning, match="compile:never"):
        torch.testing.assert_close(transconv.conv2d(X, W), torch.conv2d(X, W))
    assert counts() == ({}, {"compile:never": 1}) and not machine.processes.jobs
    transconv.config.fallback = "error"
    with pytest.raises(Unsupported, match="compile:never"):
        transconv.conv2d(X, W)


def test_where_torch_may_not_answer_the_call_waits(machine: Machine) -> None:
    transconv.config.fallback = "error"
    transconv.conv2d(X, W)
    assert counts() == ({"fwd": 1}, {}) and not machine.processes.jobs


def test_the_same_bits_are_pinned(machine: Machine) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        transconv.conv2d(X, W)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts() == ({"fwd": 1}, {})


def test_a_capture_holds_what_was_warmed_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    transconv.conv2d(X, W)  # torch's
    machine.finish()  # between warm-up and capture
    with monkeypatch.context() as m:
        m.setattr(select_impl, "is_capturing", lambda device: True)
        transconv.conv2d(X, W)
    assert counts() == ({}, {"compiling": 1, "capture:cold": 1})
    transconv.conv2d(X, W)
    with monkeypatch.context() as m:
        m.setattr(select_impl, "is_capturing", lambda device: True)
        transconv.conv2d(X, W)
    assert counts() == ({"fwd": 2}, {})


def test_compiled_graphs_wait(machine: Machine) -> None:
    torch.ops.transconv.convolution(X, W, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert counts() == ({"fwd": 1}, {}) and not machine.processes.jobs


@pytest.mark.slow
def test_explain_says_what_is_being_compiled(machine: Machine) -> None:
    assert "compiling (the first call begins it)" in transconv.explain(X, W).parts[0].reasons
    transconv.conv2d(X, W)
    said = str(transconv.explain(X, W).parts[0])
    assert "torch, because compiling (a process compiles its kernel); then " in said
    machine.processes.answer(reason="ptxas died")
    assert "ptxas died" in str(transconv.explain(X, W).parts[0])
    machine.compiled = True
    assert transconv.explain(X, W).parts[0].native


# -- kernels whose sizes are arguments --------------------------------------------------------------


EXAMPLES = compiler.EXAMPLES[2][:2]


@pytest.fixture
def sized(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two examples for each layer; its kernels count as compiled when ``general`` says so."""
    monkeypatch.setattr(compiler, "EXAMPLES", {2: EXAMPLES})
    exact = TritonKernel.is_ready
    monkeypatch.setattr(
        TritonKernel,
        "is_ready",
        lambda self, aligned: machine.general if self.sizes else exact(self, aligned),
    )
    return machine


def test_a_kernel_for_any_size_answers_while_the_exact_one_compiles(
    sized: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "EXAMPLES", {2: EXAMPLES[:1]})
    sized.general = True  # as if another program had left it on disk
    for _ in range(3):
        torch.testing.assert_close(transconv.conv2d(X, W, B), torch.conv2d(X, W, B))
    assert counts() == ({"fwd any size": 3}, {}) and len(sized.processes.jobs) == 1
    said = transconv.explain(X, W, B).parts[0].why
    assert said.startswith("the kernel for any size of this layer, by its estimate for this one; requires")
    assert said.endswith("; it stands in: compiling (a process compiles its kernel)")
    sized.finish()
    torch.testing.assert_close(transconv.conv2d(X, W, B), torch.conv2d(X, W, B))
    assert counts() == ({"fwd": 1}, {})


def test_torch_answers_until_a_kernel_for_any_size_is_there(sized: Machine) -> None:
    transconv.config.sizes = "any"
    transconv.conv2d(X, W)
    assert counts() == ({}, {"compiling": 1})
    assert [job["problem"] for job, _ in sized.processes.jobs] == [
        "mb8?ic4ih56?oc4oh54kh3",
        "mb1?ic4ih14?oc4oh12kh3",
    ]
    sized.general = True
    _, done = sized.processes.jobs.pop()
    done({"kernels": 1})
    for size in (5, 6, 7):  # one of two kernels is compiled, and is used for both
        x = torch.randn(2, 4, size, 9)
        torch.testing.assert_close(transconv.conv2d(x, W), torch.conv2d(x, W), rtol=1e-3, atol=1e-3)
    sized.finish()
    transconv.conv2d(X, W)
    assert counts() == ({"fwd any size": 4}, {}) and not sized.processes.jobs


class Counted:
    """How often functions are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
        self.calls = dict.fromkeys(functions, 0)
        for name, home in functions.items():
            monkeypatch.setattr(home, name, self.counting(name, getattr(home, name)))

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return function(*given, **named)

        return counted


def test_a_call_that_waits_for_no_kernel_looks_up_little(
    sized: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package's rows are left to the processes; the package's files are read once, by a thread that
    the setting starts; a request has one key, though its record is looked for and its job written."""
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")  # plans are kept on disk
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    monkeypatch.setenv("TRANSCONV_TUNED", "1")
    tuning_db.forget()
    files_digest.cache_clear()
    transconv.config.sizes = "any"  # a change of the settings, of which ``compile`` is background
    for thread in threading.enumerate():
        if thread.name == "transconv-files":
            thread.join()
    read = files_digest.cache_info().misses
    assert read >= 1
    counted = Counted(monkeypatch, key=plan_cache, grouped=tuning_db)
    for layer, channels in enumerate((4, 6), 1):
        transconv.conv2d(X, torch.randn(channels, 4, 3, 3))
        assert counts() == ({}, {"compiling": 1}) and len(sized.processes.jobs) == 2 * layer
        assert counted.calls == {"key": 2 * layer, "grouped": 0}
        assert files_digest.cache_info().misses == read


def test_a_layer_that_waits_asks_for_no_kernel_again(
    sized: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    transconv.config.sizes = "any"
    counted = Counted(monkeypatch, ready=registries)
    for n in (5, 6, 7, 8):
        x = torch.randn(1, 4, n, n)
        torch.testing.assert_close(transconv.conv2d(x, W), torch.conv2d(x, W))
    assert counted.calls == {"ready": 2} and counts() == ({}, {"compiling": 4})


def test_gradients_that_wait_are_asked_for_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    transconv.config.compile = "now"
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    loss = transconv.conv2d(x, w).sum()
    transconv.config.compile = "background"
    counted = Counted(monkeypatch, make_backward=select_impl)
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert counted.calls == {"make_backward": 1} and len(machine.processes.jobs) == 2


def test_prepare_asks_for_all_kernels_of_a_layer(sized: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_compile, "_pool", None)  # one of another test answers otherwise
    monkeypatch.setattr(async_compile, "Compilers", AtOnce)
    transconv.config.sizes = "any"
    report = transconv.prepare(
        torch.nn.Conv2d(4, 4, 3), X, sizes=[(7, 7), (9, 8)], backward=False, progress=False
    )
    assert len(report.problems) == 2 and all("ih56?" in p or "ih14?" in p for p in report.problems)


def test_prepare_asks_for_tensors_that_begin_anywhere(sized: Machine) -> None:
    """What begins within its memory may begin at no multiple of 16 bytes at other sizes."""
    transconv.config.sizes = "any"
    memory = torch.randn(8 + X.numel())
    for x, aligned in ((X, {True}), (memory[8:].view_as(X), {True, False})):
        with collecting() as questions:
            transconv.conv2d(x, W)
        assert {q.aligned for q in questions} == aligned and len(questions) == 2 * len(aligned)


# -- prepare ---------------------------------------------------------------------------------------


class AtOnce(Processes):
    """Processes that answer a job when they are given it."""

    failing = ""

    def submit(self, job: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> None:
        each = [
            {"reason": "ptxas died", "log": ""}
            if self.failing and self.failing in one["problem"]
            else {"kernels": 2, "seconds": 0.1, "wrong": []}
            for one in job.get("batch", [job])
        ]
        done({"each": each} if "batch" in job else each[0])


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(4, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.Dropout(), torch.nn.Conv2d(6, 4, 1)
    )


def test_prepare_compiles_what_a_model_asks_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AtOnce, "failing", "ic6")
    given, numbers = model(), torch.get_rng_state()
    before = {n: t.clone() for n, t in given.state_dict().items()}
    transconv.conv2d(X, W)
    monkeypatch.setattr(async_compile, "compilers", AtOnce)
    report = transconv.prepare(given, X, sizes=[(7, 7)], progress=False)
    # Two layers, two sizes: results, gradients of weights, and of the second layer's input.
    assert len(report.problems) == 10 and report.kernels == 8 and report.there == 0
    assert len(report.failures) == 6 and report.failures[0][1] == "ptxas died"
    assert "10 problems" in str(report) and report.mapping()["kernels"] == 8
    assert all(torch.equal(t, before[n]) for n, t in given.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers) and all(p.grad is None for p in given.parameters())
    assert counts() == ({}, {"compiling": 1}), "calls of prepare are not counted"


def test_prepare_without_gradients_and_of_what_is_there(machine: Machine) -> None:
    machine.compiled = True
    report = transconv.prepare(model(), X, backward=False, progress=False)
    assert (len(report.problems), report.there, report.kernels, report.failures) == (2, 2, 0, ())


def test_prepare_says_which_calls_are_torchs(machine: Machine) -> None:
    transconv.config.cpu = "fallback"
    with transconv.use("cpu"):
        report = transconv.prepare(model(), X, progress=False)
    assert not report.problems and dict(report.left)["device:cpu"] >= 2


@pytest.mark.parametrize("size", [(), (0, 3), (1, 2, 3, 4, 5), (2.0,)])
def test_prepare_refuses_other_sizes(machine: Machine, size: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="is no size of the last dims"):
        transconv.prepare(model(), X, sizes=[size], progress=False)


def test_no_more_processes_start_than_there_are_layers() -> None:
    """Of 128 cores most would have nothing to do for a small model."""
    lazy = torch.nn.LazyConv2d(4, 3)
    assert prepare._layers(torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.BatchNorm2d(4))) == 1
    assert prepare._layers(torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), lazy)) >= 2
    assert prepare._layers(torch.nn.ReLU()) == 1


def test_what_a_model_was_given_is_left_as_it_was() -> None:
    """Of every layout: also where torch cannot compare two tensors."""
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    rows = torch.eye(4).to_sparse()
    for x in (torch.eye(4), rows, rows.to_sparse_csr()):
        with prepare.undisturbed(torch.nn.Identity(), (x,)):
            x.mul_(2.0)
        assert torch.equal(x.to_dense(), torch.eye(4))
    with prepare.undisturbed(torch.nn.Identity(), (torch.ones(1).expand(4),)):
        pass  # its elements share one place: torch refuses to write to it
    ragged = torch.nested.nested_tensor(parts)
    with prepare.undisturbed(torch.nn.Identity(), (ragged,)):
        ragged.mul_(2.0)
    assert all(map(torch.equal, ragged.unbind(), parts))


class Counting(torch.nn.Module):
    """What calls change: a buffer in place, a buffer that is set, a number and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.calls += 1
        self.mean = self.mean * 0.5 + x.mean(0)
        y = x * self.n + self.calls * self.mean
        y = y if self.last is None else y + self.last
        self.last = x.amax(0)
        return y


def test_a_call_that_is_no_call_of_the_program_leaves_no_trace() -> None:
    tried, other, x = Counting(), Counting(), torch.randn(4, 3)
    for _ in range(3):
        with prepare.undisturbed(tried, (x,)):
            tried(x)
        assert torch.equal(tried(x), other(x))
    assert all(map(torch.equal, tried.buffers(), other.buffers())) and tried.calls == 3
