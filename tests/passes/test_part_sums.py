"""Sums of 8-bit floats that explicit kernels move to f32 in parts: right in any order of roles, whatever
the number of steps, and compiled without spills or waits after each product."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.test_explicit import kernels, right_in_any_order
from tests.stages import SM90
from transconv import ir
from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir.interp.evaluate import InterpError, Memory
from transconv.ir.interp.kernel import run
from transconv.schedule import Schedule, why_not
from transconv.verify.matrix import jobs_of

FWD = Prop.FWD
ROLE = "mma | a=box b=box via=gluon"
CASES = [  # and the products between two waits
    ("mb2ic64ih8oc64oh8kh3ph1", f"mb:1 oh:8 ow:8 oc:64 ic:64 | {ROLE} c=box stages=3 warps=4", 2),
    ("mb2ic64ih8oc64oh8kh3ph1", f"mb:1 oh:8 ow:8 oc:64 ic:32 | {ROLE} c=box stages=3 programs=1", 2),
    ("mb2ic96ih8oc64oh8kh3ph1", f"mb:1 oh:8 ow:8 oc:64 ic:32 | {ROLE} swap=1 stages=6", 4),
    ("mb2ic128ih8oc64oh8kh1", f"mb:1 oh:8 ow:8 oc:64 ic:128 | {ROLE} stages=2", 1),
    ("mb2ic256ih8oc64oh8kh3ph1", f"mb:1 oh:8 ow:8 oc:64 ic:128 | {ROLE} stages=2 split_k=2", 1),
    ("mb3ic128ih8oc64oh8kh3ph1", f"oh:8 ow:8 oc:64 ic:128 | {ROLE} stages=3 programs=1 consumers=2", 1),
    ("mb3ic64ih8oc64oh8kh3ph1", f"oh:8 ow:8 oc:64 ic:64 | {ROLE} c=box stages=3 programs=2 keep=b", 2),
    ("mb2ic32ih8oc40oh8kh3ph1", f"oh:8 ow:8 oc:16 ic:32 | {ROLE} reduce=stream group_m=1 programs=4", 2),
]


def problem(text: str) -> ConvProblem:
    return ConvProblem.parse(f"{text} dt=f8e4m3:f8e4m3:f32 tag=axb math=ieee")


@pytest.mark.every(3)
@pytest.mark.parametrize(("text", "schedule", "each"), CASES, ids=[c[1] for c in CASES])
def test_whoever_goes_first_the_answer_is_right(text: str, schedule: str, each: int) -> None:
    launches = right_in_any_order(problem(text), FWD, schedule)
    waits = [f for f in ir.find(launches[0], ir.FuncCall) if f.func is ir.PART_WAIT]
    assert waits and not any(f.func is ir.DOT_WAIT for f in ir.find(launches[0], ir.FuncCall))
    for pair in (f for f in ir.find(launches[0], ir.For) if f.var.name == "pair"):
        assert str(pair).count("dot_async(") == 2 * each


class _Hasty(ir.Mutator):
    """A kernel that goes on while one more product is still running."""

    def mutate_FuncCall(self, s: ir.FuncCall) -> ir.Stmt:
        if s.func is not ir.PART_WAIT:
            return s
        pending, *sums = s.args
        assert isinstance(pending, ir.Const)
        return ir.FuncCall(s.func, (ir.Const(int(pending.value) + 1), *sums))


def test_a_part_that_is_read_too_early_is_reported() -> None:
    p = problem("mb1ic128ih8oc64oh8kh3ph1")
    (kernel,) = kernels(p, FWD, f"oh:8 ow:8 oc:64 ic:128 | {ROLE} stages=3")
    buffers = {
        n: np.zeros(t.layout.span, t.dtype.numpy) for n in ("src", "wei", "dst") for t in (getattr(p, n),)
    }
    run(kernel, Memory(dict(buffers)), seed=0)
    with pytest.raises(InterpError, match="is read while products are still being added to it"):
        run(_Hasty().mutate(kernel), Memory(dict(buffers)), seed=0)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (
            "ow:128 oc:128 ic:128 | {} c=box swap=1 stages=4 warps=4",
            "are held three times, 4 warps hold 8192",
        ),
        (
            "oh:2 ow:128 oc:128 ic:64 | {} swap=1 stages=4 warps=8",
            "8 warps hold 16384 so, the tile has 32768",
        ),
        ("ow:64 oc:64 ic:256 | {} stages=2 warps=4", "move to f32 after 128 products .* a step has 256"),
    ],
)
def test_tiles_that_no_thread_holds(schedule: str, said: str) -> None:
    p = ConvProblem.parse("mb1ic512ih128oc512oh128kh1 dt=f8e4m3:f8e4m3:bf16 tag=nhwc math=ieee")
    (step,) = compiler.plan(p, FWD, SM90).steps
    reason = why_not(Schedule.parse(schedule.format(ROLE)), step.compute, SM90)
    assert reason is not None
    with pytest.raises(ValueError, match=said):
        _raise(reason)


def _raise(reason: str) -> None:
    raise ValueError(reason)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "schedule",
    [
        "ow:128 oc:128 ic:128 | mma | a=box b=box | c=box swap=1 programs=132 stages=6 warps=8 via=gluon",
        "ow:128 oc:128 ic:64 | mma | a=box b=box | "
        "swap=1 split_k=2 programs=132 stages=6 warps=8 via=gluon",
        "ow:64 oc:128 ic:128 | mma | a=box b=box | "
        "c=box programs=132 consumers=2 stages=6 warps=4 via=gluon",
    ],
)
def test_products_run_beside_the_additions(schedule: str) -> None:
    p = ConvProblem.parse("mb1ic512ih128oc512oh128kh3ph1 dt=f8e4m3:f8e4m3:bf16 tag=nhwc math=ieee")
    job = jobs_of(p, FWD, SM90, Schedule.parse(schedule), Epilogue.parse("mul:f32:common"))[0]
    (found,) = compile_offline([job])
    assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
    assert found.words["QGMMA"] and not found.spill_bytes and not found.serialised
