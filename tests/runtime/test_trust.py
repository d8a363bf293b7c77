"""Kernels that give wrong results are found at their first launch and never used again.

A wrong translation is planted by changing the text that the emitter makes for some schedules.
Triton's interpreter runs it, and is checked here because TRANSCONV_TRUST=always.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv import runtime
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.backend_triton.miscompiles import Miscompiled
from transconv.calls import route_cache, stats
from transconv.compute import Alone, parse
from transconv.conv import compiler, workload
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.errors import TensorError, Unsupported
from transconv.functional.calls.compiled_launch import launch
from transconv.runtime import check_records, first_run_check, operands, steps
from transconv.runtime import compiler as compiler_
from transconv.schedule.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.support import knobs
from transconv.target.records import TARGETS

INTERPRETER, SM90 = TARGETS["interpreter"], TARGETS["sm_90"]
PLAIN = ConvProblem.parse("mb2ic3ih6oc40oh6kh3ph1 math=ieee")
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No plans, verdicts, routes or files of other tests; every kernel is checked."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setattr(runtime.compiler, "_plans", {})
    check_records.forget()
    monkeypatch.setattr(transconv.config, "cpu", "interpret")
    monkeypatch.setattr(transconv.config, "fallback", "silent")
    route_cache.forget()
    transconv.stats(reset=True)
    yield
    check_records.forget()
    route_cache.forget()
    transconv.stats(reset=True)
    stats.forget_warnings()


Plant = Callable[[Callable[[str], bool]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Have kernels make products or sums too large, where ``hit`` says so of the text."""
    honest = steps.emit

    def install(hit: Callable[[str], bool]) -> None:
        def emit(*args: Any) -> str:
            source: str = honest(*args)
            if not hit(source):
                return source
            made = source.replace("tl.dot(a, ", "tl.dot(a * 1.25, ").replace("acc.to(", "(acc * 1.25).to(")
            assert made != source
            return made

        monkeypatch.setattr(steps, "emit", emit)

    return install


def ranked(p: ConvProblem, prop: Prop, phase: int = 0) -> list[Schedule]:
    return heuristics.candidates(computes(p, prop)[phase], INTERPRETER)


def tensors_of(p: ConvProblem, prop: Prop) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {n: torch.randn(shape) for n, shape in p.shapes.items()}
    made[prop.result].fill_(float("nan"))
    return made


def answer(p: ConvProblem, prop: Prop, t: dict[str, torch.Tensor]) -> torch.Tensor:
    src, wei = (t[n].clone().nan_to_num().requires_grad_() for n in ("src", "wei"))
    y = F.conv2d(src, wei, None, p.stride, p.pad_lo, p.dilation, p.g)
    if prop is Prop.FWD:
        return y.detach()
    return torch.autograd.grad(y, src if prop is Prop.BWD_D else wei, t["dst"])[0]


# -- the next plan takes over ----------------------------------------------------------------------


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("prop", list(Prop))
def test_a_wrong_kernel_is_replaced(prop: Prop, plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    best, second = ranked(PLAIN, prop)[:2]
    plant(lambda source: f"schedule {best}" in source)
    t = tensors_of(PLAIN, prop)
    first = compiler.plan(PLAIN, prop, INTERPRETER)
    assert first.schedule == best and first.rejected == 0
    with caplog.at_level(logging.WARNING, "transconv"):
        passed = first_run_check.run(first, t)
    assert passed.schedule == second and passed.rejected == 1
    torch.testing.assert_close(t[prop.result], answer(PLAIN, prop, t), atol=1e-4, rtol=1e-4)
    (line,) = caplog.messages
    assert str(PLAIN) in line and str(best) in line and str(first.steps[0].path) in line
    assert first_run_check.is_trusted(passed) and not first_run_check.is_trusted(first)
    assert compiler.plan(PLAIN, prop, INTERPRETER) is passed


@interpreted
def test_other_processes_hear_of_it(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    best, second = ranked(PLAIN, Prop.FWD)[:2]
    plant(lambda source: f"schedule {best}" in source)
    passed = first_run_check.run(compiler.plan(PLAIN, Prop.FWD, INTERPRETER), tensors_of(PLAIN, Prop.FWD))
    check_records.forget()
    assert compiler.build(PLAIN, Prop.FWD, INTERPRETER).schedule == second
    assert not first_run_check.is_trusted(passed)  # always: no other process is believed
    monkeypatch.setenv("TRANSCONV_TRUST", "check")
    assert check_records.is_right(passed.steps[0].digest, True)
    assert not check_records.is_right(passed.steps[0].digest, False)
    monkeypatch.setenv("TRANSCONV_TRUST", "never")
    assert compiler.build(PLAIN, Prop.FWD, INTERPRETER).schedule == best


@interpreted
def test_a_known_mistake_of_the_compiler_is_a_verdict(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is never used again, also by other processes, and the next best schedule takes its place."""
    best, second = ranked(PLAIN, Prop.FWD)[:2]
    honest = TritonKernel._interpret

    def interpret(self: TritonKernel, tensors: list[Any], *given: Any) -> None:
        if f"schedule {best}" in self.source:
            raise Miscompiled(self.function, "a constant is lost")
        honest(self, tensors, *given)

    monkeypatch.setattr(TritonKernel, "_interpret", interpret)
    t = tensors_of(PLAIN, Prop.FWD)
    first = compiler.plan(PLAIN, Prop.FWD, INTERPRETER)
    passed = first_run_check.run(first, t)
    assert first.schedule == best and passed.schedule == second
    assert "a constant is lost" in caplog.text and check_records.is_wrong(first.steps[0].digest)
    torch.testing.assert_close(t["dst"], answer(PLAIN, Prop.FWD, t), atol=1e-4, rtol=1e-4)
    check_records.forget()
    assert compiler.build(PLAIN, Prop.FWD, INTERPRETER).schedule == second


@pytest.fixture
def spilling(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By the schedule: how many bytes of memory the kernels of a test need."""
    sizes: dict[str, int] = {}
    honest = TritonKernel._interpret

    def interpret(self: TritonKernel, tensors: list[Any], *given: Any) -> None:
        honest(self, tensors, *given)
        self.spilled = next((n for s, n in sizes.items() if f"schedule {s}\n" in self.source), 0)

    monkeypatch.setattr(TritonKernel, "_interpret", interpret)
    return sizes


@interpreted
def test_a_kernel_that_spills_is_passed_over(spilling: dict[str, int]) -> None:
    best, second = ranked(PLAIN, Prop.FWD)[:2]
    spilling[str(best)] = 1000
    t = tensors_of(PLAIN, Prop.FWD)
    first = compiler.plan(PLAIN, Prop.FWD, INTERPRETER)
    passed = first_run_check.run(first, t)
    assert first.schedule == best and passed.schedule == second and passed.rejected == 1
    torch.testing.assert_close(t["dst"], answer(PLAIN, Prop.FWD, t), atol=1e-4, rtol=1e-4)
    assert not check_records.is_wrong(first.steps[0].digest)
    check_records.forget()  # as another process
    compiler_.forget()
    assert compiler.plan(PLAIN, Prop.FWD, INTERPRETER).schedule == second


@interpreted
def test_where_all_spill_the_least_is_taken(spilling: dict[str, int]) -> None:
    order = ranked(PLAIN, Prop.FWD)
    assert len(order) > 2
    spilling |= {str(s): 1000 - 100 * (at == 2) for at, s in enumerate(order)}
    t = tensors_of(PLAIN, Prop.FWD)
    passed = first_run_check.run(compiler.plan(PLAIN, Prop.FWD, INTERPRETER), t)
    assert passed.schedule == order[2] and passed.rejected == check_records.MOST_SPILT
    assert compiler.plan(PLAIN, Prop.FWD, INTERPRETER) is passed
    torch.testing.assert_close(t["dst"], answer(PLAIN, Prop.FWD, t), atol=1e-4, rtol=1e-4)
    compiler_.forget()
    assert compiler.plan(PLAIN, Prop.FWD, INTERPRETER).schedule == order[2]


@interpreted
def test_a_given_schedule_may_spill(spilling: dict[str, int]) -> None:
    best = ranked(PLAIN, Prop.FWD)[0]
    spilling[str(best)] = 1000
    given = compiler.plan(PLAIN, Prop.FWD, INTERPRETER, best)
    assert first_run_check.run(given, tensors_of(PLAIN, Prop.FWD)) is given
    spilling[str(best)] = check_records.ALLOWED
    few = compiler.plan(PLAIN, Prop.FWD, INTERPRETER)
    assert first_run_check.run(few, tensors_of(PLAIN, Prop.FWD)) is few


@interpreted
def test_only_the_wrong_stride_phase_is_replaced(plant: Plant) -> None:
    p = ConvProblem.parse("mb2ic3ih7oc40oh4kh3sh2ph1 math=ieee")
    best = str(ranked(p, Prop.BWD_D, 1)[0])
    plant(lambda source: "bwd_d_0_1 of" in source and f"schedule {best}" in source)
    t = tensors_of(p, Prop.BWD_D)
    first = compiler.plan(p, Prop.BWD_D, INTERPRETER)
    passed = first_run_check.run(first, t)
    torch.testing.assert_close(t["src"], answer(p, Prop.BWD_D, t), atol=1e-4, rtol=1e-4)
    changed = [
        a.compute.name for a, b in zip(first.steps, passed.steps, strict=True) if a.digest != b.digest
    ]
    assert changed == ["bwd_d_0_1"] and passed.rejected == 1


@interpreted
def test_parts_of_a_split_sum_are_rejected_together(plant: Plant) -> None:
    plant(lambda source: "_sum of" in source)
    p = ConvProblem.parse("mb1ic64ih5oc4oh5kh1 math=ieee")
    split = compiler.plan(p, Prop.FWD, INTERPRETER, "oc:16 mb.oh.ow:16 ic:16 | mma | split_k=2")
    assert len(split.steps) == 2
    with pytest.raises(Unsupported, match="gives wrong results") as refused:
        first_run_check.run(split, tensors_of(p, Prop.FWD))
    assert refused.value.reason == "miscompiled"
    assert all(check_records.is_wrong(step.digest) for step in split.steps)


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_dull_data_prove_nothing(value: float, plant: Plant) -> None:
    """Zeros hide a wrong factor: other data find it."""
    best = ranked(PLAIN, Prop.FWD)[0]
    plant(lambda source: f"schedule {best}" in source)
    t = tensors_of(PLAIN, Prop.FWD)
    t["wei"].fill_(value)
    assert first_run_check.run(compiler.plan(PLAIN, Prop.FWD, INTERPRETER), t).schedule != best
    torch.testing.assert_close(t["dst"], F.conv2d(t["src"], t["wei"], padding=1), equal_nan=True)


@interpreted
def test_what_is_not_written_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result holds the right numbers before the launch, and the kernel stores too few."""
    honest = steps.emit
    best = ranked(PLAIN, Prop.FWD)[0]

    def emit(*args: Any) -> str:
        source: str = honest(*args)
        return source.replace("oc < 40", "oc < 39") if f"schedule {best}" in source else source

    monkeypatch.setattr(steps, "emit", emit)
    t = tensors_of(PLAIN, Prop.FWD)
    t["dst"].copy_(answer(PLAIN, Prop.FWD, t))
    assert first_run_check.run(compiler.plan(PLAIN, Prop.FWD, INTERPRETER), t).schedule != best


@interpreted
def test_a_part_leaves_the_others_alone() -> None:
    """A text that stores a part of a tensor is checked without what others stored there."""

    def half(begin: int) -> str:
        return f"""compute half
    tensor X f32 [4, 8]
    tensor Y f32 [8, 8]
    axes   i=4 j=8
    read   x = X[i, j]
    store  Y[i*2 + {begin}, j] = x + {begin}.0"""

    x, y = torch.randn(4, 8), torch.zeros(8, 8)
    for begin in (0, 1):
        launch(half(begin), x.device, True, "now").start([x, y])
    assert check_records.proved(), "nothing was checked"
    assert torch.equal(y, torch.stack([x, x + 1], 1).reshape(8, 8))


@interpreted
def test_when_nothing_is_right(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(lambda source: True)
    monkeypatch.setattr(runtime.compiler, "MOST_REJECTED", 2)
    p = ConvProblem.parse("mb2ic3ih6oc4oh6kh3ph1")
    with pytest.raises(Unsupported, match="known to give wrong results") as refused:
        first_run_check.run(compiler.plan(p, Prop.FWD, INTERPRETER), tensors_of(p, Prop.FWD))
    assert refused.value.reason == "miscompiled"


class TritonGaveUp(Exception):
    pass


TritonGaveUp.__module__ = "triton.runtime.errors"


def gave_up() -> None:
    raise TritonGaveUp("out of shared memory")


def gave_up_by_name() -> None:
    """As Triton's loader does: the frame has the error, whose traceback has the frame."""
    error = TritonGaveUp("out of shared memory")
    raise error


def asserted() -> None:
    """In a function of Triton's."""
    exec("def inside(): assert False\ninside()", {"__name__": "triton.language.semantic"})


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("raised", [gave_up, asserted])
def test_a_kernel_that_triton_refuses_is_replaced(raised: Callable[[], None]) -> None:
    first = compiler.plan(PLAIN, Prop.FWD, INTERPRETER)

    def interpret(*given: Any) -> None:
        raised()

    first.steps[0].triton._interpret = interpret  # type: ignore[method-assign]
    t = tensors_of(PLAIN, Prop.FWD)
    passed = first_run_check.run(first, t)
    assert passed.rejected == 1
    torch.testing.assert_close(t["dst"], answer(PLAIN, Prop.FWD, t))
    assert [content["verdict"] for _, content in check_records.DRAWER.items()] == ["right"]


@interpreted
@pytest.mark.usefixtures("own_garbage")
def test_a_kernel_that_triton_refuses_holds_no_tensors() -> None:
    """Those of the frames that launched it go when these return, not when Python looks for cycles."""
    first = compiler.plan(PLAIN, Prop.FWD, INTERPRETER)
    first.steps[0].triton._interpret = lambda *given: gave_up_by_name()  # type: ignore[method-assign]

    def called() -> weakref.ref[torch.Tensor]:
        t = tensors_of(PLAIN, Prop.FWD)
        assert first_run_check.run(first, t).rejected == 1
        return weakref.ref(t["dst"])

    gc.collect()
    gc.disable()
    try:
        assert called()() is None
    finally:
        gc.enable()


def lost() -> None:
    """By Triton's launcher, where another kernel has ended the use of the device."""
    exec(
        "def inside(): raise RuntimeError('Triton Error [CUDA]: an illegal memory access')\ninside()",
        {"__name__": "triton.backends.nvidia.driver"},
    )


def no_memory() -> None:
    exec(
        "def inside(): raise error\ninside()",
        {"__name__": "triton.runtime.jit", "error": torch.OutOfMemoryError("no memory")},
    )


@interpreted
@pytest.mark.parametrize("raised", [lost, no_memory])
def test_what_ails_the_device_is_no_kernels(raised: Callable[[], None]) -> None:
    first = compiler.plan(PLAIN, Prop.FWD, INTERPRETER)
    first.steps[0].triton._interpret = lambda *given: raised()  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory|no memory"):
        first_run_check.run(first, tensors_of(PLAIN, Prop.FWD))
    assert not [*check_records.DRAWER.items()]


def test_the_interpreter_is_believed_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {t: compiler.build(PLAIN, Prop.FWD, t) for t in (INTERPRETER, SM90)}
    for policy, believed in {"always": [], "check": [INTERPRETER], "never": [INTERPRETER, SM90]}.items():
        monkeypatch.setenv("TRANSCONV_TRUST", policy)
        assert [t for t, plan in made.items() if first_run_check.is_trusted(plan)] == believed


# -- choosing --------------------------------------------------------------------------------------


def test_rejected_kernels_are_passed_over_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.compiler, "MOST_REJECTED", 3)
    wanted = heuristics.candidates(computes(PLAIN, Prop.FWD)[0], SM90)
    for turn in range(runtime.compiler.MOST_REJECTED):
        made = compiler.build(PLAIN, Prop.FWD, SM90)
        assert made.schedule == wanted[turn] and made.rejected == turn
        check_records.record(made.steps[0].digest, check_records.WRONG)
    with pytest.raises(Unsupported, match="3 best kernels for fwd") as refused:
        compiler.build(PLAIN, Prop.FWD, SM90)
    assert refused.value.reason == "miscompiled"
    assert compiler.build(PLAIN, Prop.FWD, SM90, wanted[0]).fixed  # given schedules are used


def test_digests_tell_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {check_records.digest(*words) for words in (("a", "sm_90"), ("a", "sm_80"), ("b", "sm_90"))}
    monkeypatch.setattr(check_records, "triton_version", lambda: "0.1")
    assert len(keys | {check_records.digest("a", "sm_90")}) == 4


# -- through torch ---------------------------------------------------------------------------------


@interpreted
def test_calls_are_right_and_checked_once(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    honest = workload.examine
    monkeypatch.setattr(
        workload, "examine", lambda p, prop, *rest: checks.append(str(prop)) or honest(p, prop, *rest)
    )
    seen: dict[str, str] = {}

    def first_schedule(source: str) -> bool:
        if "# fwd" not in source and "# bwd" not in source:
            return False  # a copy
        compute, schedule = (
            next(x for x in source.splitlines() if x.startswith(f"# {word}"))
            for word in ("bwd" if "# bwd" in source else "fwd", "schedule")
        )
        return seen.setdefault(compute, schedule) == schedule

    plant(first_schedule)
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(40, 3, 3, 3, requires_grad=True)
    b = torch.randn(40, requires_grad=True)
    for _ in range(2):
        got, want = transconv.conv2d(x, w, b, padding=1), F.conv2d(x, w, b, padding=1)
        torch.testing.assert_close(got, want)
        grad = torch.randn(got.shape)
        for ours, theirs in zip(
            torch.autograd.grad(got, (x, w, b), grad),
            torch.autograd.grad(want, (x, w, b), grad),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    assert sorted(checks) == ["bwd_d"] * 2 + ["bwd_w"] * 2 + ["fwd"] * 2
    assert transconv.stats().native == {"fwd": 2, "bwd_d": 2, "bwd_w": 2}


@interpreted
def test_torch_steps_in_when_nothing_is_right(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.compiler, "MOST_REJECTED", 2)
    plant(lambda source: True)
    x, w, b = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(4)
    for _ in range(2):
        torch.testing.assert_close(transconv.conv2d(x, w, b), F.conv2d(x, w, b))
    assert transconv.stats().fallback == {"miscompiled": 2}
    res = torch.randn(2, 4, 4, 4)
    got = transconv.fused_conv2d(x, w, b, activation="relu", residual=res)
    torch.testing.assert_close(got, torch.relu(F.conv2d(x, w, b) + res))


@interpreted
def test_fused_calls_are_checked(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime.compiler, "MOST_REJECTED", 2)
    plant(lambda source: "# epilogue" in source)
    x, w, b = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(4)
    got = transconv.fused_conv2d(x, w, b, activation="relu")
    torch.testing.assert_close(got, torch.relu(F.conv2d(x, w, b)))
    assert transconv.stats().native == {"fwd": 1}  # the sum alone is right
    told = [r.getMessage() for r in caplog.records if r.name == "transconv.trust"]
    assert len(told) == 4 and all("rejected: fwd" in line for line in told)


# -- files -----------------------------------------------------------------------------------------


def stored(key: str = "k" * 32, verdict: str = "wrong") -> Path:
    check_records.record(key, verdict, reason="x")
    check_records.forget()
    path = check_records.DRAWER.path(key)
    assert path is not None
    return path


def test_verdicts_survive_the_process() -> None:
    path = stored()
    assert json.loads(path.read_text())["content"] == {
        "verdict": "wrong",
        "reason": "x",
        "triton": check_records.triton_version(),
    }
    assert check_records.is_wrong(path.stem)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-9],
        lambda text: "",
        lambda text: "[1]",
        lambda text: "[" * 20000,
        lambda text: text.replace('"drawer": "verdicts', '"drawer": "tuning'),
        lambda text: text.replace('"triton": "', '"triton": "0'),
        lambda text: text.replace('"key": "k', '"key": "l'),
        lambda text: text.replace("wrong", "maybe"),
        lambda text: text + " " * (1 << 17),
        lambda text: '{"content": [1]}',
    ],
    ids=lambda f: "",
)
def test_files_that_say_nothing(spoil: Callable[[str], str]) -> None:
    path = stored()
    text = spoil(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    assert check_records.look_up(path.stem) == ""
    path.write_bytes(b"\xff\xfe{")
    check_records.forget()
    assert check_records.look_up(path.stem) == ""


def test_places_that_are_not_trusted(tmp_path: Path) -> None:
    path = stored()
    path.parent.chmod(0o777)
    assert check_records.look_up(path.stem) == ""
    check_records.record(path.stem, "right")  # stays in memory
    assert check_records.look_up(path.stem) == "right" and "wrong" in path.read_text()
    path.parent.chmod(0o700)
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    check_records.forget()
    assert check_records.look_up(path.stem) == ""
    path.unlink()
    path.mkdir()
    check_records.forget()
    assert check_records.look_up(path.stem) == ""
    check_records.record(path.stem, "right")  # cannot be written
    assert check_records.look_up(path.stem) == "right"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_folders_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert check_records.look_up(path.stem) == ""


# -- in graphs, whose first results torch's operators make, too ------------------------------------


def of_graph(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What a compiled graph of one convolution makes."""
    torch._dynamo.reset()
    run = torch.compile(
        lambda a, b: F.conv2d(a, b, padding=1).relu(),
        backend=transconv.graph.backend,
        options={"rest": "eager"},
    )
    made: torch.Tensor = run(x, w)
    return made


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The plans of which samples are looked at."""
    found: list[object] = []
    look = first_run_check._launch_and_look

    def looked(plan: Any, tensors: Any) -> Any:
        found.append(plan)
        return look(plan, tensors)

    monkeypatch.setattr(first_run_check, "_launch_and_look", looked)
    return found


@pytest.mark.slow
@interpreted
def test_what_torch_agrees_with_needs_no_samples(samples: list[object]) -> None:
    t = tensors_of(PLAIN, Prop.FWD)
    wanted = F.conv2d(t["src"], t["wei"], padding=1).relu()
    torch.testing.assert_close(of_graph(t["src"], t["wei"]), wanted, rtol=1e-2, atol=1e-2)
    assert not samples and check_records.proved()
    assert transconv.stats().compared == {"right": 1}


@interpreted
def test_dull_data_of_a_graph_need_samples(samples: list[object]) -> None:
    t = tensors_of(PLAIN, Prop.FWD)
    of_graph(t["src"], torch.ones_like(t["wei"]))
    assert samples and check_records.proved()


@interpreted
def test_samples_say_which_kernel_of_a_graph_is_wrong(
    monkeypatch: pytest.MonkeyPatch, samples: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    """torch's operators and the samples find it; the next best kernel takes over, and is torch's."""
    honest, seen = steps.emit, list[str]()

    def emit(*args: Any) -> str:
        source: str = honest(*args)
        seen.append(next(line for line in source.splitlines() if "schedule " in line))
        return source.replace("tl.dot(x_1, ", "tl.dot(x_1 * 1.25, ") if seen[-1] == seen[0] else source

    monkeypatch.setattr(steps, "emit", emit)
    t = tensors_of(PLAIN, Prop.FWD)
    wanted = F.conv2d(t["src"], t["wei"], padding=1).relu()
    torch.testing.assert_close(of_graph(t["src"], t["wei"]), wanted, rtol=1e-2, atol=1e-2)
    assert len(samples) == 1 and "rejected" in caplog.text and len({*seen}) > 1
    assert not transconv.stats().fallback and transconv.stats().compared == {"right": 1}


def test_indices_are_not_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host would end the capture."""
    text = (
        "compute taken\n    tensor X f32 [5]\n    tensor I i32 [3]\n    tensor Y f32 [3]\n"
        "    axes   n=3\n    read   i = I[n]\n    read   x = X[i]\n    store  Y[n] = x"
    )
    each = Alone(parse(text)).computations
    tensors = {"X": torch.zeros(5), "I": torch.tensor([0, 9, 1], dtype=torch.int32), "Y": torch.zeros(3)}
    with pytest.raises(TensorError, match="9"):
        operands.check_indices(each, tensors)
    monkeypatch.setattr(operands, "is_capturing", lambda device: True)
    operands.check_indices(each, tensors)
