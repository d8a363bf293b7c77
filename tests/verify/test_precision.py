"""Float data show every rounding too many, whole numbers none; fuzz and check run both."""

from __future__ import annotations

from math import inf

import pytest

from tests.verify.planted import planted_pass
from tests.verify.planted_precision import LONG, MMA, PRECISION, Imprecise
from transconv.conv import CompiledDirection, ConvProblem, Epilogue, Prop, compiler
from transconv.runtime import first_run_check
from transconv.schedule import is_copy, rounds
from transconv.schedule.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.target.records import TARGETS
from transconv.verify import judgement
from transconv.verify.benchdnn_run import work as checked
from transconv.verify.case import ProblemCase
from transconv.verify.fuzz.compute_trial import ComputeTrial
from transconv.verify.fuzz.main_loop import work

CUT = next(p for p in PRECISION if p.bug.what == "tf32 is cut in registers")


def made(case: ProblemCase, schedule: str) -> CompiledDirection:
    """The plan, made anew: the one that is kept has no bug."""
    return compiler.build(
        case.problem,
        case.prop,
        case.target,
        Schedule.parse(schedule),
        Epilogue.parse(case.epilogue),
        heuristics.default,
    )


@pytest.mark.every(6)
@pytest.mark.parametrize("planted", PRECISION, ids=lambda p: f"{p.bug.what} {p.epilogue}".strip())
def test_a_rounding_too_much(planted: Imprecise) -> None:
    bug = planted.bug
    case = ProblemCase(
        ConvProblem.parse(bug.problem),
        bug.prop,
        planted.epilogue,
        where="cpu",
        target=TARGETS["sm_90"],
        numpy=True,
    )
    assert case.judge(made(case, bug.schedule), "float").right
    with planted_pass(bug):
        spoiled = made(case, bug.schedule)
    assert case.judge(spoiled, "exact").right
    assert planted.said in case.judge(spoiled, "float").reason


def test_the_fuzzer_and_check_run_float_data() -> None:
    line = (
        f"--schedule={MMA.replace(' | ', '+').replace(' ', '+')} --stag=nhwc --wtag=ohwi --dtag=nhwc "
        + LONG.split(maxsplit=1)[0]
    )
    told = {
        "problem": f"{CUT.bug.problem} math=tf32",
        "prop": "fwd",
        "target": "sm_90",
        "numpy": True,
        "schedules": f"{MMA} group_m=2",
    }
    assert work(line=line)["status"] == "passed"
    with planted_pass(CUT.bug):
        assert work(line=line)["reason"].startswith("float data: the error in the 2-norm")
        assert checked(**told)["reason"].startswith("float: the error in the 2-norm")


def test_what_an_activation_flattens_is_held_against_the_sums() -> None:
    """Behind a tanh the errors of small sums of tf32 remain, and those of large ones vanish."""
    line = "--schedule=od:4+oh:4+ow:8+oc:64+ic:32+mma --epilogue=bias+res+tanh ic64id4oc64od4kd1"
    assert work(line=line)["status"] == "passed"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("dtype", "what", "said"),
    [
        ("f16", "the epilogue sees a rounded sum", "elements of C are not the answer rounded once"),
        ("f32", "tf32 is cut in registers", "the error of C in the 2-norm"),
    ],
)
def test_drawn_computations_run_on_float_data(dtype: str, what: str, said: str) -> None:
    value = "s + v" if dtype == "f16" else "s"
    trial = ComputeTrial(
        f"compute rows\n tensor C {dtype} [33, 20]\n tensor X {dtype} [33, 64]\n"
        f" tensor W {dtype} [20, 64]\n tensor V {dtype} [20]\n axes m=33 n=20 k=64\n"
        " read x = X[m, k]\n read w = W[n, k]\n"
        f" let s = sum(x*w; k)\n read v = V[n]\n store C[m, n] = {value}",
        "sm_90",
        "m:32 n:16 k:16 | mma | stages=2 warps=4",
    )
    assert trial.problem() == ""
    bug = next(p.bug for p in PRECISION if p.bug.what == what)
    with planted_pass(bug):
        assert said in trial.problem()


@pytest.mark.parametrize(
    ("unit", "math", "rounded"),
    [("mma", "tf32", True), ("mma", "ieee", False), ("mma", "tf32x3", False), ("fma", "tf32", False)],
)
def test_copies_are_rounded_for_products_of_tf32_alone(unit: str, math: str, rounded: bool) -> None:
    problem = ConvProblem.parse(f"{CUT.bug.problem} math={math}".replace("axb", "abx"))
    plan = compiler.plan(
        problem,
        CUT.bug.prop,
        TARGETS["sm_90"],
        f"mb.oh.ow:32 oc:16 ic:16 | {unit} | pack=a.b stages=2 warps=4",
    )
    assert [rounds(s.compute) for s in plan.steps if is_copy(s.compute)] == [rounded] * 2


def test_near_a_pole_single_elements_decide() -> None:
    """A few sums near 0 are most of what 1/x makes of all of them."""
    pole, smooth = (judgement.steepened(moved, 1.0, 1.0) for moved in (16.0, (8 * judgement.STEP) ** 2))
    assert pole == inf
    assert smooth == pytest.approx(8 * judgement.SLACK)
    case = ProblemCase(
        ConvProblem.parse("g2ic16ih14oc16oh14kh3ph1 dt=f32"),
        Prop.FWD,
        "pow:1:-1",
        where="cpu",
        target=TARGETS["sm_90"],
        numpy=True,
    )
    assert case.judge(case.plan(), "float").right


def test_plans_with_blocked_layouts_run_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run_check, "is_trusted", lambda *_, **__: False)
    monkeypatch.setattr(first_run_check, "run", lambda *_: pytest.fail("no view to look at"))
    for problem, epilogue in (
        ("ic8ih4oc8oh4kh1 dt=i8", "add:s8:14:aBcd4b"),
        ("ic8ih4oc8oh4kh1 dt=f32 tag=nChw8c", ""),
    ):
        case = ProblemCase(ConvProblem.parse(problem), Prop.FWD, epilogue, target=TARGETS["sm_90"])
        case.where = "cuda"
        assert case.proven().workload is not None
