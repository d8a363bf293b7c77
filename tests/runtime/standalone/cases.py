"""Plans that are exported, here for Triton's interpreter, and their results in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import transconv
from transconv.conv import CompiledDirection, ConvProblem, Epilogue, Prop, build
from transconv.runtime import Plan, operands
from transconv.schedule import Schedule
from transconv.target import Target

ALONE = Path(__file__).with_name("alone.py")


def conv(
    text: str, prop: str, schedule: str = "", epilogue: str = "", target: str = "interpreter"
) -> CompiledDirection:
    return build(
        ConvProblem.parse(text),
        Prop(prop),
        Target.parse(target),
        Schedule.parse(schedule) if schedule else None,
        Epilogue.parse(epilogue),
    )


def compute(text: str, schedule: str = "", target: str = "interpreter") -> Plan:
    return transconv.compile(text, target, schedule or None)


def run_alone(out: Path, files: Sequence[Path]) -> dict[str, Any]:
    """What came of the files in a process that cannot import transconv."""
    done = subprocess.run(
        [sys.executable, "-I", str(ALONE), str(out), *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def computed_here(plan: Plan, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What transconv's own launch makes of the same tensors."""
    near = next(iter(given.values()))
    made = {}
    for t in plan.workload.tensors:
        if t.name in given:
            continue
        strides = None if t.layout.offset else t.layout.strides()
        shape, strides = (t.shape, strides) if strides is not None else ((t.layout.span,), (1,))
        made[t.name] = torch.empty_strided(
            shape, strides, dtype=operands.torch_type(t), device=near.device
        )
    plan.launch(**given, **made)
    return tuple(made.values())
