"""The meaning of a kernel does not change: the interpreter gives the reference's answer after every
pass, for drawn problems, all three directions, and several configs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reference import integers, pack, unpack
from tests.stages import PHASES, SM90, launches_of, shapes, small_configs, wrong_stages
from tests.strategies import problems
from transconv import compiler, ir
from transconv.algorithm import algorithms
from transconv.config import Config
from transconv.epilogue import Epilogue
from transconv.ir.interp import run
from transconv.problem import ConvProblem, Prop
from transconv.simplify import one_value


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck),
          report_multiple_bugs=False, phases=PHASES)
@given(st.data(), problems(), st.sampled_from(list(Prop)), st.integers(0, 2**32 - 1))
def test_every_pass_keeps_the_meaning(data: st.DataObject, p: ConvProblem, prop: Prop,
                                      seed: int) -> None:
    first = algorithms(p, prop)[0]
    config = small_configs(first, data.draw) if all(x.size for x in first.axes) else None
    switches = {s.name: data.draw(st.booleans()) for s in compiler.PIPELINE if s.optional}
    steps = compiler.plan_steps(p, prop, SM90, config, Epilogue())
    assert wrong_stages(p, prop, launches_of(steps, switches), seed) == []


def test_a_choice_that_copies_an_operand_first() -> None:
    """The copy is a launch of its own, with a workspace between the two."""
    p = ConvProblem.parse("g2mb2ic2iw2oc2ow2kw3sw3pw2 dt=f32 tag=abx")
    config = Config.parse("mb:32 ow:2 g:16 | fma | pack=b regs=ow")
    steps = compiler.plan_steps(p, Prop.FWD, SM90, config, Epilogue())
    assert len(steps) == 2 and wrong_stages(p, Prop.FWD, launches_of(steps)) == []


@pytest.mark.parametrize("off", ["", "simplify", "simplify hoist lets tidy"])
def test_two_bounds_that_leave_one_value_name_it(off: str) -> None:
    """Whoever spells it: LLVM of Triton 3.6 takes `(0 <= iw) & (iw < 1)` of remainders for false."""
    p = ConvProblem.parse("mb3ic1ih1oc17oh4kh2ph2 dt=f32 tag=axb")
    config = Config.parse("kh.kw:16 oc:16 mb:4 oh.ow:4 | mma | stages=4")
    steps = compiler.plan_steps(p, Prop.BWD_W, SM90, config, Epilogue())
    launches = launches_of(steps, dict.fromkeys(off.split(), False))
    assert wrong_stages(p, Prop.BWD_W, launches) == []
    kernel = launches[0][-1][1]
    assert all(one_value(e) is e for e in ir.find(kernel, ir.And))
    assert "ih == 0" in str(kernel) and "iw == 0" in str(kernel)


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
        for alg, config in compiler.plan_steps(p, kind, SM90, None, Epilogue()):
            run(compiler.lower(alg, config, SM90, "conv", "ieee")[-1][1], buffers)
        got = unpack(buffers[c], getattr(p, c).layout, shapes(p)[c])
        dots.append(float((got * values[c]).sum()))
    assert dots[0] == dots[1]
