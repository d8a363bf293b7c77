"""Fused calls whose kernel has a start function, as on a GPU: with the plans of test_route.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transconv
from tests.torch_ops.test_route import (
    WARM,
    Plan,
    double,
    gaps,
    imaginary,
    kernels,
    last,
    made_up,
    negated,
    shifted,
)
from tests.torch_ops.test_warm import general
from tests.torch_ops.test_warm_fused import PARTS, given, ours, theirs
from transconv.calls import guard, route_cache
from transconv.errors import Unsupported
from transconv.torch_ops.calls import lower_call, route, select_impl
from transconv.torch_ops.calls.call_entries import CALLS

__all__ = ["general", "kernels"]


def leaves(args: list[Any]) -> list[torch.Tensor]:
    return list({id(t): t for t in args if t is not None and t.requires_grad}.values())


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_kernels_are_started_and_counted(parts: str, activation: str | None, general: list[Any]) -> None:
    args = given(parts)
    for _ in range(WARM):
        Plan.started.clear()
        general.clear()
        torch.testing.assert_close(ours(*args, activation), theirs(*args, activation))
    assert Plan.started == ["fwd"] and not general
    assert transconv.stats().native == {"fwd": WARM} and not transconv.stats().fallback


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("activation", [None, "relu", "tanh", "silu"])
def test_training_starts_three_kernels(parts: str, activation: str | None, general: list[Any]) -> None:
    args = given(parts, leaves="xwbr")
    wanted = leaves(args)

    def run(f: Any) -> Any:
        y = f(*args, activation)
        return y.detach(), *torch.autograd.grad(y.sin().sum(), wanted)

    right = run(theirs)
    for _ in range(WARM):
        Plan.started.clear()
        general.clear()
        torch.testing.assert_close(run(ours), right)
    assert sorted(Plan.started) == ["bwd_d", "bwd_w", "fwd"] and not general
    assert transconv.stats().native == {"fwd": WARM, "bwd_d": WARM, "bwd_w": WARM}


@pytest.mark.every(5)
@pytest.mark.parametrize("change", [negated, imaginary, made_up, shifted, last, gaps, double])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("trained", [False, True])
def test_tensors_that_differ_get_another_kernel(change: Any, which: int, trained: bool) -> None:
    args = given("br", leaves="xwbr" if trained else "")

    def run(f: Any, args: list[Any]) -> Any:
        y = f(*args)
        return y.detach(), *(torch.autograd.grad(y.sin().sum(), leaves(args)) if trained else ())

    for _ in range(WARM):
        run(ours, args)
    changed = [
        change(t).requires_grad_(trained) if n == which or change is double else t
        for n, t in enumerate(args)
    ]
    if changed[1] is not args[1]:  # even under the identity of the old one
        CALLS.entries[id(changed[1])] = CALLS.entries[id(args[1])]
    right = run(theirs, changed)
    for _ in range(WARM):
        torch.testing.assert_close(run(ours, changed), right)
    torch.testing.assert_close(run(ours, args), run(theirs, args))


@pytest.mark.parametrize("parts", PARTS)
def test_an_epilogue_that_no_kernel_has(
    parts: str, monkeypatch: pytest.MonkeyPatch, general: list[Any]
) -> None:
    """The convolution's own kernel is started and torch does the rest, at the first call and later."""
    asked = lower_call.question

    def refused(problem: Any, direction: Any, device: Any, epilogue: str, *rest: Any) -> Any:
        if epilogue not in ("", "bias"):
            raise Unsupported("schedule:refused")
        return asked(problem, direction, device, epilogue, *rest)

    monkeypatch.setattr(lower_call, "question", refused)
    args = given(parts)
    for _ in range(WARM):
        Plan.started.clear()
        general.clear()
        torch.testing.assert_close(ours(*args), theirs(*args))
    assert Plan.started == ["fwd"] and not general
    assert transconv.stats().native == {"fwd": WARM} and not transconv.stats().fallback


def convolution(x: Any, w: Any, b: Any, _: Any) -> torch.Tensor:
    return transconv.conv2d(x, w, b, padding=1)


@pytest.mark.parametrize(("f", "parts"), [(convolution, "b"), *((ours, parts) for parts in PARTS)])
@pytest.mark.parametrize("wanted", ["", "xwbr"])
def test_another_device_is_the_current_one(
    f: Any, parts: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]
    for module in (route, guard):
        monkeypatch.setattr(module, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = given(parts, leaves=wanted)
    right = (theirs(*args[:3], None, None) if f is convolution else theirs(*args)).detach()
    f(*args)
    for found in route_cache.routes.values():
        found.device = 0  # as if the tensors were there
    for current[0] in [0] * WARM + [1] * WARM + [0]:
        Plan.started.clear()
        torch.testing.assert_close(f(*args).detach(), right)
        assert Plan.started == ["fwd"] * (current[0] == 0)


def test_a_cold_call_in_a_capture_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = given("br")
    capturing = [True]
    monkeypatch.setattr(select_impl, "is_capturing", lambda device: capturing[0])
    for _ in range(WARM):
        torch.testing.assert_close(ours(*args), theirs(*args))
    assert transconv.stats(reset=True).fallback == {"capture:cold": WARM}
    assert not CALLS.entries and not Plan.started
    for capturing[0] in [False] * WARM + [True]:  # a warm call is captured as it is
        Plan.started.clear()
        torch.testing.assert_close(ours(*args), theirs(*args))
    assert Plan.started == ["fwd"] and transconv.stats().native == {"fwd": WARM + 1}
