"""Functional calls whose kernels take sizes as arguments: one form for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv import functional as ours
from transconv.calls import route_cache, size_policy
from transconv.functional.calls import route, symbolic_bind
from transconv.runtime import registry

Case = tuple[Callable[..., Any], Callable[..., Any]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Examples of a size that the interpreter likes; every plan that is asked for is listed."""
    for name, value in {"ROWS": 4, "LONG": 16, "ELEMENTS": 64, "SIDE": 4, "REACHES": (8, 96)}.items():
        monkeypatch.setattr(symbolic_bind, name, value)
    symbolic_bind._written.clear()  # texts that other tests had written, with other examples
    asked: list[Any] = []
    ready = registry.ready
    monkeypatch.setattr(registry, "ready", lambda *given: (asked.append(given[0]), ready(*given))[1])
    transconv.config.sizes = "any"
    yield asked
    symbolic_bind._written.clear()


def same(mine: Callable[..., Any], theirs: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
    """Results and gradients, of small whole numbers: sums of them are exact."""
    given = [torch.randint(-4, 5, shape).float().requires_grad_() for shape in shapes]
    got, want = mine(*given), theirs(*given)
    g = torch.randint(-4, 5, want.shape).float()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, given, g), torch.autograd.grad(want, given, g), rtol=1e-4, atol=1e-4
    )


ROWS: dict[str, Case] = {
    "sum": (lambda x: ours.sum(x, 1), lambda x: torch.sum(x, 1)),
    "mean first": (lambda x: ours.mean(x, 0), lambda x: torch.mean(x, 0)),
    "var": (lambda x: ours.var(x, 1), lambda x: torch.var(x, 1)),
    "log_softmax": (lambda x: ours.log_softmax(x, 1), lambda x: F.log_softmax(x, 1)),
    "rms_norm": (
        lambda x: ours.rms_norm(x, x.shape[1:], None, 0.5),
        lambda x: F.rms_norm(x, x.shape[1:], None, 0.5),
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "log_softmax")) for n in ROWS]
)
def test_drawn_sizes_edges_first_with_one_build(name: str, small: list[Any]) -> None:
    mine, theirs = ROWS[name]
    draw = torch.Generator().manual_seed(7)
    drawn = [tuple(torch.randint(2, 60, (2,), generator=draw).tolist()) for _ in range(3)]
    for at, shape in enumerate([(2, 8), (2, 9), (2, 7), (3, 96), (96, 3), (2, 2), *drawn]):
        same(mine, theirs, shape)
        if at == 0:
            built = len(small)
    assert len(small) == built <= 2 * len(symbolic_bind.REACHES)
    called = name.split()[0]
    assert transconv.stats(reset=True).native == dict.fromkeys(
        (f"{called} any size", f"{called}_gradient any size"), 9
    )


@pytest.mark.slow
def test_scale_shift_and_windows(small: list[Any]) -> None:
    def norm(f: Any) -> Callable[..., Any]:
        return lambda x, w, b: f(x, x.shape[1:], w, b, 0.5)

    def pool(f: Any) -> Callable[..., Any]:
        return lambda x: f(x, 3, 2, 1)

    for n, k in ((3, 5), (2, 20)):
        same(norm(ours.layer_norm), norm(F.layer_norm), (n, k), (k,), (k,))
    for shape in ((1, 2, 5, 4), (2, 2, 3, 6)):
        same(pool(ours.max_pool2d), pool(F.max_pool2d), shape)
        same(
            lambda x: ours.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            shape,
        )
    assert set(transconv.stats(reset=True).native) == {
        f"{name}{end} any size"
        for name in ("layer_norm", "max_pool2d", "avg_pool2d")
        for end in ("", "_gradient")
    }
    assert len(small) == 3 * 2 + 4


@pytest.mark.slow
def test_what_the_requirements_exclude_has_a_kernel_of_its_own(
    small: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbolic_bind, "MOST", 128)
    mine, theirs = ROWS["sum"]
    same(mine, theirs, (4, 32))
    native = {"sum any size": 1, "sum_gradient any size": 1}
    assert transconv.stats(reset=True).native == native
    same(mine, theirs, (4, 33))  # 132 elements
    same(mine, theirs, (2, 97))  # a row that is too long
    x = torch.ones(4, 64)[:, ::2]
    torch.testing.assert_close(ours.sum(x, 1), x.sum(1))  # gaps
    assert transconv.stats(reset=True).native == {"sum": 3, "sum_gradient": 2}
    taken, text = next(
        (kind.choose((4, 32), "now"), text)
        for kind in size_policy._registries.values()
        for text in kind.texts.values()
        if "sum(x" in text
    )
    assert "N*K <= 128" in text and "(N * K) <= 128" in taken.why


def test_a_kernel_that_stands_in_is_asked_for_until_the_wait_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, choose = [True], route.Registry.choose

    def chosen(self: Any, *given: Any) -> Any:
        return replace(choose(self, *given), waits=(lambda: not waits[0]) if waits[0] else None)

    monkeypatch.setattr(route.Registry, "choose", chosen)
    for _ in range(3):
        ours.sum(torch.ones(3, 5), 1)
    assert not route_cache.routes and [r.calls for r, _ in route_cache._waiting.values()] == [3]
    waits[0] = False
    for _ in range(2):
        ours.sum(torch.ones(3, 5), 1)
    assert not route_cache._waiting and [r.calls for r in route_cache.routes.values()] == [2]
    assert transconv.stats(reset=True).native == {"sum any size": 5}
