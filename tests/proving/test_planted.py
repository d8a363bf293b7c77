"""A bug in each pass, each emitter and the algorithm is found by running the kernel, and blamed on
the stage that it was planted in."""

from __future__ import annotations

import pytest

from tests.proving import planted, planted_rules
from tests.proving.planted import Bug
from transconv import knobs, pipeline
from transconv.config import Config
from transconv.epilogue import Epilogue
from transconv.problem import ConvProblem, Prop
from transconv.proving.bisect import blame
from transconv.proving.bisect_emitted import ask_emitter
from transconv.proving.bisect_replay import Question
from transconv.simplify import comparison, division, fixpoint
from transconv.target import TARGETS

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


def test_every_pass_has_a_bug() -> None:
    assert {bug.stage for bug in planted.PASSES} == {p.name for p in pipeline.PIPELINE}


@pytest.mark.parametrize("bug", planted.PASSES, ids=lambda bug: f"{bug.stage}: {bug.what}")
def test_a_bug_in_a_pass(bug: Bug) -> None:
    def ask() -> str:
        found = blame(bug.problem, bug.prop, "sm_90", bug.config, switches=bug.switches,
                      limit=1 << 19, parts=("ir",))
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


@pytest.mark.parametrize(("prop", "problem"), [
    (Prop.FWD, planted.PLAIN), (Prop.BWD_W, planted.PLAIN), (Prop.BWD_D, planted.PLAIN),
    (Prop.BWD_D, "g2mb2ic4ih9oc4oh5kh3sh2ph1")], ids=str)
def test_a_bug_in_the_algorithm(prop: Prop, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.padding_has_the_wrong_sign(monkeypatch)
    found = blame(problem, prop, "sm_90")
    assert found.stage == "algorithm" and not found.rule
    assert "naive" not in found.text  # nothing more is asked


def test_a_bug_in_the_loop_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.weights_are_one_further(monkeypatch)
    found = blame(planted.PLAIN, Prop.FWD, "sm_90", planted.GATHER)
    assert found.stage == "naive" and "algorithm   right" in found.text


# A spoiled return of each family, where a real kernel meets it.
CASES = {"remainder": (Prop.BWD_W, "mb2ic4ih9oc4oh5kh3sh2ph1", "")}
RULES = {
    "compare": (comparison, "_bound"), "divide": (division, "_divide_by"),
    "remainder": (division, "_remainder_by"), "collect": (division, "collect"),
    "logic": (fixpoint, "_logic"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_bug_in_a_rule_that_a_pass_uses(rule: str) -> None:
    """Of the returns of a rule, those that the kernel needs are traced from the wrong result to the
    rule."""
    module, function = RULES[rule]
    prop, problem, config = CASES.get(rule, (Prop.FWD, planted.PLAIN, planted.GATHER))
    named = 0
    for mutant in planted_rules.mutants((module,)):
        if mutant.function == function:
            with planted_rules.planted(mutant):
                found = blame(problem, prop, "sm_90", config, parts=("ir",))
            if found:
                assert found.stage in ("reuse", "simplify")
                assert found.rule in planted_rules.culprits(mutant)
                assert "wrong at" in found.text
                named += 1
    assert named


@interpreted
@pytest.mark.parametrize("bug", [b for b in planted.PASSES
                                 if "via=gluon" not in b.config and "mb7" not in b.problem],
                         ids=lambda bug: bug.stage)
def test_the_bug_shows_when_the_kernel_runs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is blamed is what a check would have seen: the emitted kernel is wrong, or fails."""
    words = ",".join(f"{'+' if on else '-'}{name}" for name, on in bug.switches.items())
    monkeypatch.setenv("TRANSCONV_PASSES", words)
    question = Question(ConvProblem.parse(bug.problem), bug.prop, TARGETS["sm_90"],
                        Config.parse(bug.config) if bug.config else None, Epilogue())
    question.fill()
    with planted.planted_pass(bug):
        verdict = ask_emitter(question, isolated=False)
        # With TRANSCONV_VERIFY=1 some are refused before they run.
        assert verdict.wrong or "VerifyError" in verdict.text, verdict.text
