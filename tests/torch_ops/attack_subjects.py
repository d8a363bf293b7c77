"""What is attacked: each public function beside that of torch which it stands for, and a legal call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import transconv
from tests.torch_ops.attack_functions import FUNCTIONS
from transconv import functional
from transconv.errors import TensorError

Drawn = random.Random
Base = Callable[[Drawn], tuple[list[Any], dict[str, Any]]]


@dataclass(frozen=True)
class Subject:
    """``base`` draws a legal call; ``around``: whether it may be made under transforms and modes."""

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    base: Base
    around: bool = True

    def allowed(self, call: Any, got: Any, wanted: Any) -> bool:
        """Whether a difference is meant."""
        tensors = [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, torch.Tensor)]
        owned = ["cpu"] if self.name.startswith(("nn.", "convert_", "inference", "fold")) else []
        # torch returns uninitialised memory, or refuses.
        mixed = len({*owned, *(t.device.type for t in tensors)}) > 1
        # What our signatures have beside torch's: an activation, `keepdim` without dims, no dim at all.
        more = {"functional.linear": 3, "functional.matmul": 2, "functional.bmm": 2}.get(self.name, 99)
        explicit = self.name in EXTREMA and (
            call.kwargs.get("keepdim") is False or any(a is None for a in call.args[1:2])
        )
        kept = (
            isinstance(wanted, TypeError)
            and self.name in KEEPING
            and (
                ("keepdim" in call.kwargs and len(call.args) < 2)
                or (len(call.args) > 1 and isinstance(call.args[1], bool))
            )
        )
        # A text has no derivative, and says so when one is asked for.
        underived = self.name == "computation" and any(t.requires_grad for t in tensors)
        # What torch decomposes a function into may have fewer derivatives.
        fewer = str(wanted).startswith(
            (
                "The function 'native_batch_norm' is not differentiable",
                "unsupported operation: more than one element",
            )
        )
        # What torch's kernels for CPUs say that they lack, or do not look at, is refused before.
        blind = call.around == "fake" or self.name.endswith("_backward")
        refused = type(got) is RuntimeError and (
            isinstance(wanted, NotImplementedError) or (blind and str(got).startswith(UNSEEN))
        )
        # Kernels of ours compute what torch's for CPUs lack; statistics are not written to one place.
        lacks = isinstance(got, (torch.Tensor, tuple)) and str(wanted).startswith(LACKING)
        refused |= type(got) is RuntimeError and "more than one element of the written-to" in str(got)
        computes = isinstance(wanted, (torch.Tensor, tuple))
        return bool(
            lacks
            or (mixed and (isinstance(got, RuntimeError) or computes))
            or len(call.args) > more
            or kept
            or explicit
            or underived
            or fewer
            or refused
        )


UNSEEN = ("Expected grad_output of size", "non-positive dilation", "Input type", "output padding must be")
LACKING = ('"', "mixed dtype (CPU)")  # "avg_pool3d_out_frame" not implemented for 'Half'
KEEPING = {f"functional.{name}" for name in ("sum", "mean", "prod", "any", "all", "var", "std")}
EXTREMA = ("functional.max", "functional.min")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


# -- convolutions ----------------------------------------------------------------------------------


def _conv(n: int, transposed: bool) -> Base:
    def base(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
        groups = rng.choice((1, 1, 2))
        x = randn(rng.choice((1, 2)), 4, *[rng.choice((3, 5)) for _ in range(n)])
        w = randn(4, 4 // groups, *[rng.choice((1, 2, 3)) for _ in range(n)])
        b = randn(4) if rng.random() < 0.5 else None
        numbers: dict[str, Any] = {
            "stride": rng.choice((1, 2, (1,) * n)),
            "padding": rng.choice((0, 1, (1,) * n)),
            "dilation": rng.choice((1, 1, 2)),
            "groups": groups,
        }
        if not transposed and numbers["stride"] != 2 and rng.random() < 0.2:
            numbers["padding"] = rng.choice(("same", "valid"))
        if transposed:
            numbers["output_padding"] = 0
        order = (
            ("stride", "padding", "output_padding", "groups", "dilation")
            if transposed
            else ("stride", "padding", "dilation", "groups")
        )
        if rng.random() < 0.3:
            return [x, w, b, *(numbers[k] for k in order)], {}
        if b is None:
            return [x, w], numbers
        return [x, w, b], numbers

    return base


def _operator(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    n = rng.choice((1, 2, 3))
    x, w = _conv(n, False)(rng)[0][:2]
    padding = rng.choice(([1] * n, [1] * n, [0] * n + [1] * n))
    return [x, w, None, [1] * n, padding, [1] * n, False, [0] * n, 4 // w.shape[1]], {}


def _operator_backward(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    args, _ = _operator(rng)
    x, w, _, *numbers = args
    grad = torch.ones_like(_their_operator(x, w, None, *numbers))
    return [grad, x, w, *numbers, [rng.random() < 0.8 for _ in range(3)]], {}


def _sides(w: Any, padding: Any, transposed: Any) -> list[int]:
    """What stands before and behind each dim, as F.pad takes it, where a padding names both sides: our
    operators know such a padding, and torch's do not."""
    n = w.dim() - 2 if isinstance(w, torch.Tensor) else 0
    both = isinstance(padding, (list, tuple, np.ndarray)) and len(padding) == 2 * n > 0 and not transposed
    return [p for i in range(n - 1, -1, -1) for p in (padding[i], padding[n + i])] if both else []


def _widened(x: Any, sides: list[int]) -> Any:
    return F.pad(x, sides) if isinstance(x, torch.Tensor) else x


def _their_operator(x: Any, w: Any, *rest: Any, **kwargs: Any) -> Any:
    if len(rest) > 4 and (sides := _sides(w, rest[2], rest[4])):
        x, rest = _widened(x, sides), (*rest[:2], [0], *rest[3:])
    return torch.ops.aten.convolution(x, w, *rest, **kwargs)


def _their_backward(*args: Any, **kwargs: Any) -> Any:
    grad, x, w, *rest = args
    sides = _sides(w, rest[1], rest[3]) if len(rest) > 4 else []
    if sides:
        x, rest[1] = _widened(x, sides), [0]
    found = torch.ops.aten.convolution_backward(grad, x, w, [4], *rest, **kwargs)
    if sides and found[0] is not None:
        found = (F.pad(found[0], [-s for s in sides]).contiguous(), *found[1:])
    none = grad.flatten()[:0]
    none = none + (x.flatten()[:0] + w.flatten()[:0]).to(none.dtype)
    return tuple(t if on else none for t, on in zip(found, rest[-1], strict=True))


# -- modules, models and scopes --------------------------------------------------------------------


def _module(names: Any, kind: str) -> Callable[..., Any]:
    def made(x: Any, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(1)
        return getattr(names, kind)(*args, **kwargs)(x)

    return made


def _module_base(n: int) -> Base:
    def base(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
        return [randn(2, 4, *[5] * n), 4, 4, rng.choice((1, 2, 3))], {
            "stride": rng.choice((1, 2)),
            "padding": rng.choice((0, 1)),
            "bias": rng.choice((True, False)),
            "groups": rng.choice((1, 2)),
        }

    return base


def _converted(x: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(*args, **kwargs), torch.nn.ReLU())
    transconv.convert_(model)
    return model(x)


def _unconverted(x: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Conv2d(*args, **kwargs), torch.nn.ReLU())(x)


def _inference(x: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(transconv.nn.Conv2d(*args, **kwargs), torch.nn.ReLU())
    model.requires_grad_(False)
    with transconv.inference(model):
        model(x)
        return model(x)


def _frozen(x: Any, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(*args, **kwargs), torch.nn.ReLU()).requires_grad_(False)
    return model(x)


def _chain(x: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    conv = torch.nn.Conv2d(*args, **kwargs)
    return torch.nn.Sequential(conv, torch.nn.BatchNorm2d(conv.out_channels), torch.nn.SiLU()).eval()


def _folded(x: Any, *args: Any, **kwargs: Any) -> Any:
    return transconv.fold(_chain(x, *args, **kwargs))(x)


def _unfolded(x: Any, *args: Any, **kwargs: Any) -> Any:
    return _chain(x, *args, **kwargs)(x)


def _enabled(*args: Any, **kwargs: Any) -> Any:
    with transconv.use("cpu"):
        return F.conv2d(*args, **kwargs)


def _fused(
    x: Any,
    w: Any,
    b: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
    *,
    residual: Any = None,
) -> Any:
    y = F.conv2d(x, w, b, stride, padding, dilation, groups)
    return F.relu(y if residual is None else y + residual)


def _our_fused(*args: Any, **kwargs: Any) -> Any:
    return transconv.fused_conv2d(*args, **kwargs, activation="relu")


# -- a computation's text --------------------------------------------------------------------------

TEXT = """compute doubled
    axes   n=3 m=4
    read   x = X[n, m]
    let    y = x + x
    store  Y[n, m] = y"""


def _doubled(*given: Any, **named: Any) -> Any:
    return transconv.computation(TEXT)(*given, **named)


def _their_doubled(x: Any = None) -> Any:
    plain = isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested
    fits = plain and x.dtype is torch.float32 and x.shape == (3, 4)
    if not fits:
        raise TensorError("expected f32 of shape (3, 4)")
    return (x + x).detach().contiguous()


SUBJECTS: tuple[Subject, ...] = (
    *(
        Subject(
            f"conv{t}{n}d",
            getattr(transconv, f"conv{t}{n}d"),
            getattr(F, f"conv{t}{n}d"),
            _conv(n, bool(t)),
        )
        for t in ("", "_transpose")
        for n in (1, 2, 3)
    ),
    Subject("fused_conv2d", _our_fused, _fused, _conv(2, False)),
    Subject(
        "torch.ops.transconv.convolution",
        lambda *a, **k: torch.ops.transconv.convolution(*a, **k),
        _their_operator,
        _operator,
    ),
    Subject(
        "torch.ops.transconv.convolution_backward",
        lambda *a, **k: torch.ops.transconv.convolution_backward(*a, **k),
        _their_backward,
        _operator_backward,
    ),
    *(
        Subject(f"nn.{kind}", _module(transconv.nn, kind), _module(torch.nn, kind), _module_base(n))
        for n in (1, 2, 3)
        for kind in (f"Conv{n}d", f"ConvTranspose{n}d")
    ),
    Subject("convert_", _converted, _unconverted, _module_base(2)),
    Subject("inference", _inference, _frozen, _module_base(2)),
    Subject("fold", _folded, _unfolded, _module_base(2), around=False),
    Subject("use", _enabled, F.conv2d, _conv(2, False)),
    Subject("computation", _doubled, _their_doubled, lambda rng: ([randn(3, 4)], {}), around=False),
    *(
        Subject(f"functional.{name}", getattr(functional, name), theirs, base)
        for name, (theirs, base) in FUNCTIONS.items()
    ),
)
