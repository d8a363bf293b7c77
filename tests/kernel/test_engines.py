"""Kernels in Triton's interpreter and in the interpreter of the IR, beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernel import cases, control_cases, function_cases, item_cases, order_cases
from tests.kernel.cases import Case
from transconv.backend_triton import CompileJob, Resources, compile_offline
from transconv.ir import Kernel, Memory, run
from transconv.kernel import Group
from transconv.kernel.launch.arguments import plain_number
from transconv.target import Target

ALL = tuple(
    c for room in (cases, item_cases, function_cases, control_cases, order_cases) for c in room.CASES
)
by_name = pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)


def copies(case: Case) -> list[Any]:
    return [a.copy() if isinstance(a, np.ndarray) else a for a in case.arguments]


def check(case: Case, got: list[Any]) -> None:
    wanted = case.expected(*copies(case))
    for at, value in wanted.items():
        np.testing.assert_allclose(
            np.asarray(got[at], np.float64),
            np.asarray(value, np.float64),
            rtol=case.within,
            atol=case.within,
            err_msg=f"argument {at}",
        )
    for at, before in enumerate(case.arguments):
        if at not in wanted and isinstance(before, np.ndarray):
            np.testing.assert_array_equal(got[at], before, err_msg=f"argument {at} was written")


@pytest.mark.every(6)
@by_name
def test_in_tritons_interpreter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = copies(case)
    case.kernel(case.group, *given)
    check(case, given)


def interpreted(case: Case, kernel: Kernel) -> list[Any]:
    given = copies(case)
    names = case.kernel.source.parameters[1:]
    values = dict(zip(names, given, strict=True))
    buffers = {t.name: np.array(values[t.name], t.dtype.numpy).reshape(-1) for t in kernel.params}
    run(kernel.at(kernel.sizes.like) if kernel.sizes else kernel, Memory(buffers))
    return [buffers[n].reshape(v.shape) if isinstance(v, np.ndarray) else v for n, v in values.items()]


@pytest.mark.every(6)
@by_name
def test_as_written_and_after_all_passes(case: Case) -> None:
    """The interpreter of the IR also checks that nothing outside of an array is touched."""
    low = case.kernel.lower(case.group, *copies(case), target="sm_90")
    for _, kernel in (low.stages[0], low.stages[-1]):
        check(case, interpreted(case, kernel))
        assert Kernel.parse(str(kernel)) is kernel


@pytest.mark.parametrize("simulated", [True, False])
def test_numbers_of_numpy_are_those_of_python(simulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = cases.floats(10)
    for alpha, n, flag in (
        (np.float32(0.5), np.int64(3), np.bool_(True)),
        (np.float64(2), np.uint8(1), True),
        (0.25, np.int32(-1), np.bool_(False)),
    ):
        y = np.zeros(10, np.float32)
        run = cases.scaled.simulate if simulated else cases.scaled
        run(Group(10, 4), x, y, alpha, n, flag)
        np.testing.assert_allclose(y, x * 2 * int(n) * (float(alpha) if flag else 1.0), 1e-6)
        passed = [type(plain_number(v)) for v in (alpha, n, flag)]
        assert passed == [float, int, bool], "a launch takes Python's own"


def test_the_texts_of_elements_at_other_places() -> None:
    """Tiles of powers of two are seen in another shape; others are gathered, each name once."""
    texts = {
        c.name: c.kernel.show(c.group, *copies(c), target="sm_90").replace("\n", "")
        for c in order_cases.CASES
    }
    reshapes, gathers = ({n: t.count(f"tl.{w}(") for n, t in texts.items()} for w in ("reshape", "gather"))
    assert gathers["regrouped"] == 1 and reshapes["regrouped"] == 3, texts["regrouped"]
    assert gathers["ordered"] == 1 and "max_of" in texts["ordered"]
    assert reshapes["handed_over"] == 1 and gathers["reshaped"] == 3
    assert "tl.cumsum(" in texts["running"] and "tl.associative_scan(" in texts["running"]


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_elements_at_other_places_are_compiled(chip: str) -> None:
    target, jobs = Target.parse(chip), []
    for c in order_cases.CASES:
        low = c.kernel.lower(c.group, *copies(c), target=target)
        types = tuple((t.dtype.name, ()) for t in low.kernel.params)
        of = (target.name, target.backend, target.arch, target.warp_size, low.warps, low.num_stages, ())
        sizes = len(low.kernel.sizes.names) if low.kernel.sizes else 0
        jobs.append(CompileJob(low.source, low.kernel.name, types, *of, sizes=sizes, fuse=False))
    for found in compile_offline(jobs):
        assert isinstance(found, Resources) and not found.spill_bytes and not found.flaw, found
