"""Attributes of a call: the public function, and its numbers (stride, padding, ...), one object for each
distinct set of them, so that a route is found by identity; which tensors are plain."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from transconv.calls.route_cache import LIMIT
from transconv.runtime import torch_internals
from transconv.support import Cache
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Ints, Params, autocast_dtype

Tensor = torch.Tensor

_Parameter = torch.nn.Parameter
FakeTensor: Any = torch_internals.FakeTensor
FunctionalTensor: Any = torch_internals.FunctionalTensor


@dataclass(eq=False, slots=True)
class CallAttributes:
    """The numbers as a caller gave them, one object for each distinct set: compared by identity.

    ``name`` and ``ndims`` say which public function was called; the registered operators have none."""

    name: str
    ndims: int
    stride: Ints
    padding: Ints | str
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int

    def resolve(self, x: Tensor, w: Tensor, b: Tensor | None) -> Params:
        """Check a batched call, in torch's order. RuntimeError as torch's."""
        p = self.params(x, w, b)
        arguments.check_tensors(x, w, b, wide=not self.name)
        return p

    def params(self, x: Tensor, w: Tensor, b: Tensor | None) -> Params:
        """The numbers for tensors of these shapes. RuntimeError as torch's where they do not fit."""
        numbers = (self.stride, self.padding, self.dilation, self.transposed, self.output_padding)
        return arguments.resolve_call(x, w, b, *numbers, self.groups, two_sided=not self.name)


# By the numbers behind the name of the function, and by the arguments of a call behind the function.
# Two objects of the same numbers cost a route, no more.
_requests: Cache[Hashable, CallAttributes] = Cache("attributes of calls", LIMIT)
_known = _requests.get


def request(
    name: str,
    ndims: int,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> CallAttributes:
    """The one object of these numbers."""
    key = (
        name,
        ndims,
        tuple(stride),
        padding if isinstance(padding, str) else tuple(padding),
        tuple(dilation),
        bool(transposed),
        tuple(output_padding),
        int(groups),
    )
    return _known(key) or _requests.keep(key, CallAttributes(*key))


@dataclass(eq=False, slots=True)
class ConvFunction:
    """One public function: its name, its rank, torch's function of that name, the function for new kinds
    of calls, and ours."""

    name: str
    ndims: int
    transposed: bool
    aten: Callable[..., Tensor]
    general: Callable[..., Tensor]
    public: Callable[..., Tensor] | None = None

    def ordered(
        self, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: Any
    ) -> tuple[Any, ...]:
        """The numbers as torch's function takes them, behind the tensors."""
        return (
            (stride, padding, output_padding, groups, dilation)
            if self.transposed
            else (stride, padding, dilation, groups)
        )

    def taken(self, numbers: tuple[Any, ...]) -> tuple[Any, Any, Any, Any, Any]:
        """The numbers as ``ordered`` takes them, of what it gives."""
        if not self.transposed:
            stride, padding, dilation, groups = numbers
            return stride, padding, 0, dilation, groups
        stride, padding, output_padding, groups, dilation = numbers
        return stride, padding, output_padding, dilation, groups


def is_plain(tensor: Any) -> bool:
    """A tensor of torch's own, whose elements lie in strided memory."""
    return (
        (tensor.__class__ is Tensor or tensor.__class__ is _Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def is_known(tensor: Tensor) -> bool:
    """Plain tensors and the fakes of compilers, as opposed to other subclasses."""
    return is_plain(tensor) or isinstance(tensor, (FakeTensor, FunctionalTensor))


def requested(
    f: ConvFunction, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: Any
) -> CallAttributes | None:
    """The request of these arguments, or None for a form that only torch's parser decides about."""
    key = (f, stride, padding, output_padding, dilation, groups)
    try:
        found = _known(key)
    except TypeError:  # a list has no hash
        found = None
    # 1.0 and True equal 1 but are no sizes: equal keys do not imply equal arguments.
    if (
        found is not None
        and _integral(stride)
        and _integral(padding)
        and _integral(output_padding)
        and _integral(dilation)
        and groups.__class__ is int
    ):
        return found
    parsed = parse(f, stride, padding, output_padding, dilation, groups)
    if parsed is None:
        return None
    stride_, padding_, output_padding_, dilation_, groups_ = parsed
    found = request(f.name, f.ndims, stride_, padding_, dilation_, f.transposed, output_padding_, groups_)
    with suppress(TypeError):
        _requests.keep(key, found)
    return found


_only_int = frozenset((int,)).issuperset


def _integral(value: Any) -> bool:
    """For a value that equals a legal one: whether it is made of ints."""
    kind = value.__class__
    return kind is int or kind is str or (kind is tuple and _only_int(map(type, value)))


def parse(
    f: ConvFunction, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: Any
) -> tuple[Any, Any, Any, Any, int] | None:
    """The same as torch's parser converts them; None where one has a form that is left to torch."""
    n = f.ndims
    parsed = (
        arguments.ints(stride, n),
        str.__str__(padding)
        if isinstance(padding, str) and not f.transposed
        else arguments.ints(padding, n),
        arguments.ints(output_padding, n),
        arguments.ints(dilation, n),
        arguments.integer(groups),
    )
    return None if None in parsed else parsed  # type: ignore[return-value]


def check_bias(f: ConvFunction, input: Tensor, bias: Tensor | None, padding: Any) -> None:
    kept = arguments.is_wide(bias, input) and autocast_dtype(input) is not None
    if not f.transposed and not isinstance(padding, str) and not kept:
        arguments.check_bias_dtype(input, bias)


def is_bias_left_to_torch(f: ConvFunction, input: Tensor, bias: Tensor | None, padding: Any) -> bool:
    """Whether a bias has another type where torch looks at it no sooner than its kernels do: those of
    GPUs add it, those of the CPU refuse it."""
    return (
        bias is not None
        and bias.dtype != input.dtype
        and bias.device == input.device
        and (f.transposed or isinstance(padding, str))
        and not (arguments.is_wide(bias, input) and autocast_dtype(input) is not None)
    )


def check_types(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """RuntimeError for a float32 bias outside autocast, which the operators accept."""
    arguments.check_tensors(input, weight, bias, wide=autocast_dtype(input) is not None)
