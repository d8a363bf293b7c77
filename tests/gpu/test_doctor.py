"""``doctor`` on a GPU: the chip has its lines, and a self-test runs there."""

from __future__ import annotations

import pytest
import torch

from transconv.__main__ import main

pytestmark = pytest.mark.gpu


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    told = capsys.readouterr().out
    assert code == 0, told
    assert torch.cuda.get_device_name() in told and "capability" in told and " clock " in told
    assert "right on the GPU" in told, told  # the second self-test is left out where the first took long
