"""Linear upsampling of several dims whose gradient is computed: one dim after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.graph.meant import by_meaning, compare
from transconv.graph import backend, report, torch_compile
from transconv.graph.regions import aot_graphs, function_graphs
from transconv.runtime import torch_internals

Tensor = torch.Tensor
Upsampling = Callable[[Tensor], Tensor]


def compiled(f: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[Any, list[bool]]:
    """What torch.compile makes of a function, and of each of its graphs whether it was rewritten."""
    seen: list[bool] = []
    real = torch_internals.aot_autograd

    def entered(**about: Any) -> Any:
        def run(gm: fx.GraphModule, inputs: Any) -> Any:
            seen.append(any(n.target is function_graphs._interpolated for n in gm.graph.nodes))
            return real(**about)(gm, inputs)

        return run

    monkeypatch.setattr(torch_compile.torch_internals, "aot_autograd", entered, raising=False)
    torch._dynamo.reset()
    return torch.compile(f, backend=backend, options={"rest": "eager"}, **how), seen


CASES: list[tuple[tuple[int, ...], Upsampling]] = [
    ((2, 3, 5, 4), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    ((1, 2, 3, 5), lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True)),
    ((1, 2, 6, 5), lambda x: F.interpolate(x, size=(3, 4), mode="bilinear")),
    ((1, 2, 1, 4), lambda x: F.interpolate(x, scale_factor=(3, 1), mode="bilinear", align_corners=True)),
    ((1, 2, 4, 7), lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear")),
    (
        (1, 2, 4, 7),
        lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
    ),
    ((1, 2, 2, 3, 4), lambda x: F.interpolate(x, scale_factor=(2, 1.5, 3), mode="trilinear")),
    ((2, 1, 3, 2, 3), lambda x: F.interpolate(x, size=(5, 4, 6), mode="trilinear", align_corners=True)),
]


@pytest.mark.every(14)
@pytest.mark.parametrize(("shape", "upsampled"), CASES)
@pytest.mark.parametrize("last", [False, True])
def test_results_and_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], upsampled: Upsampling, last: bool
) -> None:
    def f(x: Tensor) -> Tensor:
        return upsampled(x * x).sin()

    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    order = torch.contiguous_format
    if last:
        order = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    run, seen = compiled(f, monkeypatch)
    with by_meaning():
        compare(f, run, [x.contiguous(memory_format=order).requires_grad_()], 1e-12)
    assert seen == [True]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_of_a_forward_graph_are_those_of_the_decomposition(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """To the last bit, where torch's operators compute both."""
    x = torch.randn(2, 3, 4, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = []
    for rewrite in (True, False):
        with monkeypatch.context() as patch:
            if not rewrite:
                patch.setattr(function_graphs, "_lines", lambda node: ())
            torch._dynamo.reset()

            def eager(gm: fx.GraphModule, inputs: Any) -> Any:
                function_graphs.interpolated(gm)
                own = {"fw_compiler": _as_it_is, "decompositions": aot_graphs.table()}
                return torch_internals.aot_autograd(**own)(gm, inputs)

            run = torch.compile(
                lambda t: F.interpolate(t * 1, scale_factor=2, mode="trilinear"), backend=eager
            )
            made.append(run(x.clone().requires_grad_()).detach())
    assert torch.equal(*made) and made[0].stride() == made[1].stride()


def _as_it_is(gm: fx.GraphModule, inputs: Any) -> Any:
    def run(given: list[Any]) -> Any:
        return gm(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@pytest.mark.slow
def test_a_gradient_has_no_weighted_image_for_each_corner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of the large image in f32 are not there at once, nor two."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv3d(4, 8, 1), nn.Conv3d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(F.interpolate(self.one(x), scale_factor=2, mode="trilinear").relu())

    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(1, 4, 4, 4, 4)
    run, _ = compiled(model, monkeypatch)
    with by_meaning():
        compare(model, run, [x.requires_grad_()], 1e-4)
    backward = report(run).graphs[1]
    large = 8 * 8**3 * 4
    gradients = [k for k in backward.kernels if "sum_of_neighbours" in k.name or "windows" in k.name]
    assert gradients and backward.peak < 3 * large, backward


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("shape", "upsampled", "how"),
    [
        ((1, 2, 4, 5), lambda x: F.interpolate(x, (6, 7), mode="bilinear", antialias=True), {}),
        ((1, 2, 4, 5), lambda x: F.interpolate(x, (6, 7), mode="bicubic"), {}),
        ((1, 2, 4, 5), lambda x: F.interpolate(x, (6, 7)), {}),
        ((1, 2, 5), lambda x: F.interpolate(x, 7, mode="linear"), {}),
        ((1, 2, 4, 5), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), {"dynamic": True}),
    ],
)
def test_other_upsampling_stays(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], upsampled: Upsampling, how: dict[str, Any]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    run, seen = compiled(upsampled, monkeypatch, **how)
    with by_meaning():
        compare(upsampled, run, [x.requires_grad_()], 1e-4)
    assert seen == [False]


def test_without_a_gradient_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    run, seen = compiled(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), monkeypatch)
    with by_meaning(), torch.no_grad():
        run(x.requires_grad_())
    assert seen == [False]
