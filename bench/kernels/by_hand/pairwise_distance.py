import torch
import triton
import triton.language as tl


@triton.jit
def distances(
    a_ptr,
    b_ptr,
    d_ptr,
    m,
    n,
    stride_a,
    stride_b,
    stride_d,
    DIMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.static_range(DIMS):
        a = tl.load(a_ptr + rows * stride_a + k, mask=rows < m, other=0.0)
        b = tl.load(b_ptr + cols * stride_b + k, mask=cols < n, other=0.0)
        apart = a[:, None] - b[None, :]
        total += apart * apart
    tl.store(
        d_ptr + rows.to(tl.int64)[:, None] * stride_d + cols[None, :],
        tl.sqrt(total),
        mask=(rows < m)[:, None] & (cols < n)[None, :],
    )


def pairwise_distance(x1, x2):
    m, n = len(x1), len(x2)
    d = torch.empty(m, n, dtype=torch.float32, device=x1.device)
    grid = (triton.cdiv(m, 32), triton.cdiv(n, 128))
    distances[grid](
        x1,
        x2,
        d,
        m,
        n,
        x1.stride(0),
        x2.stride(0),
        d.stride(0),
        DIMS=x1.shape[1],
        BM=32,
        BN=128,
        num_warps=4,
    )
    return d
