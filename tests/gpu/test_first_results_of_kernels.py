"""First results of kernels written in Python on a GPU: compared with the simulator, once on a machine."""

# mypy: ignore-errors

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
import torch

from tests.kernel.cases import Case
from tests.kernel.test_engines import ALL, check
from tests.kernel.test_first_launch import NOT_COMPARED, again, corrupted, doubled
from transconv.errors import KernelError
from transconv.kernel import Group
from transconv.kernel.simulator import execution
from transconv.runtime import check_records

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    check_records.forget()
    yield
    check_records.forget()


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_right_results(case: Case, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    for name in ("LONGEST_S", "ENOUGH_S"):
        monkeypatch.setattr(execution, name, 5.0)
    given = [torch.from_numpy(a.copy()).cuda() if isinstance(a, np.ndarray) else a for a in case.arguments]
    with caplog.at_level(logging.INFO, "transconv.trust"):
        again(case.kernel)(case.group, *given)
    check(case, [t.cpu().numpy() if isinstance(t, torch.Tensor) else t for t in given])
    said = [r.getMessage() for r in caplog.records]
    assert not said or NOT_COMPARED.get(case.name, "-") in said[0], said


def test_wrong_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "LONGEST_S", 5.0)  # other processes may take the processor
    warps, of = corrupted(monkeypatch), again(doubled)
    x, y = torch.randn(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
    with pytest.raises(KernelError, match=r"doubled gives wrong results: Y\[1048575\]"):
        of(Group(1 << 20), x, y)
    assert len(warps) > 1 and bool((y == 1).all())


def test_a_first_launch_takes_little_longer() -> None:
    """Of 2^28 elements those of four groups are fetched; the second launch is looked up alone."""
    x, y = torch.randn(1 << 28, device="cuda"), torch.zeros(1 << 28, device="cuda")
    warm = again(doubled)
    warm(Group(1 << 20), x[: 1 << 20], y[: 1 << 20])
    check_records.forget()
    torch.cuda.synchronize()
    began = time.perf_counter()
    again(doubled)(Group(1 << 28), x, y)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 2.0  # with the compile
    assert check_records.proved() and torch.equal(y, x * 2)
