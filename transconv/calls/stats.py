"""Counts of the calls that kernels and torch compute, and the warning when torch computes one."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch

import transconv
from transconv.calls.settings import settings
from transconv.runtime import COMPILING, torch_internals
from transconv.support import Unsupported

# Reasons in words, by their topics or whole; what an error says itself comes before them.
SENTENCES = {
    "device:cpu": 'the tensors are on no GPU; without one transconv.explain(.., target="sm_90") shows '
    'the kernels, and transconv.config.cpu = "interpret" runs them',
    "device:meta": 'the tensors have no values; transconv.explain(.., target="sm_90") shows the kernels',
    "device": "kernels run on CUDA and ROCm devices alone",
    "dtype:quantized": "transconv.quantized has the calls of integers",
    "dtype:bias": "the bias has another type than the input; cast it with bias.to(input.dtype)",
    "dtype": "there is no kernel for tensors of this type; cast them",
    "layout": "kernels read strided memory alone; call to_dense() before",
    "shape": "there are no elements, so there is nothing to launch",
    "form": "an argument is of a kind that torch converts; give Python numbers, or tuples of them",
    "transform": "torch.func and forward mode have rules of their own; transconv.enable() serves them",
    "subclass": "the tensor's class has rules of its own",
    "interpreter": "Triton's interpreter is off; start the program with TRITON_INTERPRET=1",
    "import": "Triton is not installed: pip install triton, on Windows triton-windows",
    "compile:never": 'its kernel is not compiled, and transconv.config.compile is "never"; call '
    "transconv.prepare before",
    "capture": "a CUDA graph is captured at its first call; call it once before the capture",
    "quantized:gradient": "calls of integers have no gradients; use torch.no_grad()",
    "deterministic": "the gradient adds with atomics, which torch.use_deterministic_algorithms forbids",
    "schedule": "no kernel of this problem fits the GPU",
    "miscompiled": "each kernel gave a wrong first result; transconv report-wrong tells more",
    "target": "Triton compiles for GPUs from sm_80 on (not for a T4 or V100) and for listed ones of AMD",
}


def sentence(reason: str) -> str:
    """A reason in words; empty where the reason is all that is known."""
    return SENTENCES.get(reason) or SENTENCES.get(reason.partition(":")[0], "")


class FallbackWarning(UserWarning):
    """A call was handed to torch. Given once for each reason; ``transconv.config.fallback`` says
    whether to be silent, to warn or to raise instead."""


@dataclass(frozen=True)
class Stats:
    """Counts since the start or the last reset. ``native`` counts launches of generated kernels by what
    they compute: a function (softmax, softmax_gradient) or the direction of a convolution, with "any size"
    behind it where sizes are arguments. ``fallback`` counts results that torch computed, by reason;
    ``waiting``, apart from these, those that it computed while processes compiled their kernels.
    ``compared`` counts first results of compiled graphs that were held against torch's operators: right,
    wrong, left out; ``compared_us``: the microseconds that this took, by the same outcomes."""

    native: dict[str, int] = field(default_factory=dict)
    fallback: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    compared_us: dict[str, int] = field(default_factory=dict)
    waiting: int = 0

    @property
    def total(self) -> int:
        return sum(self.native.values()) + sum(self.fallback.values()) + self.waiting

    @property
    def native_share(self) -> float:
        """Part of all results that generated kernels computed; 1.0 when there was no call."""
        return sum(self.native.values()) / self.total if self.total else 1.0

    def __str__(self) -> str:
        rows = [f"native   {name:<32} {n}" for name, n in sorted(self.native.items())]
        rows += [f"fallback {name:<32} {n}" for name, n in sorted(self.fallback.items())]
        rows += [f"waiting  {'for kernels':<32} {self.waiting}"] * bool(self.waiting)
        rows += [f"compared {name:<32} {n}" for name, n in sorted(self.compared.items())]
        return "\n".join([*rows, f"{self.total} results, {self.native_share:.1%} native"])


EMPTY = "shape:empty"  # the reason of calls on tensors without elements


@dataclass
class CallTotals:
    """Launches of kernels by what they compute, results of torch by the reason, and first results of
    graphs by the outcome, "times" and "us"."""

    native: Counter[str] = field(default_factory=Counter)
    fallback: Counter[str] = field(default_factory=Counter)
    compared: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass
class CallCounts:
    """The totals that count now, and the reasons that were warned about."""

    totals: CallTotals = field(default_factory=CallTotals)
    warned: set[str] = field(default_factory=set)


lock = threading.Lock()
_counts = CallCounts()


def add(native: bool, name: str, count: int) -> None:
    """Add to the totals: ``name`` is a direction or a reason."""
    with lock:
        totals = _counts.totals
        (totals.native if native else totals.fallback)[name] += count


def held(outcome: str, us: int = 0) -> None:
    """Count a first result that was held against torch's operators, and how long that took."""
    with lock:
        _counts.totals.compared[outcome, "times"] += 1
        _counts.totals.compared[outcome, "us"] += us


def totals(reset: bool = False) -> Stats:
    """The totals that were added so far."""
    with lock:
        times, us = (
            {outcome: n for (outcome, of), n in _counts.totals.compared.items() if of == figure}
            for figure in ("times", "us")
        )
        fallback = dict(_counts.totals.fallback)
        waiting = fallback.pop(COMPILING, 0)
        now = Stats(dict(_counts.totals.native), fallback, times, us, waiting)
        if reset:
            _counts.totals = CallTotals()
        return now


@contextmanager
def aside() -> Iterator[Callable[[], Stats]]:
    """Count from zero inside (the yielded function returns the totals); restore the totals at the end."""
    with lock:
        before, _counts.totals = _counts.totals, CallTotals()
    try:
        yield totals
    finally:
        with lock:
            _counts.totals = before


def announce(reason: str, message: str = "", what: str = "convolution") -> None:
    """Apply the fallback policy to one reason: nothing, one warning, or Unsupported. ``what``: the
    operation that torch computes."""
    if reason == COMPILING:  # torch computes meanwhile, as configured
        return
    policy = settings.policy
    if reason == EMPTY and settings.invariant:  # nothing is added up
        policy = settings.fallback
    if policy == "error":
        raise Unsupported(reason, message or f"torch would have to compute this {what}")
    key = reason if what == "convolution" else f"{what} {reason}"
    if policy == "warn" and key not in _counts.warned:
        with lock:
            if key in _counts.warned:
                return
            _counts.warned.add(key)
        message = message or sentence(reason)
        detail = f": {message}" if message else ""
        many = "convolutions" if what == "convolution" else what
        _warn(f"transconv hands {many} to torch ({reason}){detail}")


def refuse_invariant(reason: str, why: str) -> None:
    """Raise Unsupported in invariant mode, where something depends on the batch, or torch would add up
    samples."""
    if settings.invariant:
        raise Unsupported(f"invariant:{reason}", why)


def tell_once(key: str, text: str) -> None:
    """A FallbackWarning, the first time that the key is given."""
    with lock:
        if key in _counts.warned:
            return
        _counts.warned.add(key)
    _warn(text)


INSIDE = (
    *(os.path.dirname(str(of.__file__)) + os.sep for of in (transconv, torch)),
    "<",
    contextlib.__file__,
    functools.__file__,
    threading.__file__,
)


def _warn(text: str) -> None:
    """Warn at the line of the program that called, through torch, this package, and what torch's compiler
    made of a function. In a thread of torch's, which has none, at its outermost line."""
    made = torch_internals.compiled_code()
    at: FrameType = sys._getframe(1)
    while at.f_back is not None and (at.f_code.co_filename.startswith(INSIDE) or at.f_code in made):
        at = at.f_back
    warnings.warn_explicit(
        text,
        FallbackWarning,
        at.f_code.co_filename,
        at.f_lineno,
        str(at.f_globals.get("__name__", "")),
        at.f_globals.setdefault("__warningregistry__", {}),
    )


def forget_warnings() -> None:
    """Warn again for reasons that were already named."""
    with lock:
        _counts.warned.clear()


def handed_over(reason: str, what: str = "convolution") -> None:
    """Apply the policy to a call that goes to torch before any route is looked up, and count it."""
    announce(reason, what=what)
    add(False, reason, 1)
