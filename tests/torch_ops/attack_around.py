"""What programs do around a call: modes, transforms, derivatives, tracers and subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import transconv

Tensor = torch.Tensor
Around = Callable[[Callable[..., Any], list[Any], dict[str, Any]], Any]


class Kin(torch.Tensor):
    """A subclass whose handler is that of Tensor."""


class _Held(torch.nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f
        self.w = torch.nn.Parameter(torch.zeros(()))

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.f(self.w, *args, **kwargs)


class _Watching(TorchDispatchMode):
    """Lets every operation pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _plain(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result, and the gradients of what requires them."""
    made = f(*args, **kwargs)
    leaves = [t for t in _tensors(args, kwargs) if t.requires_grad and t.is_leaf]
    if leaves and isinstance(made, Tensor) and made.requires_grad and not made.is_meta:
        return made, torch.autograd.grad(_number(made), leaves, allow_unused=True)
    return made


def _tensors(args: list[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    yield from (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))


def _number(made: Any) -> Any:
    """One number that depends on each element in its own way."""
    first = made[0] if isinstance(made, tuple) else made
    wide = first if first.is_complex() or first.dtype is torch.float64 else first.float()
    return (
        wide
        * torch.linspace(0.5, 1.5, wide.numel(), dtype=wide.dtype, device=wide.device).view(wide.shape)
    ).sum()


def _of_first(transform: Callable[..., Any]) -> Around:
    """A transform of the function of its first argument, called by ``transform(function, x)``."""

    def around(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else None
        return transform(lambda t: f(t, *args[1:], **kwargs), x)

    return around


def _inside(scope: Callable[[], Any]) -> Around:
    def around(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        with scope():
            return _plain(f, args, kwargs)

    return around


def _twice(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    f(*args, **kwargs)
    f(*args, **kwargs)
    return _plain(f, args, kwargs)


def _functional_call(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else None
    return torch.func.functional_call(_Held(f), {"w": x}, (args[1:], kwargs))


def _vmap_second(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, w, *rest = args
    return torch.func.vmap(lambda t: f(x, t, *rest, **kwargs), in_dims=-1)(torch.stack([w, w], -1))


def _dual(f: Callable[..., Any], x: Any) -> Any:
    with forward_ad.dual_level():
        made = f(forward_ad.make_dual(x, torch.ones_like(x)))
        return tuple(forward_ad.unpack_dual(made))


def _again(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Second derivatives: of the first ones by every argument that has some."""
    places = [
        i
        for i, t in enumerate(args)
        if isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta and t.layout is torch.strided
    ]
    args = [t.detach().requires_grad_() if i in places else t for i, t in enumerate(args)]
    of = [args[i] for i in places]
    found = torch.autograd.grad(_number(f(*args, **kwargs)), of, create_graph=True, allow_unused=True)
    total = sum(_number(g) for g in found if g is not None and g.requires_grad)
    if not isinstance(total, Tensor):
        return found
    return found, torch.autograd.grad(total, of, allow_unused=True)


def _per_sample(f: Callable[..., Any], x: Any) -> Any:
    return torch.func.vmap(torch.func.grad(lambda t: _number(f(t.unsqueeze(0)))))(x)


def _traced(f: Callable[..., Any], x: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(f)(x)(x)


def _fake(f: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What compilers see: sizes, strides and types alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [
            mode.from_tensor(t) if type(t) is Tensor and t.layout is torch.strided else t for t in args
        ]
        made = f(*args, **kwargs)
        usual = all(t.is_contiguous() for t in _tensors(args, kwargs) if t.layout is torch.strided)
    return [
        [t.dtype, t.shape, t.stride() if t.numel() and usual else (), t.requires_grad]
        for t in (made if isinstance(made, tuple) else (made,))
    ]


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _wide_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# Whose results have the strides that their transform gives them, by way of what it asks in between.
ANY_STRIDES = ("again", "vmap", "vmap of the second", "per sample", "traced", "wrapped")
AROUND: dict[str, Around] = {
    "plain": _plain,
    "twice": _twice,
    "again": _again,
    "functional_call": _functional_call,
    "fake": _fake,
    "no_grad": _inside(torch.no_grad),
    "inference_mode": _inside(torch.inference_mode),
    "autocast": _inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "use": _inside(lambda: transconv.use("cpu")),
    "watched": _inside(_Watching),
    "kept elsewhere": _inside(torch.autograd.graph.save_on_cpu),
    "deterministic": _inside(_deterministic),
    "wide by default": _inside(_wide_by_default),
    "device": _inside(lambda: torch.device("cpu")),
    "vmap": _of_first(lambda f, x: torch.func.vmap(f)(torch.stack([x, x]))),
    "jvp": _of_first(lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))),
    "grad": _of_first(lambda f, x: torch.func.grad(lambda t: _number(f(t)))(x)),
    "per sample": _of_first(_per_sample),
    "dual": _of_first(_dual),
    "traced": _of_first(_traced),
    "checkpoint": _of_first(lambda f, x: checkpoint(f, x, use_reentrant=False)),
    "subclass": _of_first(lambda f, x: f(x.as_subclass(Kin))),
    "wrapped": _of_first(lambda f, x: f(TwoTensor(x, x.clone()))),
    "vmap of the second": _vmap_second,
}
