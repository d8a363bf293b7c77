"""examples/kernels beside torch, in Triton's interpreter and in the simulator; kernels are short."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from transconv.kernel import KernelFunction

FOLDER = Path(__file__).parents[2] / "examples" / "kernels"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def convolved(src: torch.Tensor, wei: torch.Tensor, step: int) -> torch.Tensor:
    made = functional.conv2d(src.permute(0, 3, 1, 2), wei.permute(3, 2, 0, 1), stride=step)
    return made.permute(0, 2, 3, 1)


def priced(price: torch.Tensor, strike: torch.Tensor, years: torch.Tensor) -> tuple[torch.Tensor, ...]:
    spread, now, both = 0.2 * years.sqrt(), strike * (-0.1 * years).exp(), torch.distributions.Normal(0, 1)
    d = ((price / strike).log() + 0.12 * years) / spread
    call = price * both.cdf(d) - now * both.cdf(d - spread)
    return call, call - price + now


def gathered(points: torch.Tensor, centres: torch.Tensor, steps: int) -> tuple[torch.Tensor, ...]:
    for _ in range(steps):
        near = torch.cdist(points, centres).argmin(1)
        centres = torch.stack(
            [points[near == n].sum(0) / max(1, int((near == n).sum())) for n in range(len(centres))]
        )
    return centres, near


def weighed(
    a: torch.Tensor, wa: torch.Tensor, b: torch.Tensor, wb: torch.Tensor, radii: torch.Tensor
) -> torch.Tensor:
    apart = ((a[:, None] - b[None]) ** 2).sum(2)
    return torch.stack([(wa[:, None] * wb[None] * (apart <= r)).sum() for r in radii])


def moved(cosines: torch.Tensor, angles: torch.Tensor, energies: torch.Tensor) -> torch.Tensor:
    c, f, e = 2 * cosines - 1, 2 * torch.pi * angles, -energies.log()
    s = (1 - c * c).sqrt()
    return torch.stack([e, e * s * f.sin(), e * s * f.cos(), e * c], 2)


def voted(
    known: torch.Tensor, classes: torch.Tensor, points: torch.Tensor, k: int, kinds: int
) -> torch.Tensor:
    near = torch.cdist(points, known).topk(k, largest=False).indices
    return torch.stack([torch.bincount(row, minlength=kinds).argmax() for row in classes[near]])


def correlated(x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return convolved(x[None], f, 1)[0]


def dropped(x: torch.Tensor, p: float, _: int) -> torch.Tensor:
    """What is kept is told by the example."""
    kept = example("dropout")(torch.ones_like(x), p, 5) > 0
    assert abs(kept.float().mean() - 1 + p) < 0.03
    return torch.where(kept, x / (1 - p), 0)


def norm_gradients(g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = tuple(t.clone().requires_grad_() for t in (x, scale, torch.zeros(50, device=x.device)))
    return torch.autograd.grad(functional.layer_norm(leaves[0], (50,), *leaves[1:]), leaves, g)


def each_expert(a: torch.Tensor, b: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.cat([a[:150] @ b[0], a[150:] @ b[1]])


def clusters(x: torch.Tensor, radius: float, least: int) -> torch.Tensor:
    close = torch.cdist(x, x) <= radius
    core, far = close.sum(1) >= least, 2**31 - 1
    labels = torch.where(core, torch.arange(len(x), device=x.device), far)
    for _ in x:
        labels = torch.minimum(labels, torch.where(close & core, labels, far).amin(1))
    return labels


# The example, its arguments, and the same in torch.
EXAMPLES: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "softmax": ((drawn(3, 50),), lambda x: x.softmax(1)),
    "layer_norm": (
        (drawn(3, 50), drawn(50), drawn(50)),
        lambda x, a, b: functional.layer_norm(x, (50,), a, b),
    ),
    "gemm": ((drawn(21, 45), drawn(45, 37)), torch.matmul),
    "convolution": ((drawn(2, 7, 20, 5), drawn(3, 2, 5, 18), 2), convolved),
    "pairwise_distance": (
        (drawn(9, 3), drawn(20, 3)),
        lambda a, b: torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist"),
    ),
    "histogram": (
        (torch.arange(300, dtype=torch.int32) ** 2 % 23, 21),
        lambda x, bins: torch.bincount(x, minlength=bins)[:bins].int(),
    ),
    "scan": ((drawn(2, 75),), lambda x: x.cumsum(1)),
    "top_k": ((drawn(6, 20), 3), lambda x, k: torch.topk(x, k)),
    "black_scholes": (tuple(drawn(70).abs() + n for n in (9.0, 8.0, 0.5)), priced),
    "l2_norm": ((drawn(40, 7),), lambda x: x.norm(dim=1)),
    "k_means": ((drawn(50, 3), drawn(50, 3)[:5], 2), gathered),
    "gpairs": (
        (drawn(20, 3), drawn(20), -drawn(35, 3), drawn(35), torch.tensor([0.1, 0.5, 2.0])),
        weighed,
    ),
    "rambo": ((drawn(9, 20).sigmoid(), drawn(9, 20).cos().abs(), drawn(9, 20).sigmoid()), moved),
    "nearest_neighbours": ((drawn(30, 4), torch.arange(30) % 3, -drawn(11, 4), 5, 3), voted),
    "implicit_gemm": ((drawn(7, 9, 3), drawn(3, 2, 3, 18)), correlated),
    "split_k": ((drawn(20, 150), drawn(150, 37)), torch.matmul),
    "softplus": ((drawn(300),), functional.softplus),
    "silu": ((drawn(300),), functional.silu),
    "row_sums": ((drawn(9, 50),), lambda x: x.sum(1)),
    "attention": (
        (drawn(2, 20, 24), drawn(2, 75, 24), drawn(2, 75, 20)),
        functional.scaled_dot_product_attention,
    ),
    "vector_add": ((drawn(2100), -drawn(2100)), torch.add),
    "dropout": ((drawn(2100), 0.25, 5), dropped),
    "layer_norm_backward": ((drawn(21, 50), -drawn(21, 50), drawn(50)), norm_gradients),
    "grouped_gemm": (
        (
            drawn(200, 70),
            drawn(2, 70, 140),
            *torch.tensor([[0, 0, 150], [0, 128, 150], [1, 150, 200]], dtype=torch.int32).T.contiguous(),
        ),
        each_expert,
    ),
    "dbscan": ((drawn(100, 2), 0.4, 6), clusters),
}


def example(name: str) -> Callable[..., Any]:
    """The function of an example that launches its kernel."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[..., Any] = getattr(module, name)
    return found


def check(name: str, device: str = "cpu") -> None:
    arguments, meaning = EXAMPLES[name]
    got, wanted = (
        f(*(a.to(device) if torch.is_tensor(a) else a for a in arguments))
        for f in (example(name), meaning)
    )
    for a, b in zip(*((x,) if torch.is_tensor(x) else x for x in (got, wanted)), strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.every(4)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", EXAMPLES)
def test_in_tritons_interpreter(name: str) -> None:
    check(name)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_in_the_simulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelFunction, "__call__", KernelFunction.simulate)
    check(name)


def test_examples_are_short() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert [f.stem for f in files] == sorted(EXAMPLES)
    for file in files:
        text = file.read_text("utf-8")
        kernel = text[text.index("@kernel") :].split("\n\n\n")[0]
        assert len(kernel.splitlines()) <= 25, file.name
