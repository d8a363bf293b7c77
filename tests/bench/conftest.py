"""Benchmarks set torch's flags for their process. torch's test modules, which other tests import, forbid
that; here it is allowed, and undone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def flags_can_be_set() -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    with (
        getattr(torch.backends, "__allow_nonbracketed_mutation")(),
        torch.backends.cudnn.flags(enabled=True),
    ):
        yield
        products.allow_tf32 = before
