"""torch.export and AOTInductor of converted models: their convolutions stay operators of ours in the
package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import transconv
from tests.torch_ops.conftest import fresh as fresh

# Nearly all of the time is g++'s, for one file of C++: with neither headers ahead of it nor optimization.
QUICKLY = {"cpp_cache_precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a compiler of C++")
def test_a_converted_model_in_a_package(fresh: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.ConvTranspose2d(4, 2, 2, stride=2)
    ).eval()
    x = torch.randn(2, 3, 7, 5)
    want = model(x)
    transconv.config.cpu = "interpret"
    transconv.config.fallback = "error"
    transconv.convert_(model)
    exported = torch.export.export(model, (x,))
    assert "transconv" in str(exported.graph)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x), want, rtol=1e-4, atol=1e-4)
        file = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=QUICKLY
        )
        packaged = torch._inductor.aoti_load_package(file)
        transconv.stats(reset=True)
        torch.testing.assert_close(packaged(x), want, rtol=1e-4, atol=1e-4)
    assert transconv.stats().native["fwd"] == 2 and not transconv.stats().fallback
