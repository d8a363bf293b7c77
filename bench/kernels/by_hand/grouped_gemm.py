import torch
import triton
import triton.language as tl


@triton.jit
def product(
    a_ptr,
    b_ptr,
    c_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    M,
    N,
    K,
    stride_am,
    stride_be,
    stride_bk,
    stride_cm,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tile = tl.program_id(0) // tl.cdiv(N, BN)
    column = tl.program_id(0) % tl.cdiv(N, BN)
    expert = tl.load(expert_ptr + tile)
    rows = tl.load(first_ptr + tile) + tl.arange(0, BM)
    end = tl.load(end_ptr + tile)
    cols = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = a_ptr + rows[:, None] * stride_am + inner[None, :]
    b_at = b_ptr + expert * stride_be + inner[:, None] * stride_bk + cols[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_at, mask=(rows < end)[:, None] & (inner < K - k)[None, :], other=0.0)
        b = tl.load(b_at, mask=(inner < K - k)[:, None] & (cols < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_at += BK
        b_at += BK * stride_bk
    tl.store(
        c_ptr + rows[:, None] * stride_cm + cols[None, :],
        acc.to(c_ptr.dtype.element_ty),
        mask=(rows < end)[:, None] & (cols < N)[None, :],
    )


def grouped_gemm(a, b, experts, firsts, ends):
    (m, k), n = a.shape, b.shape[2]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    grid = (len(experts) * triton.cdiv(n, 128),)
    product[grid](
        a,
        b,
        c,
        experts,
        firsts,
        ends,
        m,
        n,
        k,
        a.stride(0),
        b.stride(0),
        b.stride(1),
        c.stride(0),
        BM=128,
        BN=128,
        BK=64,
        num_warps=8,
        num_stages=3,
    )
    return c
