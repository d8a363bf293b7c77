"""Convolutions with what stands before and behind their products: layouts, names, texts, refusals, tuned
rows, results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from transconv.compute import Alone, Compute, kernels, parse
from transconv.conv import ConvProblem, ConvWorkload, Prop, Surrounded, computes
from transconv.conv.fused_conv import TuningDirection, surrounded
from transconv.errors import ScheduleError
from transconv.ir import Layout
from transconv.runtime import Plan, plan
from transconv.schedule import why_not
from transconv.selection import tuning_db
from transconv.target import TARGETS

SM90 = TARGETS["sm_90"]
P = ConvProblem.parse("mb2ic16ih6oc32oh6kh3ph1 dt=f16 tag=nchw")
STRIDED = ConvProblem.parse("mb2ic16ih8oc16oh4kh3sh2ph1 dt=f16 tag=nhwc")
BEHIND = {"src": "2.0", "wei": "0.5", "dst": "relu"}


def twice(compute: Compute) -> Compute:
    """The same with a result of another name that is stored beside it."""
    (write,) = compute.writes
    tensor = replace(write.view.tensor, name="other")
    second = replace(write, view=replace(write.view, tensor=tensor))
    return replace(compute, steps=(*compute.steps, second))


def work(problem: ConvProblem, prop: Prop, layout: str = "nhwc") -> Surrounded:
    """The relation over operands that lie in another order, as a graph writes it: by its text."""
    texts = [str(c) for c in computes(problem.with_layout((layout, "oihw", layout)), prop)]
    return surrounded(problem, prop, [twice(parse(text)) for text in texts])


@pytest.mark.parametrize("prop", list(Prop))
def test_the_problem_has_the_layouts_of_the_tensors(prop: Prop) -> None:
    made = work(P, prop)
    last = Layout.parse("nhwc", P.src.dtype, P.shapes["src"])
    assert made.problem.src.layout is last and made.problem.wei.layout is P.wei.layout
    assert made.problem.dst.layout is Layout.parse("nhwc", P.dst.dtype, P.shapes["dst"])
    assert made.result == prop.result and made.results == (prop.result, "other")
    assert {t.name for t in made.tensors} == {"src", "wei", "dst", "other"}


@pytest.mark.parametrize(("problem", "prop"), [(P, Prop.FWD), (P, Prop.BWD_W), (STRIDED, Prop.BWD_D)])
def test_a_text_is_read_as_the_same_work(problem: ConvProblem, prop: Prop) -> None:
    made = work(problem, prop)
    assert len(made.parts) == (4 if problem is STRIDED else 1)
    again = tuning_db.workload_of(made.text, made.direction, made.behind)
    assert again == made and hash(again) == hash(made)
    assert [c.part for c in made.parts] == [c.part for c in computes(problem, prop)]
    assert [[x.role for x in c.axes] for c in made.parts] == [
        [x.role for x in c.axes] for c in computes(problem, prop)
    ]
    assert len({c.name for c in made.parts}) == len(made.parts)


def test_what_has_one_product_is_planned_and_what_has_several_kernels_is_not() -> None:
    made = work(STRIDED, Prop.BWD_D)
    made.refuse()
    schedules = [s.schedule for s in plan(made, SM90, None, False, Plan).steps]
    assert all(why_not(s, c, SM90) is None for s, c in zip(schedules, made.parts, strict=True))
    added = parse(
        "compute added\n tensor I i32 [4]\n tensor X f32 [4, 64]\n tensor Y f16 [8]\n"
        " axes n=4 k=64\n read i = I[n]\n read x = X[n, k]\n store Y[i] += sum(x; k)"
    )
    assert len(kernels(added)) == 2  # which adds in f32 and rounds behind it
    with pytest.raises(ScheduleError, match="it takes 2 kernels; expected one product"):
        replace(made, parts=(added,)).refuse()


def test_tuned_rows_are_those_of_the_direction() -> None:
    made = work(STRIDED, Prop.BWD_D)
    plain = ConvWorkload(made.problem, Prop.BWD_D)
    assert made.group("a chip") == plain.group("a chip") and made.innermost() == plain.innermost()
    for compute, relation in zip(made.parts, computes(made.problem, Prop.BWD_D), strict=True):
        about = made.about(compute)
        assert isinstance(about, TuningDirection)
        assert about.relation == relation.name and not about.lacks
        assert about.distance(plain) == 0 and about.named("x") == plain.named(relation.name)
    other = parse("compute other\n axes m=8 k=64\n read x = X[m, k]\n store Y[m] = sum(x; k)")
    assert made.about(other) is made or made.about(other) == Alone(other)


@pytest.mark.parametrize("wrong", ["", "dst", "other"])
def test_every_result_is_examined(wrong: str) -> None:
    made = work(P, Prop.FWD)
    like = {
        t.name: torch.empty_strided(t.shape, t.layout.strides() or (), dtype=torch.float16)
        for t in made.tensors
    }
    for name in ("src", "wei"):
        like[name].copy_(torch.randint(-1, 2, like[name].shape))
    for name in made.results:
        like[name].copy_(torch.conv2d(like["src"].float(), like["wei"].float(), padding=1))
    if wrong:
        like[wrong][1] += 1
    found = made.examine(like, like[made.result])
    assert bool(found.reason) == bool(wrong) and found.checked > 0
