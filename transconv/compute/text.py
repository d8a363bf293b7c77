"""The text of a computation, read by ``parse`` and printed by ``write``.

    compute max_pool
        tensor x f16 [n=8, c=64, h=56, w=56] nhwc          left out: f32, dense, as large as is read
        axes   n=8 c=64 oh=28 ow=28 | kh=3 kw=3            the bar is for the eye
        read   a = x[n, c, oh*2 + kh - 1, ow*2 + kw - 1] else -inf
        let    m = max(a; kh kw)
        store  y[n, c, oh, ow] = m

Coordinates that may leave their tensor are masked, and read as 0, or as what ``else`` says; ``where``
adds a condition. Reads are computed with in f32 (f64 where a tensor is f64); a store rounds to its
tensor's type. Expressions are Python's, with the operations of ``ops`` and ``where(cond, x, y)``.
"""

from __future__ import annotations

import re

from transconv.compute.compute import Compute
from transconv.compute.coordinates import as_written
from transconv.compute.reader import Reader
from transconv.compute.shapes import conditions
from transconv.compute.steps import Read, Reduction, Step, Value
from transconv.errors import ComputeError
from transconv.ir import (
    Cast,
    Const,
    Expr,
    Layout,
    Tensor,
    Var,
    View,
    readable,
    rewrite,
)

SELECTION = re.compile(r"\bselect\(")
WORDS = ("compute", "tensor", "axes", "read", "let", "store")


def parse(text: str) -> Compute:
    """Read a computation. Raises ComputeError: one line, with the place and what was expected."""
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(text.splitlines(), 1)]
    lines = [(n, line) for n, line in lines if line]
    if not lines or lines[0][1].split()[0] != "compute":
        raise ComputeError("line 1: a computation begins with 'compute NAME'")
    reader = Reader()
    for number, line in lines:
        word, _, rest = line.partition(" ")
        try:
            if word not in WORDS:
                raise ComputeError(f"'{word}' is unknown; expected one of {' '.join(WORDS)}")
            getattr(reader, f"line_{word}")(rest.strip())
        except ComputeError as error:
            raise ComputeError(f"line {number}: {error}") from None
    return reader.made()


def write(compute: Compute) -> str:
    """The text of a computation; ``parse(write(c)) == c`` for one that was read."""
    said = "".join(f" {k}={v}" for k, v, usual in (
        ("math", compute.math, "tf32"), ("merge", compute.merge, 1)) if v != usual)
    lines = [f"compute {compute.name}{said}"]
    lines += [f"    tensor {_tensor(t)}" for t in compute.tensors]
    summed = {x.name for x in compute.axes_of("K")}
    groups = [" ".join(f"{x.name}={x.size}" for x in compute.axes if (x.name in summed) is inside)
              for inside in (False, True)]
    lines.append(f"    axes   {' | '.join(filter(None, groups))}")
    lines += [f"    {_step(s, compute)}" for s in compute.steps]
    return "\n".join(lines)


def _tensor(t: Tensor) -> str:
    sizes = ", ".join(f"{d}={n}" for d, n in zip(t.dims, t.shape, strict=True))
    dense = t.layout is Layout.dense(t.dtype, t.shape)
    return f"{t.name} {t.dtype} [{sizes}]" + ("" if dense else f" {t.layout}")


def _step(step: Step, compute: Compute) -> str:
    if isinstance(step, Read):
        fill = f" else {step.fill:g}" if step.fill else ""
        return f"read   {step.name} = {_view(step.view)}{fill}"
    if isinstance(step, Value):
        return f"let    {step.name} = {_value(step.value)}"
    if isinstance(step, Reduction):
        return f"let    {step.name} = {step.op}({_value(step.value)}; {' '.join(step.axes)})"
    return f"store  {_view(step.view)} = {_value(step.value)}"


def _view(view: View) -> str:
    coords = ", ".join(_said(as_written(d.coord)) for d in view.dims)
    more = [_said(as_written(c)) for c in conditions(view)]
    return f"{view.tensor.name}[{coords}]" + (f" where {' and '.join(more)}" if more else "")


def _value(e: Expr) -> str:
    """Without the casts that reading adds: those of reads to the type that is computed in, and of a
    store to its tensor's type."""
    def shorter(at: Expr) -> Expr:
        return at.x if isinstance(at, Cast) and isinstance(at.x, (Var, Const)) else at

    return _said(rewrite(e.x if isinstance(e, Cast) else e, shorter))


def _said(e: Expr) -> str:
    """As a text has it: what the IR calls a selection is a ``where``."""
    return SELECTION.sub("where(", readable(e))
