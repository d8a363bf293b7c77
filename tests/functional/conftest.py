"""Every test starts with no routes and no counts; kernels run in Triton's interpreter."""

from __future__ import annotations

import pytest

import transconv
from tests.known_kernels import known_kernels
from tests.torch_ops.conftest import fresh, untimed_guards

__all__ = ["fresh", "known_kernels", "untimed_guards"]


@pytest.fixture(autouse=True)
def interpreted(fresh: None) -> None:
    transconv.config.cpu = "interpret"
