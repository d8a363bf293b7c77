import torch
import triton
import triton.language as tl


@triton.jit
def assign(
    points_ptr,
    centres_ptr,
    near_ptr,
    sums_ptr,
    counts_ptr,
    n,
    DIMS: tl.constexpr,
    CENTRES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = tl.arange(0, PADDED)
    inside = rows < n
    apart = tl.zeros((BLOCK, PADDED), tl.float32)
    for k in tl.static_range(DIMS):
        x = tl.load(points_ptr + rows * DIMS + k, mask=inside, other=0.0)
        c = tl.load(centres_ptr + places * DIMS + k, mask=places < CENTRES, other=0.0)
        d = x[:, None] - c[None, :]
        apart += d * d
    apart = tl.where((places < CENTRES)[None, :], apart, float("inf"))
    near = tl.argmin(apart, axis=1)
    tl.store(near_ptr + rows, near, mask=inside)
    own = (near[:, None] == places[None, :]) & inside[:, None]
    out = tl.program_id(0) * CENTRES + places
    for k in tl.static_range(DIMS):
        x = tl.load(points_ptr + rows * DIMS + k, mask=inside, other=0.0)
        total = tl.sum(tl.where(own, x[:, None], 0.0), axis=0)
        tl.store(sums_ptr + out * DIMS + k, total, mask=places < CENTRES)
    tl.store(counts_ptr + out, tl.sum(own.to(tl.int32), axis=0), mask=places < CENTRES)


def k_means(points, centres, steps):
    n, dims = points.shape
    parts, count = triton.cdiv(n, 256), len(centres)
    near = torch.empty(n, dtype=torch.int32, device=points.device)
    sums = torch.empty(parts, count, dims, dtype=torch.float32, device=points.device)
    counts = torch.empty(parts, count, dtype=torch.int32, device=points.device)
    for _ in range(steps):
        assign[(parts,)](
            points,
            centres,
            near,
            sums,
            counts,
            n,
            DIMS=dims,
            CENTRES=count,
            PADDED=triton.next_power_of_2(count),
            BLOCK=256,
            num_warps=4,
        )
        centres = sums.sum(0) / counts.sum(0).clamp_min(1)[:, None]
    return centres, near
