import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(z_ptr + at, x + y, mask=inside)


def vector_add(x, y):
    z = torch.empty_like(x)
    n = x.numel()
    add[(triton.cdiv(n, 1024),)](x, y, z, n, BLOCK=1024)
    return z
