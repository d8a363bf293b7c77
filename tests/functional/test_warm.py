"""Calls that come back take the quickest way, and any difference takes the general one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import transconv
from transconv import functional as ours
from transconv.calls.guard import current_device
from transconv.functional.calls import compiled_launch, route
from transconv.functional.calls.route import CALLS
from transconv.runtime import Launch


def entries() -> list[int]:
    """The number of entries under each key."""
    assert len(CALLS.entries) == len(CALLS._visits)
    return [kept for _, _, kept in CALLS._visits.values()]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches that have a start function, as on a GPU: here it interprets the kernel."""
    start = Launch.start

    def begin(self: Launch, tensors: Any) -> None:
        self.begin = None
        start(self, tensors)
        self.begin, self.device = (lambda *given: begin(self, given)), current_device()

    monkeypatch.setattr(Launch, "start", begin)
    monkeypatch.setattr(
        route, "_empty", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)
    )
    yield
    compiled_launch._launches.clear()


def test_other_calls_of_the_same_key_go_the_general_way() -> None:
    w, b = torch.randn(2, 6)

    def same(x: torch.Tensor, *numbers: Any) -> None:
        torch.testing.assert_close(ours.layer_norm(x, (6,), *numbers), F.layer_norm(x, (6,), *numbers))

    x = torch.randn(4, 6)
    for _ in range(3):
        same(x, w, b)
    assert entries() == [1]
    for given in (
        (x.double(), w.double(), b.double()),
        (x, None, b),
        (x.T.contiguous().T, w, b),
        (torch.randn(25)[1:].view(4, 6), w, b),
    ):
        for _ in range(2):
            same(*given)
    same(x, w, b)
    assert entries() == [CALLS.chain]  # and no more
    assert not transconv.stats().fallback
    routes_before = transconv.stats(reset=True).native["layer_norm"]
    assert routes_before == 3 + 4 * 2 + 1


def test_gradients_switches_and_modes_are_seen() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    g = torch.randn(4, 6)
    with torch.no_grad():
        for _ in range(3):
            assert not ours.softmax(x, 1).requires_grad
    for _ in range(3):
        y = ours.softmax(x, 1)
        want = F.softmax(x, 1)
        torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(want, x, g))
    with torch.no_grad():
        for _ in range(3):
            assert not ours.softmax(x, 1).requires_grad
    assert entries() == [2]
    assert transconv.stats(reset=True).native == {"softmax": 9, "softmax_gradient": 3}
    torch.testing.assert_close(torch.func.vmap(lambda t: ours.softmax(t, 0))(x), F.softmax(x, 1))
    with torch.autograd.forward_ad.dual_level():
        ours.softmax(x, 1)
    assert set(transconv.stats(reset=True).fallback) == {"transform:functorch", "transform:forward_ad"}
    with torch.autocast("cpu"):
        ours.softmax(x, 1)
    assert transconv.stats(reset=True).fallback == {"autocast": 1}
    transconv.config.cpu = "fallback"  # and the switch of the product
    ours.softmax(x, 1)
    assert "device:cpu" in transconv.stats(reset=True).fallback


def test_true_is_no_1_and_pools_have_their_form() -> None:
    x = torch.randn(2, 3, 6)
    for _ in range(3):
        assert ours.sum(x, 1).shape == (2, 6)
    with pytest.raises(TypeError):
        ours.sum(x, True)
    for _ in range(3):
        y, at = ours.max_pool1d(x, 2, return_indices=True)
        torch.testing.assert_close((y, at), F.max_pool1d(x, 2, return_indices=True))
        torch.testing.assert_close(ours.max_pool1d(x, 2), y)


def test_gradients_read_what_was_kept() -> None:
    """Hooks may keep saved tensors elsewhere: what comes back lies as the hook has it."""
    x = torch.randn(6, 4).T.requires_grad_()
    w, g = torch.randn(6, requires_grad=True), torch.randn(4, 6)
    want = torch.autograd.grad(F.rms_norm(x, (6,), w), (x, w), g)
    for hooked in (False, False, False, True, True, False):
        with saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t) if hooked else nullcontext():
            y = ours.rms_norm(x, (6,), w)
        torch.testing.assert_close(torch.autograd.grad(y, (x, w), g), want)
    assert transconv.stats(reset=True).native == {"rms_norm": 6, "rms_norm_gradient": 6}
    for dtype in (torch.float16, torch.bfloat16):  # the default eps is that of f32
        small = torch.tensor([[1e-2, 2e-2], [1.0, -1.0]], dtype=dtype)
        torch.testing.assert_close(ours.rms_norm(small, (2,)), F.rms_norm(small, (2,)))


@pytest.mark.parametrize("kind", ["transposed", "unaligned", "expanded", "negative"])
def test_a_gradient_of_another_kind_goes_the_general_way(kind: str) -> None:
    x, w, b = torch.randn(4, 6, requires_grad=True), torch.randn(6), torch.randn(6, requires_grad=True)
    plain = torch.randn(4, 6)
    g = {
        "transposed": torch.randn(6, 4).T,
        "unaligned": torch.randn(25)[1:].view(4, 6),
        "expanded": torch.randn(4, 1).expand(4, 6),
        "negative": torch.randn(4, 6, dtype=torch.cfloat).conj().imag,
    }
    for given in (plain, plain, g[kind], plain):
        got = torch.autograd.grad(ours.layer_norm(x, (6,), w, b), (x, b), given)
        torch.testing.assert_close(got, torch.autograd.grad(F.layer_norm(x, (6,), w, b), (x, b), given))
    assert len(entries()) == 1
    assert transconv.stats(reset=True).native == {"layer_norm": 4, "layer_norm_gradient": 4}


def test_a_gradient_that_is_differentiated_again_and_many_at_once() -> None:
    x, g = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)

    def second(f: Any) -> Any:
        (first,) = torch.autograd.grad(f(x, 1), x, g, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    for _ in range(3):
        torch.autograd.grad(ours.softmax(x, 1), x, g)
    torch.testing.assert_close(second(ours.softmax), second(F.softmax))
    many = torch.randn(3, 4, 6)
    torch.testing.assert_close(
        torch.autograd.grad(ours.softmax(x, 1), x, many, is_grads_batched=True),
        torch.autograd.grad(F.softmax(x, 1), x, many, is_grads_batched=True),
    )
