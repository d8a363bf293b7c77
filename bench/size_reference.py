"""The exact sums of a convolution of small whole numbers, by one product for each tap.

cuDNN plans anew for each size, which takes milliseconds, and half a second for a depthwise layer: too
long for thousands of sizes. Here the image, padded once, is cut out for each tap, and a product of
matrices adds what the tap gives, in f32 or as tf32: products and sums of small whole numbers are exact in
both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from transconv.conv import ConvProblem, Prop

Tensor = torch.Tensor
LARGEST = 2.0**22  # sums up to this are exact in f32, and on matrix units that keep some bits less


def exact_sums(p: ConvProblem, prop: Prop, given: dict[str, Tensor]) -> Tensor:
    """The result of a direction in f32, from operands by name. Raises ValueError if it is too large to be
    exact."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        made = {Prop.FWD: _forward, Prop.BWD_D: _data, Prop.BWD_W: _weight}[prop](p, given)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    if made.numel() and float(made.abs().amax()) > LARGEST:
        raise ValueError(f"{p}: a sum is larger than {LARGEST:g}; expected smaller operands")
    return made


def _forward(p: ConvProblem, given: dict[str, Tensor]) -> Tensor:
    image, weight = _padded(p, _last(given["src"])), given["wei"].float()
    total = image.new_zeros((p.mb, *p.o, p.oc))
    for tap, where in _taps(p):
        _add(total, image[where], _of_tap(p, weight, tap))
    return total.movedim(-1, 1)


def _data(p: ConvProblem, given: dict[str, Tensor]) -> Tensor:
    gradient, weight = _last(given["dst"]), given["wei"].float()
    image = gradient.new_zeros((p.mb, *(n + sum(_around(p, x)) for x, n in enumerate(p.i)), p.ic))
    for tap, where in _taps(p):
        _add(image[where], gradient, _of_tap(p, weight, tap).transpose(1, 2))
    inside = tuple(slice(p.pad_lo[x], p.pad_lo[x] + n) for x, n in enumerate(p.i))
    return image[(slice(None), *inside)].movedim(-1, 1)


def _weight(p: ConvProblem, given: dict[str, Tensor]) -> Tensor:
    image, gradient = _padded(p, _last(given["src"])), _last(given["dst"])
    total = image.new_zeros((p.oc, p.icg, *p.k))
    rows = gradient.reshape(-1, p.g, p.ocg)
    for tap, where in _taps(p):
        seen = image[where].reshape(-1, p.g, p.icg)
        if p.icg == p.ocg == 1:
            found = (rows * seen).sum(0).reshape(p.g, 1, 1)
        else:
            found = torch.bmm(rows.permute(1, 2, 0), seen.transpose(0, 1))
        total[(slice(None), slice(None), *tap)] = found.reshape(p.oc, p.icg)
    return total


def _last(x: Tensor) -> Tensor:
    """In f32, with features last."""
    return x.movedim(1, -1).float()


def _around(p: ConvProblem, x: int) -> tuple[int, int]:
    """How many zeros a dimension of the image gets before and behind it, so that each tap is inside."""
    reach = (p.o[x] - 1) * p.stride[x] + (p.k[x] - 1) * p.dilation[x] + 1
    return p.pad_lo[x], max(0, reach - p.i[x] - p.pad_lo[x])


def _padded(p: ConvProblem, image: Tensor) -> Tensor:
    zeros = [n for x in reversed(range(p.ndims)) for n in _around(p, x)]
    return torch.nn.functional.pad(image, [0, 0, *zeros])


def _taps(p: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Each tap, and what it sees of the padded image."""
    for tap in product(*map(range, p.k)):
        first = [t * d for t, d in zip(tap, p.dilation, strict=True)]
        yield (
            tap,
            (
                slice(None),
                *(slice(f, f + (o - 1) * s + 1, s) for f, o, s in zip(first, p.o, p.stride, strict=True)),
            ),
        )


def _of_tap(p: ConvProblem, weight: Tensor, tap: tuple[int, ...]) -> Tensor:
    """The weights of a tap as a matrix for each group: from features of the image to those of dst."""
    return weight[(slice(None), slice(None), *tap)].reshape(p.g, p.ocg, p.icg).transpose(1, 2)


def _add(total: Tensor, x: Tensor, matrices: Tensor) -> None:
    """Add the product of the features of ``x`` and a matrix for each group."""
    groups, inner, outer = matrices.shape
    if inner == outer == 1:
        total.addcmul_(x, matrices.reshape(-1))
    elif groups == 1:
        total += (x.reshape(-1, inner) @ matrices[0]).view(*x.shape[:-1], outer)
    else:
        found = torch.bmm(x.reshape(-1, groups, inner).transpose(0, 1), matrices)
        total += found.transpose(0, 1).reshape(*x.shape[:-1], groups * outer)
