"""Gradients of weights from 8-bit floats of few images: explicit kernels widen operands to f16, which the
matrix unit reads across the sum."""

from __future__ import annotations

import pytest

from tests.stages import SM90
from tests.test_explicit import right_in_any_order
from transconv import ir
from transconv.backend_triton.offline import Resources, compile_offline
from transconv.conv import compiler
from transconv.conv.problem import ConvProblem, Prop
from transconv.schedule import Schedule, why_not
from transconv.selection import heuristics
from transconv.verify.matrix.jobs import jobs_of

ROLE = "mma | a=box b=box via=gluon"
TYPES = "dt=f8e4m3:f32:f8e5m2 tag=axb"


@pytest.mark.every(2)
@pytest.mark.parametrize("math", ["", " math=ieee"])
@pytest.mark.parametrize(("text", "prop", "schedule"), [
    ("mb2ic64ih8oc64oh8kh3ph1 " + TYPES, Prop.BWD_W,
     f"ic:64 oc:64 oh:4 ow:8 | {ROLE} swap=1 stages=3 warps=4"),
    ("mb2ic64ih8oc32oh8kh3ph1 " + TYPES, Prop.BWD_W,
     f"kh.kw.ic:128 oc:32 oh:8 ow:4 | {ROLE} split_k=2 stages=2 programs=3 warps=4"),
    ("mb2ic64ih8oc32oh8kh3ph1 dt=f32:f8e4m3:f8e5m2 tag=axb", Prop.BWD_D,
     f"mb:1 ih:8 iw:8 ic:64 oc:32 | {ROLE} stages=2 warps=4")])
def test_whoever_goes_first_the_answer_is_right(text: str, prop: Prop, schedule: str, math: str) -> None:
    kernel, *_ = right_in_any_order(ConvProblem.parse(text + math), prop, schedule)
    assert "widener" in [r.name for r in ir.find(kernel, ir.Role)]
    assert {a.dtype for f in ir.find(kernel, ir.FuncCall) if f.func is ir.DOT_ASYNC
            for a in f.args[1:]} == {ir.f16}
    assert not any(f.func is ir.PART_WAIT for f in ir.find(kernel, ir.FuncCall))


def test_integers_are_not_widened() -> None:
    p = ConvProblem.parse("mb2ic64ih8oc64oh8kh3ph1 dt=s8:s8:s8 tag=axb")
    (step,) = compiler.plan(p, Prop.BWD_D, SM90).steps[-1:]
    reason = why_not(Schedule.parse(f"mb:1 ih:8 iw:8 ic:64 oc:32 | {ROLE} stages=2"), step.compute, SM90)
    assert reason is not None and "has other elements than those of the sum innermost" in reason


def test_few_images_are_widened_and_many_copied() -> None:
    chosen = {}
    for images in (2, 128):
        p = ConvProblem.parse(f"mb{images}ic256ih32oc256oh32kh3ph1 dt=f8e4m3:bf16:f8e5m2 tag=nhwc")
        plan = compiler.build(p, Prop.BWD_W, SM90, None, choose=heuristics.default)
        chosen[images] = next(s.schedule for s in plan.steps if s.compute.factors is not None)
    assert chosen[2].via == chosen[128].via == "gluon"
    assert not chosen[2].pack and chosen[128].pack == "a.b"


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", [
    "ic:128 oc:128 oh:8 ow:8 | mma | a=box b=box | swap=1 split_k=7 stages=4 warps=4 via=gluon",
    "ic:256 oc:128 oh:8 ow:8 | mma | a=box b=box | swap=1 split_k=7 stages=2 warps=8 via=gluon"])
def test_registers_suffice(schedule: str) -> None:
    p = ConvProblem.parse("mb2ic256ih56oc256oh56kh3ph1 dt=f8e4m3:bf16:f8e5m2 tag=nhwc")
    found = compile_offline(jobs_of(p, Prop.BWD_W, SM90, Schedule.parse(schedule), None)[:1])[0]
    assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
    assert found.words["HGMMA"] and not found.spill_bytes and not found.serialised
