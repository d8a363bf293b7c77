"""A kernel's worth of index and mask expressions is simplified in well under a second."""

from __future__ import annotations

import time

from transconv.ir import Expr, Lane, Var, eq, minimum, select
from transconv.simplify import Facts, Range, simplify

SHAPES = [  # out h, out w, stride, dilation, pad, tile
    (28, 28, 1, 1, 1, 128),
    (56, 56, 2, 1, 3, 64),
    (14, 14, 1, 2, 2, 128),
    (7, 7, 2, 1, 1, 64),
    (112, 112, 2, 1, 3, 256),
]


def _kernel(number: int) -> tuple[list[Expr], dict[Expr, Range]]:
    """Coordinates, masks and offsets of one kernel that fuses mb, oh and ow into lanes."""
    height, width, stride, dilation, pad, tile = SHAPES[number]
    m_blk, n_blk, k_blk, kh, kw = (
        Var(f"{name}{number}") for name in ("m_blk", "n_blk", "k_blk", "kh", "kw")
    )
    m = m_blk * tile + Lane("m", tile, 0)
    ic, oc = k_blk * 32 + Lane("k", 32, 1), n_blk * 64 + Lane("n", 64, 2)
    mb, oh, ow = m // (height * width), m // width % height, m % width
    ih, iw = oh * stride + kh * dilation - pad, ow * stride + kw * dilation - pad
    t, u = ih + pad - kh * dilation, iw + pad - kw * dilation
    rows, cols = height * stride, width * stride
    inside = (0 <= ih) & (ih < rows) & (0 <= iw) & (iw < cols)
    found: list[Expr] = [
        mb,
        oh,
        ow,
        ih,
        iw,
        inside,
        inside & (m < 32 * height * width) & (ic < 256),
        t // stride,
        ((mb * rows + ih) * cols + iw) * 256 + ic,
        ((mb * height + oh) * width + ow) * 64 + oc,
        ((oc * 256 + ic) * 3 + kh) * 3 + kw,
        u // stride,
        (oc < 256) & (ic < 200),
        eq(t % stride, 0) & (0 <= t // stride) & (t // stride < height),
        ((mb * 32 + ic // 8) * height * width + oh * width + ow) * 8 + ic % 8,
    ]
    for step in range(1, 5):
        found += [
            (mb * height + oh) * width * step + ow * step,
            (m + step) // width % height,
            (m + step) % width,
            (0 <= ih + step) & (ih + step < rows),
            minimum(ih, rows - 1 + step),
            (0 <= iw * step) & (iw * step < cols * step),
            select(ih + step < 0, 0, ih + step),
        ]
    ranges: dict[Expr, Range] = {
        m_blk: Range(0, 31),
        n_blk: Range(0, 3),
        k_blk: Range(0, 7),
        kh: Range(0, 2),
        kw: Range(0, 2),
    }
    return found, ranges


def test_a_kernel_is_simplified_in_time() -> None:
    kernels = [_kernel(n) for n in range(len(SHAPES))]
    facts = Facts(ranges={e: r for _, ranges in kernels for e, r in ranges.items()})
    exprs = [e for found, _ in kernels for e in found]
    assert len(exprs) >= 200
    x, y = Var("x"), Var("y")
    simplify((x + y) * (x - y))  # SymPy is imported here, which is not measured
    start = time.process_time()
    made = [simplify(e, facts) for e in exprs]
    assert time.process_time() - start < 2.0
    assert all(simplify(e, facts) is e for e in made)


def test_a_dense_tile_has_a_linear_address() -> None:
    found, ranges = _kernel(0)
    address = simplify(found[9], Facts(ranges=ranges))
    assert str(address) == "((((n_blk0 * 64) + n[0:64]) + (m_blk0 * 8192)) + (m[0:128] * 64))"
