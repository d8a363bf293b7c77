"""Gluon kernels whose sizes are arguments: roles take the sizes that they use."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from transconv.backend_triton import Resources, compile_offline
from transconv.backend_triton.launch.bound_start import describe_explicit
from transconv.compute import Compute
from transconv.conv import ConvProblem, Prop, any_size, marked
from transconv.ir import InterpError, Kernel
from transconv.runtime import Plan, build_compute, job_of, plan_cache
from transconv.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase

SM90 = Target.parse("sm_90")
LAYERS = {  # a window, a fused block, a sum that ends at a size
    "window": (
        "mb2?ic32ih6?oc16oh6kh3ph1 dt=f16 tag=nhwc",
        Prop.FWD,
        "oh:8 ow:8 oc:16 ic:16 | mma | a=box b=box | c=box stages=2 warps=4 via=gluon",
    ),
    "pointwise": (
        "mb2?ic32ih6?oc16oh6kh1 dt=f16 tag=nhwc",
        Prop.FWD,
        "mb.oh.ow:64 oc:16 ic:16 | mma | a=box b=box | c=gather stages=3 warps=4 via=gluon",
    ),
    "persistent": (
        "mb4?ic32ih16?oc64oh16kh3ph1 dt=f16 tag=nhwc",
        Prop.FWD,
        "oh:8 ow:8 oc:64 ic:16 | mma | a=box b=box | c=box swap=1 programs=3 keep=b stages=2 "
        "warps=4 via=gluon",
    ),
    "in turns": (
        "mb4?ic64ih16?oc64oh16kh1 dt=f16 tag=nhwc",
        Prop.FWD,
        "mb.oh.ow:64 oc:64 ic:32 | mma | a=box b=box | c=box swap=1 group_m=4 programs=3 "
        "consumers=2 stages=2 warps=4 via=gluon",
    ),
    "weight": (
        "mb2?ic64ih6?oc16oh6kh1 dt=f16 tag=nhwc",
        Prop.BWD_W,
        "ic:64 oc:16 mb.oh.ow:16 | mma | a=box b=box | stages=2 warps=4 via=gluon",
    ),
    "parts": (
        "mb2?ic64ih6?oc64oh6kh3ph1 dt=f8e4m3:f8e4m3:f32 tag=nhwc math=ieee",
        Prop.FWD,
        "oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box | c=box stages=3 warps=4 via=gluon",
    ),
}


@cache
def built(name: str) -> tuple[Compute, Plan]:
    text, prop, schedule = LAYERS[name]
    plain, names = marked(text)
    (compute,) = any_size(ConvProblem.parse(plain), prop, names)
    return compute, build_compute(compute, SM90, Schedule.parse(schedule))


@pytest.mark.parametrize(
    "name",
    [n if n in ("pointwise", "weight") else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS],
)
def test_drawn_sizes_edges_first(name: str) -> None:
    compute, plan = built(name)
    kernel = plan.steps[0].kernel
    for drawn in [{"MB": 1, "IH": 1, "IW": 1}, *sizes.drawn(compute, 2)[1:], {"MB": 2, "IH": 9, "IW": 5}]:
        judged = ComputationCase(compute.at(**drawn)).interpreted(kernel.at(drawn))
        assert not judged.problem, (drawn, judged.problem)


def test_a_role_that_counts_steps_of_the_example_is_found_out() -> None:
    """Planted: one role's loop has one step, whatever the sizes."""
    compute, plan = built("weight")
    text, drawn = str(plan.steps[0].kernel), {"MB": 2, "IH": 9, "IW": 5}
    loops = [*re.finditer(r"in 0\.\.\d+ until .*:\n", text)]
    assert len(loops) == 2
    for loop in loops:
        short = Kernel.parse(f"{text[: loop.start()]}in 0..1:\n{text[loop.end() :]}").at(drawn)
        with pytest.raises((InterpError, AssertionError)):
            assert not ComputationCase(compute.at(**drawn)).interpreted(short).problem


def test_programs_are_counted_for_the_sizes() -> None:
    run = built("pointwise")[1].steps[0].triton
    assert run.sizes is not None
    assert [run.numbers(*sizes)[0][0] for sizes in ((1, 1, 1), (2, 9, 5), (64, 56, 56))] == [1, 2, 3136]


def test_a_plan_lies_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    compute, plan = built("pointwise")
    step = plan.steps[0]
    again = plan_cache._read(
        plan_cache._step(step),
        SM90,
        lambda: pytest.fail("lowered"),
        0,
        {t.name: t for t in compute.tensors},
    )
    for run in (step.triton, again.triton):
        assert run.sizes is not None and run.explicit and run.describe is describe_explicit
        assert run.sizes.names == ("MB", "IH", "IW")


def test_persistent_ones_are_proposed_with_a_program_for_each_multiprocessor() -> None:
    plain, names = marked("mb8?ic64ih56?oc64oh56kh3ph1 dt=bf16 tag=nhwc")
    (compute,) = any_size(ConvProblem.parse(plain), Prop.FWD, names)
    found = [s for s in heuristics.candidates(compute, SM90) if s.via == "gluon" and s.programs]
    assert found and {s.programs for s in found} == {SM90.sms}
    assert {s.consumers for s in found} == {1, 2}


@pytest.mark.parametrize("via", ["tl", "gluon"])
def test_tiles_of_several_columns_are_not_negative(via: str) -> None:
    """Their numbers are unpacked by plain divisions, and addresses have 32 bits."""
    plain, names = marked("mb8?ic64ih56?oc256oh56kh3ph1 dt=bf16 tag=nhwc")
    (compute,) = any_size(ConvProblem.parse(plain), Prop.FWD, names)
    words = f"a=box b=box | swap=1 programs=132 stages=4 warps=4 via={via}"
    source = build_compute(compute, SM90, Schedule.parse(f"oh:16 ow:8 oc:64 ic:64 | mma | {words}")).source
    assert "group_size" in source and "m_at < 0" not in source and ".to(gl.int64)" not in source
    assert ".to(tl.int64)" not in source


def test_tiles_are_counted_in_32_bits() -> None:
    plan = built("persistent")[1]
    assert ".to(gl.int64)" not in plan.source
    assert "<= 2147483647" in str(plan.required.sizes)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_machine_code(name: str) -> None:
    (found,) = compile_offline([job_of(built(name)[1].steps[0], SM90)])
    assert isinstance(found, Resources), found
    product = "QGMMA" if name == "parts" else "HGMMA"
    assert {product, "UTMALDG"} <= found.words.keys() and not found.spill_bytes and not found.flaw
