"""Attention of wide heads: the operator beside torch in f64, its blocks, and where graphs have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import transconv
from transconv.functional import attention
from transconv.functional.calls.compiled_launch import question
from transconv.graph import backend, report
from transconv.graph.regions import graph_wait
from transconv.runtime import PlanRequest


def given(shape: tuple[int, ...], keys: int, kind: torch.dtype) -> list[Tensor]:
    torch.manual_seed(sum(shape))
    return [torch.randn(*shape[:-2], n, shape[-1]).to(kind) for n in (shape[-2], keys, keys)]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "keys", "scores", "count"),
    [
        ((2, 2, 40, 16), 24, 1 << 28, 1),  # one block
        ((3, 2, 40, 16), 24, 8192, 3),  # of two heads
        ((1, 2, 300, 16), 40, 1 << 15, 4),  # of rows of one head, the last one shorter
        ((2, 5, 8), 7, 1 << 28, 1),  # heads that are no dim
    ],
)
def test_blocks_of_queries_are_torchs(
    kind: torch.dtype,
    shape: tuple[int, ...],
    keys: int,
    scores: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "SCORES", scores)
    monkeypatch.setattr(attention, "ROWS", 64)
    q, k, v = given(shape, keys, kind)
    assert len([*attention._steps(q, k, v, 0.3)]) == count
    transconv.stats(reset=True)
    y = attention.attention(q, k, v, 0.3)
    ran = transconv.stats().native
    assert ran["attention_scores"] == ran["attention_weights"] == ran["attention_values"] == count, ran
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.3)
    # Weights of at most 1 are rounded to the type, and so is the result.
    assert y.dtype is kind and (y.double() - want).abs().max() <= 2 * torch.finfo(kind).eps * v.abs().max()


def test_operands_of_other_strides_are_torchs() -> None:
    q, k, v = given((2, 3, 10, 16), 10, torch.float16)
    y = attention.attention(q.mT.contiguous().mT, k.transpose(0, 1).contiguous().transpose(0, 1), v, 0.25)
    assert torch.equal(y, attention.attention(q, k, v, 0.25))


def found(f: Callable[..., Tensor], *given: Any, **options: Any) -> tuple[Tensor, str]:
    torch._dynamo.reset()
    run = torch.compile(f, backend=backend, options={"rest": "eager", **options})
    return run(*given), str(report(run))


def test_graphs_have_it_where_torch_has_no_fast_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WIDE", 8)
    q, k, v = given((1, 2, 9, 16), 7, torch.float16)
    mask = torch.ones(9, 7, dtype=torch.bool)

    def attend(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        return F.scaled_dot_product_attention(q * 1, k, v, **named) * 2

    with torch.no_grad():
        y, text = found(attend, q, k, v)
        assert "a kernel of its own" in text
        want = attend(q.double(), k.double(), v.double())
        torch.testing.assert_close(y.double(), want, rtol=0, atol=4e-3)
        half = [x[..., :8].contiguous() for x in (q, k, v)]
        others: list[tuple[Any, ...]] = [
            (attend, *(x.float() for x in (q, k, v))),
            (attend, *half),
            (lambda *t: attend(*t, attn_mask=mask), q, k, v),
            (lambda *t: attend(*t, is_causal=True), q, k, v),
        ]
        for f, *tensors in others:
            y, text = found(f, *tensors)
            assert "a kernel of its own" not in text
            torch.testing.assert_close(y, f(*tensors), rtol=2e-3, atol=2e-3)
    y, text = found(attend, q.requires_grad_(), k, v)
    assert "a kernel of its own" not in text


def test_processes_compile_its_kernels_with_those_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each block size once, before the first call, which waits as calls of graphs do."""
    monkeypatch.setattr(attention, "WIDE", 8)
    monkeypatch.setattr(attention, "SCORES", 1)
    monkeypatch.setattr(attention, "ROWS", 128)
    asked, waits = list[PlanRequest](), list[bool]()
    monkeypatch.setattr(graph_wait, "begin", asked.extend)
    own = attention.store

    def store(text: str, read: list[Tensor], made: list[Tensor], now: bool) -> bool:
        waits.append(now)
        return own(text, read, made, now)

    monkeypatch.setattr(attention, "store", store)
    q, k, v = given((1, 2, 130, 16), 7, torch.float16)
    with torch.no_grad():
        y, _ = found(lambda *t: F.scaled_dot_product_attention(*t) + 1, q, k, v)
    names = Counter(a.workload.title for a in asked if a.workload.title.startswith("attention_"))
    assert names == dict.fromkeys(("attention_scores", "attention_weights", "attention_values"), 2)
    assert {question(text, q.device) for *_, each in attention._steps(q, k, v, 0.25) for text in each} <= {
        *asked
    }
    assert len(waits) == 2 * 2 * 3 and all(waits)
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double()) + 1
    torch.testing.assert_close(y.double(), want, rtol=0, atol=4e-3)


class Marked(Tensor):
    """A tensor with rules of its own."""


def test_tensors_with_rules_of_their_own_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WIDE", 8)
    q, k, v = given((1, 2, 9, 16), 7, torch.float16)
    assert not attention.why_not(q, k, v)
    assert "subclasses" in attention.why_not(q, k.as_subclass(Marked), v)
    assert "not measured" in attention.why_not(*(x.to("meta") for x in (q, k, v)))


@pytest.mark.parametrize("there", [0, 1, 2, 4])
def test_torch_computes_while_a_kernel_is_not_there(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the kernels of two blocks it is, and nothing waits where calls are not to."""
    monkeypatch.setattr(attention, "SCORES", 1)
    own, asked = attention.store, list[bool]()

    def store(text: str, read: list[Tensor], made: list[Tensor], waits: bool = True) -> bool:
        asked.append(waits)
        return len(asked) <= there and own(text, read, made, waits)

    monkeypatch.setattr(attention, "store", store)
    q, k, v = given((1, 2, 9, 16), 7, torch.float16)
    with transconv.config.changed(compile="background"):
        y = attention.attention(q, k, v, 0.3)
    assert torch.equal(y, F.scaled_dot_product_attention(q, k, v, scale=0.3))
    assert asked == [False] * (there + 1)


def test_memory_of_a_block_is_counted() -> None:
    q, k = (
        torch.empty(1, 1, 16384, 512, dtype=torch.bfloat16, device="meta"),
        torch.empty(1, 1, 16384, 512),
    )
    assert attention.blocks(1, 16384, 16384) == (1, 4096)
    assert attention.scratch_bytes(q, k) == 4096 * 16384 * 6
    assert attention.blocks(1, 1 << 16, 1 << 16) == attention.blocks(1, 1 << 18, 1 << 18) == (1, 1024)
    assert attention.blocks(1, 5000, 1 << 16) == (1, 1024)
    assert attention.blocks(3, 100, 1 << 20) == (1, 100)
    assert attention.blocks(5, 6240, 6240) == (1, 6240)
    assert attention.blocks(40, 512, 512) == (40, 512)
