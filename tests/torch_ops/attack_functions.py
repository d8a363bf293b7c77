"""The functions of transconv.functional: torch's function of each name, and a legal call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Drawn = random.Random
Base = Callable[[Drawn], tuple[list[Any], dict[str, Any]]]


def _of(shapes: tuple[tuple[int, ...] | None, ...], *rest: tuple[Any, ...], **named: Any) -> Base:
    """Tensors of the shapes, then one of each of the choices."""

    def base(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
        tensors = [None if s is None else torch.randn(*s) for s in shapes]
        kwargs = {k: rng.choice(v) for k, v in named.items() if rng.random() < 0.6}
        return [*tensors, *(rng.choice(r) for r in rest)], kwargs

    return base


def _cross(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    return [torch.randn(3, 5), torch.tensor([0, 4, 2])], {
        "reduction": rng.choice(("mean", "sum", "none")),
        "label_smoothing": rng.choice((0.0, 0.1)),
    }


def _several(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    dim = rng.choice((0, 1, -1))
    shapes = [[2, 3, 4] for _ in range(rng.choice((1, 2, 3)))]
    for shape in shapes:
        shape[dim] = rng.choice((1, 2, 5))
    return [[torch.randn(*s) for s in shapes]], {"dim": dim}


def _indexed(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    return [torch.randn(3, 4), rng.choice((0, 1, -1)), torch.tensor([2, 0, 1, 1])], {}


def _gathered(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    return [torch.randn(3, 4), rng.choice((0, 1, -1)), torch.tensor([[2, 0], [1, 1]])], {}


def _embedded(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    return [torch.tensor([[2, 0], [4, 2]]), torch.randn(5, 3)], {"padding_idx": rng.choice((None, 2, -1))}


def _pools(n: int) -> dict[str, tuple[Callable[..., Any], Base]]:
    """The four pools over ``n`` dims."""
    x, pair = (2, 3, *(4, 5, 3)[:n]), (2, 1, 2)[:n]
    more: dict[str, Any] = {"stride": (1, 2, None), "padding": (0, 1), "ceil_mode": (True, False)}
    found: dict[str, Base] = {
        "max_pool": _of((x,), (2, pair), **more, dilation=(1, 2), return_indices=(True, False)),
        "avg_pool": _of((x,), (2, pair), **more, count_include_pad=(True, False)),
        "adaptive_avg_pool": _of((x,), (1, 2, (2, 3, 1)[:n], (None, 2, None)[:n])),
        "adaptive_max_pool": _of((x,), (1, 2, (2, 3, 1)[:n]), return_indices=(True, False)),
    }
    return {f"{name}{n}d": (getattr(F, f"{name}{n}d"), base) for name, base in found.items()}


X = (2, 4, 3, 4)
DIM = ((0, 1, -1, (0, 2), None),)
ONE = ((0, 1, -1, 3),)
SOME = ((0, 1, (1, 2), ()),)
KEEP = {"keepdim": (True, False)}
FUNCTIONS: dict[str, tuple[Callable[..., Any], Base]] = {
    "sum": (torch.sum, _of((X,), *DIM, **KEEP)),
    "mean": (torch.mean, _of((X,), *DIM, **KEEP)),
    "prod": (torch.prod, _of((X,), *ONE, **KEEP)),
    "amax": (torch.amax, _of((X,), *SOME, **KEEP)),
    "amin": (torch.amin, _of((X,), *SOME, **KEEP)),
    "logsumexp": (torch.logsumexp, _of((X,), *ONE, **KEEP)),
    "var": (torch.var, _of((X,), *DIM, **KEEP)),
    "std": (torch.std, _of((X,), *DIM, **KEEP)),
    "any": (torch.any, _of((X,), *ONE, **KEEP)),
    "all": (torch.all, _of((X,), *ONE, **KEEP)),
    "max": (torch.max, _of((X,), *ONE, **KEEP)),
    "min": (torch.min, _of((X,), *ONE, **KEEP)),
    "argmax": (torch.argmax, _of((X,), *ONE, **KEEP)),
    "argmin": (torch.argmin, _of((X,), *ONE, **KEEP)),
    "softmax": (F.softmax, _of((X,), *ONE)),
    "log_softmax": (F.log_softmax, _of((X,), *ONE)),
    "normalize": (F.normalize, _of((X,), dim=(0, 1), p=(1, 2), eps=(1e-12,))),
    "cross_entropy": (F.cross_entropy, _cross),
    "layer_norm": (F.layer_norm, _of((X,), ((4,), (3, 4), [4]), (None,), (None,), (1e-5,))),
    "rms_norm": (F.rms_norm, _of((X,), ((4,), (3, 4)), (None,), (None, 1e-5))),
    "group_norm": (F.group_norm, _of((X,), (1, 2, 4), (None,), (None,), (1e-5,))),
    "instance_norm": (F.instance_norm, _of((X, (4,), (4,)), use_input_stats=(True,), momentum=(0.1,))),
    "batch_norm": (F.batch_norm, _of((X, (4,), (4,), (4,), (4,)), training=(True,), momentum=(0.1,))),
    **_pools(1),
    **_pools(2),
    **_pools(3),
    "linear": (F.linear, _of(((2, 3, 4), (5, 4), (5,)))),
    "matmul": (torch.matmul, _of(((2, 3, 4), (4, 5)))),
    "bmm": (torch.bmm, _of(((2, 3, 4), (2, 4, 5)))),
    "pad": (
        F.pad,
        _of((X,), ((1, 2), (0, 1, 2, 1), (-1, 0)), mode=("constant", "reflect", "replicate", "circular")),
    ),
    "flip": (torch.flip, _of((X,), ((0,), (1, -1), [2], ()))),
    "cat": (torch.cat, _several),
    "interpolate": (
        F.interpolate,
        _of((X,), (None, 6, (2, 9)), (None, 2, (1.5, 2.0)), ("nearest", "nearest-exact", "bilinear")),
    ),
    "pixel_shuffle": (F.pixel_shuffle, _of((X,), (1, 2))),
    "pixel_unshuffle": (F.pixel_unshuffle, _of(((2, 3, 4, 6),), (1, 2))),
    "unfold": (F.unfold, _of((X,), (2, (1, 2)), padding=(0, 1), stride=(1, 2), dilation=(1, 2))),
    "fold": (F.fold, _of(((2, 8, 12),), ((4, 5),), (2,), padding=(0,), stride=(1,))),
    "index_select": (torch.index_select, _indexed),
    "gather": (torch.gather, _gathered),
    "embedding": (F.embedding, _embedded),
}
