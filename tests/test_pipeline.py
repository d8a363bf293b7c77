"""The meaning of a kernel does not change: the interpreter gives the reference's answer after every
pass, for drawn problems, all three directions, and several configs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.reference import convolve, integers, pack, unpack
from tests.strategies import problems
from transconv import compiler, heuristics
from transconv.algorithm import Algorithm, algorithms
from transconv.config import Config, why_not
from transconv.epilogue import Epilogue
from transconv.ir import Kernel
from transconv.ir.interp import run
from transconv.ir.memory import Memory
from transconv.ir.verify import verify
from transconv.problem import ConvProblem, Prop
from transconv.target import TARGETS

ROLES = {Prop.FWD: ("src", "wei", "dst"), Prop.BWD_D: ("dst", "wei", "src"),
         Prop.BWD_W: ("src", "dst", "wei")}
# Shrinking a kernel takes minutes; the message already says how to repeat a failure.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
SM90 = TARGETS["sm_90"]


def shapes(p: ConvProblem) -> dict[str, tuple[int, ...]]:
    return {"src": (p.mb, p.ic, *p.i), "wei": (p.oc, p.icg, *p.k), "dst": (p.mb, p.oc, *p.o)}


def small_configs(algorithm: Algorithm, draw: st.DrawFn) -> Config:
    """A legal config with small tiles, as a heuristic or a person could choose it."""
    legal = heuristics.candidates(algorithm, SM90)
    few = [c for c in legal if all(b.extent <= 64 for b in c.blocks)] or legal
    config = draw(st.sampled_from(few[:40]))
    words = {"swap": draw(st.sampled_from([0, 0, 1])), "group_m": draw(st.sampled_from([1, 2, 8])),
             "unroll": draw(st.sampled_from([0, 0, 1])),
             "split_k": draw(st.sampled_from([1, 1, 2, 3])),
             "reduce": draw(st.sampled_from(["partials", "atomic"])),
             "order": ".".join(draw(st.permutations([x.name for x in algorithm.axes_of("K")])))}
    for name, value in words.items():
        text = f"{config} {name}={value}"
        other = Config.parse(text)
        if why_not(other, algorithm, SM90) is None:
            config = other
    return config


def lowered(p: ConvProblem, prop: Prop, draw: st.DrawFn) -> list[list[tuple[str, Kernel]]]:
    """Per launch of the plan: the kernel after every pass."""
    first = algorithms(p, prop)[0]
    config = small_configs(first, draw) if all(x.size for x in first.axes) else None
    steps = compiler.plan_steps(p, prop, SM90, config, Epilogue())
    switches = {step.name: draw(st.booleans()) for step in compiler.PIPELINE if step.optional}
    return [compiler.lower(a, c, SM90, "conv", "ieee", switches) for a, c in steps]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck),
          report_multiple_bugs=False, phases=PHASES)
@given(st.data(), problems(), st.sampled_from(list(Prop)), st.integers(0, 2**32 - 1))
def test_every_pass_keeps_the_meaning(data: st.DataObject, p: ConvProblem, prop: Prop,
                                      seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = ROLES[prop]
    values = {name: integers(rng, shapes(p)[name]) for name in (a, b)}
    expected = convolve(p, prop, values[a], values[b])
    launches = lowered(p, prop, data.draw)
    layouts = {"src": p.src.layout, "wei": p.wei.layout, "dst": p.dst.layout}
    for stage in range(len(compiler.PIPELINE) + 1):
        buffers = {n: pack(v, layouts[n]) for n, v in values.items()}
        buffers[c] = np.zeros(layouts[c].span, layouts[c].dtype.numpy)
        for launch in launches:
            for t in launch[stage][1].params:
                if t.name == "partials":
                    buffers[t.name] = np.full(t.layout.span, np.nan, t.dtype.numpy)
        # The parts of a split sum only exist once `blockwise` has made them.
        single = stage < 2
        memory = Memory(buffers)
        for launch in launches:
            name, kernel = launch[stage]
            if single and any(t.name == "partials" for t in kernel.params):
                continue
            verify(kernel)
            if not single:
                memory.new_launch()
            run(kernel, memory)
        got = unpack(buffers[c], layouts[c], shapes(p)[c])
        assert np.array_equal(got, expected), f"{prop.value} of {p}: wrong after {launches[0][stage][0]}"


@pytest.mark.parametrize("prop", list(Prop))
def test_adjoint(prop: Prop) -> None:
    """<conv(x, w), y> = <x, bwd_d(y, w)> = <w, bwd_w(x, y)>: no reference is needed for backward."""
    p = ConvProblem.make(2, 4, 6, (7, 6), (3, 2), stride=(2, 1), dilation=(1, 2), pad=(1, 2), g=2)
    rng = np.random.default_rng(1)
    values = {n: integers(rng, s) for n, s in shapes(p).items()}
    dots = []
    for kind in (Prop.FWD, prop):
        a, b, c = ROLES[kind]
        buffers = {n: pack(values[n], getattr(p, n).layout) for n in (a, b)}
        buffers[c] = np.zeros(getattr(p, c).layout.span, np.float32)
        for alg, config in compiler.plan_steps(p, kind, SM90, None, Epilogue()):
            run(compiler.lower(alg, config, SM90, "conv", "ieee")[-1][1], buffers)
        got = unpack(buffers[c], getattr(p, c).layout, shapes(p)[c])
        dots.append(float((got * values[c]).sum()))
    assert dots[0] == dots[1]
