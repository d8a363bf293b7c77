"""The thread that makes kernels ready, and what it does for one: it loads and checks it on data of its
own. Kernels are those of Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from transconv import runtime
from transconv.backend_triton import TritonKernel
from transconv.compute import Alone, parse
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.conv.relation import every
from transconv.runtime import Plan, check_records, first_run_check
from transconv.runtime.compilation import rehearsal_thread
from transconv.runtime.compilation.rehearsal_thread import RehearsalThread
from transconv.runtime.operands import Wanted
from transconv.target import TARGETS

CPU = torch.device("cpu")
TARGET = TARGETS["interpreter"]
PROBLEM = ConvProblem.parse("mb2ic4ih6oc8oh6kh3ph1 dt=f32 tag=nhwc")


def done(thread: RehearsalThread) -> None:
    """Waits until all is done that the thread was given before."""
    ended = threading.Event()
    thread.add(CPU, lambda: None, ended.set, patient=True)
    assert ended.wait(60.0)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[RehearsalThread]:
    monkeypatch.setattr(rehearsal_thread, "START_S", 0.0)
    made = RehearsalThread()
    yield made
    made.close()


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Kernels of which nothing is known, and which are checked."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    check_records.forget()
    yield
    check_records.forget()
    runtime.forget()


def plan_of(prop: Prop = Prop.FWD, epilogue: str = "bias", sized: bool = False) -> CompiledDirection:
    workload = ConvWorkload(
        PROBLEM, prop, Epilogue.parse(epilogue), every(PROBLEM) if sized else frozenset()
    )
    return runtime.plan(workload, TARGET, None, False, CompiledDirection)


def test_tasks_are_done_in_their_order_beside_the_program(thread: RehearsalThread) -> None:
    seen: list[tuple[str, bool, str]] = []
    numbers = torch.get_rng_state()

    def told(name: str) -> None:
        seen.append((name, torch.is_grad_enabled(), threading.current_thread().name))

    for name in "abc":
        thread.add(CPU, lambda name=name: told(name))  # type: ignore[misc]
    done(thread)
    assert seen == [(name, False, rehearsal_thread.NAME) for name in "abc"]
    assert torch.is_grad_enabled() and torch.equal(numbers, torch.get_rng_state())


def test_patient_tasks_come_last_and_pause_longer(
    thread: RehearsalThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, seen, rests = threading.Event(), list[str](), list[float]()
    worked = iter(range(100))
    monkeypatch.setattr(rehearsal_thread.time, "thread_time", lambda: 0.01 * next(worked))
    monkeypatch.setattr(rehearsal_thread.time, "sleep", rests.append)
    thread.add(CPU, go.wait)
    for name, patient in (("a", True), ("b", False), ("c", True), ("d", False)):
        thread.add(CPU, lambda name=name: seen.append(name), patient=patient)  # type: ignore[misc]
    go.set()
    done(thread)
    assert seen == ["b", "d", "a", "c"]
    assert rests[:6] == pytest.approx([0.0, 0.02, 0.02, 0.02, 0.08, 0.08])  # the start's is the first


def test_a_task_that_fails_has_ended_too(thread: RehearsalThread) -> None:
    ended = threading.Event()
    thread.add(CPU, lambda: 1 / 0, ended.set)
    done(thread)
    assert ended.is_set()


def test_it_ends_without_work_and_begins_again(
    thread: RehearsalThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal_thread, "IDLE_S", 0.0)
    seen: list[int] = []
    for n in range(2):
        thread.add(CPU, lambda n=n: seen.append(n))  # type: ignore[misc]
        done(thread)
        while thread.thread is not None:
            pass
    assert seen == [0, 1]


def test_the_end_waits_for_what_has_begun_and_drops_the_rest(thread: RehearsalThread) -> None:
    begun, go, seen = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        go.wait()
        seen.append("first")

    thread.add(CPU, first)
    thread.add(CPU, lambda: seen.append("second"))
    begun.wait()
    threading.Timer(0.05, go.set).start()
    thread.close()
    thread.add(CPU, lambda: seen.append("late"))
    assert seen == ["first"]


def test_kernels_for_another_machine_are_made_ready_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rehearsal_thread.device_of(TARGETS["interpreter"]) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for here in ("sm_90", "sm_100"):
        monkeypatch.setattr(rehearsal_thread, "detect", lambda device, here=here: TARGETS[here])
        found = rehearsal_thread.device_of(TARGETS["sm_90"])
        assert found == (torch.device("cuda", 1) if here == "sm_90" else None)


def test_on_a_gpu_it_works_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by the driver once for a GPU; whose captures concern the thread is as before afterwards."""
    told: list[str] = []

    @contextmanager
    def entered(of: object) -> Iterator[None]:
        told.append(str(of))
        yield

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(rehearsal_thread, "_call", lambda name, *_: told.append(name))
    for name, made in (
        ("device", entered),
        ("stream", entered),
        ("mem_get_info", lambda _: (8, 8)),
        ("ExternalStream", lambda at, device: f"a stream of {device}"),
    ):
        monkeypatch.setattr(torch.cuda, name, made)
    rehearsal_thread._stream.cache_clear()
    for _ in range(2):
        with rehearsal_thread.aside(gpu):
            told.append("work")
    rehearsal_thread._stream.cache_clear()
    modes = ["cuThreadExchangeStreamCaptureMode", "work", "cuThreadExchangeStreamCaptureMode"]
    again = ["cuda:0", "a stream of cuda:0", *modes]
    assert told == ["cuda:0", "cuStreamCreateWithPriority", "a stream of cuda:0", *modes, *again]


def test_what_the_driver_does_not_have_is_told() -> None:
    with pytest.raises(RuntimeError, match="cuNoSuchFunction: "):
        rehearsal_thread._call("cuNoSuchFunction")


# -- what is done for a kernel ------------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", Prop)
@pytest.mark.parametrize("sized", [False, True])
def test_what_was_right_needs_no_check_at_its_first_call(unknown: None, prop: Prop, sized: bool) -> None:
    plan = plan_of(prop, "bias" if prop is Prop.FWD else "", sized)
    assert not first_run_check.is_trusted(plan)
    assert first_run_check.rehearse(plan, CPU, True, (1, 5, 7) if sized else ())
    assert first_run_check.is_trusted(plan) and not first_run_check.is_trusted(plan, aligned=False)
    assert first_run_check.rehearse(plan, CPU, False) and first_run_check.is_trusted(plan, aligned=False)


def test_the_thread_rests_behind_each_part(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, sizes, data and check: the longest of them is what a call waits for, not their sum."""
    plan, parts = plan_of(sized=True), list[str]()

    def noted(name: str, made: Any) -> Any:
        return lambda *given: (parts.append(name), made(*given))[1]

    for name in ("_fitting", "_varied", "_launch_and_look", "note"):
        monkeypatch.setattr(first_run_check, name, noted(name, getattr(first_run_check, name)))
    monkeypatch.setattr(TritonKernel, "load", noted("load", TritonKernel.load))
    monkeypatch.setattr(rehearsal_thread.thread, "rest", lambda: parts.append("rest"))
    assert first_run_check.rehearse(plan, CPU, True, (1, 5, 7))
    worked = [name for name in parts if name != "rest"]
    assert worked == ["load"] * len(plan.steps) + ["_fitting", "_varied", "_launch_and_look", "note"]
    assert parts[1:-1:2] == ["rest"] * (len(worked) - 1)


@pytest.mark.parametrize("wrong", ["result", "error"])
def test_what_was_wrong_is_left_to_the_first_call(
    unknown: None, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own data decide, as they are what a program computes with."""
    plan = plan_of()
    with monkeypatch.context() as patch:
        patch.setattr(TritonKernel, "run", lambda *_: 1 / 0 if wrong == "error" else None)
        if wrong == "error":
            with pytest.raises(ZeroDivisionError):
                first_run_check.rehearse(plan, CPU, True)
        else:
            assert not first_run_check.rehearse(plan, CPU, True)
    assert not first_run_check.is_trusted(plan) and not check_records.is_wrong(plan.steps[0].digest)


def test_data_that_tell_nothing_prove_nothing(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wanted, "varied", lambda self, device, *_: self.filled(device, 0).zero_())
    plan = plan_of()
    assert not first_run_check.rehearse(plan, CPU, True) and not first_run_check.is_trusted(plan)


def test_the_check_takes_bounded_memory(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, exact = plan_of(sized=True), plan_of()
    asked, like = {"MB": 9, "IH": 40, "IW": 9}, plan.required.sizes.like  # type: ignore[union-attr]
    nbytes = [sum(4 * w.span for w in plan.at(n).operands()) for n in (asked, like)]
    assert nbytes[0] > nbytes[1]
    for room, sizes in ((nbytes[0], asked), (nbytes[0] - 1, like), (8, None)):
        found = first_run_check._fitting(plan, tuple(asked.values()), room)
        assert (found and found.sizes) == sizes
    assert first_run_check._fitting(exact, (), 8) is None
    monkeypatch.setattr(first_run_check, "ROOM", 8)
    monkeypatch.setattr(TritonKernel, "run", lambda *_: pytest.fail("there is no room"))
    assert not first_run_check.rehearse(exact, CPU, True)


def test_indices_are_within_their_tensors_and_the_call_checks(unknown: None) -> None:
    """Others might leave their tensor, which torch's own kernels do not survive."""
    text = """
compute taken
    tensor X f32 [n=64, k=8]
    tensor I i64 [m=32]
    tensor Y f32 [m=32, k=8]
    axes   m=32 k=8
    read   i = I[m]
    read   x = X[i, k]
    store  Y[m, k] = x * 2
"""
    plan = runtime.plan(Alone(parse(text)), TARGET, None, False, Plan)
    given = first_run_check._varied(plan, CPU, True)
    assert not given["I"].any() and given["X"].std() > 0.5
    assert not first_run_check.rehearse(plan, CPU, True)


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8", "uint8", "int32", "bool"],
)
def test_operands_vary_and_begin_where_they_are_asked_to(dtype: str) -> None:
    from transconv.ir import DTYPES, Layout, Tensor

    kind = next(t for t in DTYPES.values() if t.torch == dtype)
    wanted = Wanted.of(Tensor("x", ("a", "b"), (5, 40), Layout.dense(kind, (5, 40))))
    numbers = torch.get_rng_state()
    for behind in (0, 1):
        made = wanted.varied(CPU, 3, behind, False)
        assert (made.shape, made.stride(), made.storage_offset()) == ((5, 40), (40, 1), behind)
        assert not wanted.why_not(made) and len(made.double().unique()) > 1
        assert not wanted.varied(CPU, 3, behind, True).double().any()
    one = Wanted.of(Tensor("x", ("a",), (1,), Layout.dense(kind, (1,)))).varied(CPU, 3, 0, False)
    assert not made.is_floating_point() or one.item() in (1, 2)
    assert torch.equal(numbers, torch.get_rng_state())


def test_operands_that_are_copied_lie_as_they_do() -> None:
    memory = torch.arange(64.0)
    for t in (
        memory,
        memory[3:].as_strided((2, 3), (5, 1)),
        memory.as_strided((2, 3), (0, 2), 1),
        memory[:0],
        torch.tensor(2),
    ):
        made = rehearsal_thread.copied(t)
        assert made.stride() == t.stride() and made.data_ptr() % 16 == t.data_ptr() % 16
        assert torch.equal(made, t) and made.untyped_storage()._cdata != t.untyped_storage()._cdata
