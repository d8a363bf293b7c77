"""A user's state: checkpoints of a training that was killed, averaged copies, adapters, and two ranks,
with and without our kernels."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import transconv
from tests.torch_ops.conftest import fresh as fresh
from tests.torch_ops.training_ranks import WAYS, called, compare, network, train

Tensor = torch.Tensor
GRAPH = pytest.param("compile", marks=pytest.mark.slow)
KILLED = """
import sys; from pathlib import Path; import transconv; from tests.torch_ops.training_ranks import train
transconv.config.cpu = "interpret"; transconv.config.fallback = "error"
train("convert", range(4), Path(sys.argv[1]), killed_after=1)
"""


@pytest.fixture(autouse=True)
def interpreted(fresh: None) -> None:
    transconv.config.cpu = "interpret"
    transconv.config.fallback = "error"


@pytest.mark.slow
def test_training_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A process is killed in the middle; each way goes on from its checkpoint, as if nothing had been."""
    kept = tmp_path / "at.pt"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(kept)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    losses, state = train("torch", range(4))
    saved = kept.read_bytes()
    for way in WAYS:
        kept.write_bytes(saved)
        transconv.stats(reset=True)
        found, after = train(way, range(2, 4), kept)
        assert bool(transconv.stats().native) == (way != "torch")
        assert found == pytest.approx(losses[2:], rel=1e-4)
        for name, value in state.items():
            torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["convert", GRAPH])
def test_averaged_copies(way: str) -> None:
    model, plain = network().eval(), network().eval()
    x = torch.randn(2, 3, 6, 6)
    net = called(model, way)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    torch_averaged = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for made, own, mean in ((net, model, averaged), (plain, plain, torch_averaged)):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            made(x).square().mean().backward()
            optimizer.step()
            mean.update_parameters(own)
    with torch.no_grad():
        transconv.stats(reset=True)
        torch.testing.assert_close(averaged(x), torch_averaged(x), rtol=1e-4, atol=1e-5)
        assert bool(transconv.stats().native) == (way == "convert")  # of a graph the copy is torch's
    own = copy.deepcopy(averaged.module).state_dict()
    assert own.keys() == torch_averaged.module.state_dict().keys()


class LowRank(nn.Module):
    """An adapter as LoRA has it: a weight and a product of two thin ones."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, n = weight.shape, weight[0].numel()
        self.down, self.up = nn.Parameter(torch.randn(2, n) / n), nn.Parameter(torch.zeros(len(weight), 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view(self.shape)


@pytest.mark.every(2)
@pytest.mark.parametrize("first", ["adapter", "convert", GRAPH])
def test_adapters(first: str) -> None:
    """Adapters that come before or after us train alike, and leave what they were put on."""
    found = []
    for way in ("torch", first):
        model = network().requires_grad_(False)
        net = called(model, way) if way == "convert" else model
        torch.manual_seed(1)
        parametrize.register_parametrization(model[3], "weight", LowRank(model[3].weight))
        net = called(model, {"adapter": "convert"}.get(way, way)) if way != "convert" else net
        adapter = model[3].parametrizations.weight[0]
        optimizer = torch.optim.SGD(adapter.parameters(), 0.5)
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(3))
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        parametrize.remove_parametrizations(model[3], "weight")
        with torch.no_grad():
            found.append((adapter.up.detach(), net(x)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    assert found[0][0].abs().max() > 0


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    assert compare(tmp_path, device="cpu", ranks=2, steps=3, size=6, width=4) == []
