"""The other side of a comparison: the same convolution through torch (cuDNN, or oneDNN on CPUs).

Asymmetric padding, which torch's convolutions do not have, is a separate ``pad`` before the forward
and the weight gradient, and a crop after the data gradient: what a user would write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from transconv.compute import Op, table
from transconv.conv import ConvProblem, Prop

CONVOLVE = (functional.conv1d, functional.conv2d, functional.conv3d)
TRANSPOSE = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def in_place(op: Op) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation as a user would write it to save memory: in place where torch has that."""
    function: Any = getattr(torch, f"{op.name}_", None) or op.function()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters:
        return partial(function, inplace=True)
    return function  # type: ignore[no-any-return]


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = table(
    lambda op: in_place(op) if op.activation else None
)


@dataclass(frozen=True, slots=True)
class Padding:
    """How torch pads: ``symmetric`` in the convolution; ``explicit`` (for ``functional.pad``, last
    axis first) around the input before it, or None where nothing is left over."""

    symmetric: tuple[int, ...]
    explicit: tuple[int, ...] | None

    @staticmethod
    def of(p: ConvProblem) -> Padding:
        fits = all(
            (n + 2 * lo - (k - 1) * d - 1) // s + 1 == o
            for n, lo, k, d, s, o in zip(p.i, p.pad_lo, p.k, p.dilation, p.stride, p.o, strict=True)
        )
        if fits:
            return Padding(p.pad_lo, None)
        pairs = [x for lo, hi in reversed(list(zip(p.pad_lo, p.pad_hi, strict=True))) for x in (lo, hi)]
        return Padding((0,) * p.ndims, tuple(pairs))

    def around(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.explicit is None else functional.pad(x, self.explicit)

    def off(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.explicit is None else functional.pad(x, [-n for n in self.explicit])


def memory_format(ndims: int, layout: str) -> torch.memory_format | None:
    """torch's name of a layout; None where it has none (1D channels-last)."""
    if layout == "nchw":
        return torch.contiguous_format
    return {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndims)


def settings(tf32: bool, benchmark: bool = True) -> None:
    """Set torch's global switches for a measurement."""
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32


def gradients(
    p: ConvProblem,
    grad: torch.Tensor,
    src: torch.Tensor,
    wei: torch.Tensor,
    padding: tuple[int, ...],
    mask: tuple[bool, bool, bool],
) -> Any:
    return torch.ops.aten.convolution_backward(
        grad, src, wei, None, p.stride, padding, p.dilation, False, (0,) * p.ndims, p.g, mask
    )


def call(
    p: ConvProblem,
    prop: Prop,
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: str = "",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """A call that computes one direction from its operands (see ``Prop.operands``) and the
    epilogue after it, operation by operation."""
    padding = Padding.of(p)
    run: Callable[[], torch.Tensor]
    if prop is Prop.FWD:
        convolve = CONVOLVE[p.ndims - 1]

        def run() -> torch.Tensor:
            return convolve(padding.around(a), b, bias, p.stride, padding.symmetric, p.dilation, p.g)
    elif prop is Prop.BWD_D and bias is not None and padding.explicit is None:
        transpose = TRANSPOSE[p.ndims - 1]
        extra = tuple(hi - lo for hi, lo in zip(_unread(p), (0,) * p.ndims, strict=True))

        def run() -> torch.Tensor:
            return transpose(a, b, bias, p.stride, padding.symmetric, extra, p.g, p.dilation)
    elif prop is Prop.BWD_D:
        shape = padding.around(torch.empty(p.shapes["src"], device="meta")).shape
        channels_last = p.ndims > 1 and a.stride(1) == 1 and a.shape[1] > 1
        like = torch.empty(shape, dtype=a.dtype, device=a.device)
        form = memory_format(p.ndims, "nhwc" if channels_last else "nchw")
        like = like.to(memory_format=form) if form is not None else like

        def run() -> torch.Tensor:
            made = gradients(p, a, like, b, padding.symmetric, (True, False, False))[0]
            made = padding.off(made)
            return made if bias is None else made.add_(bias.view(-1, *[1] * p.ndims))
    else:
        wei = torch.empty(p.shapes["wei"], dtype=a.dtype, device=a.device)
        form = memory_format(p.ndims, "nhwc")
        if form is not None and a.stride(1) == 1 and a.shape[1] > 1:
            wei = wei.to(memory_format=form)

        def run() -> torch.Tensor:
            made: torch.Tensor = gradients(
                p, b, padding.around(a), wei, padding.symmetric, (False, True, False)
            )[1]
            return made

    others = [t for t in (residual,) if t is not None]
    words = [w for w in epilogue.split("+") if w and w != "bias"]
    if not words:
        return run

    def run_with_epilogue() -> torch.Tensor:
        made = run()
        for word in words:
            made = ACTIVATIONS[word](made) if word != "res" else made.add_(others[0])
        return made

    return run_with_epilogue


def _unread(p: ConvProblem) -> tuple[int, ...]:
    """``output_padding`` of the transposed convolution: input points that no window reaches."""
    return tuple(
        n - ((o - 1) * s - 2 * lo + (k - 1) * d + 1)
        for n, o, s, lo, k, d in zip(p.i, p.o, p.stride, p.pad_lo, p.k, p.dilation, strict=True)
    )


def fused(
    p: ConvProblem, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> Callable[[], torch.Tensor] | None:
    """cuDNN's own convolution + bias + ReLU, where torch offers it."""
    padding = Padding.of(p)
    if padding.explicit is not None or p.ndims == 1 or not a.is_cuda:
        return None
    return lambda: torch.cudnn_convolution_relu(a, b, bias, p.stride, padding.symmetric, p.dilation, p.g)


def inductor(p: ConvProblem, prop: Prop, epilogue: str = "") -> Callable[..., torch.Tensor]:
    """The same calls through torch.compile, autotuned, as one function of the operands, the bias
    and the residual: compiled once, whatever tensors of these shapes it is called with."""
    torch._dynamo.reset()  # compiles of other problems count against a limit

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return call(p, prop, a, b, epilogue, bias, residual)()

    compiled: Callable[..., torch.Tensor] = torch.compile(
        run, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
    )
    return compiled
