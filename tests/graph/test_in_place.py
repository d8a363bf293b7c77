"""Maps that write over an operand: from the second call on, where nothing needs the operand any more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import Meant, by_meaning
from tests.graph.test_statistics import Block
from transconv.graph import backend, compiled
from transconv.graph.price import Price

Tensor = torch.Tensor
Seen = list[tuple[str, bool]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Of each launch the name, and whether a tensor is there twice."""
    found: Seen = []
    monkeypatch.setattr(compiled, "why_again", lambda kernel, rates: "")  # moments leave: a map is left
    monkeypatch.setattr(Price, "worked", lambda self, count: 1e3 * count)  # the norm is computed once
    start = Meant.start

    def noted(self: Meant, tensors: Sequence[Tensor]) -> None:
        there = [t.data_ptr() for t in tensors]
        found.append((self.texts[0].split()[1], len({*there}) < len(there)))
        start(self, tensors)
    monkeypatch.setattr(Meant, "start", noted)
    return found


def over(seen: Seen) -> set[str]:
    """The launches since it was last asked that write over an operand."""
    found = {name for name, twice in seen if twice}
    seen.clear()
    return found


@pytest.mark.parametrize("handed", [False, True])
def test_of_a_norm_behind_a_convolution(seen: Seen, handed: bool) -> None:
    block, x, w = Block().eval().requires_grad_(False), torch.randn(2, 4, 5, 6), torch.randn(2, 8, 3, 3)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        made = block.first(x)
        return F.conv2d(F.silu(block.norm(made)), w), *([made] * handed)
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with torch.no_grad(), by_meaning():
        want = f(x)
        for call in range(3):
            for a, b in zip(want, run(x), strict=True):
                assert torch.allclose(a, b, atol=1e-4)
            assert over(seen) == ({"mean_rsqrt_norm_silu"} if call and not handed else set()), call


@pytest.mark.gpu
def test_on_the_device() -> None:
    """Each call has the results of the first one, and a map holds no second image."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(128, 128, 3, padding=1), torch.nn.GroupNorm(32, 128),
                                torch.nn.SiLU(), torch.nn.Conv2d(128, 4, 3)).requires_grad_(False)
    model = model.cuda().to(torch.bfloat16, memory_format=torch.channels_last)
    x = torch.randn(1, 128, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        first = run(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            assert torch.equal(run(x), first)
        most = torch.cuda.max_memory_allocated() - before
    assert most < 1.5 * 128 * 1024 * 1024 * 2, f"{most >> 20} MiB for an image of 256"
