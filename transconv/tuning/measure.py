"""Tuning, inside worker processes. In: a problem and a schedule as texts. Out: right or not, and how fast.

Some processes compile into Triton's cache, one uses the GPU. Tensors and answers of the last few
problems stay on the GPU, because trials of several problems come in turn.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.errors import ScheduleError, Unsupported

if TYPE_CHECKING:
    import torch

    from transconv.conv import Compiled
    from transconv.ir import Layout
    from transconv.tuning.timing import Call, Make
    from transconv.verify.case import Case

Found = dict[str, Any]

SHARE = 0.4  # of the GPU's memory that kept problems may take


def compile_trial(problem: str, prop: str, epilogue: str = "", schedule: str = "") -> Found:
    """Generate a plan's kernels and compile them into Triton's cache: seconds for each. A refusal
    is not told here: whoever measures meets it again."""
    from transconv.conv import build
    from transconv.schedule import Schedule
    from transconv.target import detect
    from transconv.verify.case import device, warm

    start = time.perf_counter()
    try:
        compiled = build(ConvProblem.parse(problem), Prop(prop), detect(),
                         Schedule.parse(schedule) if schedule else None, Epilogue.parse(epilogue))
    except (ScheduleError, Unsupported):
        return {}
    found: Found = {"lower_s": time.perf_counter() - start, "kernels": len(compiled.steps)}
    if device() == "cuda":
        found["triton_s"] = warm(compiled)
    return found


# -- in the process that has the GPU ---------------------------------------------------------------

_cases: OrderedDict[tuple[str, str, str], Case] = OrderedDict()
_clocks: list[Any] = []


def measure_trial(problem: str, prop: str, epilogue: str = "", schedule: str = "",
                  budget_ms: float = 30.0) -> Found:
    """Check a schedule on exact data (every element, and guard bands around the tensors), then time
    it on random data. ``verdict``: right, wrong or refused, with a reason."""
    case = case_of(problem, prop, epilogue)
    try:
        compiled = case.plan(schedule)
    except (Unsupported, ScheduleError) as refusal:
        return {"verdict": "refused", "reason": f"{type(refusal).__name__}: {refusal}"}
    judged = case.same(compiled)
    _record(compiled, judged.reason)
    found: Found = {"verdict": "right" if judged.right else "wrong", "reason": judged.reason,
                    "max_err": judged.max_err}
    if judged.right:
        clock = _clock(case.where)
        clock.budget_ms = budget_ms
        timing = clock.one(our_calls(case, compiled), case.problem.bytes_moved())
        found.update(us=timing.us, p20=timing.p20, p80=timing.p80, method=timing.method)
    return found


def case_of(problem: str, prop: str, epilogue: str) -> Case:
    """The problem's tensors, from among those kept."""
    from transconv.verify.case import Case

    key = (problem, prop, epilogue)
    if key in _cases:
        _cases.move_to_end(key)
        return _cases[key]
    made = Case(ConvProblem.parse(problem), Prop(prop), epilogue)
    room = _room(made.where)
    while _cases and _weight(made) + sum(map(_weight, _cases.values())) > room:
        _cases.popitem(last=False)[1].release()
        _empty_cache(made.where)
    _cases[key] = made
    return made


def _weight(case: Case) -> float:
    """Bytes that stay allocated: tensors, the answer, and the timed sets."""
    return 4.0 * case.problem.bytes_moved()


def _room(where: str) -> float:
    import torch

    return SHARE * torch.cuda.mem_get_info()[1] if where == "cuda" else 1e9


def _empty_cache(where: str) -> None:
    import torch

    if where == "cuda":
        torch.cuda.empty_cache()


def _clock(where: str) -> Any:
    from transconv.tuning.timing import Clock

    if not _clocks:
        _clocks.append(Clock(where))
    return _clocks[0]


def _record(compiled: Compiled, reason: str) -> None:
    """Tell other processes about a kernel that is wrong. Of several kernels nobody knows which."""
    from transconv.runtime import verdicts

    if reason and len(compiled.steps) == 1:
        step, = compiled.steps
        verdicts.record(verdicts.variant(step.digest, True), verdicts.WRONG, reason=reason,
                        function=step.launcher.function, problem=str(compiled.problem),
                        schedule=str(step.schedule))


def random_tensor(shape: tuple[int, ...], layout: Layout, where: str) -> torch.Tensor:
    """Normally distributed values in a strided layout. Raises ValueError for a blocked one."""
    import torch

    from transconv.verify.data import torch_dtype

    strides = layout.strides()
    if strides is None:
        raise ValueError(f"the layout {layout} is blocked; expected one with strides")
    made = torch.empty_strided(shape, strides, dtype=torch_dtype(layout.dtype), device=where)
    return made.normal_()


def our_calls(case: Case, compiled: Compiled) -> Make:
    """The plan on tensors of random data, a new set for each index."""
    from transconv.verify.case import epilogue_tensors

    def make(index: int) -> Call:
        p = case.problem
        tensors: dict[str, Any] = {name: random_tensor(p.shapes[name], spec.layout, case.where)
                                   for name, spec in p.specs.items()}
        tensors |= epilogue_tensors(p, case.prop, case.epilogue, "float", case.where)
        result: torch.Tensor = tensors[case.prop.result]

        def call() -> torch.Tensor:
            compiled.launch(**tensors)
            return result
        return call
    return make
