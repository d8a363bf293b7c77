r"""Computations compiled to kernels: ``transconv.compile`` and ``transconv.lower``.

plan = transconv.compile("compute double\n axes n=8\n read x = X[n]\n store Y[n] = x + x")
plan.launch(X=x, Y=y)
"""

from __future__ import annotations

from typing import TypeVar

from transconv.compute import Compute, parse
from transconv.ir import Kernel
from transconv.passes import lower as _lower
from transconv.runtime.compiler import build_compute
from transconv.runtime.plans import Plan
from transconv.schedule import Schedule
from transconv.selection import completed
from transconv.target import Target, detect

_Kind = TypeVar("_Kind")

__all__ = ["Compute", "Kernel", "Plan", "Schedule", "Target", "compile", "lower"]


def compile(
    compute: Compute | str, target: Target | str | None = None, schedule: Schedule | str | None = None
) -> Plan:
    """The plan of a computation, or of its text: ``plan.source`` is the Triton text, ``plan.launch``
    takes torch tensors by name and writes what is stored.

    ``target``: a chip (``sm_90``), default this machine's, or Triton's interpreter without a
    GPU; ``schedule``: default the best estimate. Raises ComputeError for a text that cannot be read,
    ScheduleError for a schedule that is not legal, TypeError for what is neither text nor of its class."""
    made = parse(compute) if isinstance(compute, str) else _of(Compute, compute, "compute")
    return build_compute(made, _target(target), _schedule(schedule))


def lower(
    compute: Compute | str, schedule: Schedule | str, target: Target | str | None = None
) -> list[tuple[str, Kernel]]:
    """The kernel after every pass, ``[(stage, kernel), ...]``; each prints and can be interpreted
    (``transconv.ir.run``). Raises as ``compile``."""
    made = parse(compute) if isinstance(compute, str) else _of(Compute, compute, "compute")
    words = _of(Schedule, _schedule(schedule), "schedule")
    chip = _target(target)
    return _lower(made, completed(words, made, chip), chip, made.name, made.math)


def _target(target: Target | str | None) -> Target:
    if target is None:
        return detect()
    return Target.parse(target) if isinstance(target, str) else _of(Target, target, "target")


def _schedule(schedule: Schedule | str | None) -> Schedule | None:
    if isinstance(schedule, str):
        return Schedule.parse(schedule)
    return None if schedule is None else _of(Schedule, schedule, "schedule")


def _of(kind: type[_Kind], given: object, name: str) -> _Kind:
    """What was given, if it is of its kind; else raises TypeError."""
    if not isinstance(given, kind):
        model = "; a model is for transconv.optimize(model, x)" if callable(given) else ""
        raise TypeError(
            f"{name}: expected a {kind.__name__} or its text, got {type(given).__name__}{model}"
        )
    return given
