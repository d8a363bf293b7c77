"""The text of a computation, read by ``parse`` and printed by ``write``.

    compute max_pool
        sizes  w=56 in 1..4096, w % 8 == 0                 names for sizes; see symbolic_sizes.py
        tensor x f16 [n=8, c=64, h=56, w=56] nhwc          default: f32, dense, as large as is read
        axes   n=8 c=64 oh=28 ow=28 | kh=3 kw=3            the bar has no meaning
        read   a = x[n, c, oh*2 + kh - 1, ow*2 + kw - 1] else -inf
        let    m = max(a; kh kw)
        store  y[n, c, oh, ow] = m

Reads outside of a tensor give 0, or the value after ``else``; ``where`` after a view adds a condition.
Arithmetic is in f32 (f64 if a declared tensor is f64); a store rounds to its tensor's type, or adds to the
tensor (``+=``), which is 0 at first. Expressions are Python's, with the operations of ``ops`` and
``where(cond, x, y)``. A product may also store reductions of its result, ``store M[n] sum= y``, and
``max=``, ``min=`` and ``squares=`` (analysis/statistics.py). Two semicolons also end a line, so that
``one_line`` can write a text without line ends.
"""

from __future__ import annotations

import re
from functools import lru_cache

from transconv.compute.compute import Compute
from transconv.compute.coordinates import as_written
from transconv.compute.steps import Axis, Read, Reduction, Step, Value
from transconv.compute.text.reader import Reader
from transconv.compute.text.views import conditions
from transconv.errors import ComputeError, nearest
from transconv.ir import (
    TRUE,
    Cast,
    Const,
    DType,
    Expr,
    Layout,
    Tensor,
    Var,
    View,
    all_of,
    f32,
    f64,
    i32,
    i64,
    readable,
    rewrite,
    why_not_text,
)

SELECTION = re.compile(r"\bselect\(")
END = ";;"
"""The end of a line in a text that is written in one line."""
WORDS = ("compute", "sizes", "tensor", "axes", "read", "let", "store")


def parse(text: str) -> Compute:
    """Parse a computation. Raises ComputeError, with a message of one line that has the line's number."""
    given = text.replace(END, "\n").splitlines()
    lines = [(n, line.partition("#")[0].strip()) for n, line in enumerate(given, 1)]
    lines = [(n, line) for n, line in lines if line]
    if not lines or lines[0][1].split()[0] != "compute":
        raise ComputeError("line 1: a computation begins with 'compute NAME'")
    reader = Reader()
    for number, line in lines:
        word, _, rest = line.partition(" ")
        try:
            if reason := why_not_text(line):
                raise ComputeError(reason)
            if word not in WORDS:
                hint = nearest(word, WORDS)
                if "[" in word and "=" in line:
                    hint = f"; write: store {line.replace('+=', 'sum=')}"
                raise ComputeError(f"'{word}' is unknown; expected one of {' '.join(WORDS)}{hint}")
            reader.number = number
            getattr(reader, f"line_{word}")(rest.strip())
        except ComputeError as error:
            raise ComputeError(f"line {number}: {error}") from None
    return reader.made()


@lru_cache(maxsize=1024)
def one_line(text: str) -> str:
    """The text of a computation as one line, without comments."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return f" {END} ".join(line for line in lines if line)


def write(compute: Compute) -> str:
    """The text of a computation; ``parse(write(c)) == c`` for one that was parsed."""
    said = "".join(f" {k}={v}" for k, v, usual in (
        ("math", compute.math, "tf32"), ("merge", compute.merge, 1)) if v != usual)
    lines = [f"compute {compute.name}{said}"]
    lines += [f"    sizes  {compute.named}"] if compute.named else []
    lines += [f"    tensor {_tensor(t)}" for t in compute.tensors]
    summed = {x.name for x in compute.axes_of("K")}
    groups = [" ".join(f"{x.name}={_extent(x)}" for x in compute.axes if (x.name in summed) is inside)
              for inside in (False, True)]
    lines.append(f"    axes   {' | '.join(filter(None, groups))}")
    lines += [f"    {line(s, compute)}" for s in compute.steps]
    return "\n".join(lines)


def _tensor(t: Tensor) -> str:
    bounds = (readable(e).replace(" ", "") for e in t.bounds)
    sizes = ", ".join(f"{d}={n}" for d, n in zip(t.dims, bounds, strict=True))
    dense = t.layout is Layout.dense(t.dtype, t.shape)
    order = t.layout.tag() if t.extents else t.layout
    return f"{t.name} {t.dtype} [{sizes}]" + ("" if dense else f" {order}")


def _extent(axis: Axis) -> str:
    return str(axis.size) if axis.extent is None else readable(axis.extent).replace(" ", "")


def line(step: Step, compute: Compute) -> str:
    """The line of a step."""
    if isinstance(step, Read):
        fill = f" else {step.fill:g}" if step.fill else ""
        return f"read   {step.name} = {_view(step.view)}{fill}"
    computed = f64 if any(t.dtype is f64 for t in compute.tensors) else f32
    if isinstance(step, Value):
        return f"let    {step.name} = {_value(step.value, computed)}"
    if isinstance(step, Reduction):
        return f"let    {step.name} = {step.op}({_value(step.value, computed)}; {' '.join(step.axes)})"
    value = _value(_inner(step.value), computed)
    return f"store  {_view(step.view)} {'+' if step.op == 'add' else step.op}= {value}"


def _view(view: View) -> str:
    coords = ", ".join(_said(as_written(d.coord)) for d in view.dims)
    where = all_of(conditions(view))
    said = "" if where is TRUE else f" where {_said(as_written(where))}"
    return f"{view.tensor.name}[{coords}]{said}"


def _value(e: Expr, computed: DType) -> str:
    """The text of an expression, without the casts that the parser adds; all others stay."""
    def shorter(at: Expr) -> Expr:
        return at.x if isinstance(at, Cast) and _is_added(at, computed) else at

    return _said(rewrite(e, shorter))


def _inner(e: Expr) -> Expr:
    """The expression without an outermost cast, such as that of a store to its tensor's type."""
    return e.x if isinstance(e, Cast) else e


def _is_added(cast: Cast, computed: DType) -> bool:
    """Whether the parser makes this cast of a name or a number."""
    x = cast.x
    if isinstance(x, Const):
        return True
    if not isinstance(x, Var) or x.dtype.kind not in ("float", "int"):
        return False
    return cast.type is (computed if x.dtype.kind == "float" else i32 if x.dtype.bits < 64 else i64)


def _said(e: Expr) -> str:
    """The text of an expression, with ``where`` for the IR's ``select``."""
    return SELECTION.sub("where(", readable(e))
