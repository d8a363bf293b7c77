"""How a case on the GPU is judged and counted.

Two correct convolutions may add in different orders, so a miss of torch's tolerances is judged once
more, against float64 on the CPU, by the bound that holds for any order of the sums:
``(n + 4) eps sum|a||b| + 2 eps_out |y|``, where n is the number of products of that element.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import transconv
from tests.torch_ops import samples as s

Tensor = torch.Tensor
DEVICE = os.environ.get("DROPIN_DEVICE", "cuda")
HAS_GPU = DEVICE == "cuda" and torch.cuda.is_available()

# What torch computes on any GPU, as docs/drop_in.md says. The other reasons there (schedule:refused,
# miscompiled, error: ...) are faults of ours on this GPU, and a case that meets one has failed.
DOCUMENTED = (
    "shape:empty",
    "dtype:complex",
    "dtype:int",
    "dtype:float8",
    "dtype:quantized",
    "layout:",
    "transform:",
    "subclass:",
    "capture:cold",
)
FATAL = ("CUDA error", "AcceleratorError", "illegal memory access", "device-side assert")


def documented(reason: str) -> bool:
    return reason.startswith(DOCUMENTED) or (DEVICE == "cpu" and reason == "device:cpu")


def set_precision(word: str) -> None:
    """How float32 convolutions of torch, and ours, are multiplied: "ieee" or "tf32". By the older
    switch, because parts of torch still read it and raise once the newer one says "ieee"."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = "tf32"  # type: ignore[attr-defined]
    # torch's test data, once imported, forbids `torch.backends.cudnn.allow_tf32 = ...`.
    torch._C._set_cudnn_allow_tf32(word == "tf32")


def synchronise() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


class Cases:
    """Counts of one test: passed, those of them judged by the bound, failed, fell back by reason.
    A case of which torch computed every part counts as fallen back, whatever else happened."""

    def __init__(self) -> None:
        self.passed = self.rounded = 0
        self.failures: list[str] = []
        self.fallback: Counter[str] = Counter()
        self.native: Counter[str] = Counter()
        self.fell_back = 0

    @contextmanager
    def case(self, label: str) -> Iterator[None]:
        """Try one case; a failure is kept for the end, a fault of the GPU ends the test."""
        transconv.stats(reset=True)
        before = len(self.failures)
        try:
            yield
            synchronise()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if any(word in text for word in FATAL):
                raise
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{label}: {text[:600]} ({last.name}:{last.lineno})")
        seen = transconv.stats(reset=True)
        self.native.update(seen.native)
        self.fallback.update(seen.fallback)
        if seen.fallback and not seen.native:
            self.fell_back += 1
        strange = [r for r in seen.fallback if not documented(r)]
        if strange:
            self.failures.append(f"{label}: undocumented fallback {' '.join(strange)}")
        if len(self.failures) == before:
            self.passed += 1

    def summary(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "rounded": self.rounded,
            "failed": len(self.failures),
            "fell_back": self.fell_back,
            "fallback": dict(self.fallback),
            "native": dict(self.native),
            "failures": self.failures[:20],
        }

    def finish(self, at_least: int = 1) -> None:
        """Fail if a case did, or if there were too few."""
        shown = "\n".join(self.failures[:20])
        assert not self.failures, f"{len(self.failures)} of {self.passed} + failed:\n{shown}"
        assert self.passed >= at_least


def leaves(args: Sequence[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


def run(
    f: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], grad: Tensor | None
) -> list[Tensor]:
    """The result, then the gradients of the arguments that want one."""
    y = f(*args, **kwargs)
    if grad is None:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, leaves(args), grad)]


def exactly(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grad: Tensor | None,
    change: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """torch's own function in float64 on the CPU, of the changed tensors."""

    def moved(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return change(t.detach().cpu().double()).requires_grad_(t.requires_grad)

    return run(
        s.theirs(name), [moved(a) for a in args], kwargs, None if grad is None else moved(grad).detach()
    )


def violations(
    got: Sequence[Tensor],
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grad: Tensor | None = None,
    tf32: bool = False,
) -> list[str]:
    """Where a result is further from float64 than rounding explains: empty if nowhere."""
    refs, sums, counts = (
        exactly(name, args, kwargs, grad, change) for change in (lambda t: t, torch.abs, torch.ones_like)
    )
    found = []
    for at, (mine, ref, total, n) in enumerate(zip(got, refs, sums, counts, strict=True)):
        eps_out = torch.finfo(mine.dtype).eps
        eps = eps_out if mine.dtype == torch.float64 else torch.finfo(torch.float32).eps
        bound = (n + 4) * eps * total + 2 * eps_out * ref.abs()
        if tf32:
            bound = bound + 2.0**-10 * total
        # Below the smallest normal number of a type, steps are absolute.
        bound = bound + torch.finfo(mine.dtype).smallest_normal * eps_out
        error = (mine.detach().cpu().double() - ref).abs()
        bad = ~(error <= bound) & ~(mine.cpu().isnan() & ref.isnan())
        if bad.any():
            worst = (error / bound).nan_to_num(float("inf"))[bad].max().item()
            found.append(
                f"tensor {at} of {tuple(mine.shape)}: {int(bad.sum())} elements beyond "
                f"the bound, worst {worst:.3g} times"
            )
    return found


def agree(
    cases: Cases,
    got: Sequence[Tensor],
    wanted: Sequence[Tensor],
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grad: Tensor | None = None,
) -> None:
    """torch's tolerances, or the bound."""
    assert len(got) == len(wanted)
    for mine, its in zip(got, wanted, strict=True):
        assert (mine.dtype, mine.shape, mine.device) == (its.dtype, its.shape, its.device)
    try:
        torch.testing.assert_close(list(got), list(wanted), equal_nan=True)
    except AssertionError as miss:
        if wanted[0].dtype.is_complex or not wanted[0].dtype.is_floating_point:
            raise
        beyond = violations(got, name, args, kwargs, grad)
        if beyond:
            raise AssertionError("; ".join(beyond)) from miss
        cases.rounded += 1
