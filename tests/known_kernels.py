"""Kernels that tests of calls have in common: passes run once for a computation and a schedule.

The rooms that use this fixture test what surrounds kernels: operators, routes, modules, graphs. Where
passes are tested, or bugs are planted in them, they run for each test.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from transconv.compute import Compute
from transconv.ir import Kernel
from transconv.passes import pipeline
from transconv.runtime import compiler
from transconv.schedule import Schedule, why_not
from transconv.support import knobs
from transconv.target import Target

_known: dict[tuple[object, ...], tuple[str, Kernel]] = {}
_lower = pipeline.lower


def lower(
    compute: Compute,
    schedule: Schedule,
    target: Target,
    name: str,
    precision: str = "tf32",
    switches: Mapping[str, bool] | None = None,
) -> list[tuple[str, Kernel]]:
    """The last stage of ``passes.lower``, made once in this process."""
    key = (
        compute,
        schedule,
        target,
        name,
        precision,
        *pipeline.running(switches).items(),
        *pipeline.passes(),
        knobs.verify(),
    )
    if key not in _known or knobs.dump() or knobs.debug() or why_not(schedule, compute, target):
        _known[key] = _lower(compute, schedule, target, name, precision, switches)[-1]
    return [_known[key]]


@pytest.fixture(autouse=True)
def known_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "lower", lower)
