import torch
import triton
import triton.language as tl

FAR = 2**31 - 1


@triton.jit
def near(x_ptr, rows, cols, n, radius, DIMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.static_range(DIMS):
        a = tl.load(x_ptr + rows * DIMS + k, mask=rows < n, other=0.0)
        b = tl.load(x_ptr + cols * DIMS + k, mask=cols < n, other=0.0)
        apart = a[:, None] - b[None, :]
        total += apart * apart
    return (total <= radius * radius) & (cols < n)[None, :]


@triton.jit
def counts(x_ptr, found_ptr, n, radius, DIMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    total = tl.zeros((BM,), tl.int32)
    for start in range(0, n, BN):
        cols = start + tl.arange(0, BN)
        total += tl.sum(near(x_ptr, rows, cols, n, radius, DIMS, BM, BN).to(tl.int32), axis=1)
    tl.store(found_ptr + rows, total, mask=rows < n)


@triton.jit
def reached(
    x_ptr,
    found_ptr,
    labels_ptr,
    new_ptr,
    n,
    radius,
    least,
    LARGE: tl.constexpr,
    DIMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    lowest = tl.load(labels_ptr + rows, mask=rows < n, other=LARGE)
    for start in range(0, n, BN):
        cols = start + tl.arange(0, BN)
        core = tl.load(found_ptr + cols, mask=cols < n, other=0) >= least
        label = tl.load(labels_ptr + cols, mask=cols < n, other=LARGE)
        close = near(x_ptr, rows, cols, n, radius, DIMS, BM, BN) & core[None, :]
        lowest = tl.minimum(lowest, tl.min(tl.where(close, label[None, :], LARGE), axis=1))
    tl.store(new_ptr + rows, lowest, mask=rows < n)


def dbscan(x, radius, least):
    n, dims = x.shape
    grid = (triton.cdiv(n, 64),)
    found = torch.empty(n, dtype=torch.int32, device=x.device)
    counts[grid](x, found, n, radius, DIMS=dims, BM=64, BN=64, num_warps=8)
    places = torch.arange(n, dtype=torch.int32, device=x.device)
    labels, before = torch.where(found >= least, places, FAR), None
    while before is None or not torch.equal(labels, before):
        before, labels = labels, torch.empty_like(labels)
        reached[grid](
            x, found, before, labels, n, radius, least, LARGE=FAR, DIMS=dims, BM=64, BN=64, num_warps=8
        )
    return labels
