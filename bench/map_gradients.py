"""Gradients of norms and of what moves elements, by the library's texts; torch's are its own operators."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.map_cases import MapCase, Tensors
from bench.map_moves import image, last
from transconv.compute import library
from transconv.compute.library import LibraryFormula, Strided, views
from transconv.ir import bf16

ALL = [True, True, True]
aten = torch.ops.aten


def gradients() -> list[MapCase]:
    """Of all operands, and all are returned: torch.compile leaves out what is not."""
    rows, features, channels = (Strided.dense(n, bf16) for n in ((16384, 4096), (4096,), (256,)))
    images = last(64, 256, 56, 56)
    return [
        _case(
            "layer norm backward 16384x4096",
            library.layer_norm(rows, 1, features, features),
            lambda t: aten.native_layer_norm_backward(
                t["G"], t["X"], [4096], t["M"][:, None], t["R"][:, None], t["W"], t["W"], ALL
            ),
        ),
        _case(
            "rms norm backward 16384x4096",
            library.rms_norm(rows, 1, features),
            lambda t: aten._fused_rms_norm_backward(
                t["G"], t["X"], [4096], t["R"][:, None], t["W"], ALL[:2]
            ),
        ),
        _group_norm(256, 512),
        _group_norm(512, 128),
        _case(
            "batch norm backward resnet",
            library.batch_norm(images, w=channels, b=channels),
            lambda t: aten.native_batch_norm_backward(
                image(t["G"], *images.shape),
                image(t["X"], *images.shape),
                t["W"],
                None,
                None,
                t["M"],
                t["R"],
                True,
                1e-5,
                ALL,
            ),
        ),
        _case(
            "reflect pad backward 256x512x512",
            views.pad(last(1, 256, 512, 512), last(1, 256, 514, 514), (0, 0, 1, 1), "reflect"),
            lambda t: aten.reflection_pad2d_backward(
                image(t["G"], 1, 256, 514, 514), image(t["dX"], 1, 256, 512, 512), [1, 1, 1, 1]
            ),
        ),
        _case(
            "nearest backward 512x256x256",
            views.nearest(last(1, 512, 256, 256), last(1, 512, 512, 512), (None, None)),
            lambda t: aten.upsample_nearest2d_backward(
                image(t["G"], 1, 512, 512, 512), [512, 512], [1, 512, 256, 256]
            ),
        ),
    ]


def _case(
    name: str,
    formula: LibraryFormula,
    instead: Callable[[Tensors], object],
    other: Callable[[Tensors], Tensors] | None = None,
) -> MapCase:
    whole = formula.together
    first, *more = (g.text for g in (formula.gradients if whole is None else (whole,)))
    return MapCase(name, first, instead, tuple(more), other)


def _group_norm(c: int, size: int) -> MapCase:
    weights = Strided.dense((c,), bf16)

    def theirs(t: Tensors) -> object:
        g, x = (image(t[n].flatten(), 1, c, size, size) if t[n].dim() < 4 else t[n] for n in "GX")
        mean, rstd = (t[n][None].to(x.dtype) for n in "MR")  # torch keeps them in the image's type
        return aten.native_group_norm_backward(
            g, x, mean, rstd, t["W"].flatten(), 1, c, size * size, 32, ALL
        )

    def first(t: Tensors) -> Tensors:
        return t | {n: image(t[n].flatten(), 1, c, size, size).contiguous() for n in "GX"}

    return _case(
        f"group norm backward {c}x{size}x{size}",
        library.group_norm(last(1, c, size, size), 32, weights, weights),
        theirs,
        first,
    )
