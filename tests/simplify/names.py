"""The variables of the simplifier's tests, and what is known of them."""

from __future__ import annotations

from transconv.ir import Lane, Layout, Tensor, Var, boolean, f32, index64
from transconv.simplify import Facts, Range

a, b, x, y, z, ih = map(Var, ("a", "b", "x", "y", "z", "ih"))
i, kh, oh, q, t, s8, m_blk = map(Var, ("i", "kh", "oh", "q", "t", "s8", "m_blk"))
flag, big = Var("flag", boolean), Var("big", index64)
fx, fy = Var("fx", f32), Var("fy", f32)
lane8, lane_m = Lane("lane8", 8, 0), Lane("m", 128, 1)
m = m_blk * 128 + lane_m
src = Tensor("src", ("w",), (64,), Layout.dense(f32, (64,)))

FACTS = Facts(
    ranges={
        i: Range(0, 7),
        kh: Range(0, 2),
        oh: Range(0, 55),
        q: Range(0, 13),
        t: Range(0, 1),
        m_blk: Range(0, 24),
    },
    multiples={s8: 8},
)
