"""What is attacked: each public function beside that of torch which it stands for, and a legal call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import transconv
from transconv import functional

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
        # torch's values are what memory held, where it computes at all.
        mixed = len({*owned, *(t.device.type for t in tensors)}) > 1
        # What our signatures have beside torch's: an activation, `keepdim` without dims.
        more = {"functional.linear": 3, "functional.matmul": 2, "functional.bmm": 2}.get(self.name, 99)
        kept = isinstance(wanted, TypeError) and self.name in KEEPING and (
            "keepdim" in call.kwargs and len(call.args) < 2 or isinstance(call.args[1], bool))
        # What torch's kernels for CPUs say that they lack, or do not look at, is refused before.
        refused = type(got) is RuntimeError and (isinstance(wanted, NotImplementedError)
                                                 or str(got).startswith("Expected grad_output of size"))
        # On CPUs some of torch's kernels forget that an operand was channels last.
        loose = (isinstance(got, torch.Tensor) and isinstance(wanted, torch.Tensor) and "conv" in self.name
                 and wanted.is_contiguous() and got.dtype is wanted.dtype and got.shape == wanted.shape
                 and got.stride() != wanted.stride() and torch.allclose(got, wanted, 3e-2, 3e-2))
        return bool(loose or mixed and (isinstance(got, RuntimeError) or isinstance(wanted, torch.Tensor))
                    or len(call.args) > more or kept or refused)


KEEPING = {f"functional.{name}" for name in ("sum", "mean", "prod", "any", "all", "var", "std")}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


# -- convolutions ----------------------------------------------------------------------------------


def _conv(n: int, transposed: bool) -> Base:
    def base(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
        groups = rng.choice((1, 1, 2))
        x = randn(rng.choice((1, 2)), 4, *[rng.choice((3, 5)) for _ in range(n)])
        w = randn(4, 4 // groups, *[rng.choice((1, 2, 3)) for _ in range(n)])
        b = randn(4) if rng.random() < 0.5 else None
        numbers: dict[str, Any] = {"stride": rng.choice((1, 2, (1,) * n)), "padding": rng.choice(
            (0, 1, (1,) * n)), "dilation": rng.choice((1, 1, 2)), "groups": groups}
        if not transposed and numbers["stride"] != 2 and rng.random() < 0.2:
            numbers["padding"] = rng.choice(("same", "valid"))
        if transposed:
            numbers["output_padding"] = 0
        order = (("stride", "padding", "output_padding", "groups", "dilation") if transposed
                 else ("stride", "padding", "dilation", "groups"))
        if rng.random() < 0.3:
            return [x, w, b, *(numbers[k] for k in order)], {}
        if b is None:
            return [x, w], numbers
        return [x, w, b], numbers
    return base


def _operator(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    n = rng.choice((1, 2, 3))
    args, kwargs = _conv(n, False)(rng)
    x, w = args[:2]
    return [x, w, None, [1] * n, [1] * n, [1] * n, False, [0] * n, 4 // w.shape[1]], {}


def _operator_backward(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    args, _ = _operator(rng)
    x, w, _, *numbers = args
    grad = torch.ones_like(torch.convolution(x, w, None, *numbers))
    return [grad, x, w, *numbers, [True, True, True]], {}


def _their_backward(*args: Any, **kwargs: Any) -> Any:
    grad, x, w, *rest = args
    mask = rest[-1]
    found = torch.ops.aten.convolution_backward(grad, x, w, [w.shape[0]], *rest, **kwargs)
    return tuple(grad.new_empty(0) if not on else t for t, on in zip(found, mask, strict=True))


# -- modules, models and scopes --------------------------------------------------------------------


def _module(names: Any, kind: str) -> Callable[..., Any]:
    def made(x: Any, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(1)
        return getattr(names, kind)(*args, **kwargs)(x)
    return made


def _module_base(n: int) -> Base:
    def base(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
        return [randn(2, 4, *[5] * n), 4, 4, rng.choice((1, 2, 3))], {
            "stride": rng.choice((1, 2)), "padding": rng.choice((0, 1)),
            "bias": rng.choice((True, False)), "groups": rng.choice((1, 2))}
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


def _fused(x: Any, w: Any, b: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
           groups: Any = 1, *, residual: Any = None) -> Any:
    y = F.conv2d(x, w, b, stride, padding, dilation, groups)
    return F.relu(y if residual is None else y + residual)


def _our_fused(*args: Any, **kwargs: Any) -> Any:
    return transconv.fused_conv2d(*args, **kwargs, activation="relu")


# -- transconv.functional --------------------------------------------------------------------------


def _of(shapes: tuple[tuple[int, ...] | None, ...], *rest: tuple[Any, ...], **named: Any) -> Base:
    """Tensors of the shapes, then one of each of the choices."""
    def base(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
        tensors = [None if s is None else randn(*s) for s in shapes]
        kwargs = {k: rng.choice(v) for k, v in named.items() if rng.random() < 0.6}
        return [*tensors, *(rng.choice(r) for r in rest)], kwargs
    return base


def _cross(rng: Drawn) -> tuple[list[Any], dict[str, Any]]:
    return [randn(3, 5), torch.tensor([0, 4, 2])], {
        "reduction": rng.choice(("mean", "sum", "none")), "label_smoothing": rng.choice((0.0, 0.1))}


X = (2, 4, 3, 4)
DIM = ((0, 1, -1, (0, 2), None),)
ONE = ((0, 1, -1, 3),)
KEEP = {"keepdim": (True, False)}
THEIRS: dict[str, tuple[Callable[..., Any], Base]] = {
    "sum": (torch.sum, _of((X,), *DIM, **KEEP)), "mean": (torch.mean, _of((X,), *DIM, **KEEP)),
    "prod": (torch.prod, _of((X,), *ONE, **KEEP)),
    "amax": (torch.amax, _of((X,), ((0, 1, (1, 2), ()),)[0], **KEEP)),
    "amin": (torch.amin, _of((X,), ((0, 1, (1, 2), ()),)[0], **KEEP)),
    "logsumexp": (torch.logsumexp, _of((X,), *ONE, **KEEP)),
    "var": (torch.var, _of((X,), *DIM, **KEEP)), "std": (torch.std, _of((X,), *DIM, **KEEP)),
    "any": (torch.any, _of((X,), *ONE, **KEEP)), "all": (torch.all, _of((X,), *ONE, **KEEP)),
    "softmax": (F.softmax, _of((X,), *ONE)), "log_softmax": (F.log_softmax, _of((X,), *ONE)),
    "normalize": (F.normalize, _of((X,), dim=(0, 1), p=(1, 2), eps=(1e-12,))),
    "cross_entropy": (F.cross_entropy, _cross),
    "layer_norm": (F.layer_norm, _of((X,), ((4,), (3, 4), [4]), (None,), (None,), (1e-5,))),
    "rms_norm": (F.rms_norm, _of((X,), ((4,), (3, 4)), (None,), (None, 1e-5))),
    "group_norm": (F.group_norm, _of((X,), (1, 2, 4), (None,), (None,), (1e-5,))),
    "instance_norm": (F.instance_norm, _of((X, (4,), (4,)), use_input_stats=(True,), momentum=(0.1,))),
    "batch_norm": (F.batch_norm, _of((X, (4,), (4,), (4,), (4,)), training=(True,), momentum=(0.1,))),
    "max_pool2d": (F.max_pool2d, _of((X,), (2, (2, 1)), stride=(1, 2, None), padding=(0, 1),
                                     ceil_mode=(True, False))),
    "avg_pool2d": (F.avg_pool2d, _of((X,), (2, (2, 1)), stride=(1, 2, None), padding=(0, 1),
                                     count_include_pad=(True, False))),
    "adaptive_avg_pool2d": (F.adaptive_avg_pool2d, _of((X,), (1, (1, 2), (None, 2), 3))),
    "linear": (F.linear, _of(((2, 3, 4), (5, 4), (5,)))),
    "matmul": (torch.matmul, _of(((2, 3, 4), (4, 5)))), "bmm": (torch.bmm, _of(((2, 3, 4), (2, 4, 5)))),
}

TEXT = """compute doubled
    axes   n=3 m=4
    read   x = X[n, m]
    let    y = x + x
    store  Y[n, m] = y"""


def _doubled(x: Any) -> Any:
    return transconv.computation(TEXT)(x)


SUBJECTS: tuple[Subject, ...] = (
    *(Subject(f"conv{t}{n}d", getattr(transconv, f"conv{t}{n}d"), getattr(F, f"conv{t}{n}d"),
              _conv(n, bool(t))) for t in ("", "_transpose") for n in (1, 2, 3)),
    Subject("fused_conv2d", _our_fused, _fused, _conv(2, False)),
    Subject("torch.ops.transconv.convolution", lambda *a, **k: torch.ops.transconv.convolution(*a, **k),
            torch.ops.aten.convolution, _operator),
    Subject("torch.ops.transconv.convolution_backward", lambda *a, **k: (
        torch.ops.transconv.convolution_backward(*a, **k)), _their_backward, _operator_backward),
    *(Subject(f"nn.{kind}", _module(transconv.nn, kind), _module(torch.nn, kind), _module_base(n))
      for n in (1, 2, 3) for kind in (f"Conv{n}d", f"ConvTranspose{n}d")),
    Subject("convert_", _converted, _unconverted, _module_base(2)),
    Subject("inference", _inference, _frozen, _module_base(2)),
    Subject("fold", _folded, _unfolded, _module_base(2), around=False),
    Subject("use", _enabled, F.conv2d, _conv(2, False)),
    *(Subject(f"functional.{name}", getattr(functional, name), theirs, base)
      for name, (theirs, base) in THEIRS.items()),
)
