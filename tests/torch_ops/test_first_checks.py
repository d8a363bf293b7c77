"""What first checks need is loaded before them."""

from __future__ import annotations

import pytest
import torch

from transconv.torch_ops import execute, first_checks


@pytest.mark.parametrize("dtype", execute.DTYPES)
def test_a_check_sees_elements(dtype: torch.dtype) -> None:
    assert min(first_checks.check(torch.device("cpu"), dtype)) >= 1024


def test_it_is_done_once_on_a_gpu_and_never_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: that the check fails is left to the first one."""
    begun: list[object] = []
    monkeypatch.setattr(first_checks, "_done", set())
    monkeypatch.setattr(first_checks, "check", lambda *given: (begun.append(given), 1 / 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    gpu, capturing = torch.device("cuda", 0), [True]
    monkeypatch.setattr(execute, "capturing", lambda _: capturing[0])
    first_checks.expect(gpu, torch.float16)
    assert not begun
    capturing[0] = False
    for device, dtype in ((torch.device("cpu"), torch.float16), (gpu, torch.int64), (gpu, torch.float16),
                          (gpu, torch.float16)):
        first_checks.expect(device, dtype)
    assert begun == [(gpu, torch.float16)]
