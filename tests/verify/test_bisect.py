"""Bisection: right kernels are right at every stage, large problems are shrunk, and the command
reports the stage."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import problems
from tests.verify import planted
from transconv import ir
from transconv.__main__ import main, parser
from transconv.compute import parse
from transconv.conv import ConvWorkload, Epilogue
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.errors import ComputeError, ScheduleError
from transconv.ir import Const, FloorDiv, Kernel, Layout, Let, Mod, Store, Tensor, Var, eq
from transconv.ir.interp.kernel import run
from transconv.passes.lowering.launch_fusion import together
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.simplify import Facts, fixpoint, simplify
from transconv.support import knobs
from transconv.target.records import TARGETS
from transconv.verify.bisect import stage_search, subject
from transconv.verify.bisect.sampled_values import AssignedPoints, Unsound, audited
from transconv.verify.bisect.stage_search import NAMES, as_targets_divide, blame, blame_compute
from transconv.verify.bisect.subject import PRODUCTS, BisectSubject, evaluated, products, shrunk
from transconv.verify.fuzz.compute_trial import ComputeTrial
from transconv.verify.fuzz.main_loop import trial_of

SM90 = TARGETS["sm_90"]
FEW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def question(text: str, prop: Prop = Prop.FWD, schedule: str = "", epilogue: str = "") -> BisectSubject:
    workload = ConvWorkload(ConvProblem.parse(text), prop, Epilogue.parse(epilogue))
    return BisectSubject(workload, SM90, Schedule.parse(schedule) if schedule else None)


def problem_of(asked: BisectSubject) -> ConvProblem:
    assert isinstance(asked.workload, ConvWorkload)
    return asked.workload.problem


# -- what is right ---------------------------------------------------------------------------------


@FEW
@given(problems(), st.sampled_from(list(Prop)), st.integers(0, 99))
def test_right_kernels_are_right_at_every_stage(p: ConvProblem, prop: Prop, seed: int) -> None:
    found = blame(p, prop, SM90, seed=seed, parts=("ir",))
    assert not found and found.stage == found.rule == found.diff == "", found.text
    assert all(f"  {name} " in found.text for name in ("compute", *NAMES))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("text", "prop", "schedule", "epilogue"),
    [
        ("mb2ic4ih5oc6oh5kh3ph1", Prop.FWD, "", "bias+relu"),
        ("mb2ic4ih5oc6oh5kh3ph1 dt=f16", Prop.FWD, "", "bias+res+gelu"),
        (planted.PLAIN, Prop.FWD, f"{planted.GATHER} split_k=3", "bias+relu"),
        ("mb2ic16ih7oc16oh7kh3ph1", Prop.FWD, f"{planted.GATHER} split_k=3 reduce=atomic", ""),
        ("mb2ic6ih9oc4oh4kh3sh2ph0", Prop.BWD_D, "", ""),
        ("mb2ic6iw9oc4ow9kw3pw1 dt=bf16 tag=nwc", Prop.BWD_W, "", ""),
    ],
)
def test_epilogues_sums_and_phases(text: str, prop: Prop, schedule: str, epilogue: str) -> None:
    found = blame(text, prop, SM90, schedule, epilogue, parts=("ir",))
    assert not found, found.text


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "line",
    [
        "--dir=FWD_D --dt=f32:f32:f32 --stag=32n@240_8c@0_30w@1 --wtag=owi --dtag=nwc "
        "mb32ic8iw30oc17ow12kw3sw3pw3",
        "--dir=BWD_W --dt=i8:bf16:u8 --schedule=g:4+ic:8+oc:8+fma --epilogue=stochastic "
        "g4mb5ic12ih3oc12oh3kh1",
        "--schedule=m:8+k:2+fma compute extremes ;; tensor I i32 [19] ;; axes m=16 k=16 ;; "
        "read x = X[m, k] ;; let at = argmax(x; k) ;; store I[m + 3] = at",
    ],
)
def test_memory_and_rounding_have_a_say_in_what_is_right(line: str) -> None:
    """Operands whose elements share a place, results rounded at random, integers that are not stored."""
    trial = trial_of(line)
    found = (
        blame_compute(trial.compute, SM90, Schedule.parse(trial.schedule), parts=("ir",))
        if isinstance(trial, ComputeTrial)
        else blame(trial.problem, trial.prop, SM90, trial.schedule, trial.epilogue, parts=("ir",))
    )
    assert not found and "compute     right" in found.text, found.text


def test_a_computation_is_made_small_or_refused() -> None:
    text = "compute rows\n axes m=4096 k=4096\n read x = X[m, k]\n store Y[m] = sum(x; k)"
    asked = parse(text), SM90, Schedule.parse("m:8 k:16 | fma")
    found = blame_compute(*asked, limit=1 << 16, parts=("ir",))
    assert not found and "shrunk to m=" in found.text, found.text
    with pytest.raises(ComputeError, match="none that is smaller has a schedule"):
        blame_compute(*asked, limit=16)


@pytest.mark.slow
def test_an_index_of_a_computation_that_overflows_is_seen() -> None:
    """At the size that was asked for, which is too large to interpret."""
    bug = next(b for b in planted.PASSES if b.what.startswith("indices beyond 32 bits"))
    text = "compute rows\n axes m=70000 k=65536\n read x = X[m, k]\n store Y[m, k] = x*2"
    asked = parse(text), SM90, Schedule.parse("k:1024 | fma")
    assert not blame_compute(*asked, limit=1 << 18, parts=("ir",))
    with planted.planted_pass(bug):
        found = blame_compute(*asked, limit=1 << 18, parts=("ir",))
    assert found.stage == "narrow" and "does not fit into its type" in found.verdict, found.text


@pytest.mark.slow
def test_the_emitted_text_is_asked_in_a_process_of_its_own() -> None:
    found = blame("mb1ic4iw6oc4ow6kw3pw1", "fwd", "sm_90", parts=("emitter",))
    assert not found and "emit        right" in found.text


@pytest.mark.slow
def test_a_bug_of_the_one_launch_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stride phases that are right one by one: in one launch, a tile of the second is left out."""
    text = "mb4ic16ih16oc16oh8kh3sh2ph1 dt=f16 tag=axb"
    schedule = "mb:4 qh:2 qw:8 ic:16 oc:16 | a=box b=box via=gluon | c=box programs=2"
    found = blame(text, "bwd_d", "sm_90", schedule, parts=("ir",))
    assert not found and "together    right" in found.text

    def planted_together(kernels: list[Kernel]) -> Kernel | None:
        made = together(kernels)
        assert made is not None
        seen = [
            x for role in ir.find(made, ir.Role) for x in ir.statements(role.body) if isinstance(x, ir.For)
        ]
        second = seen[1 :: len(seen) // 2]

        class Late(ir.Mutator):
            def mutate_For(self, loop: ir.For) -> ir.Stmt:
                return replace(loop, start=loop.start + 2) if loop in second else self.generic(loop)

        return Late().mutate(made)  # type: ignore[no-any-return]

    monkeypatch.setattr(stage_search, "together", planted_together)
    found = blame(text, "bwd_d", "sm_90", schedule, parts=("ir",))
    assert found.stage == "together" and "are wrong" in found.verdict, found.text


def test_a_schedule_that_is_not_legal_is_no_bug() -> None:
    with pytest.raises(ScheduleError, match="copy engine"):
        blame(planted.PLAIN, "fwd", "sm_80", "mb:1 oh:4 ow:8 oc:16 ic:16 | a=box b=box swap=1")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("small", "full", "via", "told"),
    [
        ("", "", "tl", ""),
        ("3 of 9 are wrong", "", "tl", "3 of 9 are wrong; Triton or ptxas"),
        ("", "9 of 9 are wrong", "tl", "right in the small size, but for"),
        ("bad", "", "gluon", "bad; the Gluon emitter, Triton or ptxas"),
    ],
)
def test_the_compiler_is_asked_last(
    small: str, full: str, via: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with the GPU, which is made up here: in the small size, then in full."""
    monkeypatch.setattr(subject, "detect", lambda: SM90)
    monkeypatch.setenv(knobs.interpret.name, "0")
    monkeypatch.setattr(subject, "_run", lambda plan, asked, device, seed: small)
    monkeypatch.setattr(subject, "_in_full", lambda asked, plan: full)
    roles = "a=box b=box | via=gluon stages=3"
    found = blame(
        "mb256ic32ih8oc64oh8kh3ph1 dt=f16 tag=axb",
        "fwd",
        SM90,
        "mb:1 oh:8 ow:8 oc:64 ic:16 | " + (roles if via == "gluon" else ""),
        limit=1 << 22,
        parts=("compiler",),
    )
    assert found.stage == ("compiler" if told else "") and told in found.verdict
    assert told or found.verdict.startswith("right, for mb256")
    if told:
        assert "@" in found.diff  # the text of the kernel


def test_every_part_is_asked_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answers(name: str) -> None:
        def ask(*_: object) -> subject.EmittedVerdict:
            asked.append(name)
            return subject.EmittedVerdict(False, f"{name} is right")

        monkeypatch.setattr(stage_search, f"ask_{name}", ask)

    answers("emitter")
    answers("compiler")
    found = blame(planted.PLAIN, "fwd", "sm_80")
    assert asked == ["emitter", "compiler"] and found.stage == ""
    assert all(f"{name} is right" in found.text for name in asked)


@pytest.mark.parametrize(
    ("code", "out", "wrong", "said"),
    [
        (-11, "", True, "Triton's interpreter died of signal 11"),
        (
            0,
            '{"stage": "emit", "verdict": "3 of 9 are wrong", "diff": "@triton.jit"}',
            True,
            "3 of 9 are wrong",
        ),
        (0, '{"stage": "", "verdict": "right", "diff": ""}', False, "right"),
        (1, "no json", False, "not asked: Triton's interpreter did not start: no module"),
        (1, "{}", False, "not asked: Triton's interpreter did not start: no module"),
    ],
)
def test_however_the_interpreters_process_ends_it_has_a_verdict(
    code: int, out: str, wrong: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the text of the kernel where that is what to read."""
    asked = BisectSubject(ConvWorkload(ConvProblem.parse(planted.PLAIN), Prop.FWD), TARGETS["sm_80"])
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda words, **_: SimpleNamespace(returncode=code, stdout=out, stderr="at line 1\nno module\n"),
    )
    found = subject.ask_emitter(asked)
    assert (found.wrong, found.text) == (wrong, said) and ("@triton.jit" in found.source) == wrong


# -- what a computation and a division mean ---------------------------------------------------------


@FEW
@given(problems(), st.sampled_from(list(Prop)))
def test_the_meaning_of_a_compute(p: ConvProblem, prop: Prop) -> None:
    asked = BisectSubject(ConvWorkload(p, prop), SM90)
    (case,) = asked.cases(1)
    computes = [a for a, _ in asked.steps() if not any(x.role == "part" for x in a.axes)]
    made = evaluated(computes, case)
    assert not case.judged(made).problem
    made[prop.result].flat[-1] += 1
    assert "1 of" in case.judged(made).problem


def test_targets_divide_towards_zero() -> None:
    i = Var("i")
    out = Tensor("out", ("n", "way"), (9, 2), Layout.dense(ir.i32, (9, 2)))
    body = ir.For(
        i,
        9,
        ir.seq(
            Let(Var("q"), FloorDiv(i - 4, Const(3))),
            Let(Var("r"), Mod(i - 4, Const(3))),
            Store(out, i * 2, Var("q"), ir.TRUE),
            Store(out, i * 2 + 1, Var("r"), ir.TRUE),
        ),
        "parallel",
    )
    kernel = Kernel("divide", (out,), body)
    for made, divide in ((kernel, np.floor), (as_targets_divide(kernel), np.trunc)):
        buffers = {"out": np.zeros(18, np.int32)}
        run(made, buffers)
        numbers = np.arange(9) - 4
        quotients = divide(numbers / 3).astype(int)
        assert (buffers["out"].reshape(9, 2) == np.stack([quotients, numbers - 3 * quotients], 1)).all()


# -- sizes -----------------------------------------------------------------------------------------

LARGE = [
    ("mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=axb", Prop.FWD),
    ("g64mb32ic64ih56oc64oh56kh3ph1", Prop.FWD),
    ("mb8ic320id20oc320od20kd3pd1 dt=f16 tag=axb", Prop.BWD_W),
]


@pytest.mark.every(4)
@pytest.mark.parametrize(("text", "prop"), LARGE, ids=str)
def test_large_problems_shrink(text: str, prop: Prop) -> None:
    asked = question(text, prop)
    small, remark = shrunk(asked)
    p, q = problem_of(asked), problem_of(small)
    assert products(small) <= PRODUCTS < products(asked)
    assert f"shrunk to {q}" in remark
    assert (q.k, q.stride, q.dilation, q.pad_lo, q.dtypes) == (
        p.k,
        p.stride,
        p.dilation,
        p.pad_lo,
        p.dtypes,
    )
    assert q.pad_hi == p.pad_hi  # tails stay as they are
    for compute, schedule in small.steps():
        assert why_not(schedule, compute, SM90) is None
    if "anew" not in remark:
        assert small.schedule is None or small.schedule in [c for _, c in asked.steps()]


def test_small_problems_and_given_schedules_stay() -> None:
    asked = question(planted.PLAIN, schedule=planted.GATHER)
    assert shrunk(asked) == (asked, "")
    asked = question(
        "mb64ic64ih56oc64oh56kh3ph1 dt=f16 tag=axb",
        schedule="mb:1 oh:4 ow:8 oc:64 ic:64 | a=box b=box swap=1",
    )
    small, remark = shrunk(asked)
    assert small.schedule == asked.schedule and "anew" not in remark
    assert problem_of(small).o[0] % 4 == 0 and problem_of(small).o[1] % 8 == 0  # boxes still divide
    assert shrunk(asked, limit=1 << 60) == (asked, "")


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("words", ["pack=a", "pack=b", "pack=a.b.c"])
def test_a_copy_has_no_say_in_the_size(words: str) -> None:
    """Its kernel comes first, the schedule of the main one is kept."""
    asked = question(
        "mb64ic64ih56oc64oh56kh3ph1 dt=f16", schedule=f"mb.oh.ow:64 oc:64 ic:64 | mma | {words} stages=2"
    )
    small, remark = shrunk(asked)
    assert small.schedule == asked.schedule and "shrunk to" in remark and "anew" not in remark
    assert products(small) <= PRODUCTS
    given = replace(asked, schedule=None)
    assert any(a.does == "pack" for a, _ in given.steps())  # heuristics have copies here as well
    kept = shrunk(given)[0].schedule
    assert kept is None or kept in [c for a, c in given.steps() if a.does == "compute"]


def test_a_bug_is_found_in_the_small_size() -> None:
    bug = next(b for b in planted.PASSES if b.stage == "hoist")
    with planted.planted_pass(bug):
        found = blame(LARGE[0][0], "fwd", SM90, "mb.oh.ow:64 oc:64 ic:32 | mma", parts=("ir",))
    assert found.stage == "hoist" and "shrunk to" in found.text and "+++ hoist" in found.diff


# -- the watch on the simplifier -------------------------------------------------------------------


def test_the_report_of_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was given, what it made of it, a point, and the conditions that hold there."""
    a, b = Var("a"), Var("b")
    facts = Facts().with_range(a, 0, 20).with_range(b, 0, 20).assume(eq(a % 4, 0)).assume(a < b)
    honest = fixpoint.RULES[Mod]
    monkeypatch.setitem(
        fixpoint.RULES, Mod, lambda e, f, again: Const(0) if e.b is Const(6) else honest(e, f, again)
    )
    with audited(), pytest.raises(Unsound) as caught:
        simplify((a + b) % 6, facts)
    told = str(caught.value)
    assert "`(a + b) % 6` became `0`, wrong at a=" in told and "a < b" in told
    at = dict(word.split("=") for word in caught.value.at.split(":")[0].split(", "))
    assert int(at["a"]) % 4 == 0 and int(at["a"]) < int(at["b"]) <= 20
    assert (int(at["a"]) + int(at["b"])) % 6
    simplify((a + b) % 6, Facts())  # no witness is registered any more


def test_points_are_those_that_the_facts_allow() -> None:
    a, b, c = Var("a"), Var("b"), Var("c")
    facts = (
        Facts()
        .with_range(a, -2, 7)
        .with_multiple(a, 3)
        .assume(a + b < 4)
        .with_range(b - c, 0, 2)
        .with_range(Var("other"), 0, 1)
    )
    points = AssignedPoints.draw((a,), facts, np.random.default_rng(0))
    assert points is not None and set(points.at) == {a, b, c}  # what bears on it is drawn with it
    x, y, z = (points.at[v] for v in (a, b, c))
    assert set(x) == {0, 3, 6} and (x + y < 4).all() and ((0 <= y - z) & (y - z <= 2)).all()
    none = facts.assume(a > 100)
    assert AssignedPoints.draw((a,), none, np.random.default_rng(0)) is None


@pytest.mark.slow
def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bisection.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(program, {})
    assert "all right" in capsys.readouterr().out
    for line in re.findall(r"^transconv (bisect .*)$", page, re.MULTILINE):
        parser().parse_args(shlex.split(line))


# -- the command -----------------------------------------------------------------------------------


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bisect",
        *planted.PLAIN.split(),
        "--prop",
        "fwd",
        "--target",
        "sm_90",
        "--schedule",
        planted.GATHER,
        "--parts",
        "ir",
    ]
    assert main(words) == 0
    assert "every stage is right" in capsys.readouterr().out
    bug = replace(planted.PASSES[0], problem=planted.PLAIN)
    with planted.planted_pass(bug):
        assert main(words) == 1
        assert "WRONG in stage gridwise" in capsys.readouterr().out
        assert main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["stage"] == "gridwise" and told["rule"] == "" and "elements" in told["verdict"]
    assert main([*words[:-1], "ir,all"]) == 2
    assert "unknown all" in capsys.readouterr().err
