"""Whether ``input_zero_sums`` are those of a weight and a zero point: compared once, and after a change.

A kernel that reads the sums gives wrong results with those of another weight or zero point. They are
computed again and compared when these three tensors come together for the first time, or one of them has
been written to since, which its version counter tells. Inside a capture of a CUDA graph, where the host
cannot see a comparison's result, the graph computes the sums.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from transconv.conv import zero_sums, zero_sums_shape
from transconv.disk_cache import Cache
from transconv.errors import TensorError
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import lower_call

Tensor = torch.Tensor
Zero = Tensor | float

LIMIT = 4096  # sums that are remembered


class WrongSums(TensorError):
    """``input_zero_sums`` that are not those of the weight and the zero point."""


class _Compared:
    """Three tensors whose values agreed, as they were then."""

    __slots__ = ("sums", "versions", "weight", "zero")

    def __init__(self, weight: Tensor, zero: Zero, sums: Tensor, forget: Any) -> None:
        self.sums, self.weight = weakref.ref(sums, forget), weakref.ref(weight)
        self.zero: Any = weakref.ref(zero) if isinstance(zero, Tensor) else zero
        self.versions = _versions(weight, zero, sums)


_compared: Cache[int, _Compared] = Cache("compared sums", LIMIT)


def _versions(weight: Tensor, zero: Zero, sums: Tensor) -> tuple[int, int, int]:
    """Those made in inference mode have no counter."""
    try:
        return weight._version, zero._version if isinstance(zero, Tensor) else 0, sums._version
    except RuntimeError:
        w, z, s = (t._version if isinstance(t, Tensor) and not t.is_inference() else 0
                   for t in (weight, zero, sums))
        return w, z, s


def are_known(weight: Tensor, zero: Zero, sums: Tensor) -> bool:
    """Whether the three were compared as they are."""
    held = _compared.get(id(sums))
    if held is None or held.sums() is not sums or held.weight() is not weight:
        return False
    if isinstance(zero, Tensor):
        same = isinstance(held.zero, weakref.ref) and held.zero() is zero
    else:
        same = bool(held.zero == zero)
    return same and held.versions == _versions(weight, zero, sums)


def checked(weight: Tensor, zero: Zero, sums: Tensor, p: Params) -> Tensor:
    """The sums; in a capture, if they were not compared before it, those that the graph computes.
    WrongSums if they are others, or of another shape."""
    if are_known(weight, zero, sums):
        return sums
    name, shape = "input_zero_sums", zero_sums_shape(len(weight), p.pad_lo, p.pad_hi)
    if tuple(sums.shape) != shape:
        raise WrongSums(f"{name}: expected the shape {shape} of these paddings, got {tuple(sums.shape)}")
    whole = zero if isinstance(zero, Tensor) else torch.tensor(zero, device=weight.device)
    made = zero_sums(weight, whole, p.pad_lo, p.pad_hi, p.dilation)
    if made is None:
        raise WrongSums(f"{name}: expected None: windows reach beyond the input in too many ways")
    if lower_call.capturing(sums.device):
        return made
    if not torch.equal(made, sums):
        raise WrongSums(f"{name}: expected what the zero point adds to the sums of this weight; "
                        f"{int((made != sums).sum())} of {made.numel()} differ. Was the weight or the "
                        "zero point changed after they were made? None has them computed in every call")
    _remember(weight, zero, sums)
    return sums


def _remember(weight: Tensor, zero: Zero, sums: Tensor) -> None:
    key = id(sums)

    def forget(gone: object) -> None:
        if (held := _compared.get(key)) is not None and held.sums is gone:
            _compared.pop(key, None)

    _compared.pop(key, None)
    _compared.keep(key, _Compared(weight, zero, sums, forget))
