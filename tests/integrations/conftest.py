"""Tests with other packages, of the versions in constraints-integrations.txt: ``make integrations`` runs
those that are marked ``integrations``. They import their packages inside, so that any environment collects
them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import transconv
from tests.integrations import torchvision_operators
from tests.torch_ops.conftest import fresh

__all__ = ["fresh"]

# Nothing here asks a hub, and no package asks whether there is a newer one.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "YOLO_OFFLINE"):
    os.environ.setdefault(name, "1")


@pytest.fixture(autouse=True)
def interpreted(fresh: None) -> Iterator[None]:
    """Calls on a CPU run kernels in Triton's interpreter; one that torch computed instead is an error."""
    torchvision_operators.define()
    transconv.config.cpu = "interpret"
    transconv.config.fallback = "error"
    yield
    torch._dynamo.reset()
