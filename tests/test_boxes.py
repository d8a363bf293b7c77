"""Boxes: the interpreter gives the reference's answer after every pass, and refusals say why."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import convolve, integers, pack, unpack
from tests.stages import ROLES, SM90, shapes
from transconv import compiler
from transconv.algorithm import algorithms
from transconv.boxes import Box, box_of
from transconv.config import Config
from transconv.epilogue import Epilogue
from transconv.ir.interp import run
from transconv.ir.memory import Memory
from transconv.ir.verify import verify
from transconv.legality import why_not
from transconv.problem import ConvProblem, Prop

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
BOXED = "a=box b=box c=box swap=1"
CASES = [
    ("mb4ic16ih7oc24oh7kh3ph1", FWD, f"mb:2 oh:4 ow:4 oc:16 ic:16 | {BOXED} programs=3"),
    ("mb4ic24ih7oc24oh7kh3ph1", FWD, f"mb:2 oh:4 ow:4 oc:16 ic:16 | {BOXED} programs=3"),
    ("mb4ic24ih7oc24oh7kh3ph1", FWD, "mb:2 oh:4 ow:4 oc:16 ic:16 | b=box c=box programs=3"),
    ("mb4ic16ih6oc32oh6kh1", FWD, f"mb.oh.ow:16 oc:16 ic:16 | {BOXED} programs=2"),
    ("mb4ic16ih7oc16oh7kh3ph1", BWD_D, f"mb:2 ih:2 iw:4 oc:16 ic:16 | {BOXED} programs=5"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", BWD_D, "mb:2 qh:2 qw:4 oc:16 ic:16 | a=box b=box swap=1"),
    ("mb4ic16ih8oc16oh8kh1", BWD_W, "mb.oh.ow:16 oc:16 ic:16 | a=box b=box swap=1"),
    ("mb16ic16ih3oc16oh3kh3ph1", BWD_W, "mb:16 oc:16 ic:16 | a=box b=box swap=1"),
    ("g2mb4ic32ih8oc32oh8kh3ph1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16 | a=box b=box swap=1 split_k=3"),
    ("mb4ic16iw18oc16ow16kw3", FWD, f"mb:1 ow:16 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh4kh4sh2ph1", BWD_D, f"mb:1 qh:4 qw:4 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", BWD_W, "mb:1 oh:4 ow:4 oc:16 ic:16 | a=box swap=1"),
    ("mb2ic16ih9oc16oh3kh3sh3ph0", FWD, f"mb:2 oh:4 ow:2 oc:16 ic:16 | {BOXED} programs=2"),
    ("mb2ic16id4oc16od4kd3pd1", FWD, f"mb:1 od:2 oh:2 ow:4 oc:16 ic:16 | {BOXED}"),
    ("mb2ic16ih9oc16oh9kh3ph2dh1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}"),
]


@pytest.mark.parametrize(("text", "prop", "config"), CASES, ids=[f"{c[1]}-{c[0]}" for c in CASES])
def test_every_pass_keeps_the_meaning(text: str, prop: Prop, config: str) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag=axb")
    rng = np.random.default_rng(0)
    a, b, c = ROLES[prop]
    values = {n: integers(rng, shapes(p)[n], 2) for n in (a, b)}
    expected = convolve(p, prop, values[a], values[b])
    steps = compiler.plan_steps(p, prop, SM90, Config.parse(config), Epilogue())
    launches = [compiler.lower(alg, chosen, SM90, "conv", "ieee") for alg, chosen in steps]
    layouts = {n: getattr(p, n).layout for n in ("src", "wei", "dst")}
    for stage in range(len(compiler.PIPELINE) + 1):
        buffers = {n: pack(v, layouts[n]) for n, v in values.items()}
        buffers[c] = np.zeros(layouts[c].span, layouts[c].dtype.numpy)
        memory = Memory(buffers)
        for launch in launches:
            name, kernel = launch[stage]
            parts = [t for t in kernel.params if t.name == "partials"]
            if parts and stage < 2:
                continue  # the parts of a split sum exist once `blockwise` has made them
            for t in parts:
                if t.name not in memory.buffers:
                    full = {**memory.buffers, t.name: np.full(t.layout.span, np.nan, t.dtype.numpy)}
                    memory = Memory(full)
            verify(kernel)
            memory.new_launch()
            run(kernel, memory)
        got = unpack(memory.buffers[c], layouts[c], shapes(p)[c])
        assert np.array_equal(got, expected), f"wrong after {name}"


REFUSALS = [
    ("mb4ic16ih9oc16oh5kh3sh2ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16", "axb",
     "src: lane oh moves along ih as oh*2 + kh - 1, a box steps by 1 and 9 is no multiple of 2"),
    ("mb4ic3ih8oc16oh8kh3ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16", "axb", "multiple of 16 bytes"),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, "mb.oh.ow:16 oc:16 ic:16", "axb",
     "do not follow one another in memory"),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, "mb:1 oh:2 ow:8 oc:16 ic:16", "abx", "not at 16 bytes"),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16", "aBx16b", "blocked layout"),
    ("g2mb4ic48ih8oc48oh8kh3ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16", "axb",
     "block ic:16 does not divide 24"),
    ("mb4ic16ih8oc16oh8kh3ph1", BWD_W, "mb:1 oh:4 ow:4 oc:16 ic:16", "axb",
     "b=box: a left operand of more than two dimensions goes through registers"),
    ("mb4ic16ih8oc16oh8kh1", BWD_W, "mb:2 oh:2 ow:8 oc:16 ic:16", "abx",
     "apart in memory"),
    ("mb4ic16ih6oc16oh6kh3ph1", BWD_W, "mb:1 oh:4 ow:4 oc:16 ic:16", "axb",
     "block oh:4 does not divide 6"),
]


@pytest.mark.parametrize(("text", "prop", "config", "tag", "reason"), REFUSALS)
def test_refusals_say_why(text: str, prop: Prop, config: str, tag: str, reason: str) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag={tag}:axb:{tag}")
    algorithm = algorithms(p, prop)[0]
    said = why_not(Config.parse(f"{config} | a=box b=box swap=1"), algorithm, SM90)
    assert said is not None and reason in said


def test_the_target_must_have_a_copy_engine() -> None:
    from transconv.target import TARGETS

    algorithm = algorithms(ConvProblem.parse("mb4ic16ih8oc16oh8kh3ph1 dt=f16 tag=axb"), FWD)[0]
    config = Config.parse(f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}")
    assert why_not(config, algorithm, SM90) is None
    assert why_not(config, algorithm, TARGETS["sm_80"]) == "sm_80 has no copy engine for boxes"
    assert isinstance(box_of(algorithm.b, config, algorithm), Box)  # type: ignore[arg-type]
