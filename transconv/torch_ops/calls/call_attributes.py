"""The non-tensor arguments of a call (stride, padding, ...): one object for each distinct set of numbers,
so that a route is found by identity."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Ints, Params


class CallAttributes:
    """The numbers as a caller gave them, one object for each distinct set: compared by identity.

    ``name`` and ``ndims`` say which public function was called; the registered operators have none.
    """

    __slots__ = (
        "dilation",
        "groups",
        "name",
        "ndims",
        "output_padding",
        "padding",
        "stride",
        "transposed",
    )

    def __init__(self, name: str, ndims: int, stride: Ints, padding: Ints | str, dilation: Ints,
                 transposed: bool, output_padding: Ints, groups: int) -> None:
        self.name = name
        self.ndims = ndims
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.transposed = transposed
        self.output_padding = output_padding
        self.groups = groups

    def resolve(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Params:
        """Check a batched call, in torch's order. RuntimeError as torch's."""
        p = arguments.resolve(
            x.shape, w.shape, None if b is None else b.shape, self.stride, self.padding,
            self.dilation, self.transposed, self.output_padding, self.groups,
            two_sided=not self.name)
        arguments.check_tensors(x, w, b, wide=not self.name)
        return p


LIMIT = 4096  # sets of numbers kept

_requests: dict[Hashable, CallAttributes] = {}


def request(name: str, ndims: int, stride: Sequence[int], padding: Sequence[int] | str,
            dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
            groups: int) -> CallAttributes:
    """The one Request of these numbers."""
    key = (name, ndims, tuple(stride), padding if isinstance(padding, str) else tuple(padding),
           tuple(dilation), bool(transposed), tuple(output_padding), int(groups))
    found = _requests.get(key)
    if found is None:
        if len(_requests) >= LIMIT:
            _requests.clear()  # two objects of the same numbers cost a route, no more
        found = _requests.setdefault(key, CallAttributes(*key))
    return found
