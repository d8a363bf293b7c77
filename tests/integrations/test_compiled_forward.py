"""A forward that is compiled in place: who it belongs to, in copies, pickles and among other forwards."""

from __future__ import annotations

import copy
import inspect
import pickle

import torch
from torch import nn

import transconv
from transconv.integrations.compiled_forward import compile_forward, compiled_forward, restore_forward

X = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = self.conv(x) * scale
        return made


def test_copies_are_their_own() -> None:
    layer = Layer().eval().requires_grad_(False)
    want = layer(X, scale=2.0)
    assert compile_forward(layer, "eager") and not compile_forward(layer, "eager")
    torch.testing.assert_close(layer(X, scale=2.0), want, rtol=1e-3, atol=1e-3)
    assert transconv.stats().native["graph"] == 1
    assert str(inspect.signature(layer.forward)) == str(inspect.signature(Layer().forward))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        found = compiled_forward(twin)
        assert found is not None and found.module is twin and found.compiled is None
        twin.conv.weight.zero_()
        twin.conv.bias.fill_(3)
        torch.testing.assert_close(twin(X), torch.full((1, 2, 6, 6), 3.0))
    torch.testing.assert_close(layer(X, scale=2.0), want, rtol=1e-3, atol=1e-3)
    restore_forward(layer)
    assert "forward" not in vars(layer) and [*layer.state_dict()] == ["conv.weight", "conv.bias"]


def test_other_forwards_stay() -> None:
    """One of accelerate's gets ours below it; one of the user's is left alone."""
    layer = Layer()
    layer._old_forward = layer.forward
    layer.forward = lambda *given: layer._old_forward(*given)
    above = layer.forward
    assert compile_forward(layer) and layer.forward is above and compiled_forward(layer)
    restore_forward(layer)
    assert compiled_forward(layer) is None and layer._old_forward == Layer.forward.__get__(layer)
    own = Layer()
    own.forward = lambda x: x
    assert not compile_forward(own) and own(X) is X
