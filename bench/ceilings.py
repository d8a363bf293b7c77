"""Measures the matrix rate and the copy bandwidth of this GPU, which give lower bounds of times."""

from __future__ import annotations

import torch

from transconv.runtime.timing import Call, Clock


def measure(clock: Clock, size: int = 8192, copied: int = 1 << 30) -> dict[str, float]:
    """TFLOP/s of a bf16 product of ``size`` square random matrices, and TB/s of a copy of
    ``copied`` bytes (read and written bytes together)."""
    device = clock.flush.device

    def product(index: int) -> Call:
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in "ab")
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    def copy(index: int) -> Call:
        a = torch.randn(copied // 4, device=device)
        b = torch.empty_like(a)
        return lambda: b.copy_(a)

    times = clock.compare({"product": product, "copy": copy}, 2 * copied)
    return {
        "gemm_tflops": 2 * size**3 / times["product"].us / 1e6,
        "copy_tbs": 2 * copied / times["copy"].us / 1e6,
    }
