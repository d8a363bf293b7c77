"""Calls of every public function with odd arguments, drawn, beside torch's: the same result or the same
class of error.

    python -m tests.torch_ops.attack --n 300                     every function, torch behind ours
    TRITON_INTERPRET=1 python -m tests.torch_ops.attack --n 20   the same with interpreted kernels
    python -m tests.torch_ops.attack --only conv2d --seed 7 --first 41 --n 1    one call again

A call starts from a legal one of the function; up to three of its arguments are replaced by odd ones, and
it is made plainly or under what PyTorch programs do around calls. Everything follows from the name, the
seed and the number of the call.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import transconv
from tests.torch_ops.attack_subjects import SUBJECTS, Subject
from transconv.errors import TransconvError

Tensor = torch.Tensor
Drawn = random.Random

# -- odd arguments ---------------------------------------------------------------------------------


class Text(str):
    """A subclass of str."""


def values(rng: Drawn) -> Any:
    """Something in the place of a number, a list of numbers, a flag or a word."""
    import numpy as np

    return rng.choice([
        0, 1, 2, 3, -1, -2, 5, 100, True, False, 1.0, 0.5, float("nan"), None, "same", "valid", "relu", "",
        Text("same"), (1,), (2, 1), (1, 2, 1), [1], [2, 2], (), [], (0,), (-1, 1), (1.0,), (True,), ("1",),
        (None,), np.int64(2), np.int32(1), np.bool_(True), np.float32(1), np.array([1, 2]), [np.int64(1)],
        torch.tensor(1), torch.tensor([1, 2]), torch.tensor(1.5), [torch.tensor(1)], torch.Size((1, 1)),
        torch.float64, torch.float16, torch.int32, 2**31, 2**40, {1}, {}, slice(1), range(2), b"same", 1j,
        object])


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


LIKE: tuple[Callable[[Tensor, Drawn], Any], ...] = (
    lambda t, rng: _gaps(t), lambda t, rng: _last(t), lambda t, rng: _reversed(t),
    lambda t, rng: _misaligned(t), lambda t, rng: _negated(t), lambda t, rng: _zero_stride(t),
    lambda t, rng: t.flip(0) if t.dim() else t,
    lambda t, rng: torch.nn.Parameter(t) if t.is_floating_point() else t,
    lambda t, rng: t.clone().requires_grad_() if t.is_floating_point() else t,
)
UNLIKE: tuple[Callable[[Tensor, Drawn], Any], ...] = (
    lambda t, rng: t.unsqueeze(0), lambda t, rng: t[0] if t.dim() and t.shape[0] else t,
    lambda t, rng: t.flatten(), _empty, lambda t, rng: t.new_zeros(()), lambda t, rng: None,
    lambda t, rng: t.to("meta"), lambda t, rng: t.tolist(), lambda t, rng: t.numpy(), lambda t, rng: 1.0,
    lambda t, rng: t.to_sparse(), lambda t, rng: t.transpose(0, -1) if t.dim() else t,
    lambda t, rng: t[..., :1], lambda t, rng: t.narrow(-1, 0, t.shape[-1] // 2) if t.dim() else t,
    lambda t, rng: t.repeat(2, *[1] * (t.dim() - 1)) if t.dim() else t,
    *(lambda t, rng, d=d: t.to(d) for d in (
        torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8,
        torch.complex64)),
)


# -- a call ----------------------------------------------------------------------------------------


@dataclass
class Call:
    """Positional and named arguments, and what is around the call."""

    args: list[Any]
    kwargs: dict[str, Any]
    around: str

    def __str__(self) -> str:
        shown = [*map(_shown, self.args), *(f"{k}={_shown(v)}" for k, v in self.kwargs.items())]
        return f"{', '.join(shown)}  [{self.around}]"


def _shown(v: Any) -> str:
    if isinstance(v, Tensor):
        more = " neg" * v.is_neg() + " grad" * v.requires_grad
        strides = tuple(v.stride()) if v.layout is torch.strided else v.layout
        return f"<{type(v).__name__} {tuple(v.shape)} {strides} {str(v.dtype)[6:]} {v.device}{more}>"
    return repr(v)


AROUND = ("plain", "plain", "plain", "no_grad", "inference_mode", "autocast", "vmap", "jvp", "grad",
          "twice", "use", "functional_call")


def drawn(subject: Subject, seed: int, number: int) -> Call:
    """The call of this number."""
    rng = random.Random(f"{subject.name} {seed} {number}")
    torch.manual_seed(rng.randrange(2**31))
    args, kwargs = subject.base(rng)
    around = rng.choice(AROUND) if subject.around else rng.choice(("plain", "no_grad"))
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16))
    args = [_cast(a, dtype) for a in args]
    kwargs = {k: _cast(v, dtype) for k, v in kwargs.items()}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        _mutate(args, kwargs, rng)
    return Call(args, kwargs, around)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _mutate(args: list[Any], kwargs: dict[str, Any], rng: Drawn) -> None:
    kind = rng.random()
    if kind < 0.04 and args:
        args.pop()
    elif kind < 0.07:
        args.append(values(rng))
    elif kind < 0.10:
        kwargs[rng.choice(("strid", "pad", "out", "dtype", "memory_format", "bias", "dim", "eps"))] = (
            values(rng))
    else:
        places: list[Any] = [*range(len(args)), *kwargs]
        if not places:
            return
        place = rng.choice(places)
        held: Any = args if isinstance(place, int) else kwargs
        value = held[place]
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            change = rng.choice(LIKE if rng.random() < 0.6 else UNLIKE)
            try:
                held[place] = change(value.detach(), rng)
            except (RuntimeError, TypeError, IndexError):
                pass  # torch makes no such view of this one
        else:
            held[place] = values(rng)


# -- what comes of it ------------------------------------------------------------------------------


def outcome(f: Callable[..., Any], call: Call) -> Any:
    """The result with the gradients of what requires them, or the error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return _around(f, call)
    except Exception as error:  # noqa: BLE001  (its class is what is compared)
        return error


def _around(f: Callable[..., Any], call: Call) -> Any:
    args, kwargs, x = call.args, call.kwargs, call.args[0] if call.args else None
    match call.around:
        case "no_grad":
            with torch.no_grad():
                return f(*args, **kwargs)
        case "inference_mode":
            with torch.inference_mode():
                return f(*args, **kwargs)
        case "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return f(*args, **kwargs)
        case "vmap":
            return torch.func.vmap(lambda t: f(t, *args[1:], **kwargs))(torch.stack([x, x]))
        case "jvp":
            return torch.func.jvp(lambda t: f(t, *args[1:], **kwargs), (x,), (torch.ones_like(x),))
        case "grad":
            return torch.func.grad(lambda t: f(t, *args[1:], **kwargs).float().sum())(x)
        case "twice":
            f(*args, **kwargs)
            f(*args, **kwargs)
        case "use":
            with transconv.use("cpu"):
                return f(*args, **kwargs)
        case "functional_call":
            return torch.func.functional_call(_Held(f), {"w": x}, (args[1:], kwargs))
    made = f(*args, **kwargs)
    leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad]
    if leaves and isinstance(made, Tensor) and made.requires_grad and not made.is_meta:
        return made, torch.autograd.grad(made.float().sum(), leaves, allow_unused=True)
    return made


class _Held(torch.nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f
        self.w = torch.nn.Parameter(torch.zeros(()))

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.f(self.w, *args, **kwargs)


LOOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.complex64: 1e-4,
         torch.float64: 1e-9}


def difference(got: Any, wanted: Any) -> str:
    """What is not the same; empty if nothing is."""
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        if type(got) is type(wanted):
            return ""
        if isinstance(got, TransconvError) and isinstance(got, type(wanted)):
            return ""
        return f"{_told(got)}; torch: {_told(wanted)}"
    if isinstance(wanted, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(wanted):
            return f"{_told(got)}; torch: {_told(wanted)}"
        return next(filter(None, map(difference, got, wanted)), "")
    if not isinstance(wanted, Tensor):
        return "" if type(got) is type(wanted) and got == wanted else f"{got!r}; torch: {wanted!r}"
    if not isinstance(got, Tensor) or _look(got) != _look(wanted):
        return f"{_told(got)}; torch: {_told(wanted)}"
    if wanted.is_meta or not wanted.numel():
        return ""
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (got, wanted))
    if a.layout is not torch.strided:
        return ""
    close = LOOSE.get(wanted.dtype, 0)
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    if torch.allclose(a, b, rtol=close, atol=close * max(scale, 1e-3), equal_nan=True):
        return ""
    return f"values differ by {float((a - b).abs().nan_to_num().max()):.3g} of {scale:.3g}"


def _look(t: Tensor) -> Any:
    if t.layout is not torch.strided:
        return t.dtype, t.shape, t.layout, t.device
    strides = [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if t.numel() else []
    return t.dtype, t.shape, t.device, strides, t.requires_grad, t.is_inference()


def _told(made: Any) -> str:
    if isinstance(made, Exception):
        return f"{type(made).__name__}: {str(made).splitlines()[0][:110] if str(made) else ''}"
    if isinstance(made, (tuple, list)):
        return f"({', '.join(map(_told, made))})"
    return _shown(made)


def attacked(subject: Subject, seed: int, first: int, n: int) -> Iterator[tuple[int, Call, str]]:
    """The calls whose outcomes differ."""
    for number in range(first, first + n):
        call = drawn(subject, seed, number)
        wanted = outcome(subject.theirs, call)
        got = outcome(subject.ours, drawn(subject, seed, number))
        if (told := difference(got, wanted)) and not subject.allowed(call, got, wanted):
            yield number, call, told


def prepare(interpreted: bool) -> None:
    """Switches for a comparison: nothing told, true f32."""
    transconv.config.fallback = "silent"
    transconv.config.cpu = "interpret" if interpreted else "fallback"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.torch_ops.attack")
    parser.add_argument("--n", type=int, default=300, help="calls of each function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--only", default="", help="functions, by their names")
    given = parser.parse_args(words)
    prepare(os.environ.get("TRITON_INTERPRET") == "1")
    wrong = 0
    warnings.filterwarnings("ignore")
    for subject in SUBJECTS:
        if given.only and subject.name not in given.only.split(","):
            continue
        for number, call, told in attacked(subject, given.seed, given.first, given.n):
            wrong += 1
            print(f"{subject.name} --seed {given.seed} --first {number}: {call}\n    {told}", flush=True)
    print(f"{wrong} calls differ from torch's")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
