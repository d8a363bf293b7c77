"""Every differentiable function of the library and of fused calls, of operands that are made of one
tensor, beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import transconv
from transconv import functional

Tensor = torch.Tensor


class Case(NamedTuple):
    """``ours`` and ``theirs`` take one f64 tensor of ``shape``, of which they make all operands."""

    ours: Callable[[Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]
    shape: tuple[int, ...] = (3, 4)


def _case(make: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...] = (3, 4)) -> Case:
    """Of a function of a namespace and a tensor: transconv.functional, or torch's functions."""
    return Case(lambda x: make(functional, x), lambda x: make(TORCH, x), shape)


class _Torch:
    def __getattr__(self, name: str) -> Any:
        return getattr(F, name, None) or getattr(torch, name)


TORCH = _Torch()
ROWS = torch.tensor([0, 2, 2, 1])


def _first(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made[0]


LIBRARY: dict[str, Case] = {
    "matmul": _case(lambda f, x: f.matmul(x, x.T)),
    "matmul_of_one": _case(lambda f, x: f.matmul(x, x), (3, 3)),
    "bmm": _case(lambda f, x: f.bmm(x, x.mT * 2), (2, 2, 3)),
    "linear": _case(lambda f, x: f.linear(x, x.sin(), x[:, 0])),
    "layer_norm": _case(lambda f, x: f.layer_norm(x, (4,), x[0].exp(), x[1])),
    "rms_norm": _case(lambda f, x: f.rms_norm(x, (4,), x[0].exp())),
    "group_norm": _case(lambda f, x: f.group_norm(x, 2, x[0, :, 0], x[1, :, 1].sin()), (2, 4, 3)),
    "instance_norm": _case(lambda f, x: f.instance_norm(x, None, None, x[0, :, 0], x[1, :, 1]), (2, 2, 3)),
    "batch_norm": _case(lambda f, x: f.batch_norm(x, None, None, x[0, :, 0], x[1, :, 1], True), (2, 3, 2)),
    "batch_norm_of_running": _case(
        lambda f, x: f.batch_norm(
            x, torch.ones(3).double(), torch.full((3,), 2.0).double(), x[0, :, 0], x[1, :, 1]
        ),
        (2, 3, 2),
    ),
    "softmax": _case(lambda f, x: f.softmax(x * x.sum(), 1)),
    "log_softmax": _case(lambda f, x: f.log_softmax(x * x.sum(), 1)),
    "normalize": _case(lambda f, x: f.normalize(x * x.sum(), 2.0, 1)),
    "cross_entropy": _case(lambda f, x: f.cross_entropy(x * x.sum(), ROWS[:3])),
    "sum": _case(lambda f, x: f.sum(x * x, 1)),
    "mean": _case(lambda f, x: f.mean(x * x, 1)),
    "prod": _case(lambda f, x: f.prod(x * x[0], 1)),
    "amax": _case(lambda f, x: f.amax(x * x[0], 1)),
    "amin": _case(lambda f, x: f.amin(x * x[0], 1)),
    "max": _case(lambda f, x: f.max(x * x[0], 1)[0]),
    "min": _case(lambda f, x: f.min(x * x[0], 1)[0]),
    "max_of_all": _case(lambda f, x: f.max(x * x[0])),
    "logsumexp": _case(lambda f, x: f.logsumexp(x * x[0], 1)),
    "var": _case(lambda f, x: f.var(x * x[0], 1)),
    "std": _case(lambda f, x: f.std(x * x[0], 1)),
    "embedding": _case(lambda f, x: f.embedding(ROWS, x * x[0])),
    "gather": _case(lambda f, x: f.gather(x * x[0], 0, ROWS[None])),
    "index_select": _case(lambda f, x: f.index_select(x * x[0], 0, ROWS)),
    "cat": _case(lambda f, x: f.cat([x, x * x, x], 1)),
    "flip": _case(lambda f, x: f.flip(x * x, (1,))),
    "pad": _case(lambda f, x: f.pad(x * x, (1, 2))),
    "pad_reflect": _case(lambda f, x: f.pad(x * x, (1, 2), mode="reflect")),
    "interpolate": _case(lambda f, x: f.interpolate(x * x, scale_factor=2), (1, 2, 3)),
    "pixel_shuffle": _case(lambda f, x: f.pixel_shuffle(x * x, 2), (1, 4, 2, 3)),
    "pixel_unshuffle": _case(lambda f, x: f.pixel_unshuffle(x * x, 2), (1, 1, 4, 2)),
    "unfold": _case(lambda f, x: f.unfold(x * x, 2), (1, 2, 3, 3)),
    "fold": _case(lambda f, x: f.fold(x * x, (3, 3), 2), (1, 4, 4)),
    **{
        f"{kind}_pool{n}d": _case(
            lambda f, x, name=f"{kind}_pool{n}d": getattr(f, name)(x * x.sum(), 2), (1, 1, *[4] * n)
        )
        for kind in ("max", "avg")
        for n in (1, 2, 3)
    },
    **{
        f"adaptive_{kind}_pool{n}d": _case(
            lambda f, x, name=f"adaptive_{kind}_pool{n}d": _first(getattr(f, name)(x * x.sum(), 2)),
            (1, 1, *[4] * n),
        )
        for kind in ("max", "avg")
        for n in (1, 2, 3)
    },
}
"""Functions of transconv.functional."""


def _convolution(n: int, transposed: bool) -> Case:
    name = f"conv_transpose{n}d" if transposed else f"conv{n}d"

    def of(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: f(x, x.sin().transpose(0, 1), x[(0, slice(1), *[0] * n)], padding=1)

    return Case(of(getattr(transconv, name)), of(getattr(F, name)), (1, 1, *[3 if n == 1 else 2] * n))


def _fused(activation: str | None, residual: bool) -> Case:
    def ours(x: Tensor) -> Tensor:
        return transconv.fused_conv1d(
            x,
            x,
            x[0, :, 0],
            padding=1,
            activation=activation,
            residual=F.conv1d(x, x, padding=1) if residual else None,
        )

    def theirs(x: Tensor) -> Tensor:
        y = F.conv1d(x, x, x[0, :, 0], padding=1)
        return getattr(torch, activation or "clone")(y + F.conv1d(x, x, padding=1) if residual else y)

    return Case(ours, theirs, (1, 1, 3))


CONVOLUTIONS: dict[str, Case] = {
    **{
        c: _convolution(n, t)
        for n in (1, 2, 3)
        for t in (False, True)
        for c in [f"conv_transpose{n}d" if t else f"conv{n}d"]
    },
    **{
        f"fused_{a or 'plain'}{'_residual' * r}": _fused(a, bool(r))
        for a in (None, "relu", "sigmoid", "tanh")
        for r in (0, 1)
    },
    "epilogue": Case(
        lambda x: transconv.fused_conv1d(x, x[:, :, :1], epilogue=lambda a, g: a * g, operands=(x,)),
        lambda x: F.conv1d(x, x[:, :, :1]) * x,
        (1, 1, 3),
    ),
    "epilogue_of_two": Case(
        lambda x: transconv.fused_conv1d(
            x, x[:, :, :1], epilogue=lambda a, g, h: F.silu(a + g) * h, operands=(x.sin(), x)
        ),
        lambda x: F.silu(F.conv1d(x, x[:, :, :1]) + x.sin()) * x,
        (1, 1, 3),
    ),
}
"""The drop-in's functions."""

CASES = LIBRARY | CONVOLUTIONS
