"""What first checks need is loaded before them."""

from __future__ import annotations

import threading

import pytest
import torch

from transconv.torch_ops import execute, first_checks


@pytest.mark.parametrize("dtype", execute.DTYPES)
def test_a_check_sees_elements_of_each_direction(dtype: torch.dtype) -> None:
    assert min(first_checks.check(torch.device("cpu"), dtype)) >= 1024


def test_it_is_begun_once_and_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    ended = threading.Event()
    monkeypatch.setattr(first_checks, "_begun", set())
    monkeypatch.setattr(first_checks, "_on_gpu", lambda *given: (begun.append(given), ended.set()))
    gpu = torch.device("cuda", 0)
    for device in (torch.device("cpu"), gpu, gpu):
        first_checks.expect(device, torch.float16)
    assert ended.wait(10.0) and begun == [(gpu, torch.float16)]


def test_what_fails_is_left_to_the_first_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_checks, "check", lambda *_: 1 / 0)
    first_checks._on_gpu(torch.device("cuda", 99), torch.float16)  # there is none
