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
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import transconv
from tests.torch_ops.attack_arguments import LIKE, UNLIKE, values
from tests.torch_ops.attack_around import ANY_STRIDES, AROUND
from tests.torch_ops.attack_subjects import SUBJECTS, Subject
from transconv.errors import TransconvError

Tensor = torch.Tensor
Drawn = random.Random

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
        if v.is_nested:
            return f"<nested {str(v.dtype)[6:]} {v.device}{more}>"
        strides = tuple(v.stride()) if v.layout is torch.strided else v.layout
        return f"<{type(v).__name__} {tuple(v.shape)} {strides} {str(v.dtype)[6:]} {v.device}{more}>"
    return repr(v)


DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


def drawn(subject: Subject, seed: int, number: int) -> Call:
    """The call of this number."""
    rng = random.Random(f"{subject.name} {seed} {number}")
    torch.manual_seed(rng.randrange(2**31))
    args, kwargs = subject.base(rng)
    around = rng.choice(["plain"] * 3 + [*AROUND]) if subject.around else rng.choice(("plain", "no_grad"))
    dtype = rng.choice(DTYPES)
    args = [_cast(a, dtype) for a in args]
    kwargs = {k: _cast(v, dtype) for k, v in kwargs.items()}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        _mutate(args, kwargs, rng)
    return Call(args, kwargs, around)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(v, dtype) for v in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _mutate(args: list[Any], kwargs: dict[str, Any], rng: Drawn) -> None:
    kind = rng.random()
    if kind < 0.04 and args:
        args.pop()
    elif kind < 0.07:
        args.append(values(rng))
    elif kind < 0.10:
        name = rng.choice(("strid", "pad", "out", "out", "dtype", "memory_format", "bias", "dim", "eps"))
        given = name == "out" and rng.random() < 0.7
        kwargs[name] = torch.empty(rng.choice((0, 3)), dtype=rng.choice(DTYPES)) if given else values(rng)
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
            return AROUND[call.around](f, call.args, call.kwargs)
    except Exception as error:  # its class is what is compared
        return error


LOOSE = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float64: 1e-9,
}


def difference(got: Any, wanted: Any, strides: bool = True, least: float = 0.0) -> str:
    """What is not the same, the strides of tensors included or not; empty if nothing is. ``least``: how
    much values may differ whatever their type."""
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        if type(got) is type(wanted):
            return ""
        if isinstance(got, TransconvError) and isinstance(got, type(wanted)):
            return ""
        return f"{_told(got)}; torch: {_told(wanted)}"
    if isinstance(wanted, (tuple, list)):
        if type(got) is not type(wanted) or len(got) != len(wanted):
            return f"{_told(got)}; torch: {_told(wanted)}"
        found = (difference(a, b, strides, least) for a, b in zip(got, wanted, strict=True))
        return next(filter(None, found), "")
    if got is None and isinstance(wanted, Tensor) and not wanted.any():
        return ""  # a derivative of nothing
    if not isinstance(wanted, Tensor):
        return "" if type(got) is type(wanted) and got == wanted else f"{got!r}; torch: {wanted!r}"
    if not isinstance(got, Tensor) or _look(got, strides) != _look(wanted, strides):
        return f"{_told(got)}; torch: {_told(wanted)}"
    if wanted.is_meta or not wanted.numel():
        return ""
    if wanted.is_nested:
        return difference(got.unbind(), wanted.unbind())
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (got, wanted))
    if a.layout is not torch.strided:
        return ""
    close = max(least, LOOSE.get(wanted.dtype, 0))
    finite = b[b.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    if torch.allclose(a, b, rtol=close, atol=close * max(scale, 1e-3), equal_nan=True):
        return ""
    return f"values differ by {float((a - b).abs().nan_to_num().max()):.3g} of {scale:.3g}"


def _look(t: Tensor, with_strides: bool) -> Any:
    if t.is_nested:
        return type(t), t.dtype, "nested", t.layout, t.device
    if t.layout is not torch.strided:
        return type(t), t.dtype, t.shape, t.layout, t.device
    shown = with_strides and t.numel()
    strides = [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] if shown else []
    return type(t), t.dtype, t.shape, t.device, strides, t.requires_grad, t.is_inference()


def _is_dense(made: Any) -> bool:
    if isinstance(made, tuple):
        return all(map(_is_dense, made))
    return not isinstance(made, Tensor) or made.layout is not torch.strided or made.is_contiguous()


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
        # On CPUs some of torch's kernels forget that an operand of a convolution was channels last.
        forgets = "conv" in subject.name and _is_dense(wanted)
        least = LOOSE[torch.bfloat16] if call.around == "autocast" else 0.0
        told = difference(got, wanted, call.around not in ANY_STRIDES and not forgets, least)
        if told and not subject.allowed(call, got, wanted):
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
    logging.disable()
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
