import torch
import triton
import triton.language as tl


@triton.jit
def rows(
    g_ptr,
    x_ptr,
    scale_ptr,
    dx_ptr,
    dscale_ptr,
    dshift_ptr,
    stride,
    m,
    n,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < n
    w = tl.load(scale_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    dscale = tl.zeros((BLOCK,), tl.float32)
    dshift = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * ROWS, min(part * ROWS + ROWS, m)):
        x = tl.load(x_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / n
        d = tl.where(inside, x - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(d * d, axis=0) / n + eps)
        y = d * rstd
        wg = w * g
        c1 = tl.sum(y * wg, axis=0) / n
        c2 = tl.sum(wg, axis=0) / n
        tl.store(dx_ptr + row * stride + cols, (wg - (y * c1 + c2)) * rstd, mask=inside)
        dscale += g * y
        dshift += g
    tl.store(dscale_ptr + part * n + cols, dscale, mask=inside)
    tl.store(dshift_ptr + part * n + cols, dshift, mask=inside)


def layer_norm_backward(g, x, scale, eps=1e-5):
    m, n = x.shape
    parts = triton.cdiv(m, 16)
    dx = torch.empty_like(x)
    dscale = torch.empty(parts, n, dtype=torch.float32, device=x.device)
    dshift = torch.empty(parts, n, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(n)
    rows[(parts,)](
        g,
        x,
        scale,
        dx,
        dscale,
        dshift,
        x.stride(0),
        m,
        n,
        eps,
        ROWS=16,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return dx, dscale.sum(0), dshift.sum(0)
