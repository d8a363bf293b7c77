"""Rows of reductions, and of what is made of them: moments, pools."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from transconv.graph import moves
from transconv.graph.map_rows import cast
from transconv.graph.pieces import Chosen, Constant, Index, Mapped, Part, Piece, Reduced, Seen
from transconv.graph.rows import Call, NotOurs, computed, expanded, kind, mapped, reshaped, row
from transconv.graph.sizes import Length


def reduced(op: str, dims: Sequence[int], *inputs: Piece, dtype: torch.dtype, label: str = "",
            write: Any = str) -> Piece:
    """A reduction, with the reduced dims gone."""
    alone = [d for d in dims if inputs[0].shape[d] == 1]
    if alone:
        kept = [n for d, n in enumerate(inputs[0].shape) if d not in alone]
        inputs = tuple(reshaped(x, kept) for x in inputs)
        dims = [d - sum(a < d for a in alone) for d in dims if d not in alone]
    computed(dtype)
    x = inputs[0]
    if not dims:
        if op.startswith("arg"):
            return Constant(shape=x.shape, dtype=dtype, value=0)
        return mapped(write, *inputs, dtype=dtype, label=label or op)
    shape = tuple(n for d, n in enumerate(x.shape) if d not in dims)
    return Reduced(shape=shape, dtype=dtype, inputs=inputs, op=op, dims=tuple(dims), label=label or op,
                   write=write)


def dims_of(given: Any, rank: int) -> tuple[int, ...]:
    """The dims that a call names; none means all."""
    if given is None or isinstance(given, (list, tuple)) and not given:
        return tuple(range(rank))
    listed = given if isinstance(given, (list, tuple)) else [given]
    return tuple(sorted(d % rank for d in listed)) if rank else ()


def _number(x: Piece, dtype: torch.dtype) -> Piece:
    """What is reduced: truths as whole numbers."""
    return cast(x, dtype) if kind(x.dtype) == "bool" else x


@row("sum.dim_IntList", "sum")
def _sum(call: Call) -> Piece:
    x = _number(call.args[0], torch.int64)
    if kind(call.dtype) != kind(x.dtype) or kind(x.dtype) == "int":  # whole ones in 64 bits
        x = cast(x, call.dtype)
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    return reshaped(reduced("sum", dims, x, dtype=call.dtype), call.shape)


@row("mean.dim", "mean")
def _mean(call: Call) -> Piece:
    x = call.args[0]
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    return reshaped(_mean_of(x, dims, call.dtype)[1], call.shape)


def _mean_of(x: Piece, dims: Sequence[int], dtype: torch.dtype) -> tuple[Piece, Piece]:
    """A sum and the mean."""
    total = reduced("sum", dims, x, dtype=_wide(dtype), label="mean")
    count = prod(x.shape[d] for d in dims)
    return total, mapped(f"{{}} / {count}".format, total, dtype=dtype, label="mean")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@row("amax", "amin")
def _extreme(call: Call) -> Piece:
    x = call.args[0]
    if kind(x.dtype) == "bool":
        raise NotOurs("extremes of truths")
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    return reshaped(reduced(call.name.split(".")[0][1:], dims, x, dtype=call.dtype), call.shape)


@row("prod", "prod.dim_int")
def _prod(call: Call) -> Piece:
    x = call.args[0]
    if kind(x.dtype) != "float":
        raise NotOurs("products of whole numbers")
    given = call.arg(1, "dim") if call.name.endswith("dim_int") else None
    return reshaped(reduced("prod", dims_of(given, len(x.shape)), x, dtype=call.dtype), call.shape)


@row("any", "any.dim", "any.dims", "all", "all.dim", "all.dims")
def _truths(call: Call) -> Piece:
    x = call.args[0]
    x = cast(cast(x, torch.bool), torch.int32)
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    op = "max" if call.name.startswith("any") else "min"
    return reshaped(cast(reduced(op, dims, x, dtype=torch.int32), torch.bool), call.shape)


@row("argmax", "argmin")
def _place(call: Call) -> Piece:
    x = call.args[0]
    if kind(x.dtype) != "float":
        raise NotOurs("places of extremes of whole numbers")
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    found = reduced(call.name.split(".")[0], dims, x, dtype=torch.int64)
    return reshaped(found, call.shape)


@row("max.dim", "min.dim")
def _extreme_and_place(call: Call) -> tuple[Piece, ...]:
    x = call.args[0]
    if kind(x.dtype) != "float":
        raise NotOurs("places of extremes of whole numbers")
    op, dims = call.name.split(".")[0], dims_of(call.arg(1, "dim"), len(x.shape))
    return (reshaped(reduced(op, dims, x, dtype=x.dtype), call.shape),
            reshaped(reduced(f"arg{op}", dims, x, dtype=torch.int64), call.shape))


# -- moments ---------------------------------------------------------------------------------------


def _moments(call: Call) -> tuple[Piece, Piece]:
    """Variance and mean."""
    x = call.args[0]
    if call.name.startswith("var") and call.name.split(".")[-1] not in ("correction", "default", "dim"):
        raise NotOurs("names of dims")
    dims = dims_of(call.arg(1, "dim"), len(x.shape))
    given = call.kwargs.get("correction", 1)
    count = prod(x.shape[d] for d in dims)
    least = count - (1 if given is None else given)
    if least <= 0:
        raise NotOurs("the variance of one number")
    mean, squares = _centred(x, dims, _wide(call.dtype))
    var = mapped(f"{{}} / {least!r}".format, squares, dtype=call.dtype, label="var")
    return reshaped(var, call.shape), reshaped(mean, call.shape)


def _centred(x: Piece, dims: Sequence[int], dtype: torch.dtype) -> tuple[Piece, Piece]:
    """The mean, and the sum of the squared deviations from it."""
    mean = _mean_of(x, dims, dtype)[1]
    kept = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    centre = expanded(reshaped(mean, kept), x.shape)
    off = mapped("{} - {}".format, x, centre, dtype=dtype, label="deviation")
    squares = reduced("sum", dims, off, dtype=dtype, label="var", write="{0}*{0}".format)
    if isinstance(squares, Reduced) and squares.inputs == (off,):
        squares.deviating = x
    return mean, squares


@row("var.correction")
def _var(call: Call) -> Piece:
    return _moments(call)[0]


@row("var_mean.correction")
def _var_mean(call: Call) -> tuple[Piece, ...]:
    return _moments(call)


@row("native_group_norm")
def _group_norm(call: Call) -> tuple[Piece, ...]:
    x, weight, bias, n, features, _, groups, eps = call.args
    shape = (n, groups, features // groups, *x.shape[2:])
    lead = (1, groups, features // groups, *[1] * (len(x.shape) - 2))
    scales = [None if t is None else expanded(reshaped(t, lead), shape) for t in (weight, bias)]
    made, *moments = _normal(reshaped(x, shape), scales, 2, eps, call)
    return (reshaped(made, call.shape), *moments)


@row("native_layer_norm")
def _layer_norm(call: Call) -> tuple[Piece, ...]:
    x, normal, weight, bias, eps = call.args
    scales = [None if t is None else expanded(t, x.shape) for t in (weight, bias)]
    return _normal(x, scales, len(x.shape) - len(normal), eps, call)


def _normal(x: Piece, scales: Sequence[Piece | None], first: int, eps: float,
            call: Call) -> tuple[Piece, ...]:
    """What is normalized over the dims from ``first`` on, the mean, and one over the deviation."""
    dtype = _wide(call.dtype)
    dims = tuple(range(first, len(x.shape)))
    mean, var = _centred(x, dims, dtype)
    scale = mapped(f"rsqrt({{}} / {prod(x.shape[d] for d in dims)} + {eps!r})".format, var, dtype=dtype,
                   label="rsqrt", work=8)
    kept = (*x.shape[:first], *[1] * len(dims))
    wide = [expanded(reshaped(t, kept), x.shape) for t in (mean, scale)]
    made: Piece = mapped("({} - {})*{}".format, x, *wide, dtype=dtype, label="norm", work=2)
    weight, bias = scales
    if weight is not None:
        made = mapped("{}*{}".format, made, weight, dtype=dtype, label="norm")
    if bias is not None:
        made = mapped("{} + {}".format, made, bias, dtype=dtype, label="norm")
    moments = []
    for t, result in zip((mean, scale), call.results[1:], strict=True):
        assert result is not None
        moments.append(reshaped(mapped(str, t, dtype=result.dtype, label="norm", work=0), result.shape))
    return mapped(str, made, dtype=call.dtype, label="norm", work=0), *moments


@row("index_put", "_unsafe_index_put")
def _repeated(call: Call) -> Piece:
    """The gradient of nearest upsampling: the sums of neighbours."""
    x, indices, grad = call.args[:3]
    whole = isinstance(x, Constant) and x.value == 0 and call.arg(3, "accumulate", False)
    told = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not whole or len(grad.shape) != len(x.shape) or any(i.values is None for _, i in told):
        raise NotOurs("elements are put where values say")
    shape: list[Length] = list(grad.shape)
    dims: list[int] = []
    for d, index in reversed(told):
        times, rest = divmod(grad.shape[d], x.shape[d])
        flat = index.values.flatten()
        if rest or not torch.equal(flat, torch.arange(grad.shape[d]) // max(1, times)):
            raise NotOurs("elements are put at a ratio that is no whole number")
        shape[d:d + 1] = [x.shape[d], times]
        dims = [d + 1, *(e + 1 for e in dims)]
    return reduced("sum", dims, reshaped(grad, shape), dtype=call.dtype, label="sum of neighbours")


# -- pools -----------------------------------------------------------------------------------------


def _list(given: Any, n: int, usual: Sequence[int]) -> list[int]:
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    listed = listed or list(usual)
    return listed * n if len(listed) == 1 else listed


def window_numbers(call: Call, n: int, first: int) -> tuple[list[int], list[int], list[int]]:
    """The window, stride and padding of a pool, whose arguments begin with these at a place."""
    window = _list(call.args[first], n, ())
    return (window, _list(call.arg(first + 1, "stride", []), n, window),
            _list(call.arg(first + 2, "padding", 0), n, ()))


def _windows(x: Piece, sizes: Sequence[Length], window: Sequence[int], stride: Sequence[int],
             padding: Sequence[int], dilation: Sequence[int], fill: float) -> Piece:
    """(..., o, k): the elements of each window."""
    n = len(window)
    shape = (*x.shape[:-n], *sizes, *window)
    move = moves.windows(n, stride, padding, dilation)
    dims = [len(x.shape) - n + d for d in range(n)]
    leaves = any(p or (o - 1) * s + (k - 1) * d - p >= i for o, s, k, d, p, i in zip(
        sizes, stride, window, dilation, padding, x.shape[-n:], strict=True))
    if not leaves:
        return Seen(shape=shape, dtype=x.dtype, of=x, move=move, label="windows")
    beyond = Constant(shape=shape, dtype=x.dtype, value=fill)
    return Chosen(shape=shape, dtype=x.dtype, label="windows", parts=(
        Part(x, move, moves.inside(x.shape, move, dims)), Part(beyond, lambda at: at)))


@row("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(call: Call) -> tuple[Piece, ...]:
    x = call.args[0]
    n = 3 if "3d" in call.name else 2
    window, stride, padding = window_numbers(call, n, 1)
    dilation = _list(call.arg(4, "dilation", 1), n, ())
    sizes = call.shape[-n:]
    seen = _windows(x, sizes, window, stride, padding, dilation, float("-inf"))
    dims = tuple(range(len(seen.shape) - n, len(seen.shape)))
    top = reduced("max", dims, seen, dtype=call.dtype, label="max_pool")
    place = reduced("argmax", dims, seen, dtype=torch.int64, label="max_pool")

    def coordinates(at: Index) -> Index:
        first = len(at) - n
        return tuple(at[first + d] * stride[d] - padding[d] for d in range(n))

    def flat(found: str, *corner: str) -> str:
        said, below = "", prod(window)
        for d in range(n):
            below //= window[d]
            own = f"{found} // {below}" if below > 1 else found
            own = f"({own}) % {window[d]}" if d else f"({own})"
            own = f"({corner[d]} + {own}*{dilation[d]})"
            said = f"({said}*{x.shape[len(x.shape) - n + d]} + {own})" if said else own
        return said

    index = Mapped(shape=top.shape, dtype=torch.int64, inputs=(place,), write=flat, place=coordinates,
                   label="max_pool", work=4 * n)
    return top, index


@row("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(call: Call) -> Piece:
    x = call.args[0]
    n = int(call.name.split(".")[0][-2])
    window, stride, padding = window_numbers(call, n, 1)
    ceil, counts_all, divisor = (call.arg(4, "ceil_mode", False), call.arg(5, "count_include_pad", True),
                                 call.arg(6, "divisor_override"))
    if ceil or any(padding) and not counts_all:
        raise NotOurs("windows of unlike counts")
    seen = _windows(x, call.shape[-n:], window, stride, padding, [1] * n, 0.0)
    dims = tuple(range(len(seen.shape) - n, len(seen.shape)))
    total = reduced("sum", dims, seen, dtype=_wide(call.dtype), label="avg_pool")
    return mapped(f"{{}} / {divisor or prod(window)}".format, total, dtype=call.dtype, label="avg_pool")


