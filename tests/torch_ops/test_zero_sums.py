"""``input_zero_sums``: those of another weight or zero point are refused, or made anew by their module."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from transconv import errors
from transconv.calls import guard
from transconv.conv import zero_sums
from transconv.support import knobs
from transconv.torch_ops.quantized import input_quantization as compared
from transconv.torch_ops.quantized import quantized_route

Tensor = torch.Tensor
WAYS = [
    "fallback",
    pytest.param(
        "interpret", marks=pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
    ),
]


class Call:
    """A call with known sums; ``expected``: without them."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(5)
        self.x, self.w = (
            torch.randint(-128, 128, s, generator=draw).char() for s in ((1, 16, 5, 5), (8, 16, 3, 3))
        )
        self.zero = torch.tensor([7], dtype=torch.int32)
        self.sums = self.right()

    def right(self) -> Tensor:
        made = zero_sums(self.w, self.zero, (1, 1), (1, 1), (1, 1))
        assert made is not None
        return made

    def __call__(self, **given: Any) -> Tensor:
        return transconv.quantized.conv2d(
            self.x,
            self.w,
            padding=1,
            **{"input_zero_point": self.zero, "input_zero_sums": self.sums, **given},
        )

    def expected(self) -> Tensor:
        return torch.conv2d(self.x.double() - self.zero.double(), self.w.double(), padding=1).float()


@pytest.mark.every(2)
@pytest.mark.parametrize("way", WAYS)
def test_wrong_sums_are_an_error_in_every_call(way: str) -> None:
    """In the first call, in one like those before, and once a tensor was written to."""
    transconv.config.cpu, call = way, Call()
    for wrong, reason in (
        (call.sums + 1, "128 of 128 differ"),
        (call.sums[:, :1], r"expected the shape \(8, 2, 2, 2, 2\)"),
    ):
        with pytest.raises(errors.TensorError, match="input_zero_sums: .*" + reason):
            call(input_zero_sums=wrong)
    for _ in range(guard.PATIENCE + 3):
        assert torch.equal(call(), call.expected())
    with pytest.raises(errors.TensorError, match="128 of 128 differ"):
        call(input_zero_sums=call.sums - 1)
    for changed in (call.zero, call.w, call.sums):
        changed += 1
        with pytest.raises(errors.TensorError, match="input_zero_sums: .* changed after they were made"):
            call()
        call.sums.copy_(call.right())
        for _ in range(2):
            assert torch.equal(call(), call.expected())
    other, call.zero = call.zero, call.zero + 1  # a tensor of the same kind
    with pytest.raises(errors.TensorError, match="differ"):
        call()
    call.zero = other
    assert torch.equal(call(), call.expected())
    with pytest.raises(errors.TensorError, match="differ"):
        call(input_zero_point=3)


@pytest.mark.every(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("own_garbage")
def test_sums_are_compared_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transconv.config.cpu, call = way, Call()
    made: list[Tensor] = []
    monkeypatch.setattr(compared, "zero_sums", lambda w, *rest: made.append(w) or zero_sums(w, *rest))
    for _ in range(guard.PATIENCE + 3):
        call()
        call(input_zero_point=7)
        call(input_zero_point=7)
    assert len(made) == 2 * (guard.PATIENCE + 3)  # two zero points in turn
    made.clear()
    found: list[Any] = []
    find = quantized_route.find
    monkeypatch.setattr(quantized_route, "find", lambda *given: found.append(given) or find(*given))
    for _ in range(4):
        call(input_zero_point=7)
    assert not made
    with torch.inference_mode():
        inside = Call()
        assert torch.equal(inside(), inside.expected()) and torch.equal(inside(), inside.expected())
    assert len(made) == 1
    held = id(call.sums)
    assert held in compared._compared
    del call
    found.clear()
    gc.collect()
    assert held not in compared._compared


def test_a_capture_computes_sums_that_were_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call()
    wrong = torch.zeros_like(call.sums)
    monkeypatch.setattr(compared, "is_capturing", lambda device: True)
    params = quantized_route.arguments.resolve(
        call.x.shape, call.w.shape, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1
    )
    assert torch.equal(compared.checked(call.w, call.zero, wrong, params), call.sums)
    assert not compared.are_known(call.w, call.zero, wrong)


CHANGES = {
    "zero point": lambda m: m.input_zero_point.add_(3),
    "weight": lambda m: m.weight.neg_(),
    "replaced": lambda m: setattr(m, "input_zero_point", m.input_zero_point - 2),
    "loaded": lambda m: m.load_state_dict({**m.state_dict(), "input_zero_point": m.input_zero_point + 1}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_makes_its_sums_again(change: str, way: str) -> None:
    transconv.config.cpu = way
    module = transconv.nn.QuantConv2d.from_float(nn.Conv2d(16, 8, 3, padding=1), 0.02, 9)
    x = torch.randn(1, 16, 5, 5)

    def expected(m: Any) -> Tensor:
        whole = ((x * (1 / m.input_scale)).round() + m.input_zero_point).clamp(-128, 127)
        sums = torch.conv2d((whole - m.input_zero_point).double(), m.weight.double(), padding=1).float()
        return sums * (m.input_scale * m.weight_scale).view(-1, 1, 1) + m.bias.view(-1, 1, 1)

    for made in (module, copy.deepcopy(module)):
        for _ in range(guard.PATIENCE + 2):
            assert torch.equal(made(x), expected(made))
        CHANGES[change](made)
        was = made.input_zero_sums.clone()
        assert torch.equal(made(x), expected(made))
        assert torch.equal(made.input_zero_sums, was) is (change == "loaded")
