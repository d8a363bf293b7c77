"""One side of a reported case, ours or torch's, in one memory order: whether it is right, how long it
takes, and what memory it needs. Runs in a process of its own, which a fault of the GPU ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import transconv
from bench import reference
from bench.issue_cases import CASES, TYPES, WANTED, IssueCase
from transconv.conv import Prop, sampled
from transconv.runtime.timing import Clock, Timing, summary
from transconv.torch_ops import operators
from transconv.tuning.table import Row
from transconv.verify.machine import device, is_fatal, synchronize

Tensor = torch.Tensor
Results = list[Tensor]
Call = Callable[[], Results]
HOMES: dict[str, Any] = {"ours": transconv, "torch": torch.nn.functional}
# The operators below autograd, because autograd's own time would hide that of short kernels.
BACKWARD: dict[str, Any] = {
    "ours": operators.convolution_backward,
    "torch": torch.ops.aten.convolution_backward.default,
}

# A result is wrong if an element is off by more than this share of the largest one: beyond any rounding
# of sums in these types, tf32 and FFT included.
FAR = {"f32": 5e-3, "c64": 5e-3, "f16": 2e-2, "bf16": 5e-2}
SLOW_US = 2e4  # calls that take longer are timed a few times
HUGE = 1 << 30  # bytes beyond which only one side has its tensors at a time


def measure(name: str, small: bool, sides: Sequence[str], budget_ms: float = 60.0) -> Row:
    """The result of each side (``ours.nhwc``), and ``left``: those not run because of a fault.
    Without a GPU nothing is timed: an interpreter's times say nothing about a kernel."""
    case = next(c for c in CASES if c.name == name)
    case = case.shrunk() if small else case
    where = device()
    found: Row = {}
    quick: dict[str, Callable[[int], Call]] = {}
    with switches(case, where):
        for at, side in enumerate(sides):
            try:
                found[side] = judged(case, side, where)
            except Exception as error:
                found[side] = {"verdict": "raises", "reason": _first_line(error)}
                if is_fatal(error) and not isinstance(error, torch.OutOfMemoryError):
                    again = [*quick, *sides[at + 1 :]]  # right results, not timed yet
                    done = {s: side for s, side in found.items() if s not in quick}
                    return {"sides": done, "left": again, "fatal": True}
            _free(where)
            if found[side].pop("quick", False):
                quick[side] = maker(case, side, where)
        for side, timing in Clock(where, budget_ms).compare(quick, case.bytes()).items() if quick else ():
            found[side] |= {"us": timing.us, "spread": timing.spread}
    return {"sides": found, "left": []}


@contextmanager
def switches(case: IssueCase, where: str) -> Iterator[None]:
    """Set torch's switches for the case, and fall back to torch without warnings."""
    reference.settings(case.tf32)
    before = transconv.config.fallback, transconv.config.cpu
    transconv.config.fallback = "silent"
    transconv.config.cpu = "interpret" if where == "cpu" else before[1]
    torch.use_deterministic_algorithms(case.deterministic, warn_only=True)
    torch.backends.cudnn.deterministic = case.deterministic
    try:
        yield
    finally:
        transconv.config.fallback, transconv.config.cpu = before
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def operands(case: IssueCase, layout: str, where: str, seed: int = 0) -> list[Tensor]:
    """Input, weight and bias, of random numbers; the weight's such that results are about 1."""
    generator = torch.Generator(where).manual_seed(seed)
    channels_last = reference.memory_format(case.ndims, layout)
    summed = max(1, case.w[0] if case.transposed else case.w[1])
    made = []
    for shape, scale in ((case.x, 1.0), (case.w, (summed * 9) ** -0.5)):
        t = torch.randn(shape, dtype=TYPES[case.dtype], device=where, generator=generator)
        t = t.mul_(scale)
        made.append(t if channels_last is None else t.contiguous(memory_format=channels_last))
    if case.bias:
        made.append(
            torch.randn(case.shape()[1], dtype=TYPES[case.dtype], device=where, generator=generator)
        )
    return made


def called(case: IssueCase, side: str, tensors: list[Tensor]) -> tuple[Call, Tensor | None]:
    """What computes the case's results on these tensors for one of HOMES, and the gradient that it
    starts from."""
    function = case.on(HOMES[side])
    wanted = WANTED[case.direction]
    if not wanted:

        def forward() -> Results:
            with torch.no_grad():
                return [function(*tensors)]

        return forward, None
    with torch.no_grad():
        y = function(*tensors)
    made = torch.randn(
        y.shape, dtype=y.dtype, device=y.device, generator=torch.Generator(y.device).manual_seed(1)
    )
    gradient = torch.empty_like(y).copy_(made)
    x, w = tensors[:2]
    bias_sizes = [None] if side == "torch" else []
    numbers = (gradient, x, w, *bias_sizes, *case.numbers(), [0 in wanted, 1 in wanted, False])
    backward = BACKWARD[side]

    def gradients() -> Results:
        with torch.no_grad():
            found = backward(*numbers)
        return [found[i] for i in wanted]

    return gradients, gradient


def maker(case: IssueCase, side: str, where: str) -> Callable[[int], Call]:
    """The call on the i-th set of tensors."""
    whose, layout = side.split(".")
    return lambda index: called(case, whose, operands(case, layout, where, index))[0]


def judged(case: IssueCase, side: str, where: str) -> Row:
    """Run one side: its verdict, error, memory and, where a call is long, its time."""
    whose, layout = side.split(".")
    tensors = operands(case, layout, where)
    left_to_torch = sum(transconv.stats().fallback.values())
    call, gradient = called(case, whose, tensors)
    results = call()
    synchronize()
    by_torch = whose == "ours" and sum(transconv.stats().fallback.values()) > left_to_torch
    far = error(case, layout, tensors, gradient, results)
    del results
    found: Row = {"verdict": "right" if far <= FAR[case.dtype] else "wrong", "err": far, "reason": ""}
    if far > FAR[case.dtype]:
        found["reason"] = f"off by {far:.2g} of the largest element"
    elif by_torch:
        found["reason"] = "computed by torch"
    if whose == "ours":
        found["schedule"] = schedule(case, tensors)
    if where == "cuda" and far <= FAR[case.dtype]:
        found["peak_mb"] = peak(call)
        us = _once(call)
        found["quick"] = us < SLOW_US and case.bytes() < HUGE
        if not found["quick"]:
            timing = slowly(call, us)
            found |= {"us": timing.us, "spread": timing.spread}
    return found


# -- right or wrong --------------------------------------------------------------------------------


def error(
    case: IssueCase, layout: str, tensors: list[Tensor], gradient: Tensor | None, results: Results
) -> float:
    """The largest difference to sums in f64, as a share of the largest element; of large results at
    sampled elements. Infinite where a result is not finite or of another shape."""
    problem = case.problem(layout)
    worst = 0.0
    for prop, result, shape in zip(case.props(), results, _shapes(case), strict=True):
        if tuple(result.shape) != shape:
            return float("inf")
        if not result.numel():
            continue
        if problem is None:
            got, want = result.cpu(), _whole(case, tensors)
        else:
            named = _named(case, tensors, gradient, prop, result)
            at, want = sampled(problem, prop, named)
            if case.bias and gradient is None:
                want = want + tensors[2].double()[at[1]]
            got = result[tuple(at)].double()
        far = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
        worst = max(worst, far.item() if far.isfinite() else float("inf"))
    return worst


def _shapes(case: IssueCase) -> list[tuple[int, ...]]:
    wanted = WANTED[case.direction]
    return [(case.x, case.w)[i] for i in wanted] or [case.shape()]


def _named(
    case: IssueCase, tensors: list[Tensor], gradient: Tensor | None, prop: Prop, result: Tensor
) -> dict[str, Tensor]:
    """Tensors by the names that the problem has for them; the result stands for itself."""
    y = result if gradient is None else gradient
    src, dst = (y, tensors[0]) if case.transposed else (tensors[0], y)
    return {"src": src, "wei": tensors[1], "dst": dst, prop.result: result}


def _whole(case: IssueCase, tensors: list[Tensor]) -> Tensor:
    """The answer by torch in twice the precision, on the CPU; zeros where there is nothing to sum."""
    wide = torch.complex128 if case.dtype == "c64" else torch.float64
    return case.on(torch.nn.functional)(*(t.cpu().to(wide) for t in tensors))


# -- time and memory -------------------------------------------------------------------------------


def peak(call: Call) -> float:
    """Megabytes that a call needs beside its operands, its result included; not its first call."""
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _once(call: Call) -> float:
    """Microseconds of one call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    synchronize()
    return float(start.elapsed_time(stop) * 1e3)


def slowly(call: Call, us: float) -> Timing:
    """The time of a long call: of a few, with cold caches."""
    return summary([_once(call) for _ in range(3 if us > 10 * SLOW_US else 7)], "events")


def schedule(case: IssueCase, tensors: list[Tensor]) -> str:
    """What our kernels are made by."""
    o = dict(case.options)
    bias = tensors[2] if case.bias else None
    try:
        told = transconv.explain(tensors[0], tensors[1], bias, transposed=case.transposed, **o)
    except Exception:  # it explains what can be computed
        return ""
    names = {
        "fwd": ("result",),
        "bwd_d": ("input gradient",),
        "bwd_w": ("weight gradient",),
        "bwd": ("input gradient", "weight gradient"),
    }[case.direction]
    return " ;; ".join(
        p.schedule or f"torch: {'; '.join(p.reasons)}" for p in told.parts if p.computes in names
    )


def _free(where: str) -> None:
    if where == "cuda":
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
