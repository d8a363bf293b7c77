"""What ``python -m bench kernels`` times: Triton's tutorials and the kernels of IntelPython/dpbench, each
with its data, torch's way to say it, and sizes: those of the tutorials, and dpbench's M with float32, but
for GPairs and nearest neighbours (see there), and k-means, of which one step is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Arguments = tuple[Any, ...]
Draw = Callable[..., torch.Tensor]
FAR = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KernelCase:
    """``data``: arguments, from a drawing of uniform numbers and the sizes; ``torch``: the same in torch,
    ``compiled`` if that is its best; ``exact``: what the results are compared with, torch's in f64 unless
    there is one; ``prepare``: arguments for torch; ``part``: of results and answers that is compared."""

    name: str
    kernel: str
    sizes: tuple[int, ...]
    small: tuple[int, ...]
    data: Callable[..., Arguments]
    torch: Callable[..., Any]
    compiled: bool = False
    exact: Callable[..., Any] | None = None
    prepare: Callable[..., Arguments] | None = None
    part: Callable[..., Any] = lambda t: t


def drawing(device: str, seed: int) -> Draw:
    """Uniform numbers from 0 to 1, the same for a seed and a device."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device).to(dtype)

    return draw


def cases() -> tuple[KernelCase, ...]:
    """All of them, the tutorials first."""
    from bench.kernels.dpbench_cases import DPBENCH

    return (*TUTORIALS, *DPBENCH)


def _centred(draw: Draw, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (draw(*shape) * 2 - 1).to(dtype)


TILE = 128  # rows of grouped products


def tiles(sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Which expert has each tile of rows, where the tile begins, and where the expert's rows end."""
    found, begin = [], 0
    for expert, size in enumerate(sizes):
        found += [(expert, first, begin + size) for first in range(begin, begin + size, TILE)]
        begin += size
    return torch.tensor(found, dtype=torch.int32, device=device).reshape(-1, 3).unbind(1)


def _expert_rows(draw: Draw, experts: int, rows: int, inner: int, columns: int) -> Arguments:
    sizes = [max(1, rows * (n + 1) * 2 // (experts + 1)) for n in range(experts)]
    # Triton's interpreter does not multiply bfloat16
    dtype = torch.bfloat16 if draw(1).is_cuda else torch.float16
    a = _centred(draw, sum(sizes), inner, dtype=dtype)
    b = _centred(draw, experts, inner, columns, dtype=dtype)
    return a, b, *(t.contiguous() for t in tiles(sizes, a.device))


def _ends(experts: torch.Tensor, ends: torch.Tensor) -> list[int]:
    """Where the rows of each expert end."""
    last = dict(zip(experts.tolist(), ends.tolist(), strict=True))
    return [last[e] for e in sorted(last)]


def _each_expert(
    a: torch.Tensor, b: torch.Tensor, experts: torch.Tensor, _: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    stops = _ends(experts, ends)
    return torch.cat([a[i:j] @ b[e] for e, (i, j) in enumerate(zip([0, *stops], stops, strict=False))])


def _offsets(
    a: torch.Tensor, b: torch.Tensor, experts: torch.Tensor, _: torch.Tensor, ends: torch.Tensor
) -> Arguments:
    return a, b, torch.tensor(_ends(experts, ends), dtype=torch.int32, device=a.device)


def _kept(x: torch.Tensor, p: float, _: int) -> torch.Tensor:
    return x / (1 - p)


def _norm_gradients(g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaf, w = x.detach().requires_grad_(), scale.detach().requires_grad_()
    shift = torch.zeros_like(w, requires_grad=True)
    F.layer_norm(leaf, (x.shape[1],), w, shift, 1e-5).backward(g)
    found = leaf.grad, w.grad, shift.grad
    assert all(t is not None for t in found)
    return found  # type: ignore[return-value]


def _moments(g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> Arguments:
    _, mean, rstd = torch.native_layer_norm(x, (x.shape[1],), scale, scale, 1e-5)
    return g, x, scale, mean, rstd


def _backward(
    g: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> Any:
    return torch.ops.aten.native_layer_norm_backward(
        g, x, [x.shape[1]], mean, rstd, scale, scale, [True, True, True]
    )


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if q.dtype == torch.float64:  # the answer for some heads alone: the scores of all are large
        return (q[:2] @ k[:2].mT * q.shape[2] ** -0.5).softmax(2) @ v[:2]
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def _softmax_case(rows: int, columns: int) -> KernelCase:
    return KernelCase(
        f"softmax {rows}x{columns}",
        "softmax",
        (rows, columns),
        (3, 50),
        lambda draw, m, n: (_centred(draw, m, n, dtype=torch.float32) * 4,),
        lambda x: torch.softmax(x, 1),
    )


TUTORIALS = (
    KernelCase(
        "vector add",
        "vector_add",
        (1 << 26,),
        (3000,),
        lambda draw, n: (draw(n), draw(n)),
        lambda x, y: x + y,
    ),
    _softmax_case(4096, 781),
    _softmax_case(4096, 8192),
    KernelCase(
        "matmul 4096 f16",
        "gemm",
        (4096, 4096, 4096),
        (150, 70, 300),
        lambda draw, m, k, n: (_centred(draw, m, k), _centred(draw, k, n)),
        torch.matmul,
    ),
    KernelCase(
        "dropout",
        "dropout",
        (1 << 26,),
        (3000,),
        lambda draw, n: (draw(n) + 0.5, 0.5, 7),
        lambda x, p, _: F.dropout(x, p),
        exact=_kept,
    ),
    KernelCase(
        "layer norm f16",
        "layer_norm",
        (4096, 8192),
        (3, 50),
        lambda draw, m, n: (_centred(draw, m, n), *(draw(n).half() for _ in "ab")),
        lambda x, a, b: F.layer_norm(x, (x.shape[1],), a, b, 1e-5),
    ),
    KernelCase(
        "layer norm backward f16",
        "layer_norm_backward",
        (4096, 8192),
        (21, 50),
        lambda draw, m, n: (_centred(draw, m, n), _centred(draw, m, n), draw(n).half()),
        _backward,
        exact=_norm_gradients,
        prepare=_moments,
    ),
    KernelCase(
        "attention f16",
        "attention",
        (128, 4096, 64),
        (2, 150, 24),
        lambda draw, h, n, d: tuple(_centred(draw, h, n, d) for _ in "qkv"),
        _attended,
        part=lambda t: t[:2],
    ),
    KernelCase(
        "grouped GEMM bf16",
        "grouped_gemm",
        (8, 1024, 2048, 2048),
        (3, 60, 70, 150),
        _expert_rows,
        lambda a, b, ends: torch._grouped_mm(a, b, ends),
        exact=_each_expert,
        prepare=_offsets,
    ),
)
"""Triton's tutorials. The grouped products have experts of different numbers of rows, twice the average at
most, and torch's are ``torch._grouped_mm``."""
