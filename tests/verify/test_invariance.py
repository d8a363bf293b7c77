"""Certificates of invariant mode: what is proved, and that a grouping which depends on the batch is found
by the proof and by drawn batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transconv import ir
from transconv.compute import Alone, Workload, parse
from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop
from transconv.runtime import Plan, build, compiler
from transconv.schedule import Schedule, Scheduled
from transconv.support import Unsupported
from transconv.target import TARGETS, Target
from transconv.verify.invariance import proof
from transconv.verify.invariance.drawn_batches import differing
from transconv.verify.invariance.proof import of_kernel, prove, reduction_tree

SM90, HERE = TARGETS["sm_90"], TARGETS["interpreter"]
LAYERS = (
    "mb8ic64ih28oc64oh28kh3ph1 dt=f16 tag=nhwc",
    "mb4ic16ih16oc32oh8kh3sh2ph1",
    "g16mb2ic16ih9oc16oh9kh3ph1 dt=bf16",
)
NORM = """compute norm
    tensor X f32 [4, 96]
    axes   m=4 | k=96
    read   x = X[m, k]
    let    mean = sum(x; k) / 96
    let    d = x - mean
    let    var = sum(d*d; k) / 96
    store  Y[m, k] = d * rsqrt(var + 0.00001)
"""
DEPTHWISE = """compute depthwise
    sizes  S=2 in 1..64
    tensor X bf16 [S, 9, 9, 16]
    tensor W bf16 [16, 5]
    axes   g=16 n=S h=9 w=9 | k=5
    read   x = X[n, h, w + k - 2, g]
    read   y = W[g, k]
    let    z = sum(x*y; k)
    store  Y[n, h, w, g] = z
"""
IN_REGISTERS = "n.h:16 w:4 k:5 g:8 | fma | a=gather b=gather | regs=w.k stages=1 warps=4"


def of(text: str, prop: Prop) -> ConvWorkload:
    return ConvWorkload(ConvProblem.parse(text), prop)


@pytest.mark.every(12)
@pytest.mark.parametrize("prop", Prop)
@pytest.mark.parametrize("text", LAYERS)
def test_layers_are_proved(text: str, prop: Prop) -> None:
    made = prove(of(text, prop), SM90)
    assert made.holds, str(made)
    assert {f.about.split()[-1] for f in made.findings} >= {"choice", "grouping", "kernel"}


def test_a_norm_is_proved() -> None:
    made = prove(Alone(parse(NORM)), SM90)
    assert made.holds and "no BATCH in over k" in str(made)


WEIGHTS = "mb2ic16ih6oc16oh6kh3ph1"
PLANTED = (
    ("ic:16 oc:16 ow:16 | mma | order=oh.mb.ow stages=1", "MB decides turn = "),
    ("ic:16 oc:16 mb.oh.ow:16 | mma | split_k=3 stages=1", "MB decides part = "),
)


@pytest.mark.every(2)
@pytest.mark.parametrize(("schedule", "why"), PLANTED)
def test_a_planted_grouping_is_found_by_the_proof(schedule: str, why: str) -> None:
    for target in (SM90, HERE):
        made = prove(of(WEIGHTS, Prop.BWD_W), target, Schedule.parse(schedule))
        assert not made.holds and why in str(made)
        assert made.findings[0].holds  # the choice


@pytest.mark.slow
def test_a_planted_split_is_found_by_drawn_batches() -> None:
    planted, dealt = (f"ic:16 oc:16 mb.oh.ow:16 | mma | split_k=3{w} stages=1" for w in ("", " deal=1"))
    given = of(WEIGHTS, Prop.BWD_W), HERE, "cpu", 1, 1
    assert all(
        "wei of" in line and "elements differ" in line
        for line in differing(*given, [Schedule.parse(planted)])
    )
    assert list(differing(*given, [Schedule.parse(dealt)])) == [""]


class PlantedChoice(ConvWorkload):
    """A layer whose reference follows its batch."""

    def of_any_batch(self) -> tuple[Workload, Any]:
        form, sizes = ConvWorkload(self.problem, self.prop).of_any_batch()
        p = self.problem
        return replace(form, problem=p.at(2 * p.mb, p.i, p.o)), sizes  # type: ignore[type-var]


def test_a_planted_choice_is_found_by_the_proof() -> None:
    made = prove(PlantedChoice(ConvProblem.parse(LAYERS[0]), Prop.FWD), SM90)
    assert not made.holds and "asks for another kernel than 4 others" in str(made)


FEW, MANY = (f"mb.oh.ow:{rows} oc:16 ic:16 | mma | stages=1 warps=2" for rows in (16, 64))
APART = (  # for many samples the terms of a step, their order, the parts, or what adds them up differ
    "mb.oh.ow:64 oc:16 ic:32 | mma | stages=1 warps=2",
    "mb.oh.ow:64 oc:16 ic:16 | mma | order=kw.kh.ic stages=1 warps=2",
    "mb.oh.ow:64 oc:16 ic:16 | mma | stages=1 warps=4",
    "mb.oh.ow:4 oc:8 ic:16 | fma | stages=1",
)


def of_two(monkeypatch: pytest.MonkeyPatch, few: str, many: str) -> proof.BatchCertificate:
    """The certificate of a layer with one schedule for few samples and another one for many."""

    def planted(form: Any, target: Target, schedule: Any, *rest: Any) -> Plan:
        given = few if form.problem.mb == 1 else many
        return build(form, target, Schedule.parse(given), *rest)

    monkeypatch.setattr(proof, "build", planted)
    return prove(of("mb2ic32ih6oc16oh6kh3ph1 dt=f16", Prop.FWD), SM90)


def test_tiles_of_other_samples_add_up_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_two(monkeypatch, FEW, MANY)
    assert made.holds and "plans for few and many samples add up alike" in str(made), str(made)


@pytest.mark.parametrize("many", APART)
def test_plans_with_two_groupings_are_refused(monkeypatch: pytest.MonkeyPatch, many: str) -> None:
    made = of_two(monkeypatch, FEW, many)
    (wrong,) = (f for f in made.findings if not f.holds)
    assert wrong.about == "fwd plans"


@pytest.mark.slow
@pytest.mark.parametrize(("many", "same"), [(MANY, True), (APART[0], False)])
def test_plans_with_two_groupings_are_found_by_drawn_batches(many: str, same: bool) -> None:
    """Without a word of what a grouping is."""
    given = [Schedule.parse(s) for s in (FEW, many)]
    found = list(differing(of("mb2ic32ih6oc16oh6kh3ph1", Prop.FWD), HERE, "cpu", 2, 3, given))
    assert ({*found} == {""}) == same and (same or any("elements of" in f for f in found))


def kernel() -> ir.Kernel:
    """One whose sum is a loop of Triton's."""
    form, _ = of(LAYERS[1], Prop.FWD).of_any_batch()
    schedule = Schedule.parse("mb.oh.ow:64 oc:32 ic:16 | mma | stages=3")
    return build(form, SM90, schedule, None, True, Plan).steps[-1].kernel


class PlantedEnd(ir.Mutator):
    """Has the loops of sums end at the number of samples."""

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        made = self.generic(loop)
        assert isinstance(made, ir.For)
        if made.kind == "grid":
            return made
        return replace(made, until=ir.minimum(ir.Var("MB"), made.stop))


def test_a_loop_that_ends_at_the_number_is_found() -> None:
    made = kernel()
    assert of_kernel(made, "MB", False, "fwd").holds
    planted = PlantedEnd().mutate(made)
    assert isinstance(planted, ir.Kernel)
    found = of_kernel(planted, "MB", False, "fwd")
    assert not found.holds and "MB decides: the loop over" in found.why


def test_a_branch_that_adds_by_the_number_is_found() -> None:
    made = kernel()
    (call,) = ir.find(made, ir.FuncCall)

    class Planted(ir.Mutator):
        def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
            return ir.If(ir.Var("many") < 3, at) if at is call else at

    planted = Planted().mutate(
        replace(made, body=ir.seq(ir.Let(ir.Var("many"), ir.Var("MB") * 2), made.body))
    )
    assert isinstance(planted, ir.Kernel)
    found = of_kernel(planted, "MB", False, "fwd")
    assert not found.holds and "a branch at" in found.why


def test_texts_with_and_without_masks_add_alike() -> None:
    """The number of samples says which tile a program has, and that which of two texts it takes: a tile
    inside an image needs no masks. Both have to add the same terms in the same order."""
    made = build(Alone(parse(DEPTHWISE)), SM90, Schedule.parse(IN_REGISTERS), None, True, Plan)
    kernel = made.steps[0].kernel
    (branch,) = ir.find(kernel, ir.If)
    assert of_kernel(kernel, "S", False, "depthwise").holds
    (one, two, *_), (first, *more) = ir.find(branch.then, ir.Load), ir.find(branch.then, ir.Update)
    again = next(u for u in more if u.var is first.var)
    planted = [replace(branch, other=None)] + [
        replace(branch, then=ir.substitute(branch.then, changes))
        for changes in ({first.value: again.value, again.value: first.value}, {one: two})
    ]

    class Planted(ir.Mutator):
        def mutate_If(self, at: ir.If) -> ir.Stmt:
            return planted.pop()

    while planted:
        found = of_kernel(Planted().rebuilt(kernel), "S", False, "depthwise")
        assert not found.holds and "a branch at inside adds to sums" in found.why


def test_kernels_without_a_certificate_are_refused_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "decided", lambda *_: ["the batch decides"])
    with pytest.raises(Unsupported, match="have no certificate: the batch decides") as refused:
        build(Alone(parse(DEPTHWISE)), SM90, None, None, True, Plan)
    assert refused.value.reason == "invariant:kernel"


@pytest.mark.parametrize(
    ("schedule", "part", "turn"),
    [
        ("mb.oh.ow:128 oc:64 ic:64 | mma", "0", "kh*3 + kw"),
        ("mb.oh.ow:128 oc:64 ic:32 | mma | split_k=2", "(kh*6 + kw*2 + ic // 32) // 9", None),
        ("mb.oh.ow:128 oc:64 ic:32 | mma | split_k=2 deal=1", "(kh*6 + kw*2 + ic // 32) % 2", None),
    ],
)
def test_trees_say_where_each_term_is_added(schedule: str, part: str, turn: str | None) -> None:
    """And agree with the order in which a list of all terms is divided."""
    compute = of(LAYERS[0], Prop.FWD).computations[0]
    given = Schedule.parse(schedule)
    tree = reduction_tree(Scheduled(compute, given, SM90).main, given)
    assert tree is not None
    if turn is not None:
        assert ir.readable(tree.turn).startswith(turn)
    extent = given.block_of("ic").extent  # type: ignore[union-attr]
    terms = [(h, w, c) for h in range(3) for w in range(3) for c in range(64)]
    steps = sorted({(h, w, c // extent) for h, w, c in terms})
    parts = given.split_k
    chunk = -(-len(steps) // parts)
    for h, w, c in terms:
        at = {"kh": h, "kw": w, "ic": c}
        step = steps.index((h, w, c // extent))
        wanted = (step % parts, step // parts) if given.deal else (step // chunk, step % chunk)
        assert (ir.value_at(tree.part, at), ir.value_at(tree.turn, at)) == wanted
        assert [ir.value_at(e, at) for e in tree.lanes] == [c % extent]


def test_streamed_steps_depend_on_the_tiles_of_all_samples() -> None:
    schedule = Schedule.parse("mb.oh.ow:64 oc:64 ic:64 | mma | reduce=stream programs=7 group_m=1")
    compute = ConvWorkload(ConvProblem.parse(LAYERS[0]), Prop.FWD, open=frozenset({"mb"})).computations[0]
    tree = reduction_tree(compute, schedule)
    assert tree is not None and any(line.startswith("part = ") for line in tree.depends("MB"))


def test_sizes_that_are_names_are_proved_too() -> None:
    """A text that names its sizes has no other form, and is proved for them."""
    text = """compute sums
        sizes  N=64 in 1..1000
        tensor X f32 [n=N, k=64]
        tensor Y f32 [k=64]
        axes   k=64 | n=N
        read   x = X[n, k]
        store  Y[k] = sum(x; n)
    """
    made = prove(Alone(parse(text)), SM90)
    assert made.holds and "no N in over n" in str(made)
    fixed = (
        text.replace("N=64 in 1..1000", "K=64 in 1..1000").replace("n=N", "n=64").replace("k=64", "k=K")
    )
    made = prove(Alone(parse(fixed)), SM90)
    assert not made.holds and "none of its sizes is a number of samples" in str(made)


def test_results_rounded_at_random_are_refused() -> None:
    """By an element's place in the batch."""
    problem = ConvProblem.parse("mb2ic8ih5oc8oh3kh3 dt=bf16")
    made = prove(ConvWorkload(problem, Prop.FWD, Epilogue.parse("stochastic")), SM90)
    assert not made.holds and "it rounds at random" in str(made)


def test_what_has_no_form_is_refused_by_name() -> None:
    made = prove(
        Alone(
            parse(
                "compute gaps\n tensor X f32 [4, 8] strides(16,1)\n axes n=4 | k=8\n"
                " read x = X[n, k]\n store Y[n] = sum(x; k)"
            )
        ),
        SM90,
    )
    assert not made.holds and "gaps: X has gaps between its elements" in str(made)


@pytest.mark.every(3)
@pytest.mark.parametrize("prop", Prop)
def test_drawn_batches_of_a_layer(prop: Prop) -> None:
    few = 31  # a seed that draws two samples
    assert list(differing(of("mb2ic4ih5oc6oh5kh3ph1", prop), HERE, "cpu", 1, few)) == [""]


def test_a_certificate_prints_what_it_is_of() -> None:
    target: Target = SM90
    made = proof.BatchCertificate(
        "title", (proof.ProofLine("choice", True, "why"), proof.ProofLine("k", False, "no"))
    )
    assert str(made) == "title\n  proved   choice: why\n  REFUSED  k: no\n  the proof does not hold"
    assert not proof.BatchCertificate("empty").holds and target.name == "sm_90"


def test_the_page_tells_what_was_drawn() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "bench/results/h200_certified.txt").read_text(encoding="utf-8").splitlines()
    drawn = [line.split() for line in lines if "have the same" not in line]
    calls = [words[1:] for words in drawn if words[0].isdigit()]
    verdicts = Counter(verdict for verdict, *_ in calls)
    assert set(verdicts) == {"same", "refused"}
    page = (root / "docs/invariance.md").read_text(encoding="utf-8")
    assert f"drew {len(calls):,} calls" in page and f" {verdicts['same']:,} had the same bits" in page
    assert verdicts["refused"] == 6 and all(call[1] == "linear" for call in calls if call[0] == "refused")
