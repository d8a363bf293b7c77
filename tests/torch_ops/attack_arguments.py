"""Odd values in the place of an argument, and tensors like and unlike a given one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Drawn = random.Random


class Text(str):
    """A subclass of str."""


def values(rng: Drawn) -> Any:
    """Something in the place of a number, a list of numbers, a flag or a word."""
    import numpy as np

    return rng.choice(
        [
            0,
            1,
            2,
            3,
            -1,
            -2,
            5,
            17,
            True,
            False,
            1.0,
            0.5,
            float("nan"),
            None,
            "same",
            "valid",
            "relu",
            "",
            Text("same"),
            (1,),
            (2, 1),
            (1, 2, 1),
            [1],
            [2, 2],
            (),
            [],
            (0,),
            (-1, 1),
            (1.0,),
            (True,),
            ("1",),
            (None,),
            np.int64(2),
            np.int32(1),
            np.bool_(True),
            np.float32(1),
            np.array([1, 2]),
            [np.int64(1)],
            torch.tensor(1),
            torch.tensor([1, 2]),
            torch.tensor(1.5),
            [torch.tensor(1)],
            torch.Size((1, 1)),
            torch.float64,
            torch.float16,
            torch.int32,
            2**31,
            2**40,
            {1},
            {},
            slice(1),
            range(2),
            b"same",
            1j,
            object,
        ]
    )


def _negated(t: Tensor) -> Tensor:
    """A view whose elements are negated when they are read."""
    if t.dtype not in (torch.float32, torch.float64):
        return t
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def _misaligned(t: Tensor) -> Tensor:
    flat = torch.zeros(t.numel() + 1, dtype=t.dtype)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


def _gaps(t: Tensor) -> Tensor:
    if not t.dim():
        return t
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 1).to(t.dtype)
    wide[..., 1::2] = t
    return wide[..., 1::2]


def _last(t: Tensor) -> Tensor:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    return t if form is None else t.contiguous(memory_format=form)


def _reversed(t: Tensor) -> Tensor:
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def _empty(t: Tensor, rng: Drawn) -> Tensor:
    if not t.dim():
        return t
    shape = list(t.shape)
    shape[rng.randrange(len(shape))] = 0
    return t.new_zeros(shape)


def _zero_stride(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape) if t.dim() and t.shape[0] else t


def _made_in_inference_mode(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def _odd_strides_of_one(t: Tensor) -> Tensor:
    """The stride of a dim with one element means nothing."""
    return t.as_strided(t.shape, [7 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


LIKE: tuple[Callable[[Tensor, Drawn], Any], ...] = (
    lambda t, rng: _gaps(t),
    lambda t, rng: _last(t),
    lambda t, rng: _reversed(t),
    lambda t, rng: _misaligned(t),
    lambda t, rng: _negated(t),
    lambda t, rng: _zero_stride(t),
    lambda t, rng: t.flip(0) if t.dim() else t,
    lambda t, rng: torch.nn.Parameter(t) if t.is_floating_point() else t,
    lambda t, rng: t.clone().requires_grad_() if t.is_floating_point() else t,
    lambda t, rng: t.clone().requires_grad_() * 1 if t.is_floating_point() else t,
    lambda t, rng: _made_in_inference_mode(t),
    lambda t, rng: _odd_strides_of_one(t),
    lambda t, rng: t.unsqueeze(-1).expand(*t.shape, 3)[..., 1],
)
UNLIKE: tuple[Callable[[Tensor, Drawn], Any], ...] = (
    lambda t, rng: t.unsqueeze(0),
    lambda t, rng: t[0] if t.dim() and t.shape[0] else t,
    lambda t, rng: t.flatten(),
    _empty,
    lambda t, rng: t.new_zeros(()),
    lambda t, rng: None,
    lambda t, rng: t.to("meta"),
    lambda t, rng: t.tolist(),
    lambda t, rng: t.numpy(),
    lambda t, rng: 1.0,
    lambda t, rng: t.to_sparse(),
    lambda t, rng: t.transpose(0, -1) if t.dim() else t,
    lambda t, rng: t.to(torch.complex64).conj(),
    lambda t, rng: torch._efficientzerotensor(t.shape),
    lambda t, rng: torch.nested.nested_tensor([t, t]),
    lambda t, rng: t.expand(2, *t.shape),
    lambda t, rng: t[..., :1],
    lambda t, rng: t.narrow(-1, 0, t.shape[-1] // 2) if t.dim() else t,
    lambda t, rng: t.repeat(2, *[1] * (t.dim() - 1)) if t.dim() else t,
    *(
        lambda t, rng, d=d: t.to(d)
        for d in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.bool,
            torch.uint8,
            torch.complex64,
        )
    ),
)
