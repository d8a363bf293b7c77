import torch
import triton
import triton.language as tl


@triton.jit
def pairs(
    a_ptr,
    wa_ptr,
    b_ptr,
    wb_ptr,
    radii_ptr,
    sums_ptr,
    n_a,
    n_b,
    bins,
    BINS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    bin_at = tl.arange(0, BINS)
    r = tl.load(radii_ptr + bin_at, mask=bin_at < bins, other=-1.0)
    x = tl.load(a_ptr + rows * 3, mask=rows < n_a, other=0.0)
    y = tl.load(a_ptr + rows * 3 + 1, mask=rows < n_a, other=0.0)
    z = tl.load(a_ptr + rows * 3 + 2, mask=rows < n_a, other=0.0)
    w = tl.load(wa_ptr + rows, mask=rows < n_a, other=0.0)
    total = tl.zeros((BINS, BM), tl.float32)
    first = tl.program_id(1) * BN
    for k in range(first, tl.minimum(first + BN, n_b)):
        dx, dy = x - tl.load(b_ptr + k * 3), y - tl.load(b_ptr + k * 3 + 1)
        dz = z - tl.load(b_ptr + k * 3 + 2)
        apart = dx * dx + dy * dy + dz * dz
        weight = w * tl.load(wb_ptr + k)
        total += tl.where(apart[None, :] <= r[:, None], weight[None, :], 0.0)
    part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + part * bins + bin_at, tl.sum(total, axis=1), mask=bin_at < bins)


def gpairs(a, wa, b, wb, radii):
    grid = triton.cdiv(len(a), 64), triton.cdiv(len(b), 512)
    sums = torch.empty(*grid, len(radii), dtype=torch.float32, device=a.device)
    pairs[grid](
        a,
        wa,
        b,
        wb,
        radii,
        sums,
        len(a),
        len(b),
        len(radii),
        BINS=triton.next_power_of_2(len(radii)),
        BM=64,
        BN=512,
        num_warps=4,
    )
    return sums.sum((0, 1))
