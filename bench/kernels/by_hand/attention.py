import torch
import triton
import triton.language as tl


@triton.jit
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    scale,
    n_q,
    n_k,
    stride_qh,
    stride_qn,
    stride_kh,
    stride_kn,
    stride_vh,
    stride_vn,
    stride_oh,
    stride_on,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols, cols_v = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    q = tl.load(
        q_ptr + head * stride_qh + rows[:, None] * stride_qn + cols[None, :],
        mask=(rows < n_q)[:, None] & (cols < D)[None, :],
        other=0.0,
    )
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DV_PAD), tl.float32)
    for start in range(0, n_k, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(
            k_ptr + head * stride_kh + keys[None, :] * stride_kn + cols[:, None],
            mask=(keys < n_k)[None, :] & (cols < D)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where((keys < n_k)[None, :], scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, 1))
        e = tl.math.exp2(scores - largest[:, None])
        old = tl.math.exp2(most - largest)
        total = total * old + tl.sum(e, 1)
        v = tl.load(
            v_ptr + head * stride_vh + keys[:, None] * stride_vn + cols_v[None, :],
            mask=(keys < n_k)[:, None] & (cols_v < DV)[None, :],
            other=0.0,
        )
        acc = tl.dot(e.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
        most = largest
    tl.store(
        o_ptr + head * stride_oh + rows[:, None] * stride_on + cols_v[None, :],
        (acc / total[:, None]).to(o_ptr.dtype.element_ty),
        mask=(rows < n_q)[:, None] & (cols_v < DV)[None, :],
    )


def attention(q, k, v):
    heads, n, d = q.shape
    dv = v.shape[2]
    out = torch.empty(heads, n, dv, dtype=q.dtype, device=q.device)
    grid = (triton.cdiv(n, 128), heads)
    forward[grid](
        q,
        k,
        v,
        out,
        d**-0.5 * 1.4426950408889634,
        n,
        k.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        BM=128,
        BN=64,
        D=d,
        DV=dv,
        D_PAD=max(16, triton.next_power_of_2(d)),
        DV_PAD=max(16, triton.next_power_of_2(dv)),
        num_warps=4 if d <= 64 else 8,
        num_stages=3,
    )
    return out
