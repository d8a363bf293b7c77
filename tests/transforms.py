"""torch's transforms of a function of one tensor, each by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]


def _squares(f: Function) -> Function:
    return lambda x: f(x).square().sum()


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def _all_ones(y: Tensor) -> Tensor:
    """A gradient for each element of a result."""
    return torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)


def _dual(f: Function, x: Tensor, v: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v)))


def _forward_over_reverse(f: Function, x: Tensor, v: Tensor) -> Any:
    leaf = _leaf(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, v)
        (found,) = torch.autograd.grad(_squares(f)(dual), dual, create_graph=True)
        return forward_ad.unpack_dual(found).tangent


def _reverse_over_forward(f: Function, x: Tensor, v: Tensor) -> Any:
    leaf = _leaf(x)
    with forward_ad.dual_level():
        moved = forward_ad.unpack_dual(f(forward_ad.make_dual(leaf, v))).tangent
        return torch.autograd.grad(moved.square().sum(), leaf, allow_unused=True)


def _batched(f: Function, x: Tensor, v: Tensor, again: bool = False) -> Any:
    leaf = _leaf(x)
    y = f(leaf)
    (found,) = torch.autograd.grad(y, leaf, _all_ones(y), is_grads_batched=True, create_graph=again)
    return torch.autograd.grad(found.square().sum(), leaf, allow_unused=True) if again else found


def _again(f: Function, x: Tensor, v: Tensor) -> Any:
    """The gradient, and that of the gradient along ``v``."""
    leaf = _leaf(x)
    (found,) = torch.autograd.grad(_squares(f)(leaf), leaf, create_graph=True)
    return found, torch.autograd.grad(found, leaf, v)


TRANSFORMS: dict[str, Callable[[Function, Tensor, Tensor], Any]] = {
    "jvp": lambda f, x, v: jvp(f, (x,), (v,)),
    "dual": _dual,
    "vmap": lambda f, x, v: vmap(f)(torch.stack([x, x * 2])),
    "vmap_last": lambda f, x, v: vmap(f, in_dims=-1)(torch.stack([x, x * 2], -1)),
    "grad": lambda f, x, v: grad(_squares(f))(x),
    "jacrev": lambda f, x, v: jacrev(f)(x),
    "jacfwd": lambda f, x, v: jacfwd(f)(x),
    "hessian": lambda f, x, v: hessian(_squares(f))(x),
    "vmap_of_grad": lambda f, x, v: vmap(grad(_squares(f)))(torch.stack([x, x * 2])),
    "jvp_of_jvp": lambda f, x, v: jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,)),
    "forward_over_reverse": _forward_over_reverse,
    "reverse_over_forward": _reverse_over_forward,
    "is_grads_batched": _batched,
    "is_grads_batched_again": lambda f, x, v: _batched(f, x, v, True),
    "vectorized_jacobian": lambda f, x, v: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "vectorized_hessian": lambda f, x, v: torch.autograd.functional.hessian(
        _squares(f), x, vectorize=True
    ),
    "create_graph": _again,
}


def differences(ours: Function, theirs: Function, x: Tensor, v: Tensor) -> dict[str, str]:
    """The transforms under which ``ours`` differs from ``theirs``, with what was raised. Where torch's own
    raises, there is nothing to compare with."""
    found: dict[str, str] = {}
    for name, transform in TRANSFORMS.items():
        try:
            want = transform(theirs, x, v)
        except Exception:
            continue
        try:
            torch.testing.assert_close(transform(ours, x, v), want)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found
