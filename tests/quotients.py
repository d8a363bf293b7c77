"""Quotients in f32 by the function ``divided`` of the IR, in a kernel; for tests."""

from __future__ import annotations

import numpy as np
import torch

from transconv import ir
from transconv.backend_triton.emitters import triton
from transconv.backend_triton.launch.jit_module import load

N = 128


def kernel() -> ir.Kernel:
    """y[i] = x[i] / by[i], N elements in a program."""
    x, by, y = (ir.Tensor(n, ("x",), (N,), ir.Layout.dense(ir.f32, (N,))) for n in ("x", "by", "y"))
    program = ir.Var("pid")
    at = program * N + ir.Lane("i", N, 1)
    quotient = ir.Call("divided", (ir.Load(x, at, ir.TRUE), ir.Load(by, at, ir.TRUE)))
    return ir.Kernel("each", (x, by, y), ir.For(program, 1, ir.Store(y, at, quotient, ir.TRUE), "grid"))


def wrong(count: int, seed: int, device: str) -> tuple[int, int]:
    """Of ``count`` drawn pairs of numbers, signs, exponents and digits all as likely: how many have a
    quotient of at least 2**-39 or none, and of how many of them a kernel has other bits than NumPy."""
    x, by = np.random.default_rng(seed).integers(0, 1 << 32, (2, count), np.uint32).view(np.float32)
    out = torch.full(x.shape, torch.nan, device=device)
    with np.errstate(all="ignore"):
        load(triton.emit(kernel()), "each")[count // N,](
            torch.from_numpy(x).to(device), torch.from_numpy(by).to(device), out
        )
        want = x / by
    got, large = out.cpu().numpy(), ~(np.abs(want) < 2.0**-39)
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    return int(large.sum()), int((large & ~same).sum())
