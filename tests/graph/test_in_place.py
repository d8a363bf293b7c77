"""Maps that write over an operand: from the second call on, where nothing needs the operand any more."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import Meant, by_meaning, results, traced
from tests.graph.test_statistics import Block
from transconv.functional.calls.compiled_launch import program
from transconv.functional.calls.torch_operators import by_numpy
from transconv.graph import backend
from transconv.graph.fusion.groups import Price
from transconv.graph.regions import region_kernels

Tensor = torch.Tensor
Seen = list[tuple[str, bool]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Of each launch the name, and whether a tensor is there twice."""
    found: Seen = []
    monkeypatch.setattr(
        region_kernels, "why_again", lambda kernel, rates: ""
    )  # moments leave: a map is left
    monkeypatch.setattr(Price, "worked", lambda self, count: 1e3 * count)  # the norm is computed once
    start = Meant.start

    def noted(self: Meant, tensors: Sequence[Tensor]) -> None:
        there = [t.data_ptr() for t in tensors]
        found.append((self.texts[0].split()[1], len({*there}) < len(there)))
        for text in self.texts:
            needs_own_places(text, tensors)
        start(self, tensors)

    monkeypatch.setattr(Meant, "start", noted)
    return found


def needs_own_places(text: str, tensors: Sequence[Tensor]) -> None:
    """An element that is written over an operand is computed of the operand's element there, and of no
    other: programs write in any order."""
    found = program(text)
    views = [
        t.as_strided(m.shape, m.strides, t.storage_offset())
        for t, m in zip(tensors, [*found.given.values(), *found.stored.values()], strict=True)
    ]
    count = len(found.given)
    for i, x in enumerate(views[:count]):
        for j, into in enumerate(views[count:]):
            if x.data_ptr() == into.data_ptr():
                kept = torch.rand(into.shape) < 0.5
                other = [
                    torch.where(kept, v, torch.randn_like(v)) if k == i else v
                    for k, v in enumerate(views[:count])
                ]
                made = [by_numpy(text, given, x.device)[j] for given in (views[:count], other)]
                assert torch.equal(made[0][kept], made[1][kept]), text
    written = [t.data_ptr() for t in views[count:]]
    assert len({*written}) == len(written), text


def over(seen: Seen) -> set[str]:
    """The launches since it was last asked that write over an operand."""
    found = {name for name, twice in seen if twice}
    seen.clear()
    return found


@pytest.mark.every(2)
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


Step = Callable[[list[Tensor]], list[Tensor]]


def network(seed: int) -> Callable[[Tensor], list[Tensor]]:
    """Maps behind convolutions of drawn earlier values; what is handed out is any of them."""
    rng = random.Random(seed)
    steps: list[Step] = []
    for at in range(rng.randint(2, 4)):
        a, b = (rng.choice([0, 0, 1]) if at else 0 for _ in "ab")
        w, scale = torch.randn(4, 4, 3, 3) / 6, torch.randn(rng.choice([(1, 4, 1, 1), (2, 4, 5, 5), (5,)]))
        way, groups, keeps = rng.randrange(6), rng.choice([1, 2]), rng.random() < 0.5

        def step(
            v: list[Tensor],
            a: int = a,
            b: int = b,
            w: Tensor = w,
            scale: Tensor = scale,
            way: int = way,
            groups: int = groups,
            keeps: bool = keeps,
        ) -> list[Tensor]:
            y = F.conv2d(v[a], w, padding=1)
            n = F.group_norm(y, groups)
            made = [
                [F.silu(n)],
                [n + v[b]],
                [n * y.flip(3)],
                [n.transpose(2, 3).relu()],
                [n.relu(), n * 2],
                [n * scale],
            ][way]
            return [*made, *([y] if keeps else [])]

        steps.append(step)
    handed = [at for at in range(1, len(steps)) if rng.random() < 0.2]

    def f(x: Tensor) -> list[Tensor]:
        values = [x]
        for step in steps:
            values = [*step(values), *values]
        return [F.conv2d(values[0] + values[1], torch.ones(4, 4, 3, 3)), *(values[at] for at in handed)]

    return f


@pytest.mark.slow
def test_what_is_needed_later_is_not_written_over(seen: Seen) -> None:
    """Drawn networks: each call has the results of torch, and those of earlier calls stay as they were."""
    replaced = 0
    for seed in range(12):
        f, inputs = network(seed), [torch.randn(2, 4, 5, 5) for _ in range(3)]
        with torch.no_grad(), by_meaning():
            run, found = traced(f, inputs[:1]), []
            for x in inputs:
                before = x.clone()
                found.append(results(run(x)))
                assert torch.equal(x, before)
            for x, made in zip(inputs, found, strict=True):
                for a, b in zip(f(x), made, strict=True):
                    assert torch.allclose(a, b, atol=1e-3), seed
        replaced += len(over(seen))
    assert replaced > 2


@pytest.mark.gpu
def test_on_the_device() -> None:
    """Each call has the results of the first one, and a map holds no second image."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(128, 128, 3, padding=1),
        torch.nn.GroupNorm(32, 128),
        torch.nn.SiLU(),
        torch.nn.Conv2d(128, 4, 3),
    ).requires_grad_(False)
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
