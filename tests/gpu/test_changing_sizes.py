"""Functions in torch.compile at several shapes, by kernels of a GPU, beside the functions themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.graph.test_aliases import VIEWS
from tests.graph.test_changing_sizes import PLACES
from transconv.graph import backend, report

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor


def checked(f: Callable[..., Any], sets: list[list[Tensor]], dynamic: bool | None) -> None:
    torch._dynamo.reset()
    run = torch.compile(f, backend=backend, dynamic=dynamic, options={"rest": "eager"})
    for given in sets:
        for _ in range(2):  # the second call looks at nothing
            torch.testing.assert_close(run(*given), f(*given), rtol=1e-4, atol=1e-4)
    assert any(g.kernels for g in report(run).graphs)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PLACES)
def test_counts_and_places(name: str, dynamic: bool | None) -> None:
    """Beyond a tile, too."""
    f, shapes = PLACES[name]
    more = (*shapes, (129, 700) if len(shapes[0]) == 2 else (33, 5, 260))
    checked(f, [[torch.randn(s, device="cuda")] for s in more], dynamic)


@pytest.mark.parametrize("dynamic", [None, True])
def test_indices_into_concatenations_and_pads(dynamic: bool | None) -> None:
    x, y = torch.randn(70, 33, device="cuda"), torch.randn(40, 33, device="cuda")
    i = torch.randint(0, 110, (200,), device="cuda")
    checked(lambda x, y, i: torch.cat([x, y])[i] * 2, [[x, y, i], [x[:9], y, i[i < 49]]], dynamic)
    checked(
        lambda x, i: F.pad(x, (1, 2)).index_select(1, i) * 2,
        [[x, i[i < 36]], [y[:, :20], i[i < 23]]],
        dynamic,
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_bilinear_and_a_weight_of_unknown_sizes(dynamic: bool | None) -> None:
    images = [[torch.randn(s, device="cuda")] for s in ((2, 3, 14, 15), (3, 3, 15, 14), (2, 3, 37, 6))]
    checked(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear") * 2, images, dynamic)
    sets = [
        [torch.randn(s, device="cuda"), torch.randn(w, device="cuda") * 0.1]
        for s, w in (
            ((2, 16, 16, 15), (32, 16, 3, 3)),
            ((3, 32, 17, 18), (16, 32, 3, 3)),
            ((2, 24, 19, 18), (8, 24, 5, 5)),
        )
    ]
    for stride in (1, 2):
        with torch.backends.cudnn.flags(allow_tf32=False):
            checked(lambda x, w, s=stride: F.conv2d(x, w, stride=s, padding=1).relu(), sets, dynamic)


def test_sums_of_integers_wrap_around() -> None:
    sets = [[torch.full((n, 4), 2**30, dtype=torch.int32, device="cuda")] for n in (3, 4)]
    checked(lambda x: (x * 1).sum(0, dtype=torch.int32), sets, None)


@pytest.mark.parametrize("name", ["half", "split in two", "chunk", "permute"])
def test_views_that_are_results(name: str) -> None:
    x = torch.randn(3, 4, 6, device="cuda")
    for f in (VIEWS[name], lambda x: (y := x.sin(), VIEWS[name](y))):
        run: Any = torch.compile(f, backend=backend, dynamic=True, options={"rest": "eager"})
        made, want = run(x), f(x)
        for a, b in zip(
            (made if isinstance(made, tuple) else (made,)),
            (want if isinstance(want, tuple) else (want,)),
            strict=True,
        ):
            assert a.stride() == b.stride()
            near = 0 if f is VIEWS[name] else 1e-6  # a sine of its own
            torch.testing.assert_close(a, b, rtol=near, atol=near)
