"""torch's own samples of the operations that work element by element, each as a text of one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

import transconv
from tests.functional.samples import Found, _same
from tests.torch_ops.samples import drawn
from transconv.compute import OPS, Op
from transconv.ir import DTYPES

NAMES = {f"torch.{t.torch}": t.name for t in DTYPES.values() if t.torch and not t.within}

CONDITIONS = {"lt", "le", "gt", "ge", "eq", "ne"}


def entries(op: Op) -> Iterator[Any]:
    """torch's entries for an operation."""
    from torch.testing._internal.common_methods_invocations import op_db

    dotted = str(op.torch).removeprefix("torch.")
    yield from (e for e in op_db if e.name == dotted and not e.variant_test_name)


def text_of(op: Op, tensors: list[torch.Tensor], numbers: list[float]) -> str:
    """The text of an operation on tensors, which are broadcast, with the numbers behind
    them. Its result is stored in their type, a condition as 0 or 1."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    shape = shape or torch.Size((1,))
    axes = [f"d{i}" for i in range(len(shape))]
    lines = [f"compute {op.name}_sample"]
    reads = []
    for name, t in zip("XYZ", tensors, strict=False):
        sizes, dtype = ", ".join(map(str, t.shape or (1,))), NAMES[str(t.dtype)]
        strides = ",".join(map(str, t.stride() or (1,)))
        lines.append(f"tensor {name} {dtype} [{sizes}] strides({strides})")
        own = axes[len(axes) - t.dim() :]
        coords = ["0" if n == 1 else a for a, n in zip(own, t.shape, strict=True)]
        reads.append(f"read {name.lower()} = {name}[{', '.join(coords or ['0'])}]")
    lines.append(f"tensor R {NAMES[str(tensors[0].dtype)]} [{', '.join(map(str, shape))}]")
    lines.append("axes " + " ".join(f"{a}={n}" for a, n in zip(axes, shape, strict=True)))
    value = f"{op.name}({', '.join([*'xyz'[: len(tensors)], *map(repr, numbers)])})"
    value = f"where({value}, 1.0, 0.0)" if op.name in CONDITIONS else value
    return " ;; ".join([*lines, *reads, f"store R[{', '.join(axes)}] = {value}"])


def tried(op: Op, device: str, dtype: torch.dtype, near: float = 1e-4, every: int = 1) -> Found:
    """How every n-th sample ended; those without a text are counted as torch's, by reason."""
    found = Found()
    for entry in entries(op):
        grads = entry.supports_autograd and op.derivative is not None
        for at, sample in enumerate(drawn(entry, device, dtype, grads)):
            given = [sample.input, *sample.args]
            if at % every:
                continue
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            named = dict(op.numbers) | {n: v for n, v in sample.kwargs.items() if (n, v) not in op.options}
            if {*named} != {n for n, _ in op.numbers} or dict(op.options) != {
                n: v for n, v in sample.kwargs.items() if n not in named
            }:
                found.handed["another form"] += 1
            elif len(tensors) != op.arity or len(given) > op.arity:
                found.handed["other operands"] += 1
            elif not all(t.numel() for t in tensors):
                found.handed["shape:empty"] += 1
            else:
                numbers = [float(v) for v in named.values()]
                found.count(
                    f"{op.name} {at}",
                    partial(
                        _compare, op, tensors, numbers, partial(entry.op, *given, **sample.kwargs), near
                    ),
                )
    return found


def _compare(
    op: Op,
    tensors: list[torch.Tensor],
    numbers: list[float],
    theirs: Callable[[], torch.Tensor],
    near: float,
) -> bool:
    want = theirs()
    text = text_of(op, tensors, numbers)
    got = transconv.computation(text)(*(t if t.dim() else t.view(1) for t in tensors))
    got = got.view(want.shape).to(want.dtype)
    _same(got, want, near)
    leaves = [t for t in tensors if t.requires_grad]
    if leaves and want.requires_grad:
        g = torch.randn_like(want)
        mine, theirs = (torch.autograd.grad(y, leaves, g) for y in (got, want))
        _same(mine, theirs, near)
    return bool(leaves and want.requires_grad)


@cache
def rows() -> list[Op]:
    """The operations of which torch has samples, and whose operands and result are floats."""
    return [op for op in OPS.values() if op.arity in (1, 2) and any(True for _ in entries(op))]
