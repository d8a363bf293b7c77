"""DTensor rules of convolutions, for transconv's operators and for aten's.

transconv's own are served from the import of this room on. aten's are while `transconv.enable` or a scope
of `transconv.use` replaces its kernels on any device, in all threads, and from the first `parallelize` on:
torch's rule for sharded images is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from transconv.distributed import aten_operators, sharded_convolution
from transconv.runtime import torch_internals
from transconv.support import Unsupported
from transconv.torch_ops import operators, tensor_subclasses
from transconv.torch_ops.conversion import aten_convolutions

_new_library: Any = torch.library.Library
_register: Any = torch.library.register_torch_dispatch
FakeTensor: Any = torch_internals.FakeTensor
Tensor = torch.Tensor


def _check(*tensors: Any) -> None:
    """RuntimeError or Unsupported for tensors that no rule is for."""
    given = [t for t in tensors if t is not None]
    plain = [t for t in given if not isinstance(t, DTensor)]
    if plain:
        raise RuntimeError(
            f"a convolution got a plain tensor of size {list(plain[0].shape)} beside DTensors; distribute "
            "all of them over one mesh, with torch.distributed.tensor.distribute_tensor"
        )
    meshes = list(dict.fromkeys(t.device_mesh for t in given))
    if len(meshes) > 1:
        raise RuntimeError(
            f"a convolution got DTensors of {len(meshes)} meshes: {meshes[0]} and "
            f"{meshes[1]}; distribute all of them over one"
        )
    if meshes[0].get_coordinate() is None:
        raise RuntimeError(
            f"a convolution of DTensors was called by a rank that their mesh {meshes[0]} does not have"
        )
    if torch.compiler.is_compiling() or any(isinstance(t.to_local(), FakeTensor) for t in given):
        raise Unsupported(
            "distributed:compile",
            "sharded convolutions run eagerly; leave them out of "
            "torch.compile with torch.compiler.disable",
        )


@torch.no_grad()
def forward(input: Any, weight: Any, bias: Any, *numbers: Any) -> DTensor:
    """aten.convolution of DTensors."""
    _check(input, weight, bias)
    params = operators.resolve(input, weight, bias, numbers)
    return sharded_convolution.forward(input, weight, bias, params)


@torch.no_grad()
def backward(grad: Any, input: Any, weight: Any, *rest: Any) -> tuple[DTensor | None, ...]:
    """The gradients of input, weight and bias that the mask, the last of ``rest``, asks for."""
    *numbers, mask = rest
    _check(grad, input, weight)
    params = operators.resolve(input, weight, None, numbers)
    return sharded_convolution.backward(grad, input, weight, params, mask)


def _aten_backward(
    grad: Any, input: Any, weight: Any, _bias_sizes: Any, *rest: Any
) -> tuple[DTensor | None, ...]:
    return backward(grad, input, weight, *rest)


@torch.no_grad()
def _own_forward(input: Any, weight: Any, bias: Any, residual: Any, numbers: str) -> DTensor:
    params, activation, _ = operators.read(numbers)
    if residual is not None or activation:
        raise Unsupported(
            "distributed:fused",
            "DTensors have no fused convolution; call the convolution, then the activation",
        )
    return forward(input, weight, bias, *params)


def _add(name: str, function: Callable[..., Any], library: Any) -> None:
    """Let an operator on DTensors be computed by a function of its arguments."""

    def rule(_class: Any, _function: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **(kwargs or {}))

    _register(name, DTensor, rule, lib=library)


_ATEN: dict[str, Callable[..., Any]] = {
    "aten::convolution": forward,
    "aten::convolution_backward": _aten_backward,
}


class _Libraries:
    """What holds the rules for aten's operators: while they are replaced, and of models for good."""

    def __init__(self) -> None:
        self.replacing: Any = None
        self.of_models: Any = None


_libraries = _Libraries()


def replace(devices: frozenset[str]) -> None:
    """Serve aten's operators while any device is replaced, or a model is sharded, and give them back to
    torch after that."""
    wanted = bool(devices) or _libraries.of_models is not None
    if wanted and _libraries.replacing is None:
        library = _libraries.replacing = _new_library("aten", "FRAGMENT")
        for name, function in _ATEN.items():
            _add(name, function, library)
    elif _libraries.replacing is not None and not wanted:
        _libraries.replacing._destroy()
        _libraries.replacing = None


_OF_MODELS: dict[str, Callable[..., Any]] = {
    "aten::native_group_norm": aten_operators.group_norm,
    "aten::native_group_norm_backward": aten_operators.group_norm_backward,
    "aten::constant_pad_nd": aten_operators.padded,
    **aten_operators.UPSAMPLING,
}


def serve_models() -> None:
    """Serve convolutions, group norms, constant padding and nearest upsampling of DTensors from now on, in
    place of DTensor's rules."""
    if _libraries.of_models is None:
        _libraries.of_models = _new_library("aten", "FRAGMENT")
        for name, function in _OF_MODELS.items():
            _add(name, function, _libraries.of_models)
        replace(aten_convolutions.replacement.devices)


def _own_backward(grad: Any, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(0) if t is None else t for t in backward(grad, *rest))


# The first is called below autograd, the others where there is none, as in inference mode.
_OWN: dict[str, Callable[..., Any]] = {
    "transconv::fwd": _own_forward,
    "transconv::convolution": forward,
    "transconv::convolution_backward": _own_backward,
}
for _name, _rule in _OWN.items():
    _add(_name, _rule, operators.library)
tensor_subclasses.serve(DTensor, forward, backward, replace)
