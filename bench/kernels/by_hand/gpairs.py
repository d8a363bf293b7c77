import torch
import triton
import triton.language as tl


@triton.jit
def pairs(a_ptr, wa_ptr, b_ptr, wb_ptr, radii_ptr, sums_ptr, n_a, n_b, bins, BINS: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    bin_at = tl.arange(0, BINS)
    r = tl.load(radii_ptr + bin_at, mask=bin_at < bins, other=-1.0)
    x = tl.load(a_ptr + rows * 3, mask=rows < n_a, other=0.0)
    y = tl.load(a_ptr + rows * 3 + 1, mask=rows < n_a, other=0.0)
    z = tl.load(a_ptr + rows * 3 + 2, mask=rows < n_a, other=0.0)
    w = tl.load(wa_ptr + rows, mask=rows < n_a, other=0.0)
    total = tl.zeros((BINS,), tl.float32)
    for start in range(0, n_b, BN):
        cols = start + tl.arange(0, BN)
        u = tl.load(b_ptr + cols * 3, mask=cols < n_b, other=0.0)
        v = tl.load(b_ptr + cols * 3 + 1, mask=cols < n_b, other=0.0)
        t = tl.load(b_ptr + cols * 3 + 2, mask=cols < n_b, other=0.0)
        g = tl.load(wb_ptr + cols, mask=cols < n_b, other=0.0)
        dx, dy, dz = x[:, None] - u[None, :], y[:, None] - v[None, :], z[:, None] - t[None, :]
        apart = dx * dx + dy * dy + dz * dz
        weight = w[:, None] * g[None, :]
        found = tl.where(apart[None, :, :] <= r[:, None, None], weight[None, :, :], 0.0)
        total += tl.sum(tl.sum(found, axis=2), axis=1)
    tl.store(sums_ptr + tl.program_id(0) * bins + bin_at, total, mask=bin_at < bins)


def gpairs(a, wa, b, wb, radii):
    parts = triton.cdiv(len(a), 32)
    sums = torch.empty(parts, len(radii), dtype=torch.float32, device=a.device)
    pairs[(parts,)](a, wa, b, wb, radii, sums, len(a), len(b), len(radii),
                    BINS=triton.next_power_of_2(len(radii)), BM=32, BN=32, num_warps=8)
    return sums.sum(0)
