"""The meaning of a kernel does not change: the interpreter gives the reference's answer after every
pass, for drawn problems, all three directions, and several schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import integers, pack, unpack
from tests.stages import DRAWN, SM90, launches_of, shapes, small_schedules, wrong_stages
from tests.strategies import problems
from transconv import ir
from transconv.conv import Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.ir.interp.kernel import run
from transconv.passes import PIPELINE, lower
from transconv.passes.lowering import gridwise, naive
from transconv.schedule.schedule import Schedule
from transconv.simplify import one_value


@settings(DRAWN, max_examples=16)
@given(st.data(), problems(), st.sampled_from(list(Prop)), st.integers(0, 2**32 - 1))
def test_every_pass_keeps_the_meaning(data: st.DataObject, p: ConvProblem, prop: Prop, seed: int) -> None:
    first = computes(p, prop)[0]
    schedule = small_schedules(first, data.draw) if all(x.size for x in first.axes) else None
    switches = {s.name: data.draw(st.booleans()) for s in PIPELINE if s.optional}
    steps = compiler.plan_steps(p, prop, SM90, schedule, Epilogue())
    assert wrong_stages(p, prop, launches_of(steps, switches), seed) == []


def test_a_choice_that_copies_an_operand_first() -> None:
    """The copy is a launch of its own, with a workspace between the two."""
    p = ConvProblem.parse("g2mb2ic2iw2oc2ow2kw3sw3pw2 dt=f32 tag=abx")
    schedule = Schedule.parse("mb:32 ow:2 g:16 | fma | pack=b regs=ow")
    steps = compiler.plan_steps(p, Prop.FWD, SM90, schedule, Epilogue())
    assert len(steps) == 2 and wrong_stages(p, Prop.FWD, launches_of(steps)) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("off", ["", "simplify", "simplify hoist lets"])
def test_two_bounds_that_leave_one_value_name_it(off: str) -> None:
    """Also where a pass writes it: the LLVM of Triton 3.6 evaluates `(0 <= iw) & (iw < 1)` of
    remainders as false."""
    p = ConvProblem.parse("mb3ic1ih1oc17oh4kh2ph2 dt=f32 tag=axb")
    schedule = Schedule.parse("kh.kw:16 oc:16 mb:4 oh.ow:4 | mma | stages=4")
    steps = compiler.plan_steps(p, Prop.BWD_W, SM90, schedule, Epilogue())
    launches = launches_of(steps, dict.fromkeys(off.split(), False))
    assert wrong_stages(p, Prop.BWD_W, launches) == []
    kernel = launches[0][-1][1]
    assert all(one_value(e) is e for e in ir.find(kernel, ir.And))
    assert "ih == 0" in str(kernel) and "iw == 0" in str(kernel)


OTHER = {"acc": "zq_acc", "a": "zq_a", "b": "zq_b", "bia_value": "zq_bia_value_zq"}
EXPLICIT = "mma | a=box b=box via=gluon"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "text",
    [
        "mb.oh.ow:32 oc:16 ic:16 | mma",
        "mb.oh.ow:32 oc:16 ic:16 | mma | swap=1 split_k=3 reduce=partials",
        "oh.ow:16 oc:16 ic:16 | fma | late=1",
        f"oh:8 ow:8 oc:16 ic:16 | {EXPLICIT} keep=b programs=2",
        f"oh:8 ow:8 oc:16 ic:16 | {EXPLICIT} reduce=stream programs=3 group_m=1",
    ],
)
def test_names_mean_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the first two passes call sums, operands and lanes, the kernel is the same."""
    p = ConvProblem.parse(
        "mb4ic32ih8oc32oh8kh3ph1 dt=f32 tag=axb"
        if "gluon" not in text
        else "mb4ic32ih8oc16oh8kh3ph1 dt=bf16 tag=axb"
    )
    (compute,) = computes(p, Prop.FWD, Epilogue.parse("bias+relu"))

    def lowered() -> list[str]:
        return [str(k) for _, k in lower(compute, Schedule.parse(text), SM90, "conv")]

    plain, write = lowered(), naive.naive

    def renamed(*args: Any) -> ir.Kernel:
        kernel = write(*args)
        names = {v: ir.Var(OTHER[v.name], v.type) for v in ir.bound_vars(kernel) if v.name in OTHER}
        return ir.substitute(kernel, names)

    monkeypatch.setattr(naive, "naive", renamed)
    monkeypatch.setattr(gridwise, "LANES", {k: f"zq_{v}" for k, v in gridwise.LANES.items()})
    made = lowered()
    assert made != plain
    assert [t.replace("zq_", "").replace("_zq", "") for t in made] == plain


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", list(Prop))
def test_adjoint(prop: Prop) -> None:
    """<conv(x, w), y> = <x, bwd_d(y, w)> = <w, bwd_w(x, y)>: no reference is needed for backward."""
    p = ConvProblem.make(2, 4, 6, (7, 6), (3, 2), stride=(2, 1), dilation=(1, 2), pad=(1, 2), g=2)
    rng = np.random.default_rng(1)
    values = {n: integers(rng, s) for n, s in shapes(p).items()}
    dots = []
    for kind in (Prop.FWD, prop):
        a, b, c = kind.roles
        buffers = {n: pack(values[n], getattr(p, n).layout) for n in (a, b)}
        buffers[c] = np.zeros(getattr(p, c).layout.span, np.float32)
        for compute, schedule in compiler.plan_steps(p, kind, SM90, None, Epilogue()):
            run(compiler.lower(compute, schedule, SM90, "conv", "ieee")[-1][1], buffers)
        got = unpack(buffers[c], getattr(p, c).layout, shapes(p)[c])
        dots.append(float((got * values[c]).sum()))
    assert dots[0] == dots[1]
