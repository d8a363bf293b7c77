"""What first checks need is loaded before them."""

from __future__ import annotations

import pytest
import torch

from transconv.torch_ops.calls import lower_call, precompile


@pytest.mark.parametrize("dtype", lower_call.DTYPES)
def test_a_check_sees_elements(dtype: torch.dtype) -> None:
    assert min(precompile.check_zeros(torch.device("cpu"), dtype)) >= 1024


def test_it_is_done_once_on_a_gpu_and_never_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: that the check fails is left to the first one."""
    begun: list[object] = []
    precompile.load_check.cache_clear()
    monkeypatch.setattr(precompile, "check_zeros", lambda *given: (begun.append(given), 1 / 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    gpu, capturing = torch.device("cuda", 0), [True]
    monkeypatch.setattr(lower_call, "capturing", lambda _: capturing[0])
    precompile.expect_check(gpu, torch.float16)
    assert not begun
    capturing[0] = False
    for device, dtype in ((torch.device("cpu"), torch.float16), (gpu, torch.int64), (gpu, torch.float16),
                          (gpu, torch.float16)):
        precompile.expect_check(device, dtype)
    assert begun == [(gpu, torch.float16)]
