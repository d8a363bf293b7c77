"""Result shapes and memory formats: one rule for launcher, fake and torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import transconv
from tests.torch_ops import samples as s
from transconv.torch_ops import arguments

FORMATS = (s.contiguous, s.channels_last, s.reversed_dims)


@given(
    st.lists(st.integers(1, 3), min_size=4, max_size=5), st.randoms(use_true_random=False), st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_suggests_channels_last_as_torch_does(sizes: Any, random: Any, narrow: bool) -> None:
    """Against torch's own judgement: an elementwise result follows the suggested format."""
    order = list(range(len(sizes)))
    random.shuffle(order)
    back = [order.index(d) for d in range(len(sizes))]
    t = torch.empty([sizes[d] for d in order]).permute(back)
    if narrow:
        t = t[..., :1]
    form = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    told = torch._prims_common.suggest_memory_format(t)
    assert arguments.suggests_channels_last(t.shape, t.stride()) == (told == form)


@pytest.mark.parametrize("ndims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("x_format", FORMATS)
@pytest.mark.parametrize("w_format", FORMATS)
def test_format_of_results_and_gradients(
    ndims: int, transposed: bool, x_format: Any, w_format: Any
) -> None:
    name = f"conv_transpose{ndims}d" if transposed else f"conv{ndims}d"
    x = s.vary(torch.randn(2, 4, *[5] * ndims), x_format).requires_grad_()
    w = s.vary(torch.randn(4, 4, *[3] * ndims), w_format).requires_grad_()
    y = s.ours(name)(x, w)
    wanted = s.theirs(name)(x, w)
    assert y.stride() == wanted.stride()
    last = ndims > 1 and s.channels_last in (x_format, w_format)
    form = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}[ndims]
    for t in (y, *torch.autograd.grad(y, (x, w), torch.randn_like(y))):
        assert t.is_contiguous(memory_format=form if last else torch.contiguous_format)
    fake = torch.ops.transconv.convolution(
        x.detach().to("meta"), w.detach().to("meta"), None, [1], [0], [1], transposed, [0], 1
    )
    assert (fake.shape, fake.stride()) == (y.shape, y.stride())


@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_sizes_as_torch_computes_them(
    size: int, kernel: int, stride: int, dilation: int, padding: int, extra: int, transposed: bool
) -> None:
    x, w = torch.empty(1, 1, size), torch.empty(1, 1, kernel)
    if transposed:
        args = (None, stride, padding, extra, 1, dilation)
        calls = (F.conv_transpose1d, transconv.conv_transpose1d)
    else:
        args = (None, stride, padding, dilation)
        calls = (F.conv1d, transconv.conv1d)
    found = []
    for call in calls:
        try:
            found.append(tuple(call(x, w, *args).shape))
        except RuntimeError:
            found.append(())
    assert found[0] == found[1]
