"""``transconv.optimize`` on a GPU: CUDA graphs whose results stay, the table, training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import transconv
from transconv.graph import report

pytestmark = pytest.mark.gpu


def network() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.SiLU()) for _ in range(6)
    ]
    return nn.Sequential(*blocks).cuda().bfloat16()


def image() -> torch.Tensor:
    return torch.randn(2, 64, 28, 28, device="cuda", dtype=torch.bfloat16)


def test_results_of_cuda_graphs_stay(capsys: pytest.CaptureFixture[str]) -> None:
    model = network().eval()
    fast = transconv.optimize(model, image(), cudagraphs=True)
    assert report(fast).optimization.kept == "transconv, CUDA graphs"
    assert "a compiled graph, CUDA graphs" in capsys.readouterr().out
    inputs = [image() for _ in range(4)]
    made = [fast(x) for x in inputs]
    for x, y in zip(inputs, made, strict=True):
        torch.testing.assert_close(y, model(x), rtol=5e-2, atol=5e-2)
    model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()})
    torch.testing.assert_close(fast(inputs[0]), model(inputs[0]), rtol=5e-2, atol=5e-2)
    assert transconv.stats().native.get("graph")


@pytest.mark.parametrize("training", [False, True])
def test_the_fastest_is_kept(training: bool) -> None:
    fast = transconv.optimize(network().train(training), image(), measure=True)
    found = report(fast).optimization
    times = {s.name: s.ms for s in found.sides if s.ms is not None}
    assert {"eager", "torch.compile", "transconv"} <= {*times} and not any(s.error for s in found.sides)
    assert times[found.kept] == min(times.values()) and max(s.difference for s in found.sides) < 0.1
    made = fast(image())
    if training:
        made.square().mean().backward()
        assert all(p.grad is not None for p in fast.parameters())


def test_a_graph_is_recorded_in_training_where_it_is_asked_for() -> None:
    fast = transconv.optimize(network().train(), image(), cudagraphs=True, verbose=False)
    for _ in range(4):
        fast.zero_grad()
        fast(image()).square().mean().backward()
    assert report(fast).optimization.kept == "transconv, CUDA graphs"


def test_numbers_of_the_cpu_are_copied_at_no_call(capsys: pytest.CaptureFixture[str]) -> None:
    """A mask that is assigned number by number is part of one kernel, and of a CUDA graph."""

    class ShiftedWindow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask, n = x.new_zeros(56, 56), 0
            for rows in (slice(0, -7), slice(-7, -3), slice(-3, None)):
                for columns in (slice(0, -7), slice(-7, -3), slice(-3, None)):
                    mask[rows, columns] = n
                    n += 1
            return x.relu() * torch.tensor(0.5) + mask

    model, x = ShiftedWindow(), torch.randn(2, 8, 56, 56, device="cuda")
    fast = transconv.optimize(model, x, cudagraphs=True)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
    assert report(fast).optimization.kept == "transconv, CUDA graphs"
    assert "0 regions of torch" in capsys.readouterr().out
    assert len(report(fast).graphs[0].rows) == 1


@pytest.mark.parametrize("length", [197, 64])
def test_attention_with_an_expanded_mask_is_one_call(length: int) -> None:
    """torch alone computes its scores in memory, in f32."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones((), dtype=torch.bool, device=q.device).expand(q.shape[0], 1, length, length)
        return nn.functional.scaled_dot_product_attention(q * 2, k, v, mask).relu()

    torch.manual_seed(0)
    given = [torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    run = torch.compile(attention, backend="transconv")
    want = attention(*(t.double() for t in given))
    torch.testing.assert_close(run(*given).double(), want, rtol=3e-2, atol=3e-2)
    rows = report(run).graphs[0].rows
    assert any("_scaled_dot_product_" in str(getattr(r, "operations", "")) for r in rows), rows
    assert not any("bmm" in str(getattr(r, "name", "")) for r in rows)
