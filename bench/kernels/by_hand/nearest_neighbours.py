import torch
import triton
import triton.language as tl


@triton.jit
def vote(
    known_ptr,
    classes_ptr,
    points_ptr,
    found_ptr,
    n,
    count,
    K: tl.constexpr,
    KINDS: tl.constexpr,
    DIMS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    places = tl.arange(0, COUNT)
    apart = tl.zeros((BLOCK, COUNT), tl.float32)
    for d in range(DIMS):
        x = tl.load(points_ptr + rows * DIMS + d, mask=rows < n, other=0.0)
        c = tl.load(known_ptr + places * DIMS + d, mask=places < count, other=0.0)
        diff = x[:, None] - c[None, :]
        apart += diff * diff
    apart = tl.where((places < count)[None, :], apart, float("inf"))
    kinds = tl.arange(0, KINDS)
    votes = tl.zeros((BLOCK, KINDS), tl.int32)
    for _ in range(K):
        best = tl.argmin(apart, axis=1)
        kind = tl.load(classes_ptr + best)
        votes += (kind[:, None] == kinds[None, :]).to(tl.int32)
        apart = tl.where(places[None, :] == best[:, None], float("inf"), apart)
    tl.store(found_ptr + rows, tl.argmax(votes, axis=1), mask=rows < n)


def nearest_neighbours(known, classes, points, k, kinds):
    n = len(points)
    found = torch.empty(n, dtype=torch.int32, device=points.device)
    vote[(triton.cdiv(n, 16),)](
        known,
        classes,
        points,
        found,
        n,
        len(known),
        K=k,
        KINDS=triton.next_power_of_2(kinds),
        DIMS=points.shape[1],
        COUNT=triton.next_power_of_2(len(known)),
        BLOCK=16,
        num_warps=8,
    )
    return found
