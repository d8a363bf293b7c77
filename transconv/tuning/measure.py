"""The measurement of a schedule in a worker process: whether it is right, and how fast; and the
rates of the machine, which give lower bounds of times.

Several processes compile into Triton's cache, one uses the GPU. Tensors and answers of the last few
workloads stay on the GPU, because the trials of several workloads alternate."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

from transconv.runtime import Plan, check_records, timing
from transconv.support import ScheduleError, Unsupported
from transconv.verify.case import Case, warm
from transconv.verify.computation import case_of
from transconv.verify.machine import device

Found = dict[str, Any]

SHARE = 0.4  # of the GPU's memory, for workloads that are kept


def compile_trial(text: str, direction: str, behind: str = "", schedule: str = "") -> Found:
    """Generate a plan's kernels and compile them into Triton's cache: seconds for each. A refusal is
    not reported here, because the measuring process meets it again and reports it."""
    start = time.perf_counter()
    try:
        compiled = case_of(text, direction, behind).plan(schedule)
    except (ScheduleError, Unsupported):
        return {}
    found: Found = {"lower_s": time.perf_counter() - start, "kernels": len(compiled.steps)}
    if device() == "cuda":
        found["triton_s"] = warm(compiled)
    return found


# -- in the process that has the GPU ---------------------------------------------------------------


def ceilings(clock: timing.Clock, size: int = 8192, copied: int = 1 << 30) -> dict[str, float]:
    """TFLOP/s of a bf16 product of ``size`` square random matrices, TB/s of a copy of ``copied`` bytes
    (read and written bytes together), and microseconds of a launch that computes one number."""
    import torch

    where = clock.flush.device

    def product(index: int) -> Callable[[], object]:
        a, b = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in "ab")
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    def copy(index: int) -> Callable[[], object]:
        a = torch.randn(copied // 4, device=where)
        b = torch.empty_like(a)
        return lambda: b.copy_(a)

    def launch(index: int) -> Callable[[], object]:
        one = torch.zeros(1, device=where)
        return lambda: one.add_(1)

    times = clock.compare({"product": product, "copy": copy}, 2 * copied)
    return {
        "gemm_tflops": 2 * size**3 / times["product"].us / 1e6,
        "copy_tbs": 2 * copied / times["copy"].us / 1e6,
        "launch_us": clock.one(launch, 4).us,
    }


class KeptCases:
    """The workloads of the last trials, with their tensors: the one that was used longest ago is released
    first, when another needs its share of the memory."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, str, str], Case] = OrderedDict()

    def case(self, text: str, direction: str, behind: str) -> Case:
        """A workload, kept from an earlier trial or new."""
        key = (text, direction, behind)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        made = case_of(*key)
        room = _room(made.where)
        while self._held and _weight(made) + sum(map(_weight, self._held.values())) > room:
            self._held.popitem(last=False)[1].release()
            _empty_cache(made.where)
        self._held[key] = made
        return made


kept = KeptCases()


def measure_trial(
    text: str, direction: str, behind: str = "", schedule: str = "", budget_ms: float = 30.0
) -> Found:
    """Check a schedule on exact data, then time it on random data. ``verdict``: right, wrong or refused,
    with a reason."""
    case = kept.case(text, direction, behind)
    try:
        compiled = case.plan(schedule)
    except (Unsupported, ScheduleError) as refusal:
        return {"verdict": "refused", "reason": f"{type(refusal).__name__}: {refusal}"}
    judged = case.same(compiled)
    _record(compiled, judged.reason)
    found: Found = {
        "verdict": "right" if judged.right else "wrong",
        "reason": judged.reason,
        "max_err": judged.max_err,
    }
    if judged.right:
        clock = _clock(case.where)
        clock.budget_ms = budget_ms
        timing = clock.one(case.make(compiled), case.footprint)
        found.update(us=timing.us, p20=timing.p20, p80=timing.p80, method=timing.method)
    return found


def _weight(case: Case) -> float:
    """Bytes that stay allocated: tensors, the answer, and the timed sets."""
    return 4.0 * case.footprint


def _room(where: str) -> float:
    import torch

    return SHARE * torch.cuda.mem_get_info()[1] if where == "cuda" else 1e9


def _empty_cache(where: str) -> None:
    import torch

    if where == "cuda":
        torch.cuda.empty_cache()


@cache
def _clock(where: str) -> Any:
    return timing.Clock(where)


def _record(compiled: Plan, reason: str) -> None:
    """Record a kernel as wrong for other processes. Of a plan with several kernels none is recorded."""
    if reason and len(compiled.steps) == 1:
        (step,) = compiled.steps
        check_records.record(
            check_records.variant(step.digest, True),
            check_records.WRONG,
            reason=reason,
            function=step.triton.function,
            problem=str(compiled.workload),
            schedule=str(step.schedule),
        )
