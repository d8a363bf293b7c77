"""The first launch of a kernel is compared with the simulator. Right ones run on; a planted mistake is
refused, and the arrays are as they were. What cannot be compared is launched, and the log says so."""

# mypy: ignore-errors

from __future__ import annotations

import logging
import os
import re
import warnings

import numpy as np
import pytest
import torch

from tests.kernel import cases
from tests.kernel.cases import Case, floats
from tests.kernel.test_engines import ALL, by_name, check, copies
from transconv.backend_triton import TritonKernel
from transconv.errors import KernelError
from transconv.kernel import Group, KernelFunction, kernel
from transconv.kernel.simulator import execution
from transconv.kernel.simulator.execution import PlaceNumbers
from transconv.runtime import Plan, check_records, first_run_check

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    for name in ("LONGEST_S", "ENOUGH_S"):  # other programs may have the cores
        monkeypatch.setattr(execution, name, 5.0)
    check_records.forget()
    yield
    check_records.forget()


def again(of: KernelFunction) -> KernelFunction:
    """The kernel, which nobody has launched."""
    return KernelFunction(
        of.python, of.precision, of.work_shape, of.group_shape, of.tuned, of.asked_results
    )


def corrupted(monkeypatch: pytest.MonkeyPatch, only=lambda step: True) -> list[int]:
    """From now on launches store a wrong last element; the warps of those that did."""
    real, warps = Plan.run, []

    def run(self, tensors) -> None:
        (step,), arrays = self.steps, [t for t in tensors.values() if isinstance(t, torch.Tensor)]
        before = [t.clone() for t in arrays]
        real(self, tensors)
        if only(step):
            warps.append(step.schedule.warps)
            for old, t in zip(before, arrays, strict=True):
                if not torch.equal(old, t):
                    t[(-1,) * t.dim()] += 1000

    monkeypatch.setattr(Plan, "run", run)
    return warps


NOT_COMPARED = dict.fromkeys(("added_to_one_place", "added_up"), "its groups add to what others add to")


@pytest.mark.every(10)
@by_name
def test_right_results(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """All kinds of kernels: compared and right, or the log says why they were not compared."""
    given = copies(case)
    with caplog.at_level(logging.INFO, "transconv.trust"):
        again(case.kernel)(case.group, *given)
    check(case, given)
    said = [r.getMessage() for r in caplog.records]
    assert not any("rejected" in line for line in said), said
    if case.name in NOT_COMPARED:
        assert NOT_COMPARED[case.name] in said[0]
    else:
        assert not said and len(check_records.proved()) == (case.group.count > 0)


@kernel
def doubled(group, X, Y):
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) * 2.0)


@kernel
def in_place(group, X):
    (i,) = group.work_offset()
    group.store(X[i:], group.load(X[i:], shape=group.shape) + 1.0)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["pairwise", "product"])
def test_wrong_results_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in cases.CASES if c.name == name)
    warps, given = corrupted(monkeypatch), copies(case)
    with pytest.raises(KernelError, match=rf"{name} gives wrong results: [DC]\[.*\] is .* the simulator"):
        again(case.kernel)(case.group, *given)
    assert len(warps) > 1, "other numbers of warps are tried"
    for got, before in zip(given, case.arguments, strict=True):
        np.testing.assert_array_equal(got, before)


def test_a_wrong_kernel_in_place_leaves_its_array(monkeypatch: pytest.MonkeyPatch) -> None:
    warps = corrupted(monkeypatch)
    x = floats(100)
    before = x.copy()
    with pytest.raises(KernelError, match=r"X\[99\] is .*, and .* in the simulator \(1 of"):
        again(in_place)(Group(100, 32, warps_hint=2), x)
    assert warps == [2], "the call says how many warps"
    np.testing.assert_array_equal(x, before)


def test_other_warps_that_are_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of, x = again(doubled), torch.randn(70)
    warps = corrupted(monkeypatch, lambda step: step.schedule.warps == 1)
    for _ in range(2):
        y = torch.zeros(70)
        of(Group(70, 32), x, y)
        assert torch.equal(y, x * 2)
    assert warps == [1], "the second call knows"
    assert "instead    of 1 warps: Y[69]" in of.explain(Group(70, 32), x, y, target="interpreter")
    assert any(
        re.search(r"rejected: kernel doubled .* with schedule .* warps=1: Y\[69\]", r.getMessage())
        for r in caplog.records
    )


@pytest.mark.parametrize(("policy", "compared"), [("never", False), ("check", False), ("always", True)])
def test_the_knob(policy: str, compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is compared where somebody asks for it."""
    monkeypatch.setenv("TRANSCONV_TRUST", policy)
    corrupted(monkeypatch)
    x, y = floats(10), floats(10)
    if compared:
        with pytest.raises(KernelError, match="TRANSCONV_TRUST=never"):
            again(doubled)(Group(10), x, y)
    else:
        again(doubled)(Group(10), x, y)
        assert y[-1] > 900


@kernel
def speaking(group, X, Y):
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) * 2.0)
    if X.shape[0] == 0:
        print("empty")


@pytest.mark.parametrize(
    "why",
    [
        "arrays share memory",
        "the simulator takes more than 0 ms",
        "it speaks in the simulator",
        "no memory for copies",
        "has no result: S7",
    ],
)
def test_what_is_not_compared(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is launched, and nothing is recorded: a later process may compare it."""
    of, x = again(speaking if "speaks" in why else doubled), torch.randn(40)
    y = torch.zeros(40)
    if "0 ms" in why:
        monkeypatch.setattr(execution, "LONGEST_S", 0.0)
    if "memory for" in why:

        def full(tensor):
            raise torch.OutOfMemoryError

        monkeypatch.setattr(execution, "_copied", full)
    if "S7" in why:

        def planted(*_):
            raise KeyError("S7")

        monkeypatch.setattr(execution.GroupSamples, "run", planted)
        why = "has no result: 'S7'"
    with caplog.at_level(logging.INFO, "transconv.trust"):
        expected, y = x * 2, x if "share" in why else y
        of(Group(40, 16), x, y)
    assert torch.equal(y, expected)
    assert why in caplog.records[0].getMessage() and not check_records.proved()


def test_a_launch_of_a_capture_is_compared_later(monkeypatch: pytest.MonkeyPatch) -> None:
    of, x, y = again(doubled), torch.randn(40), torch.zeros(40)
    for capturing in (True, False):
        monkeypatch.setattr(first_run_check, "is_capturing", lambda device, now=capturing: now)
        of(Group(40, 16), x, y)
        assert torch.equal(y, x * 2) and len(check_records.proved()) == (not capturing)


def test_a_kernel_that_spills_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote it gave its schedule: there is no other one to try, here and where it is on disk. A
    warning says so; no other kernel has one."""
    honest = TritonKernel._interpret

    def interpret(self: TritonKernel, *given: object) -> None:
        honest(self, *given)
        self.spilled = 100 * check_records.ALLOWED

    monkeypatch.setattr(TritonKernel, "_interpret", interpret)
    x = torch.randn(40)
    for _ in range(2):
        check_records.forget()
        y = torch.zeros(40)
        with pytest.warns(UserWarning, match="doubled: 25600 bytes of the values of each thread"):
            again(doubled)(Group(40, 16), x, y)
        assert torch.equal(y, x * 2) and len(check_records.proved()) == 1
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again(doubled)(Group(40, 16), x, y)


def test_places_are_those_of_numpy() -> None:
    """Slices, numbers, new dimensions and tiles as indices of an array that is nowhere."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(1, 4)))
        want = np.arange(np.prod(shape)).reshape(shape)
        got = PlaceNumbers(shape, [s // 8 for s in want.strides])
        for _ in range(2):
            index = []
            for n in want.shape:
                a, b = sorted(int(x) for x in rng.integers(-n - 2, n + 3, 2))
                index += [None] * int(rng.random() < 0.2)
                index.append(
                    [
                        slice(a, b, int(rng.choice((1, 2, -1)))),
                        slice(None),
                        int(rng.integers(-n, n)) if n else slice(0, 5),
                    ][rng.integers(3)]
                )
            index = (*index, ...) if rng.random() < 0.5 else (..., *index)
            want, got = want[index], got[index]
            np.testing.assert_array_equal(np.asarray(got), want)
            assert got.shape == want.shape and got.size == want.size
        np.testing.assert_array_equal(np.asarray(got.T), want.T)
        if want.size and want.ndim:
            at = tuple(rng.integers(0, n, (2, 3)) for n in want.shape)
            np.testing.assert_array_equal(np.asarray(got[at]), want[at])
            mask = rng.random(want.shape) < 0.5
            np.testing.assert_array_equal(np.asarray(got[mask]), want[mask])


def test_long_arrays_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an array's elements those are looked at that some groups read."""
    from transconv.kernel.simulator.execution import DeviceElements

    read, seen = DeviceElements.read, []
    monkeypatch.setattr(
        DeviceElements, "read", lambda self, places: seen.append(places.size) or read(self, places)
    )
    x, y = torch.randn(64 * 1024), torch.zeros(64 * 1024)
    again(doubled)(Group(64 * 1024, 4096), x, y)
    assert torch.equal(y, x * 2) and check_records.proved()
    assert sum(seen) <= 4 * 4096 * 5, seen
    assert len(ALL) > 30
