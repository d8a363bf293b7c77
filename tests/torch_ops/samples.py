"""torch's own sample inputs, and ways to lay the same numbers out differently in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import transconv

FUNCTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def opinfo(name: str) -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == f"nn.functional.{name}")


def ours(name: str) -> Callable[..., torch.Tensor]:
    return getattr(transconv, name)


def theirs(name: str) -> Callable[..., torch.Tensor]:
    return getattr(torch.nn.functional, name)


def samples(
    name: str, dtype: torch.dtype, requires_grad: bool = False, device: str = "cpu"
) -> Iterator[Any]:
    yield from drawn(opinfo(name), device, dtype, requires_grad)


def drawn(entry: Any, device: str, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[Any]:
    """The samples that ``entry.sample_inputs`` gives. It reads the source of every caller to find a test
    of ``unittest``, for each sample."""
    from torch.testing._internal.common_utils import SEED, set_rng_seed

    left = iter(entry.sample_inputs_func(entry, device, dtype, requires_grad))
    end = object()
    while True:
        set_rng_seed(SEED)
        if (sample := next(left, end)) is end:
            return
        yield sample


def contiguous(t: torch.Tensor) -> torch.Tensor:
    return t


def channels_last(t: torch.Tensor) -> torch.Tensor:
    if t.dim() not in (4, 5):
        return t
    form = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return t.contiguous(memory_format=form)


def gaps(t: torch.Tensor) -> torch.Tensor:
    """Every second element of the last dim of a larger tensor, from its second element on."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 1), float("nan"), device=t.device)
    wide = wide.to(t.dtype)
    view = wide[..., 1::2]
    view.copy_(t)
    return view


def reversed_dims(t: torch.Tensor) -> torch.Tensor:
    """The dims in the opposite order in memory."""
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def offset(t: torch.Tensor) -> torch.Tensor:
    """One element behind the start of its storage: a misaligned pointer."""
    flat = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    flat[1:] = t.reshape(-1)
    return flat[1:].view(t.shape)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """The first entry of the first dim, repeated with stride 0."""
    return t[:1].expand(t.shape)


VARIANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (contiguous, channels_last, gaps, reversed_dims, offset, expanded)
}


def vary(value: Any, variant: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The variant of a tensor as a leaf; any other value itself."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 0:
        return value
    return variant(value.detach()).requires_grad_(value.requires_grad)
