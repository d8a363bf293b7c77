"""Edge cases of torch's view functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv import functional as ours


@pytest.mark.parametrize("pad", [(-1, 1, -2, 1), (2, -1, -1, 3)])
def test_a_circular_pad_repeats_what_is_left_of_a_dim(pad: tuple[int, ...]) -> None:
    x = torch.randn(1, 2, 4, 5, requires_grad=True)
    y, want = ours.pad(x, pad, "circular"), F.pad(x, pad, "circular")
    torch.testing.assert_close(y, want)
    g = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(want, x, g))
    assert transconv.stats().native == {"pad": 1, "pad_gradient": 1}
