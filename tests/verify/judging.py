"""The judgement of a problem with given types and words, for tests of them."""

from __future__ import annotations

import pytest

from transconv.conv import ConvProblem, Prop
from transconv.support import knobs
from transconv.verify.case import ProblemCase
from transconv.verify.judgement import Judgement

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


def case_of(problem: str, prop: str, words: str, numpy: bool) -> ProblemCase:
    bia = "f32" if "bias" in words else ""
    return ProblemCase(ConvProblem.parse(problem), Prop(prop), words, "cpu", bia=bia, numpy=numpy)


def judged(problem: str, prop: str, words: str, numpy: bool, mode: str = "exact") -> Judgement:
    case = case_of(problem, prop, words, numpy)
    return case.judge(case.plan(), mode, 3)
