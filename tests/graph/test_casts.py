"""Chains of casts, clamped and seen through views, drawn: to the bit what torch computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

import transconv
from tests.graph.meant import by_meaning, results, traced

Tensor = torch.Tensor
Step = Callable[[Tensor], Tensor]
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WHOLE = (torch.int32, torch.int64)
BYTES = (torch.int8, torch.uint8)
LIMITS = {
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
    torch.int32: (-1000, 1000),
    torch.int64: (-5, 70000),
}
MOVES: tuple[Step, ...] = (
    lambda x: x.transpose(0, 1),
    lambda x: x[1:],
    lambda x: x.flip(0),
    lambda x: x.contiguous(),
    lambda x: x.reshape(-1, 2).t(),
    lambda x: torch.cat([x, x]),
    lambda x: x[:1].expand(3, -1),
)
EXACT: tuple[Step, ...] = (
    lambda x: x * 2,
    lambda x: -x,
    lambda x: x.relu(),
    lambda x: torch.maximum(x, -x),
    lambda x: torch.where(x > 1, x, x * 0),
)


def values(dtype: torch.dtype) -> Tensor:
    """Halves, and the ends of types and what is beyond them: numbers that all types of floats hold, since
    the meaning of a text is computed without rounding."""
    x = torch.tensor(
        [
            0.0,
            0.5,
            1.5,
            -0.5,
            -1.5,
            2.5,
            126.5,
            127.0,
            127.5,
            128.0,
            -128.0,
            -127.5,
            -129.0,
            254.0,
            255.0,
            256.0,
            996.0,
            -3.75,
            0.375,
            -0.625,
            3.125,
            1.0,
            -70.5,
            12.25,
        ],
        dtype=torch.float64,
    ).reshape(4, 6)
    return x.to(dtype) if dtype.is_floating_point else x.clamp(*LIMITS[dtype]).to(dtype)


def drawn(rng: random.Random) -> tuple[torch.dtype, list[Step]]:
    """A type to begin with, and steps. No float is beyond a type's ends: torch leaves that open."""
    first = at = rng.choice([*FLOATS, *WHOLE, *BYTES])
    steps: list[Step] = []

    def to(dtype: torch.dtype) -> None:
        nonlocal at
        steps.append(lambda x: x.to(dtype))
        at = dtype

    for _ in range(rng.randint(2, 5)):
        kind = rng.random()
        if kind < 0.3:
            steps.append(rng.choice(MOVES))
        elif kind < 0.45 and at in FLOATS:
            steps.append(rng.choice(EXACT))
        elif kind < 0.7 and at in FLOATS:
            dtype = rng.choice([*BYTES, *BYTES, torch.int32])
            low, high = LIMITS[dtype]
            low, high = rng.choice([(low, high), (low, high - 1), (low + 3, 100), (0, 1)])
            if rng.random() < 0.6:
                steps.append(torch.round)
            steps.append(lambda x, low=low, high=high: x.clamp(low, high))  # type: ignore[misc]
            if rng.random() < 0.3:
                steps.append(rng.choice(MOVES))
            to(dtype)
        elif kind < 0.75 and at in FLOATS:
            to(torch.bool)
            to(rng.choice(FLOATS))
        else:
            to(rng.choice(FLOATS))
    return first, steps


def composed(chains: Sequence[Sequence[Step]]) -> Callable[..., list[Tensor]]:
    def f(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        found = []
        for x, steps in zip((a, b, c), chains, strict=True):
            for step in steps:
                x = step(x)
            found.append(x)
        return found

    return f


@pytest.mark.every(16)
@pytest.mark.parametrize("seed", range(16))
def test_drawn_chains_are_torchs_to_the_bit(seed: int) -> None:
    rng, answered = random.Random(seed), 0
    for _ in range(10):
        chains = [drawn(rng) for _ in range(3)]
        f, given = composed([steps for _, steps in chains]), [values(dtype) for dtype, _ in chains]
        want = f(*given)
        with by_meaning() as texts, torch.no_grad():
            got = results(traced(f, given)(*given))
        answered += bool(texts)
        for a, b in zip(want, got, strict=True):
            assert a.dtype is b.dtype and torch.equal(a, b), (a, b, texts)
    assert answered > 6


@pytest.mark.every(5)
@pytest.mark.parametrize("narrow", [torch.float16, torch.float32])
@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_narrower_type_on_the_way_rounds(narrow: torch.dtype, moved: int) -> None:
    """Also through a view, and not where the value came from that type."""
    x = torch.randn(4, 6, dtype=torch.float64)
    wide = torch.float32 if narrow is torch.float16 else torch.float64

    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            MOVES[moved](x.to(narrow)).to(wide) * 2,
            MOVES[moved](y.to(wide)).to(narrow),
            MOVES[moved](x.to(narrow).to(wide)).to(narrow) * 2,
        ]

    given = [x.to(wide), x.to(narrow)]
    before, transconv.config.cpu = transconv.config.cpu, "interpret"
    try:
        with torch.no_grad():
            before_it = transconv.stats().native.get("graph", 0)
            got = results(traced(f, given)(*given))
            assert transconv.stats().native["graph"] == before_it + 1
    finally:
        transconv.config.cpu = before
    for a, b in zip(f(*given), got, strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


@pytest.mark.parametrize(
    ("low", "high", "ours"),
    [(-128, 127, True), (-129, 127, False), (-128, 128, False), (-128.5, 127, False), (0, 127, True)],
)
def test_floats_that_may_be_beyond_a_type_are_left_to_torch(low: float, high: float, ours: bool) -> None:
    x = values(torch.float32).clamp(-100, 100)

    def f(x: Tensor) -> list[Tensor]:
        return [(x * 1.5).clamp(low, high).to(torch.int8).to(torch.float32) * 2]

    with by_meaning() as texts, torch.no_grad():
        (got,) = results(traced(f, [x])(x))
    assert torch.equal(got, f(x)[0]) and any("i8(" in text for text in texts) == ours, texts


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, *BYTES], ids=str)
def test_products_of_every_type(dtype: torch.dtype) -> None:
    """Products of whole numbers are torch's, to the bit also where a float has other ones."""
    x, y = (
        (torch.arange(12) * step % 251).to(dtype).view(shape)
        for step, shape in ((67, (3, 4)), (89, (4, 3)))
    )
    if dtype in WHOLE:
        x, y = x * 40000 + 1, y * 40000 + 3

    def product(x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (torch.matmul(x, y) + x[:, :3],)

    run = traced(product, [x, y])
    with by_meaning() as texts:
        (found,), (right,) = run(x, y), product(x, y)
    assert found.dtype is right.dtype
    torch.testing.assert_close(found, right, rtol=0 if dtype not in FLOATS else 1e-2, atol=0)
    assert bool(texts) is (dtype in FLOATS) or all("sum(" not in text for text in texts)


def listed(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    return lambda x, y: [f(x, y)]


@pytest.mark.parametrize("held", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "step", [lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x[..., 1:]], ids=range(3)
)
def test_factors_that_were_widened_are_multiplied_as_they_were(held: torch.dtype, step: Step) -> None:
    """f32 has each product of numbers of 16 bits. What was computed in f32, or of another type, is of
    f32."""
    x, y = (torch.randn(shape).to(held) for shape in ((2, 5, 8), (2, 6, 8)))
    forms: list[tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = [
        (True, lambda x, y: step(x.float()) @ step(y.float()).mT),
        (True, lambda x, y: step((x * 2).float()) @ step(y).float().mT),
        (False, lambda x, y: (step(x.float()) * 1.1) @ step(y.float()).mT),
        (False, lambda x, y: step(x.float()) @ step(y.double().float()).mT),
    ]
    for narrow, f in forms:
        with by_meaning() as texts:
            (made,) = results(traced(listed(f), [x, y])(x, y))
        torch.testing.assert_close(made, f(x, y), rtol=1e-5, atol=1e-5)
        (text,) = (t for t in texts if "sum(" in t)
        assert made.dtype is torch.float32
        assert ("f32(" not in text) is narrow, text
