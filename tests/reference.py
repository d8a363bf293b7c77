"""Reference answers: direct convolution in NumPy, tap by tap, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir import Layout


def _taps(p: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
    """Every filter tap with the output positions it reaches and the input positions it reads."""
    for tap in itertools.product(*map(range, p.k)):
        outs, ins = [], []
        for x, k in enumerate(tap):
            shift = k * p.dilation[x] - p.pad_lo[x]
            first = max(0, -(shift // p.stride[x]))
            last = min(p.o[x] - 1, (p.i[x] - 1 - shift) // p.stride[x])
            count = max(0, last - first + 1)
            outs.append(slice(first, first + count))
            start = first * p.stride[x] + shift
            stop = start + (count - 1) * p.stride[x] + 1 if count else start
            ins.append(slice(start, stop, p.stride[x]) if count else slice(0, 0))
        if all(s.stop > s.start for s in outs):
            yield tap, tuple(outs), tuple(ins)


def convolve(p: ConvProblem, prop: Prop, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The result of one direction from its two operands (A and B of the computation), in float64.

    FWD takes (src, wei), BWD_D (dst, wei), BWD_W (src, dst), each in its logical shape.
    """
    shapes = {"src": (p.mb, p.ic, *p.i), "wei": (p.oc, p.icg, *p.k), "dst": (p.mb, p.oc, *p.o)}
    names = {Prop.FWD: ("src", "wei"), Prop.BWD_D: ("dst", "wei"), Prop.BWD_W: ("src", "dst")}[prop]
    given = {n: np.asarray(v, np.float64).reshape(shapes[n]) for n, v in zip(names, (a, b), strict=True)}
    made = ({"src", "wei", "dst"} - set(names)).pop()
    t = {**given, made: np.zeros(shapes[made])}
    src = t["src"].reshape(p.mb, p.g, p.icg, *p.i)
    wei = t["wei"].reshape(p.g, p.ocg, p.icg, *p.k)
    dst = t["dst"].reshape(p.mb, p.g, p.ocg, *p.o)
    for tap, outs, ins in _taps(p):
        s, w, d = (..., *ins), (slice(None), slice(None), slice(None), *tap), (..., *outs)
        if prop is Prop.FWD:
            dst[d] += np.einsum("ngi...,goi->ngo...", src[s], wei[w])
        elif prop is Prop.BWD_D:
            src[s] += np.einsum("ngo...,goi->ngi...", dst[d], wei[w])
        else:
            x, y = src[s].reshape(p.mb, p.g, p.icg, -1), dst[d].reshape(p.mb, p.g, p.ocg, -1)
            wei[w] += np.einsum("ngip,ngop->goi", x, y)
    return t[made]


def offsets(layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    """The memory offset of every logical element, by the definition of a blocked layout."""
    total = np.full(shape, layout.offset)
    for dim, size in enumerate(shape):
        position = np.arange(size)
        inner = 1
        for block in reversed(layout.of_dim(dim)):
            step = (position // inner) % block.size * block.stride
            total = total + step.reshape([-1 if d == dim else 1 for d in range(len(shape))])
            inner *= block.size
    return total


def pack(values: np.ndarray, layout: Layout, fill: float = 0.0) -> np.ndarray:
    """Lay a logical array out in memory; what no element maps to holds ``fill``."""
    memory = np.full(layout.span, fill, dtype=layout.dtype.numpy)
    memory[offsets(layout, values.shape)] = values
    return memory


def unpack(memory: np.ndarray, layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    return memory[offsets(layout, shape)]


def integers(rng: np.random.Generator, shape: tuple[int, ...], most: int = 4) -> np.ndarray:
    """Small whole numbers: every order of summation gives the same bits."""
    return rng.integers(-most, most + 1, shape).astype(np.float64)
