"""Drawn kernels give the same in the simulator, as written, after all passes, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernel.drawn import Draw, Drawn
from transconv.ir import Kernel, run

QUICK, SLOW = 40, 1500


def simulated(case: Drawn) -> dict[str, np.ndarray]:
    given = {n: a.copy() for n, a in case.arguments.items()}
    case.kernel.simulate(case.group, **given)
    return given


def interpreted(case: Drawn, made: Kernel) -> dict[str, np.ndarray]:
    flat = {n: a.copy().reshape(-1) for n, a in case.arguments.items()}
    run(made, flat)
    return {n: flat[n].reshape(a.shape) for n, a in case.arguments.items()}


def agree(case: Drawn, wanted: dict[str, np.ndarray], got: dict[str, np.ndarray], engine: str) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4,
                                   err_msg=f"{name} {engine}\n{case.text}")


def check(seed: int, triton: bool) -> None:
    case = Draw(seed).made()
    with np.errstate(all="ignore"):
        wanted = simulated(case)
        low = case.kernel.lower(case.group, target="sm_90", **case.arguments)
        for stage, made in (low.stages[0], low.stages[-1]):
            agree(case, wanted, interpreted(case, made), f"after {stage}")
        if triton:
            given = {n: a.copy() for n, a in case.arguments.items()}
            case.kernel(case.group, **given)
            agree(case, wanted, given, "in Triton's interpreter")


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_drawn_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check(seed, seed % 4 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_drawn_kernels(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for seed in range(QUICK + part, SLOW, 10):
        check(seed, seed % 50 == 0)
