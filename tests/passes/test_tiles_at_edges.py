"""Tiles inside an image have a text without the masks of its edges; those at an edge have both."""

from __future__ import annotations

from functools import cache

import pytest

from transconv.compute import Compute
from transconv.conv import ConvProblem, Prop, any_size, marked
from transconv.conv.relation import computes
from transconv.ir import If, InterpError, Load, Select, Stmt, Store, Var, conjuncts, find
from transconv.passes import lower, pipeline
from transconv.passes.scalar import unroll
from transconv.runtime import Plan, build_compute
from transconv.schedule import Schedule, why_not
from transconv.support import StageError
from transconv.target import Target
from transconv.verify import any_size as sizes
from transconv.verify.computation import ComputationCase

SM90 = Target.parse("sm_90")
PLANE = "g8mb2?ic8ih9?oc8oh9kh3ph1 dt=f16 tag=nhwc"
WIDE = "g8mb2?ic8ih9?oc8oh9kh7ph3 dt=f16 tag=nhwc"
VOLUME = "g6mb1?ic6id5?oc6od5kd3pd1 dt=f16 tag=ndhwc"
LINE = "g8mb2?ic8iw9?oc8ow9kw3pw1 dt=f16 tag=nwc"
WORDS = "fma | a=gather b=gather |"
KERNELS = (  # a loop of steps, one text without a loop, copies, volumes, sums over positions in parts
    (PLANE, Prop.FWD, f"mb.oh:4 ow:4 kw:3 g:8 | {WORDS} regs=ow.kw stages=1 warps=4"),
    (LINE, Prop.FWD, f"mb:4 ow:4 kw:3 g:8 | {WORDS} regs=ow.kw stages=1 warps=4"),
    (PLANE, Prop.BWD_D, f"mb.ih:4 iw:4 kh:3 kw:3 g:8 | {WORDS} regs=iw.kh.kw stages=1 warps=4"),
    (WIDE, Prop.FWD, f"mb.oh:4 ow:5 kw:7 g:8 | {WORDS} pack=b regs=ow.kw stages=1 warps=4"),
    pytest.param(
        VOLUME,
        Prop.BWD_D,
        f"mb.id.ih:4 iw:4 kw:3 g:8 | {WORDS} regs=iw.kw stages=1 warps=4",
        marks=pytest.mark.slow,
    ),
    (PLANE, Prop.BWD_W, f"mb.oh:8 ow:4 kw:3 g:8 | {WORDS} split_k=2 regs=ow.kw late=1 stages=1 warps=4"),
)


@cache
def built(text: str, prop: Prop, words: str) -> tuple[Compute, Plan]:
    plain, names = marked(text)
    (compute,) = any_size(ConvProblem.parse(plain), prop, names)
    assert why_not(Schedule.parse(words), compute, SM90) is None
    return compute, build_compute(compute, SM90, Schedule.parse(words))


@pytest.mark.every(6)
@pytest.mark.parametrize(("text", "prop", "words"), KERNELS)
def test_no_mask_of_a_tile_is_left_inside(text: str, prop: Prop, words: str) -> None:
    _, plan = built(text, prop, words)
    kernel = next(s.kernel for s in plan.steps if find(s.kernel, If))
    (branch,) = find(kernel, If)
    assert isinstance(branch.cond, Var) and branch.other is not None

    def of_width(part: Stmt) -> int:
        """Masks of positions along the width, or named after them."""
        masks = [x.mask for x in (*find(part, Load), *find(part, Store))]
        return sum("IW" in str(c) or "in_base" in str(c) for m in masks for c in conjuncts(m))

    assert of_width(branch.then) == 0 < of_width(branch.other)
    assert not find(branch.then, Select)
    assert len(find(branch.then, Load)) == len(find(branch.other, Load))


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "prop", "words"), KERNELS)
def test_tiles_inside_and_at_edges(text: str, prop: Prop, words: str) -> None:
    """The least sizes, at which every tile is at an edge, drawn ones, and rows of a few whole tiles."""
    compute, plan = built(text, prop, words)
    assert compute.named is not None
    least = {s.name: s.least for s in compute.named.each}
    for drawn in (least, *sizes.drawn(compute, 2), least | {"IW": 12}, least | {"IW": 21}):
        case = ComputationCase(compute.at(**drawn))
        assert not case.interpreted(*[s.kernel.at(drawn) for s in plan.steps]).problem, drawn


def test_tiles_at_an_edge_that_are_taken_for_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll._Edges, "strongest", lambda _, found: found[:1])
    with pytest.raises(StageError, match="addresses-are-inside"):  # for some sizes
        built.__wrapped__(*KERNELS[0])
    monkeypatch.setattr(pipeline, "verify_addresses", lambda *_: None)
    compute, plan = built.__wrapped__(*KERNELS[0])
    given = {"MB": 2, "IH": 9, "IW": 9}
    with pytest.raises(InterpError, match=r"offset \d+ of src is not in"):
        ComputationCase(compute.at(**given)).interpreted(*[s.kernel.at(given) for s in plan.steps])


def test_kernels_of_given_sizes_have_one_text() -> None:
    """Their masks are proved, or are those of the last tile alone."""
    (compute,) = computes(ConvProblem.parse(PLANE.replace("?", "")), Prop.FWD)
    (_, made) = lower(compute, Schedule.parse(KERNELS[0][2]), SM90, "given")[-1]
    assert not find(made, If)
