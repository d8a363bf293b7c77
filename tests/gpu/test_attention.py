"""Attention of wide heads on a GPU: the operator, and a decoder's block that is compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transconv.functional import attention
from transconv.graph import backend, report

pytestmark = pytest.mark.gpu


def off(made: Tensor, want: Tensor) -> float:
    return float((made.double() - want.double()).abs().max())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "queries", "keys", "wide", "scores"),
    [
        (1, 4096, 4096, 512, 1 << 28),
        (3, 1000, 777, 384, 1 << 22),  # odd rows, a head at a time
        (2, 3000, 1111, 320, 1 << 20),  # rows of a head, the last block shorter
        (7, 129, 65, 272, 1 << 17),
        (1, 1, 33, 512, 1 << 28),
    ],
)
def test_attention_of_wide_heads(
    kind: torch.dtype,
    heads: int,
    queries: int,
    keys: int,
    wide: int,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights of at most 1 are rounded to the type, and so is the result."""
    monkeypatch.setattr(attention, "SCORES", scores)
    monkeypatch.setattr(attention, "ROWS", 128)
    torch.manual_seed(queries)
    q, k, v = (torch.randn(heads, 1, n, wide, device="cuda").to(kind) for n in (queries, keys, keys))
    q = 2 * q
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    made = attention.attention(q, k, v, wide**-0.5)
    assert 0 < off(made, want) <= 2 * torch.finfo(kind).eps * v.abs().max()
    assert torch.equal(made, attention.attention(q, k, v, wide**-0.5))


class Block(nn.Module):
    """The middle of a decoder: a norm, attention of one head of all features, a residual sum."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, wide)
        self.inner, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(self.norm(x).flatten(2).mT)[:, None].chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.out(y).mT.reshape(x.shape)


@pytest.mark.parametrize("rest", ["eager", "inductor"])
@pytest.mark.parametrize("graphs", [False, True])
def test_the_middle_of_a_decoder(rest: str, graphs: bool) -> None:
    torch.manual_seed(0)
    model = Block(384).cuda().eval()
    x = torch.randn(2, 384, 24, 40, device="cuda")
    with torch.no_grad():
        want = model.double()(x.double())
        model.to(torch.bfloat16)
        torchs = model(x.bfloat16())
        run = torch.compile(model, backend=backend, options={"rest": rest, "cudagraphs": graphs})
        for _ in range(3):
            made = run(x.bfloat16())
            assert off(made, want) <= 1.5 * off(torchs, want)
    assert "a kernel of its own" in str(report(run))
