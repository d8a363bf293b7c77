"""Modules that train in 8-bit floats: gradients, delayed scales, a loss that follows f32's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from transconv import errors
from transconv.support import knobs
from transconv.torch_ops.quantized import float8

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["fallback", pytest.param("interpret", marks=interpreted)])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(16, 32, 3, 2, 1), (2, 16, 8, 7)),
        (nn.Conv1d(4, 6, 4, padding="same", groups=2), (2, 4, 9)),
    ],
)
def test_gradients_are_those_of_torch(layer: Any, shape: tuple[int, ...], way: str) -> None:
    transconv.config.cpu = way
    torch.manual_seed(0)
    layer, x = copy.deepcopy(layer), torch.randn(shape)
    made = float8.OURS[type(layer)].from_float(copy.deepcopy(layer))
    outcomes = []
    for module in (layer, made):
        given = x.clone().requires_grad_()
        y = module(given)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        outcomes.append((y.detach(), given.grad, module.weight.grad, module.bias.grad))
    errors_of = [off(got, want) for want, got in zip(*outcomes, strict=True)]
    assert all(e < 0.06 for e in errors_of[:1]) and all(e < 0.12 for e in errors_of[1:3]), errors_of
    assert errors_of[3] < 1e-6 and min(errors_of[:3]) > 1e-3  # rounded to 8 bits, which shows
    assert [t.dtype for t in outcomes[1]] == [torch.float32] * 4
    assert transconv.stats().native == ({"fwd": 1, "bwd_d": 1, "bwd_w": 1} if way == "interpret" else {})


def test_scales_are_those_of_earlier_steps() -> None:
    made = transconv.nn.Float8Conv2d(4, 4, 1, bias=False)
    ones = torch.ones(1, 4, 2, 2)
    first = made.small(ones, float8.INPUT)
    assert float(first.scale) == pytest.approx(1 / 448)  # of the tensor itself
    later = made.small(ones * 10, float8.INPUT)
    assert float(later.scale) == pytest.approx(1 / 448) and float(later.value.float().max()) == 448
    assert float(made.small(ones, float8.INPUT).scale) == pytest.approx(10 / 448)
    for _ in range(float8.HISTORY):
        made.small(ones, float8.INPUT)
    assert float(made.small(ones, float8.INPUT).scale) == pytest.approx(1 / 448)
    made.eval()
    made.small(ones * 3, float8.INPUT)
    assert float(made.amax_history[float8.INPUT].max()) == 1
    assert made.small(torch.full((2,), 1e6), float8.GRADIENT).value.dtype is torch.float8_e5m2


def test_the_history_is_state_and_stays_in_f32() -> None:
    made = transconv.nn.Float8Conv2d(4, 4, 3)
    made(torch.randn(1, 4, 5, 5))
    again = transconv.nn.Float8Conv2d(4, 4, 3)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again.amax_history, made.amax_history) and float(made.amax_history[0, 0]) > 0
    cast = made.bfloat16()
    assert cast.weight.dtype is torch.bfloat16 and cast.amax_history.dtype is torch.float32
    assert cast(torch.randn(4, 5, 5, dtype=torch.bfloat16)).shape == (4, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert again(torch.randn(1, 4, 5, 5)).dtype is torch.bfloat16
    with pytest.raises(errors.TensorError, match="input: expected float16, bfloat16 or float32, got"):
        again(torch.randn(1, 4, 5, 5).double())
    with pytest.raises(TypeError, match=r"expected a torch.nn.Conv2d, got Conv1d"):
        transconv.nn.Float8Conv2d.from_float(nn.Conv1d(4, 4, 3))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors wait for threads longer than they are computed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_loss_follows_that_of_f32(one_thread: None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 1, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    small = copy.deepcopy(net)
    for i in (0, 3):
        transconv.nn.Float8Conv2d.from_float(small[i])
    losses = [train(model, x, y) for model in (net, small)]
    assert losses[0][-1] < 0.4 * losses[0][0]
    for plain, rounded in zip(*losses, strict=True):
        assert rounded == pytest.approx(plain, rel=0.1, abs=0.03)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found
