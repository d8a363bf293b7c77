"""A bug in each pass, each emitter and the computation is found by running the kernel, and blamed on
the stage that it was planted in."""

from __future__ import annotations

import pytest

from tests.verify import planted, planted_rules
from tests.verify.planted import Bug
from transconv.conv import ConvWorkload
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.passes import pipeline
from transconv.schedule.schedule import Schedule
from transconv.simplify import division, fixpoint
from transconv.support import knobs
from transconv.target.records import TARGETS
from transconv.verify.bisect.stage_search import blame
from transconv.verify.bisect.subject import BisectSubject, ask_emitter

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


def test_every_pass_has_a_bug() -> None:
    named = {"edges"}  # see tests/passes/test_tiles_at_edges.py
    assert {bug.stage for bug in planted.PASSES} == {p.name for p in pipeline.PIPELINE} - named


@pytest.mark.every(12)
@pytest.mark.parametrize("bug", planted.PASSES, ids=lambda bug: f"{bug.stage}: {bug.what}")
def test_a_bug_in_a_pass(bug: Bug) -> None:
    def ask() -> str:
        found = blame(
            bug.problem,
            bug.prop,
            "sm_90",
            bug.schedule,
            switches=bug.switches,
            limit=1 << 19,
            parts=("ir",),
        )
        assert bool(found) == bool(found.stage) == ("WRONG" in found.text)
        assert "the pass failed" not in found.text and not found.rule
        if found and "breaks a rule" not in found.verdict and "not fit" not in found.verdict:
            assert f"+++ {found.stage}" in found.diff
        return found.stage

    assert ask() == ""
    with planted.planted_pass(bug):
        assert ask() == bug.stage


@interpreted
@pytest.mark.parametrize("name", planted.EMITTERS)
def test_a_bug_in_an_emitter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.EMITTERS[name](monkeypatch)
    found = blame(planted.PLAIN, "fwd", "sm_90", planted.GATHER, isolated=False)
    assert found.stage == "emit" and "tl.load" in found.diff and "final" in found.text


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("prop", "problem"),
    [
        (Prop.FWD, planted.PLAIN),
        (Prop.BWD_W, planted.PLAIN),
        (Prop.BWD_D, planted.PLAIN),
        (Prop.BWD_D, "g2mb2ic4ih9oc4oh5kh3sh2ph1"),
    ],
    ids=str,
)
def test_a_bug_in_the_compute(prop: Prop, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.padding_has_the_wrong_sign(monkeypatch)
    found = blame(problem, prop, "sm_90")
    assert found.stage == "compute" and not found.rule
    assert "naive" not in found.text  # nothing more is asked


def test_a_bug_in_the_loop_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.weights_are_one_further(monkeypatch)
    found = blame(planted.PLAIN, Prop.FWD, "sm_90", planted.GATHER)
    assert found.stage == "naive" and "compute     right" in found.text


GROUPS = "g8mb2ic32ih8oc32oh8kh3ph1 dt=f16 tag=axb"
MERGED = "mb.oh.ow:32 oc:16 ic:16 | mma | merge=4 stages=2"
CHANNELS_LAST = "mb2ic32ih8oc32oh8kh3ph1 dt=f16"


@pytest.mark.parametrize(
    ("prop", "problem", "schedule"),
    [(Prop.FWD, GROUPS, MERGED), (Prop.BWD_D, GROUPS, MERGED.replace("oh.ow", "ih.iw"))],
    ids=str,
)
def test_a_bug_in_merging(
    prop: Prop, problem: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = blame(problem, prop, "sm_90", schedule, parts=("ir",))
    assert not right and "merging     right" in right.text and "packing" not in right.text
    planted.groups_are_mixed(monkeypatch)
    found = blame(problem, prop, "sm_90", schedule)
    assert found.stage == "merging" and "compute     right" in found.text
    assert "wei" in found.diff and "naive" not in found.text


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("pack=c", CHANNELS_LAST),
        ("pack=a.b", CHANNELS_LAST),
        ("pack=a.b.c split_k=3", CHANNELS_LAST),
        ("merge=4 pack=b", GROUPS),
        ("merge=4 pack=a.b.c", GROUPS.removesuffix("tag=axb")),
    ],
)
def test_a_bug_in_packing(words: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the parts of a sum go to the result without a copy back."""
    schedule = f"mb.oh.ow:32 oc:16 ic:16 | mma | {words} stages=2"
    right = blame(problem, "fwd", "sm_90", schedule, parts=("ir",))
    assert not right and "packing     right" in right.text
    planted.copies_are_read_backwards(monkeypatch)
    found = blame(problem, "fwd", "sm_90", schedule)
    assert found.stage == "packing" and "_packed" in found.diff and "naive" not in found.text


def test_a_bug_in_a_pass_over_copies_is_its_own() -> None:
    bug = next(b for b in planted.PASSES if b.stage == "hoist")
    with planted.planted_pass(bug):
        found = blame(
            CHANNELS_LAST, "fwd", "sm_90", "mb.oh.ow:32 oc:32 ic:32 | mma | pack=c stages=2", parts=("ir",)
        )
    assert found.stage == "hoist" and "+++ hoist" in found.diff


# A spoiled return of each family, where a real kernel meets it.
CASES = {"remainder": (Prop.BWD_W, "mb2ic4ih9oc4oh5kh3sh2ph1", "")}
RULES = {
    "compare": (division, "_bound"),
    "divide": (division, "_divide_by"),
    "remainder": (division, "_remainder_by"),
    "collect": (division, "collect"),
    "logic": (fixpoint, "_logic"),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("rule", RULES)
def test_a_bug_in_a_rule_that_a_pass_uses(rule: str) -> None:
    """Of the returns of a rule, those that the kernel needs are traced from the wrong result to the
    rule."""
    module, function = RULES[rule]
    prop, problem, schedule = CASES.get(rule, (Prop.FWD, planted.PLAIN, planted.GATHER))
    named = 0
    for mutant in planted_rules.mutants((module,)):
        if mutant.function == function:
            with planted_rules.planted(mutant):
                found = blame(problem, prop, "sm_90", schedule, parts=("ir",))
            if found:
                assert found.stage in ("reuse", "simplify")
                assert found.rule in planted_rules.culprits(mutant)
                assert "wrong at" in found.text
                named += 1
    assert named


@interpreted
@pytest.mark.every(12)
@pytest.mark.parametrize(
    "bug",
    [
        b
        for b in planted.PASSES
        if "via=gluon" not in b.schedule and "mb7" not in b.problem and b.stage != "quads"
    ],  # Triton's interpreter has no machine code
    ids=lambda bug: bug.stage,
)
def test_the_bug_shows_when_the_kernel_runs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is blamed is what a check would have seen: the emitted kernel is wrong, or fails."""
    words = ",".join(f"{'+' if on else '-'}{name}" for name, on in bug.switches.items())
    monkeypatch.setenv("TRANSCONV_PASSES", words)
    question = BisectSubject(
        ConvWorkload(ConvProblem.parse(bug.problem), bug.prop),
        TARGETS["sm_90"],
        Schedule.parse(bug.schedule) if bug.schedule else None,
    )
    with planted.planted_pass(bug):
        verdict = ask_emitter(question, isolated=False)
        # With TRANSCONV_VERIFY=1 some are refused before they run.
        assert verdict.wrong or "VerifyError" in verdict.text, verdict.text
