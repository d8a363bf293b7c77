"""The registry of a layer: which of its kernels a size gets, and that these plans lie on disk."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv.backend_triton.launch import bound_start, triton_kernel
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, LayerRegistry, Prop
from transconv.conv import compiler as directions
from transconv.conv.relation import any_size, every, spelled
from transconv.cost import estimate
from transconv.errors import TensorError, Unsupported
from transconv.ir.functions import size_values
from transconv.runtime import Waiting, build_compute, compiler, plan_cache, plans
from transconv.runtime import registry as registries
from transconv.runtime.registry import TUNED, RegisteredPlan, SizeTable
from transconv.selection import choice, tuning_db
from transconv.target import Target

SM80, SM90 = Target.parse("sm_80"), Target.parse("sm_90")
LAYER = ConvProblem.parse("mb2ic64ih20oc64oh20kh3ph1 dt=bf16 tag=nhwc")


@pytest.fixture(scope="module")
def layer() -> LayerRegistry:
    return LayerRegistry(LAYER, Prop.FWD, SM90, Epilogue(), True, False)


@pytest.fixture(scope="module")
def gathered() -> LayerRegistry:
    """For a chip without a copy engine."""
    return LayerRegistry(LAYER, Prop.FWD, SM80, Epilogue(), True, False)


def at(sizes: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("MB", "IH", "IW"), sizes, strict=True))


# A kernel of its own would have no boxes for a single row or column, and so other counts.
SIZES = ((1, 14, 14), (1, 2, 2), (8, 56, 56), (2, 7, 333), (16, 400, 400), (16, 1024, 1024))


def test_a_first_plan_is_compiled_before_further_ones_of_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def waiting(workload: ConvWorkload, *given: object) -> None:
        asked.append((workload.text, int(str(given[-1]))))
        raise Waiting("a process compiles it", lambda: False)

    monkeypatch.setattr(registries, "ready", waiting)
    layer = LayerRegistry(LAYER, Prop.FWD, SM90, Epilogue(), True, False)
    for _ in range(2):
        with pytest.raises(Unsupported):
            layer.choose((8, 56, 56), "background")
    assert [later for _, later in asked] == [*range(len(layer.questions))] and len(asked) > 3
    assert asked[0][0] == layer.questions[0].workload.text


def test_while_plans_come_a_size_is_decided_once_more(
    layer: LayerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all are there, not at each; until then what came first answers, and no text is compiled."""
    layer.complete()
    come, tables = set[str](), list[int]()

    def ready(workload: ConvWorkload, *given: object) -> CompiledDirection:
        def over() -> bool:
            return workload.text in come

        if not over():
            raise Waiting("a process compiles it", over)
        return next(k.plan for q, k in layer.there.items() if q.workload.text == workload.text)

    class Counted(SizeTable[CompiledDirection]):
        def __init__(self, kernels: list[RegisteredPlan[CompiledDirection]], settled: bool) -> None:
            tables.append(len(kernels))
            super().__init__(kernels, settled)

    monkeypatch.setattr(registries, "ready", ready)
    monkeypatch.setattr(registries, "SizeTable", Counted)
    slow = LayerRegistry(LAYER, Prop.FWD, SM90, Epilogue(), True, False)
    first, *others = [q.workload.text for q in slow.questions]
    with pytest.raises(Waiting):
        slow.choose(SIZES[0], "background")
    come.add(first)
    chosen = slow.choose(SIZES[0], "background")
    assert chosen.waits is not None and chosen.question.workload.text == first
    for at, text in enumerate(others):
        assert not chosen.waits() and tables == [1]
        assert slow.choose((3, 20 + at, 20), "background").question.workload.text == first
        come.add(text)
    assert chosen.waits()
    for sizes in SIZES:
        now = slow.choose(sizes, "background")
        assert now.waits is None and now.question.workload == layer.choose(sizes, "now").question.workload
    assert tables == [1, len(slow.there)]


def test_an_estimate_compiles_nothing(layer: LayerRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    layer.complete()
    monkeypatch.setattr(size_values, "defined", lambda *_: pytest.fail("a text is compiled"))
    for sizes in SIZES:
        assert layer.choose(sizes, "now").of >= len(layer.estimates(sizes)) > 0


def test_the_estimate_chooses(layer: LayerRegistry) -> None:
    """It is what the cost model says of the same schedule and the numbers, and the least of those."""
    seen = set()
    for sizes in SIZES:
        chosen = layer.choose(sizes, "now")
        there = {q: k.plan for q, k in layer.there.items() if not k.plan.required.sizes.why_not(at(sizes))}
        exact = {
            q: sum(estimate(s.schedule, s.compute.at(**at(sizes)), SM90) for s in plan.steps)
            * (TUNED if plan.tuned else 1)
            for q, plan in there.items()
        }
        assert chosen.us == pytest.approx(exact[chosen.question]) == pytest.approx(min(exact.values()))
        assert chosen.of == len({p.schedule for p in there.values()})
        assert "for any size of this layer" in chosen.why
        seen.add(chosen.plan.schedule)
    assert len(seen) >= 2 and len(layer.questions) <= directions.MOST_KERNELS


@pytest.mark.slow
def test_addresses_are_as_wide_as_the_requirements_need(gathered: LayerRegistry) -> None:
    """Images of 2^36 elements need 64 bits: they are not for kernels of a layer whose examples do not."""
    chosen = gathered.choose((8, 300, 400), "now")
    assert "int64" not in chosen.plan.source
    with pytest.raises(Unsupported, match="does not hold for"):
        gathered.choose((128, 1024, 8192), "now")
    problem = ConvProblem.parse("mb512ic64ih1024oc64oh1024kh1 dt=bf16 tag=nhwc")
    (compute,) = any_size(problem, Prop.FWD)
    assert compute.named and not compute.named.why_not({"MB": 512, "IH": 1024, "IW": 1024})
    assert "int64" in build_compute(compute, SM80).source
    with pytest.raises(TensorError, match="the plan requires MB="):
        chosen.plan.at({"MB": 1, "IH": 16385, "IW": 1})


def test_what_no_kernel_takes_is_said(layer: LayerRegistry) -> None:
    with pytest.raises(Unsupported, match=r"IH=20000 is not in 1\.\.16384") as told:
        layer.choose((1, 20000, 3), "now")
    assert told.value.reason == "sizes:refused"
    with pytest.raises(Unsupported, match="does not hold for MB=65535"):
        layer.choose((65535, 1000, 1000), "now")


@pytest.mark.slow
def test_a_start_has_nothing_left_to_decide(
    gathered: LayerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a size is known, its launch passes the grid and the sizes as they were computed."""
    held = gathered.choose((3, 20, 30), "now").plan
    (step,) = held.steps
    assert step.triton.sizes is not None
    assert held.starter(0, True) is None, "nothing is compiled yet"
    started: list[tuple[object, ...]] = []
    kernel = SimpleNamespace(function="f", packed_metadata="p")
    monkeypatch.setattr(bound_start, "entry", lambda *_: (lambda *args: started.append(args), None))
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False
    )
    monkeypatch.setitem(step.triton.kept, (0, True), step.triton.starting(kernel))
    run = held.starter(0, True)
    assert run is not None
    assert held.required is not None
    monkeypatch.setattr(held.required, "numbers", lambda *_: pytest.fail("the grid is computed again"))
    run(*(SimpleNamespace(data_ptr=lambda at=at: at) for at in (16, 32, 48)))
    ((grid, *rest),) = started
    assert grid == 3 * -(-20 * 30 // 32) * (64 // 16) and str(step.schedule).startswith("oh.ow:32 oc:16")
    assert rest == [
        1,
        1,
        "stream 0",
        "f",
        False,
        False,
        None,
        None,
        "p",
        None,
        None,
        None,
        16,
        32,
        48,
        3,
        20,
        30,
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", Prop)
def test_no_more_than_six_kernels(prop: Prop, monkeypatch: pytest.MonkeyPatch) -> None:
    strided = ConvProblem.parse("mb2ic8iw20oc8ow10kw3sw2pw1 dt=f16")
    phases = 2 if prop is Prop.BWD_D else 1
    made = LayerRegistry(strided, prop, SM90, Epilogue(), True, False)
    assert len(made.questions) * phases <= directions.MOST_KERNELS
    assert len(made.questions) == 3
    assert made.most == directions.MOST_KERNELS + directions.COPIES, "copies leave room for plans"
    last = LayerRegistry(strided.with_layout("nwc"), prop, SM90, Epilogue(), True, False)
    assert last.most == directions.MOST_KERNELS


@pytest.mark.parametrize("mode", ["background", "never"])
def test_what_there_is_no_room_for_is_not_waited_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``prepare`` has made its plan, and compiled nothing for it."""
    made = LayerRegistry(LAYER, Prop.FWD, SM90, Epilogue(), True, False)
    plans = [SimpleNamespace(digests={f"{n}", f"{n} adds"}, required=None) for n in range(3)]
    of = dict(zip([q.workload.text for q in made.questions], plans, strict=False))
    del made.questions[3:]
    made.most = 5
    monkeypatch.setattr(registries, "compiles", lambda target: True)
    monkeypatch.setattr(registries, "planned", lambda q, kind: of[q.workload.text])
    monkeypatch.setattr(registries, "RegisteredPlan", lambda q, plan: SimpleNamespace(plan=plan))
    monkeypatch.setattr(registries, "ready", lambda w, *_: of.pop(w.text))
    assert made._look(mode) == ("", []) and made.is_settled()
    assert [*of.values()] == plans[2:] and "more than 5" in str([*made.failed.values()])


def test_a_text_for_any_size_is_read_back() -> None:
    for text in (
        "mb2g2ic16ih9oc32oh9kh3ph1 dt=f16",
        "mb1ic3iw9oc3ow9kw1",
        "mb4ic3id4ih5iw6oc3od4oh5ow6kd1kh1kw1",
    ):
        problem = ConvProblem.parse(text)
        workload = ConvWorkload(problem, Prop.FWD, Epilogue.parse("bias"), every(problem))
        assert workload.like(workload.text) == workload, spelled(problem, workload.open)
        assert workload.text.count("?") >= 2
        assert {*workload.tensors[:3]} == {
            t for c in workload.computations for t in c.tensors if t is not workload.tensors[3]
        }


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "text",
    [
        "mb8ic64ih56oc64oh56kh1",
        "mb8ic64ih56oc64oh56kh3ph1",
        "mb1ic16id8oc16od8kd1",
        "mb8ic64iw4096oc64ow4096kw1",
    ],
)
def test_sizes_of_other_multiples_are_other_questions(text: str) -> None:
    """Also where the sides of the example are alike: plans lie on disk by their text."""
    problem = ConvProblem.parse(f"{text} dt=bf16")
    for prop in Prop:
        made = LayerRegistry(problem, prop, SM90, Epilogue(), True, False)
        assert len({q.workload.text for q in made.questions}) == len(made.questions)
        for q in made.questions:
            assert q.workload.like(q.workload.text) == q.workload
        shared = sorted({n for q in made.questions for n in q.workload.open if "%" in n})
        if problem.ndims == 1 or max(problem.k) > 1:
            assert shared == ([] if prop is Prop.BWD_W and max(problem.k) > 1 else ["iw%8"])
        else:
            assert shared == ["ih%2", "iw%4"]


def test_plans_for_any_size_lie_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process makes no text and runs no pass; damaged records are ignored."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.setattr(directions, "EXAMPLES", {2: directions.EXAMPLES[2][:1]})
    compiler.forget()
    first = LayerRegistry(LAYER, Prop.BWD_W, SM90, Epilogue(), True, False).choose((1, 9, 9), "now")
    compiler.forget()
    with monkeypatch.context() as m:
        m.setattr(compiler, "build", lambda *_: pytest.fail("a plan was made"))
        again = LayerRegistry(LAYER, Prop.BWD_W, SM90, Epilogue(), True, False)
        (question,) = again.questions
        for room in (plans, triton_kernel):  # few plans that are read take a call
            m.setattr(room, "function_of", lambda *_: pytest.fail("a function of sizes was made"))
        found = plan_cache.find(
            question.workload, SM90, False, type(first.plan), lambda: pytest.fail("lowered")
        )
    assert found is not None and found.source == first.plan.source
    run, was = found.steps[0].triton, first.plan.steps[0].triton
    assert (run.sizes, run.programs, run.types, run.key) == (was.sizes, was.programs, was.types, was.key)
    assert run.boxes == was.boxes
    assert found.required.sizes == first.plan.required.sizes
    ((name, content),) = plan_cache.DRAWER.items()
    for sizes in ("MB=8 in 9..7", 7, "MB=8 in 1..3; import os"):
        step = {**content["steps"][0], "sizes": sizes}
        plan_cache.DRAWER.put(name, {**content, "steps": [step]})
        assert plan_cache.find(question.workload, SM90, False, type(first.plan), first.plan.at) is None
    compiler.forget()


def test_schedules_come_from_tuned_rows_where_they_are_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of given sizes, without the words that need numbers; only where tiles are not mostly empty."""
    monkeypatch.setattr(directions, "EXAMPLES", {2: directions.EXAMPLES[2][:2]})
    near = LAYER.at(8, (56, 56), (56, 56))

    def chosen(text: str) -> list[CompiledDirection]:
        row = tuning_db.make(ConvWorkload(near, Prop.FWD, Epilogue()), SM90, text, 10.0, 9)
        monkeypatch.setattr(
            tuning_db, "rows_of", lambda group: [row] if group.startswith("sm_90x132") else []
        )
        monkeypatch.setattr(choice, "surprise", lambda *_: 1.9)
        made = LayerRegistry(LAYER, Prop.FWD, SM90, Epilogue(), True, False)
        return [
            compiler.build(q.workload, SM90, None, None, False, CompiledDirection) for q in made.questions
        ]

    middle, small = chosen(
        "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box | c=box via=gluon programs=132 "
        "swap=1 stages=4 warps=4"
    )
    words = "mma | a=box b=box | c=box swap=1 stages=4 warps=4"
    assert str(middle.schedule) == f"mb:2 oh:8 ow:8 oc:64 ic:64 | {words}"
    assert middle.why.startswith("like the schedule tuned for mb8ic64ih56oc64oh56kh3ph1")
    assert "mb:2" not in str(small.schedule) and small.why.startswith("the heuristics"), "for one image"
    (first, _) = chosen("no schedule")
    assert first.why.startswith("the heuristics")


@pytest.mark.slow
def test_copies_leave_room_for_small_images() -> None:
    """In torch's order the plan for middle sizes has two copies. Small sizes have a plan of their own."""
    p = ConvProblem.parse("mb1ic512ih10iw15oc2048oh10ow15kh1kw1 dt=f32 tag=nchw")
    made = LayerRegistry(p, Prop.BWD_W, SM90, Epilogue(), True, False)
    made.choose((1, 10, 15), "now")
    us = sorted(us for us, _ in made.estimates((1, 10, 15)))
    assert len(made.there) >= 4 and us[0] < us[-1] / 2


def test_other_proportions_have_plans_where_tiles_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of weight gradients, which have two kernels, but for those of three sides, which divide their
    sum alike; none without a window. A stride needs plans for its multiples only where boxes take no
    steps."""

    def sides(text: str, prop: Prop = Prop.FWD) -> list[str]:
        made = LayerRegistry(
            ConvProblem.parse(f"{text} dt=bf16 tag=nhwc"), prop, SM90, Epilogue(), True, False
        )
        return [
            s
            for q in made.questions
            for s in re.findall(r"i[dhw][\d?%]+(?=i|oc)", q.workload.text)
            if s not in ("ih56?", "ih14?", "ih224?")
        ]

    others = ["ih400?", "iw100?", "ih24?", "iw200?", "ih96?"]
    assert sides("mb8ic64ih56oc64oh56kh3ph1") == others == sides("mb8ic64ih56oc64oh56kh3ph1", Prop.BWD_D)
    assert sides("mb8ic64ih56oc64oh56kh3ph1", Prop.BWD_W) == others[:2]
    assert not sides("mb8ic64ih56oc64oh56kh1") and not sides("mb8g2ic64ih56oc64oh56kh3ph1", Prop.BWD_W)
    assert sides("mb8g2ic64ih56oc64oh56kh3ph1") == others[:2]
    assert "id128?" in sides("mb1ic64id16oc64od16kd3pd1", Prop.BWD_W)
    strided = "mb8ic64ih56oc64oh28kh3sh2ph1"
    assert sides(strided) == others
    monkeypatch.setattr(directions, "is_direct", lambda: False)
    assert sides(strided) == [*others[:2], "ih96?%2", "ih96?%2"]


def test_a_tuned_schedule_is_taken_where_estimates_are_nearly_equal(
    layer: LayerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured to be fast is, by an estimate that is less than a twentieth above another."""
    layer.choose((8, 56, 56), "now")
    made = [*layer.there.values()]
    before = SizeTable(made, True).find(8, 56, 56)[1]
    for k in made:
        monkeypatch.setattr(k.plan, "tuned", not k.plan.tuned)
    after = SizeTable(made, True).find(8, 56, 56)[1]
    for k, one, two in zip(SizeTable(made, True).kernels, before, after, strict=True):
        assert two == pytest.approx(one * TUNED if k.plan.tuned else one / TUNED)
