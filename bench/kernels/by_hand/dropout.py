import torch
import triton
import triton.language as tl


@triton.jit
def drop(x_ptr, y_ptr, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    kept = tl.rand(seed, at) >= p
    tl.store(y_ptr + at, tl.where(kept, x / (1 - p), 0.0), mask=inside)


def dropout(x, p, seed):
    y = torch.empty_like(x)
    n = x.numel()
    drop[(triton.cdiv(n, 1024),)](x, y, n, p, seed, BLOCK=1024)
    return y
