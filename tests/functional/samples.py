"""torch's own samples of the functions that transconv.functional has, tried on a device: results and
gradients are torch's, or the call is torch's for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

import transconv
from bench.claims import FATAL
from tests.torch_ops.samples import drawn
from transconv import functional

ROOT = {
    "softmax",
    "log_softmax",
    "sum",
    "mean",
    "prod",
    "amax",
    "amin",
    "var",
    "std",
    "logsumexp",
    "any",
    "all",
    "matmul",
    "bmm",
    "argmax",
    "argmin",
    "max",
    "min",
    "cat",
    "flip",
    "gather",
    "index_select",
}
NONE = {"fold", "causal_conv1d_fn", "causal_conv1d_update"}  # torch has no samples of them
# Kinds of calls of which none has a kernel: others of torch's modes, and functions of two tensors.
OTHERS = {
    "interpolate": {"linear", "bilinear", "bicubic", "trilinear", "area"},
    "max": {"binary"},
    "min": {"binary"},
}


@dataclass(slots=True)
class Found:
    """How the samples of a function ended. Each has passed, of these so many with gradients, or is
    torch's, in part or as a whole, by reason, or has failed, with a message."""

    passed: int = 0
    gradients: int = 0
    handed: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def count(self, label: str, compare: Callable[[], bool]) -> None:
        """One sample. ``compare`` raises if something is not torch's, else it says whether there were
        gradients. A fault of the GPU is raised again, because each later sample would fail too."""
        transconv.stats(reset=True)
        try:
            graded = compare()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if any(word in text for word in FATAL):
                raise
            self.failures.append(f"{label}: {text[:600]}")
            return
        if away := transconv.stats().fallback:
            self.handed[" and ".join(sorted(away))] += 1
        else:
            self.passed += 1
            self.gradients += graded

    @property
    def reasons(self) -> set[str]:
        return {reason for several in self.handed for reason in several.split(" and ")}

    def summary(self) -> dict[str, Any]:
        """Under the names that ``bench.dropin`` adds up."""
        return {
            "passed": self.passed,
            "gradients": self.gradients,
            "fell_back": self.handed.total(),
            "fallback": dict(self.handed),
            "failed": len(self.failures),
            "failures": self.failures[:20],
        }


def ops_of(name: str) -> Iterator[Any]:
    """torch's entries for a function, one for each of its forms."""
    from torch.testing._internal.common_methods_invocations import op_db

    dotted = name if name in ROOT else f"nn.functional.{name}"
    forms = [op for op in op_db if op.name == dotted]
    plain = [op for op in forms if op.variant_test_name in ("", "unbiased_off")]
    yield from plain or [op for op in forms if op.variant_test_name not in OTHERS.get(name, ())]


def ours_of(name: str) -> Callable[..., Any]:
    ours: Callable[..., Any] = getattr(functional, name)
    # torch's samples begin with what is differentiated.
    return (lambda weight, index, **more: ours(index, weight, **more)) if name == "embedding" else ours


def tried(
    name: str, device: str, dtype: torch.dtype, every: int = 1, near: float = 1e-4, only: int | None = None
) -> Found:
    """How every n-th sample of a function ended; or one of them alone."""
    found = Found()
    for op in ops_of(name):
        grads = op.supports_autograd
        samples = drawn(op, device, dtype, grads)
        for at, sample in enumerate(islice(samples, None if only is None else only + 1)):
            if at % every or only not in (None, at):
                continue
            found.count(f"{op.full_name} {at}", partial(_compare, op.op, ours_of(name), sample, near))
    return found


def _compare(theirs: Callable[..., Any], ours: Callable[..., Any], sample: Any, near: float) -> bool:
    args = (sample.input, *sample.args)
    got, want = ours(*args, **sample.kwargs), theirs(*args, **sample.kwargs)
    _same(got, want, near)
    operands = sample.input if isinstance(sample.input, (list, tuple)) else [sample.input]
    leaves = [
        t
        for t in (*operands, *sample.args, *sample.kwargs.values())
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    ours_first, first = (t[0] if isinstance(t, tuple) else t for t in (got, want))
    if first.requires_grad:
        assert ours_first.stride() == first.stride() or not first.numel(), "other strides than torch's"
        g = torch.randn_like(first)
        mine, theirs = (torch.autograd.grad(y, leaves, g, allow_unused=True) for y in (ours_first, first))
        _same(mine, theirs, near)
    return bool(first.requires_grad)


def _same(got: Any, want: Any, near: float) -> None:
    # A row of one element has gradients that are zero but for the rounding of its mean.
    torch.testing.assert_close(got, want, equal_nan=True, rtol=near, atol=near)


def _causal(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.pad(x, (w.shape[1] - 1, 0)), w[:, None], groups=len(w))


def transformed(name: str) -> None:
    """One sample of a function under torch's tracer, vmap, grad and jvp, held against torch's own."""
    theirs, ours, sample = F.fold, functional.fold, None
    x, rest, named = torch.randn(1, 12, 4), ((4, 4), 2), {"stride": 2}
    if name == "causal_conv1d_fn":
        theirs, ours, x, rest, named = _causal, functional.causal_conv1d_fn, x, (torch.randn(12, 3),), {}
    elif name not in NONE:
        op = next(iter(ops_of(name)))
        theirs, ours = op.op, ours_of(name)
        sample = next(
            s
            for s in drawn(op, "cpu", torch.float32)
            if not isinstance(s.input, torch.Tensor) or (s.input.dim() and s.input.numel() > 1)
        )
        x, rest, named = sample.input, sample.args, {**sample.kwargs}
    listed = not isinstance(x, torch.Tensor)
    if listed:  # of a list, its first
        x, others = x[0], x[1:]

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        def called(x: torch.Tensor) -> Any:
            found = f((x, *others) if listed else x, *rest, **named)
            return found if isinstance(found, torch.Tensor) else found[0]

        return called

    def squares(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: of(f)(x).square().sum()

    mine, want = of(ours), of(theirs)(x)
    traced = torch.jit.trace(mine, (x,), check_trace=False)
    torch.testing.assert_close(traced(x), want)
    if name not in ("batch_norm", "instance_norm"):  # torch has no statistics of each of the samples
        both = torch.stack([x, x.flip(0)])
        torch.testing.assert_close(torch.vmap(mine)(both), torch.vmap(of(theirs))(both))
    if want.is_floating_point() and x.is_floating_point():
        grad = torch.func.grad(squares(theirs))(x)
        torch.testing.assert_close(torch.func.grad(squares(ours))(x), grad)
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(*torch.autograd.grad(traced(leaf).square().sum(), leaf), grad)
        torch.testing.assert_close(
            torch.func.jvp(mine, (x,), (x,))[1], torch.func.jvp(of(theirs), (x,), (x,))[1]
        )
