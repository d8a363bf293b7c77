"""Pieces of computations: what they read, and that each element is that of the whole."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from transconv.compute import execute, parse
from transconv.compute.restriction import (
    AxisSpan,
    TensorWindow,
    positions,
    restricted,
    span_of,
    without_statistics,
)

CONV = """compute conv
    tensor X f32 [2, 3, {i}, 5]
    tensor W f32 [4, 3, {k}, 3]
    tensor Y f32 [2, 4, {o}, 5]
    axes   n=2 oc=4 oh={o} ow=5 | kh={k} kw=3 ic=3
    read   x = X[n, ic, {row}, ow + kw - 1]
    read   w = W[oc, ic, kh, kw]
    let    s = sum(x*w; kh kw ic)
    store  Y[n, oc, oh, ow] = s
"""
ROWS = {
    "plain": (9, 3, 9, "oh + kh - 1"),
    "strided": (11, 3, 5, "oh*2 + kh"),
    "dilated": (11, 3, 9, "oh + kh*3 - 2"),
    "replicated": (7, 5, 7, "min(max(oh + kh - 2, 0), 6)"),
    "enlarged": (5, 3, 10, "(oh + kh) // 2"),
    "causal": (8, 3, 8, "oh + kh - 2"),
}
FLAT = """compute flat
    tensor X f32 [3, 42]
    tensor Y f32 [3, 42]
    axes   c=3 i=42
    read   x = X[c, i]
    let    y = x*x + 1
    store  Y[c, i] = y
"""
PHASES = """compute phases
    tensor X f32 [2, 6]
    tensor Y f32 [2, 12]
    axes   q=6 r=2 c=2 | t=2
    read   x = X[c, q - t + r]
    let    s = sum(x; t)
    store  Y[c, q*2 + r] = s
"""


def _pieces(text: str, axis: str, slot: dict[str, int], cuts: list[int]) -> None:
    """Compare all pieces of a computation with its whole, bit for bit, and what they read with what they
    may. Parts of tensors hold what is read and nothing else."""
    compute = parse(text)
    sizes = tuple((x.name, x.size) for x in compute.axes)
    rng = np.random.default_rng(0)
    given = {t.name: rng.standard_normal(t.shape) for t in compute.tensors if t.name != "Y"}
    whole = execute(compute, given)["Y"].value
    for start, stop in itertools.pairwise(cuts):
        at = AxisSpan(start, stop)
        windows, parts = {}, dict(given)
        for name, dim in slot.items():
            view = next(v for v in compute.views() if v.tensor.name == name)
            n = view.tensor.shape[dim]
            span = span_of(view.dims[dim].coord, sizes, axis, at)
            assert span is not None
            span = span.within(AxisSpan(0, n))
            shape = [span.size if d == dim else m for d, m in enumerate(view.tensor.shape)]
            strides = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
            windows[name] = TensorWindow(dim, span, strides)
            if name in given:
                parts[name] = np.take(given[name], range(span.start, span.stop), dim)
        made = execute(restricted(compute, axis, at, windows), parts)["Y"].value
        own = windows["Y"].span
        assert np.array_equal(made, np.take(whole, range(own.start, own.stop), slot["Y"]))
        assert positions(compute.c.dims[slot["Y"]].coord, sizes, axis, own) == at


@pytest.mark.parametrize("name", ROWS)
def test_pieces_of_rows_are_those_of_the_whole(name: str) -> None:
    i, k, o, row = ROWS[name]
    rng = random.Random(name)
    for _ in range(3):
        cuts = sorted({0, o, *rng.sample(range(1, o), 2)})
        _pieces(CONV.format(i=i, k=k, o=o, row=row), "oh", {"X": 2, "Y": 2}, cuts)


def test_pieces_of_rows_that_are_counted_with_columns() -> None:
    _pieces(FLAT, "i", {"X": 1, "Y": 1}, [0, 7, 21, 42])


def test_pieces_of_stride_phases() -> None:
    _pieces(PHASES, "q", {"X": 1, "Y": 1}, [0, 1, 4, 6])


def test_pieces_inside_have_one_text() -> None:
    compute = parse(CONV.format(i=32, k=3, o=32, row="oh + kh - 1"))
    inside = set()
    for start in (4, 8, 20):
        rows, own = AxisSpan(start - 1, start + 5), AxisSpan(start, start + 4)
        windows = {"X": TensorWindow(2, rows, (90, 30, 5, 1)), "Y": TensorWindow(2, own, (80, 20, 5, 1))}
        inside.add(str(restricted(compute, "oh", own, windows)))
    assert len(inside) == 1


def test_what_values_tell_may_be_anywhere() -> None:
    compute = parse(
        "compute gather\n  tensor I i32 [4]\n  tensor X f32 [9]\n  tensor Y f32 [4]\n  axes n=4\n"
        "  read i = I[n]\n  read x = X[i]\n  store Y[n] = x\n"
    )
    view = next(v for v in compute.views() if v.tensor.name == "X")
    span = span_of(view.dims[0].coord, (("n", 4),), "n", AxisSpan(0, 2))
    assert span is None or span.within(AxisSpan(0, 9)) == AxisSpan(0, 9)


def test_without_statistics_nothing_else_is_lost() -> None:
    compute = parse(
        "compute left\n  tensor X f32 [6, 4]\n  tensor W f32 [4, 3]\n  tensor Y f32 [6, 3]\n"
        "  tensor S f32 [3]\n  axes m=6 n=3 | k=4\n  read x = X[m, k]\n  read w = W[k, n]\n"
        "  let s = sum(x*w; k)\n  let b = s + 1\n  store Y[m, n] = s\n  store S[n] sum= b\n"
    )
    made = without_statistics(compute)
    assert [w.view.tensor.name for w in made.writes] == ["Y"] and "b" not in str(made).split()
    rng = np.random.default_rng(1)
    given = {"X": rng.standard_normal((6, 4)), "W": rng.standard_normal((4, 3))}
    assert np.array_equal(execute(made, given)["Y"].value, execute(compute, given)["Y"].value)
