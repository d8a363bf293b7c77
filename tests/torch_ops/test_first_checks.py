"""What first checks need is loaded before them."""

from __future__ import annotations

import pytest
import torch

from transconv.runtime import rehearsal_thread
from transconv.torch_ops.calls import lower_call


@pytest.mark.parametrize("dtype", lower_call.DTYPES)
def test_a_check_sees_elements(dtype: torch.dtype) -> None:
    assert min(lower_call.check_zeros(torch.device("cpu"), dtype)) >= 1024


def test_it_is_done_once_on_a_gpu_by_a_thread_beside_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    lower_call.expect_checks.cache_clear()
    monkeypatch.setattr(
        rehearsal_thread.thread, "add", lambda device, work: begun.append((device, *work.args))
    )
    gpu = torch.device("cuda", 0)
    for device, dtype in (
        (torch.device("cpu"), torch.float16),
        (gpu, torch.int64),
        (gpu, torch.float16),
        (gpu, torch.float16),
    ):
        lower_call.expect_checks(device, dtype)
    assert begun == [(gpu, gpu, torch.float16)]
    lower_call.expect_checks.cache_clear()


def test_the_thread_rests_behind_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each may load a kernel, for which the program's launches wait."""
    rests: list[int] = []
    monkeypatch.setattr(rehearsal_thread.thread, "rest", lambda: rests.append(1))
    lower_call.check_zeros(torch.device("cpu"), torch.float32)
    assert len(rests) > 100
