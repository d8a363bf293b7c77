"""Reductions of a product's result: they leave with its store where the estimate is lower, and what is
computed of them is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.meant import by_meaning, compare
from transconv.compute import parse
from transconv.graph import backend, report
from transconv.graph.graph_report import GraphReport
from transconv.graph.regions import region_kernels

Tensor = torch.Tensor


class Block(nn.Module):
    """A convolution, a group norm, an activation, a convolution."""

    def __init__(self, wide: int = 8, groups: int = 2) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, wide, 3, padding=1), nn.GroupNorm(groups, wide)
        self.second = nn.Conv2d(wide, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.silu(self.norm(self.first(x))))


class Reduced(nn.Module):
    """What heads and gradients reduce of a product: averages, sums over the batch, extremes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 8, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made, rows = self.conv(x), self.linear(y)
        return made, made.mean((2, 3)), made.amax((0, 2, 3)), rows, rows.var(0)


def whole(network: nn.Module, *shapes: tuple[int, ...]) -> tuple[GraphReport, list[str]]:
    """The report of a network whose results are compared with torch's, and the texts of its kernels."""
    run: Any = torch.compile(network.eval(), backend=backend, options={"rest": "eager"})
    with by_meaning() as texts, torch.no_grad():
        compare(network, run, [torch.randn(s) for s in shapes], 1e-5)
    return report(run).graphs[0], texts


def stored(texts: list[str]) -> set[tuple[str, ...]]:
    """The operations of each kernel's statistics."""
    return {tuple(w.op for w in parse(t).statistics) for t in texts} - {()}


@pytest.mark.parametrize(
    ("network", "shapes", "operations"),
    [
        (Block(), [(2, 4, 5, 6)], {("sum", "squares")}),
        (Reduced(), [(2, 4, 6, 5), (7, 6)], {("sum", "max"), ("sum", "squares")}),
    ],
    ids=["block", "reduced"],
)
def test_they_are_torch_s(
    network: nn.Module,
    shapes: list[tuple[int, ...]],
    operations: set[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever they cost."""
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")
    assert stored(whole(network, *shapes)[1]) == operations


def test_what_multiplies_a_vector_reduces_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no tiles of which parts could leave."""
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")
    x, w = torch.randn(1, 4), torch.randn(4, 3)
    run: Any = torch.compile(
        lambda x, w: (y := x @ w).exp() / y.sum(), backend=backend, options={"rest": "eager"}
    )
    with by_meaning() as texts, torch.no_grad():
        torch.testing.assert_close(run(x, w), (x @ w).exp() / (x @ w).sum(), rtol=1e-2, atol=1e-2)
    assert not stored(texts) and "a vector is multiplied" in str(report(run))


def test_the_price_decides() -> None:
    """Rows that registers hold are reduced by the kernel that applies the norm, and the report says so."""
    small, texts = whole(Block(), (2, 4, 5, 6))
    assert not stored(texts) and any(
        e.user == "mean" and "leaves with the product" in e.reason for e in small.edges
    )


@pytest.mark.slow
def test_long_rows_leave() -> None:
    """They would be read twice."""
    large, texts = whole(Block(128, 32), (1, 4, 192, 192))
    assert stored(texts) == {("sum", "squares")}
    assert large.kernels[0].operations == ("convolution", "bias", "mean", "var")
    assert not any(e.user == "mean" for e in large.edges)


@pytest.mark.gpu
def test_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments of tiles of the real kernels, whatever they cost: group norms behind convolutions, in both
    layouts."""
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")
    torch.manual_seed(0)
    for layout in (torch.contiguous_format, torch.channels_last):
        network = Block(128, 32).cuda().bfloat16().to(memory_format=layout).eval()
        x = torch.randn(1, 4, 512, 512, device="cuda", dtype=torch.bfloat16).to(memory_format=layout)
        run: Any = torch.compile(network, backend=backend)
        with torch.no_grad():
            torch.testing.assert_close(run(x), network(x), rtol=2e-2, atol=2e-2)
        assert any("store  Y1" in k.text and "squares= " in k.text for k in report(run).graphs[0].kernels)


@pytest.mark.slow
def test_kernels_and_their_second_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched as they are, by Triton's interpreter."""
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")
    network, x = Block(16, 4).eval(), torch.randn(2, 4, 9, 9)
    run: Any = torch.compile(network, backend=backend, options={"rest": "eager"})
    with torch.no_grad():
        torch.testing.assert_close(run(x), network(x), rtol=1e-3, atol=1e-3)  # f32 is multiplied in tf32
    assert stored([k.text for k in report(run).graphs[0].kernels]) == {("sum", "squares")}


def test_what_only_a_statistic_needs_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The squares of an RMS norm over features leave their sums; the product's result is stored, once."""
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(self.conv(x), dim=1)

    report_, texts = whole(Root(), (1, 4, 6, 5))
    assert stored(texts) == {("sum",)}
    first = parse(texts[0])
    assert [len(first.statistics), len(first.writes)] == [1, 2]
    assert report_.kernels[0].operations[:2] == ("convolution", "bias")


class Masked(nn.Module):
    """The gradient of a convolution behind those of an activation and of a batch norm, in bf16."""

    def forward(self, g: Tensor, w: Tensor, active: Tensor, x: Tensor) -> Tensor:
        made = nn.functional.conv_transpose2d(g, w, padding=1)
        made = torch.where(active <= 0, 0, made).float()
        dims = [0, 2, 3]
        total, dot = made.sum(dims, keepdim=True), (made * x).sum(dims, keepdim=True)
        return (made - total * 0.1 - x * dot * 0.2).bfloat16()


@pytest.mark.parametrize(("images", "size"), [(2, 6), (3, 5)])
def test_what_others_need_beside_a_statistic_is_stored(
    images: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masked gradient, which the norm reads: neither the mask nor what it masks. Its numbers are those
    of f64."""
    monkeypatch.setattr(region_kernels, "why_again", lambda kernel, rates: "")
    torch.manual_seed(size)
    shapes = (images, 4, size, size), (4, 8, 3, 3), *[(images, 8, size, size)] * 2
    given = [torch.randn(s).bfloat16() for s in shapes]
    run: Any = torch.compile(Masked(), backend=backend, options={"rest": "eager"})
    with by_meaning() as texts, torch.no_grad():
        made, meant = run(*given), Masked()(*(x.double() for x in given))
    torch.testing.assert_close(made.float(), meant.float(), rtol=2e-2, atol=6e-2)
    product, norm = (parse(t) for t in texts)
    assert [len(product.statistics), len(product.writes)] == [2, 3]
    assert {v.tensor.dtype.name for v in norm.views()} == {"bf16", "f32"}
    assert sum(v.tensor.shape == (images, 8, size * size) for v in norm.views()) == 3
