"""The parts of a norm: texts of the library against torch's operations."""

from __future__ import annotations

import pytest
import torch

from transconv import computation
from transconv.functional import norms
from transconv.functional.calls.symbolic_bind import BoundCall, bind
from transconv.functional.calls.torch_operators import FUNCTIONS

LAYOUTS = (torch.contiguous_format, torch.channels_last_3d)


def by_text(bound: BoundCall, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a text, on tensors as it sees them."""
    given = dict(zip(bound.operands, tensors, strict=True))
    seen = bound.seen
    views = [
        given[name].reshape(seen[name].shape).permute(seen[name].order).reshape(seen[name].sizes)
        for name in bound.forward.given
    ]
    made = computation(bound.forward.text)(*views)
    found = []
    made = made if isinstance(made, tuple) else (made,)
    for (name, memory), t in zip(bound.forward.stored.items(), made, strict=True):
        order = seen[name].order
        back = [order.index(i) for i in range(len(order))]
        found.append(t.reshape([seen[name].shape[i] for i in order]).permute(back).reshape(memory.shape))
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["moments", "sums", "scaled", "mixed"])
def test_texts(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x, g = (torch.randn(2, 3, 4, 5, 6).to(dtype).to(memory_format=layout) for _ in range(2))
    a, b, c = (
        torch.randn(2, 3, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
        for _ in range(3)
    )
    given = {"moments": [x], "sums": [g, x], "scaled": [x, a, b], "mixed": [g, x, a, b, c]}[name]
    want = getattr(norms, name)(*given)
    got = by_text(bind(FUNCTIONS[name], given, (), ()), given)
    for one, other in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other)
        assert one.dim() == 2 or one.stride() == other.stride() == x.stride()


def test_moments_of_a_large_mean() -> None:
    """Deviations are taken from the mean: no large numbers are subtracted."""
    x = 4096 + torch.randn(1, 2, 30, 30)
    mean, squares = norms.moments(x)
    torch.testing.assert_close(squares / 900, x.double().flatten(2).var(2, correction=0).float())
    torch.testing.assert_close(mean, x.flatten(2).mean(2))
