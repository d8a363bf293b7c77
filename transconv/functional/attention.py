"""transconv::attention: attention of heads that torch's fast kernels do not take, in blocks of queries.

torch's fast attention holds a head of at most 256 numbers on chip (NVIDIA). Decoders of images have one
head of all features, 384 or 512, which torch's memory-efficient kernel computes. Two products and a
softmax are 2 to 4 times as fast (H200, ``bench attention``), although the scores pass through memory: a
block of queries after another, so that few of them are there at once.

    scores    f32, of a block: queries times keys, times a factor
    weights   the softmax of each row, rounded to the type of the operands, as in torch's kernels
    result    weights times values, added up in f32

Compiled graphs have the operator where ``why_not`` has no reason (graph/regions/function_graphs.py)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod

import torch
import torch.nn.functional as F

from transconv.calls.settings import settings
from transconv.functional.calls.compiled_launch import HELD, question
from transconv.functional.calls.torch_operators import store
from transconv.runtime import PlanRequest
from transconv.torch_ops.calls.call_attributes import is_known
from transconv.torch_ops.operators import implement, library

Tensor = torch.Tensor

WIDE = 256  # numbers of a head that torch's fast kernels take
SCORES = 2**28  # bytes of the scores of a block at most,
ROWS = 1024  # but for a block of so many queries, so that a block keeps a GPU busy

library.define(
    "attention(Tensor query, Tensor key, Tensor value, float factor) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attention = torch.ops.transconv.attention.default


def why_not(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Why torch's own attention of (..., heads, positions, numbers) is as good; empty where it is not."""
    given = query, key, value
    if query.device.type not in ("cuda", "cpu") or torch.version.hip is not None:
        return "torch's attention on other devices was not measured"
    if not all(map(is_known, given)):
        return "subclasses of tensors have rules of their own"
    if query.dtype not in (torch.float16, torch.bfloat16) or len({x.dtype for x in given}) > 1:
        return "types that are not of 16 bits"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "gradients need the weights"
    if not all(isinstance(n, int) and n for x in given for n in x.shape):
        return "sizes that are names, or no elements"
    if query.dim() < 3 or any(x.shape[:-2] != query.shape[:-2] for x in given):
        return "operands of other dims"
    return "" if query.shape[-1] > WIDE else "heads that torch's fast kernels take"


def blocks(heads: int, queries: int, keys: int) -> tuple[int, int]:
    """The heads and the queries of a block: heads as many as have scores of ``SCORES`` bytes, or rows of
    one head, in whole tiles, blocks of about one size."""
    scores = 4 * queries * keys
    if scores <= SCORES or queries <= ROWS:
        return min(heads, max(1, SCORES // scores)), queries
    count = -(-queries // max(ROWS, SCORES // (4 * keys)))
    return 1, min(queries, -(-queries // (128 * count)) * 128)


def scratch_bytes(query: Tensor, key: Tensor) -> int:
    """Bytes of the scores and the weights of a block, while it is computed."""
    heads, rows = blocks(prod(query.shape[:-2]), query.shape[-2], key.shape[-2])
    return heads * rows * key.shape[-2] * (4 + query.itemsize)


@lru_cache(maxsize=256)
def _texts(
    dtype: str, heads: int, m: int, n: int, k: int, wide: int, factor: float
) -> tuple[str, str, str]:
    """The computations of a block: scores, weights, result."""
    return (
        f"compute attention_scores\n tensor Q {dtype} [{heads}, {m}, {k}]\n"
        f" tensor K {dtype} [{heads}, {n}, {k}]\n tensor S f32 [{heads}, {m}, {n}]\n"
        f" axes h={heads} m={m} n={n} | k={k}\n read q = Q[h, m, k]\n read w = K[h, n, k]\n"
        f" let s = sum(q*w; k)\n store S[h, m, n] = s*{factor!r}\n",
        f"compute attention_weights\n tensor S f32 [{heads}, {m}, {n}]\n"
        f" tensor P {dtype} [{heads}, {m}, {n}]\n axes h={heads} m={m} | n={n}\n read x = S[h, m, n]\n"
        " let top = max(x; n)\n let total = sum(exp(x - top); n)\n"
        " store P[h, m, n] = exp(x - top)/total\n",
        f"compute attention_values\n tensor P {dtype} [{heads}, {m}, {n}]\n"
        f" tensor V {dtype} [{heads}, {n}, {wide}]\n tensor Y {dtype} [{heads}, {m}, {wide}]\n"
        f" axes h={heads} m={m} w={wide} | n={n}\n read p = P[h, m, n]\n read v = V[h, n, w]\n"
        " let s = sum(p*v; n)\n store Y[h, m, w] = s\n",
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    """The operator's kernels, of dense operands. Calls of graphs wait by default (region_kernel.py)."""
    q, k, v = (x.reshape(-1, *x.shape[-2:]).contiguous() for x in (query, key, value))
    made, waits = q.new_empty((*q.shape[:2], v.shape[-1])), settings.compile == "auto"
    for here, rows, texts in _steps(query, key, value, factor):
        block, keys, values, y = q[here, rows], k[here], v[here], made[here, rows]
        scores = block.new_empty((*block.shape[:2], keys.shape[1]), dtype=torch.float32)
        weights = torch.empty_like(scores, dtype=block.dtype)
        if not (
            store(texts[0], [block, keys], [scores], waits)
            and store(texts[1], [scores], [weights], waits)
            and store(texts[2], [weights, values], [y], waits)
        ):
            return _composed(query, key, value, factor)
    return made.view(*query.shape[:-1], value.shape[-1])


def _steps(
    query: Tensor, key: Tensor, value: Tensor, factor: float
) -> Iterator[tuple[slice, slice, tuple[str, str, str]]]:
    """The heads and the queries of each block, and its computations."""
    heads, (queries, k), (keys, wide) = prod(query.shape[:-2]), query.shape[-2:], value.shape[-2:]
    some, rows = blocks(heads, queries, keys)
    for h, m in product(range(0, heads, some), range(0, queries, rows)):
        sizes = min(some, heads - h), min(rows, queries - m), keys, k, wide
        yield slice(h, h + some), slice(m, m + rows), _texts(HELD[query.dtype].name, *sizes, factor)


def questions(query: Tensor, key: Tensor, value: Tensor, factor: float) -> list[PlanRequest]:
    """What the kernels of a call are asked for. Its graph has processes compile them with its own."""
    texts = dict.fromkeys(text for *_, each in _steps(query, key, value, factor) for text in each)
    return [question(text, query.device) for text in texts]


def _fake(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _composed(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=factor)


def _flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


implement("attention", _fake, _attention, _composed, flops=_flops)
