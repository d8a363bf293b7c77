"""What first checks need is loaded before them."""

from __future__ import annotations

import pytest
import torch

from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.precompile import first_check


@pytest.mark.parametrize("dtype", lower_call.DTYPES)
def test_a_check_sees_elements(dtype: torch.dtype) -> None:
    assert min(first_check.check(torch.device("cpu"), dtype)) >= 1024


def test_it_is_done_once_on_a_gpu_and_never_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: that the check fails is left to the first one."""
    begun: list[object] = []
    first_check.load.cache_clear()
    monkeypatch.setattr(first_check, "check", lambda *given: (begun.append(given), 1 / 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    gpu, capturing = torch.device("cuda", 0), [True]
    monkeypatch.setattr(lower_call, "capturing", lambda _: capturing[0])
    first_check.expect(gpu, torch.float16)
    assert not begun
    capturing[0] = False
    for device, dtype in ((torch.device("cpu"), torch.float16), (gpu, torch.int64), (gpu, torch.float16),
                          (gpu, torch.float16)):
        first_check.expect(device, dtype)
    assert begun == [(gpu, torch.float16)]
