"""Reductions in Triton's interpreter with functions that it does not know."""

from __future__ import annotations

import pytest
import torch

from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.support import knobs

# x -> m*x + c, and then x -> n*x + d: the order of the elements matters.
SOURCE = """
import triton
import triton.language as tl


@triton.jit
def then(m, c, n, d):
    return m * n, c * n + d


@triton.jit
def composed(M, C, P, Q):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    m, c = tl.reduce((tl.load(M + at), tl.load(C + at)), {axis}, then, keep_dims={keep})
    tl.store(P + {place}, m)
    tl.store(Q + {place}, c)
"""


@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("axis", "keep", "place"),
    [(1, False, "tl.arange(0, 4)"), (0, False, "tl.arange(0, 8)"), (0, True, "tl.arange(0, 8)[None, :]")],
)
def test_functions_are_combined_in_order(axis: int, keep: bool, place: str) -> None:
    m, c = torch.randint(-2, 3, (2, 4, 8), generator=torch.Generator().manual_seed(1)).float()
    p, q = torch.full((2, 8 if axis == 0 else 4), torch.nan)
    combined = TritonKernel(SOURCE.format(axis=axis, keep=keep, place=place), "composed", None, 1, 4, 2)
    combined.run([m, c, p, q])
    left, right = m.select(axis, 0), c.select(axis, 0)
    for k in range(1, m.shape[axis]):
        left, right = left * m.select(axis, k), right * m.select(axis, k) + c.select(axis, k)
    assert torch.equal(p, left) and torch.equal(q, right)
