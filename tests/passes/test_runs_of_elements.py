"""Addresses that are written as runs of elements for the compiler to see: kernels take no more for it."""

from __future__ import annotations

import re

import pytest

from tests.stages import SM90
from transconv.backend_triton import CompileJob, Resources, compile_offline
from transconv.conv import ConvProblem, Prop, compiler
from transconv.ir import Expr, Load
from transconv.passes.scalar import simplification
from transconv.runtime import job_of
from transconv.schedule import Schedule

TILE = Schedule.parse("mb.oh.ow:128 oc:64 kw.ic:32 | mma | a=gather b=gather | stages=3 warps=4")
STEM = "mb8ic{}ih56oc64oh28kh7sh2ph3 dt={} tag=nhwc"


def job(features: int, dtype: str) -> CompileJob:
    problem = ConvProblem.parse(STEM.format(features, dtype))
    (step,) = compiler.build(problem, Prop.FWD, SM90, TILE).steps
    return job_of(step, SM90)


def as_named(pass_: simplification._Simplify, at: Load, mask: Expr) -> Expr:
    return pass_.index(at.offset)


@pytest.mark.every(4)
@pytest.mark.parametrize(("features", "dtype"), [(3, "bf16"), (3, "f32"), (2, "bf16"), (12, "bf16")])
def test_registers(features: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of columns of a filter that lie side by side, where an image's edges cut the runs."""
    written = job(features, dtype)
    monkeypatch.setattr(simplification._Simplify, "along_lanes", as_named)
    found = compile_offline([written, job(features, dtype)])
    runs, named = (x.registers for x in found if isinstance(x, Resources) and x.spill_bytes == 0)
    assert runs <= named * 9 / 8  # as the record of registers allows


@pytest.mark.parametrize("patch", [16, 14, 8, 4])
def test_patches(patch: int) -> None:
    """Of windows that no edge cuts: of three features, too, each row is one run."""
    problem = ConvProblem.parse(f"mb8ic3ih224oc64oh{224 // patch}kh{patch}sh{patch} dt=bf16 tag=nhwc")
    (step,) = compiler.build(problem, Prop.FWD, SM90, TILE).steps
    assert not re.search(r"(//|%) 3\b", step.triton.source)
