"""Functions in torch.compile at several shapes, with torch's ways to have sizes that change, beside the
functions themselves; and graphs held to themselves at other batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.graph.draw import Draw, Drawn, Step
from tests.graph.draw_at_shapes import compiled, halved, least, permuted, ran, wrong
from tests.graph.meant import by_meaning, compare
from transconv.graph import backend, report

Tensor = torch.Tensor
Shapes = Sequence[tuple[int, ...]]
FLAT = ((4, 6), (9, 7), (3, 17), (5, 6))
DEEP = ((4, 2, 6), (3, 5, 7), (2, 3, 17), (5, 4, 6))
IMAGES = ((2, 3, 4, 5), (3, 3, 5, 4), (2, 3, 7, 6))


def checked(
    f: Callable[..., Any],
    sets: Sequence[Sequence[Tensor]],
    dynamic: bool | None,
    most: float = 1e-9,
    named: bool = True,
    alone: bool = True,
    gradients: bool = False,
) -> None:
    """At each set of inputs what f gives; by kernels of ours, ``alone``, of which one has sizes as names
    (``named``)."""
    run = torch.compile(f, backend=backend, dynamic=dynamic, options={"rest": "eager"})
    for given in sets:
        compare(f, run, given, most, gradients)
    graphs = report(run).graphs
    kernels = [k for g in graphs for k in g.kernels]
    assert kernels and not any(g.whole for g in graphs)
    assert not alone or all(len(g.rows) == len(g.kernels) for g in graphs), report(run)
    assert not named or any("sizes  S" in k.text and not k.numbers for k in kernels)


def random(shapes: Shapes, needs: bool = False) -> list[list[Tensor]]:
    return [[torch.randn(s, dtype=torch.float64, requires_grad=needs)] for s in shapes]


PLACES: dict[str, tuple[Callable[[Tensor], Any], Shapes]] = {
    "argmax": (lambda x: (x * 2).argmax(1), FLAT),
    "argmin": (lambda x: (x * 2).argmin(1), FLAT),
    "max": (lambda x: (x * 2).max(1), FLAT),
    "min": (lambda x: (x * 2).min(0), FLAT),
    "two axes": (lambda x: (x * 2).flatten(1).argmax(1), DEEP),
    "all": (lambda x: (x * 2).argmin(), FLAT),
    "kept": (lambda x: (x * 2).argmax(1, keepdim=True), DEEP),
    "std": (lambda x: x.std(0), FLAT),
    "std_mean": (lambda x: torch.std_mean(x, 1), FLAT),
    "var of a fraction": (lambda x: x.var(1, correction=0.5), FLAT),
    "var of two axes": (lambda x: x.var((0, 2), correction=2), DEEP),
    "normalized": (lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5), FLAT),
    "over a size": (lambda x: x.sum(1) / (x.shape[1] - 1), FLAT),
    "times a fraction": (lambda x: x * (x.shape[1] / 4) + x.shape[0] * 0.5, FLAT),
    "padded with a size": (lambda x: F.pad(x, (1, 2), value=x.shape[0]).sin(), FLAT),
    "filled": (lambda x: x + torch.full_like(x, x.shape[1]) * x.new_full((x.shape[1],), 0.5), FLAT),
}
QUICK = ("argmax", "max", "std")  # by kernels; all, with each way, in `make check-all`


@pytest.mark.every(2)
@pytest.mark.parametrize("name", QUICK)
def test_kernels_have_no_size_of_the_example(name: str) -> None:
    f, shapes = PLACES[name]
    checked(f, random(shapes[:3]), None)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PLACES)
def test_counts_and_places_at_several_shapes(name: str, dynamic: bool | None) -> None:
    f, shapes = PLACES[name]
    checked(f, random(shapes), dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_gradient_of_a_maximum(dynamic: bool | None) -> None:
    checked(
        lambda x: (x * 2).max(1)[0].sin(), random(FLAT[:3], True), dynamic, alone=False, gradients=True
    )


# -- indices, and what reaches the user -------------------------------------------------------------

D = torch.float64


def _joined(f: Callable[..., Any]) -> list[list[Tensor]]:
    return [
        [torch.randn(n, 5, dtype=D), torch.randn(m, 5, dtype=D), torch.tensor(i)]
        for n, m, i in ((2, 2, [0, 3, 1]), (3, 4, [6, 0, 3]), (4, 6, [9, 5, 0, 4]))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_an_index_into_a_concatenation(dynamic: bool | None) -> None:
    for f in (lambda x, y, i: torch.cat([x, y])[i] * 2, lambda x, y, i: torch.cat([x.sin(), y])[i] * 2):
        checked(f, _joined(f), dynamic, named=False)
        run = torch.compile(f, backend=backend, dynamic=dynamic, options={"rest": "eager"})
        x, y, _ = _joined(f)[0]
        with pytest.raises(IndexError, match="out of bounds"):
            run(x, y, torch.tensor([0, 4, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_an_index_into_a_pad(dynamic: bool | None) -> None:
    sets = [[torch.randn(2, n, dtype=D), torch.tensor([0, n + 2, 2, 1])] for n in (5, 4, 7)]
    for mode in ("constant", "replicate"):
        checked(
            lambda x, i, mode=mode: F.pad(x, (1, 2), mode=mode).index_select(1, i) * 2,
            sets,
            dynamic,
            named=False,
        )


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_bilinear_at_several_shapes(dynamic: bool | None) -> None:
    sets = [[torch.randn(s, dtype=D)] for s in IMAGES]
    checked(
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear") * 2,
        sets,
        dynamic,
        1e-6,
        named=False,
        alone=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_a_convolution_with_a_weight_of_unknown_sizes(dynamic: bool | None) -> None:
    sets = [
        [torch.randn(s, dtype=D), torch.randn(w, dtype=D)]
        for s, w in (
            ((2, 3, 6, 5), (4, 3, 3, 3)),
            ((3, 5, 7, 8), (6, 5, 3, 3)),
            ((2, 4, 9, 8), (3, 4, 5, 5)),
        )
    ]
    for stride in (2,) if dynamic is None else (1, 2):
        sets = sets[:2] if dynamic is None else sets
        checked(
            lambda x, w, s=stride: F.conv2d(x, w, stride=s, padding=1).relu(),
            sets,
            dynamic,
            1e-9,
            named=False,
        )


def test_sums_of_integers_wrap_around() -> None:
    sets = [[torch.full((n, 4), 2**30, dtype=torch.int32)] for n in (3, 4)]
    checked(lambda x: (x * 1).sum(0, dtype=torch.int32), sets, None, named=False)
    checked(lambda x: (x * 1).sum(dtype=torch.int32), sets, None, named=False)


# -- drawn graphs -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", ["none", "true"])
@pytest.mark.parametrize(
    "seed", [*range(4), 20000, 13044]
)  # a part of a result has no rule; a product of a size with itself
def test_drawn_graphs_at_four_shapes(seed: int, dynamic: str) -> None:
    """`python -m tests.graph.draw --shapes 4` draws more."""
    with by_meaning():
        found, drawn = wrong(seed, 4, dynamic)
        assert not found.problem, least(drawn, dynamic)
        assert found.kernels


@pytest.mark.slow
def test_a_value_is_stored_where_its_group_has_it() -> None:
    """Also where its shape has no order of the group's rows at all sizes."""
    with by_meaning():
        found, drawn = wrong(210099, 4, "true", True)
    assert not found.problem, least(drawn, "true")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_halves_and_other_orders_of_a_batch(seed: int) -> None:
    """A graph of which no operation joins images gives the same of each, alone or among others."""
    drawn = Draw(seed).drawn(gradients=False, together=False)
    with by_meaning():
        run = compiled(drawn, True)
        assert not halved(drawn, run), drawn
        assert not permuted(drawn, run), drawn
    assert any(g.kernels for g in report(run).graphs)


@pytest.mark.slow
def test_a_planted_number_of_the_example_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of elements that are those of the example, as if a rule had read a value."""
    monkeypatch.setenv("TRANSCONV_TRUST", "never")  # else it is torch's
    from transconv.graph.lowerings import reductions
    from transconv.graph.sizes import like

    monkeypatch.setattr(reductions, "prod", lambda sizes: like(math.prod(sizes)))
    x = torch.randn(4, 6, dtype=torch.float64)
    drawn = Drawn(
        (x,),
        (
            Step((0,), torch.sin, "sin"),
            Step((1,), lambda x: x.std(1), "std"),
            Step((2,), torch.exp, "exp"),
        ),
        (3,),
        others=((torch.randn(3, 9, dtype=torch.float64),),),
    )
    with by_meaning():
        assert "off by" in ran(drawn, True).problem and not ran(drawn, False).problem
        why, made = least(drawn, "true")
    assert [s.says for s in made.steps] == ["std"] and "off by" in why
