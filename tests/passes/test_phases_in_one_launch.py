"""Stride phases in one launch: the same answer in any order of execution, and separate launches where
one launch is wrong or impossible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.passes.test_explicit import ROLE, answer
from tests.reference import convolve, integers
from tests.stages import SM90, shapes
from transconv import ir
from transconv.__main__ import main
from transconv.conv import CompiledDirection, ConvWorkload, Epilogue, compiler, marked
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.cost import AtSizes
from transconv.ir.rules.verifier import verify
from transconv.runtime import check_records
from transconv.runtime import compiler as runtime_compiler
from transconv.schedule.schedule import Schedule
from transconv.verify.machine import executable

BWD_D = Prop.BWD_D
EVEN = "mb5ic16ih16oc32oh8kh3sh2ph1"
ODD = "mb3ic16ih15iw13oc48oh8ow7kh3kw3sh2sw2ph1pw1"
BLOCKS = f"mb:4 qh:2 qw:8 ic:16 oc:16 | {ROLE} c=box"
CASES = [
    (EVEN, f"{BLOCKS} programs=3"),
    ("mb5ic16ih16oc32oh8kh3sh2ph1", f"qh:8 qw:8 ic:16 oc:16 | {ROLE} c=box programs=3"),  # whole images
    (EVEN, f"{BLOCKS} programs=2 stages=3"),
    (ODD, f"{BLOCKS.replace(' c=box', '')} programs=3 stages=2"),
    (
        "mb2ic16ih8iw32oc16oh4ow16kh5kw5sh2sw2ph2pw2",
        f"mb:2 qh:4 qw:8 ic:16 oc:16 | {ROLE} c=box programs=1",
    ),
    (EVEN, f"{BLOCKS} programs=3 consumers=2"),
    (EVEN, f"{BLOCKS} programs=5 consumers=2 stages=2"),
    (ODD, f"{BLOCKS.replace(' c=box', '')} programs=3 consumers=2 stages=5"),
    (
        "mb2ic16ih8iw32oc16oh4ow16kh5kw5sh2sw2ph2pw2",
        f"mb:2 qh:4 qw:8 ic:16 oc:16 | {ROLE} c=box programs=1 consumers=2",
    ),
    ("mb9ic16ih16oc32oh4kh5sh4ph1", f"mb:4 qh:4 qw:4 ic:16 oc:16 | {ROLE} programs=2"),
]


def problem(text: str) -> ConvProblem:
    return ConvProblem.parse(f"{text} dt=f16 tag=axb")


@pytest.mark.every(16)
@pytest.mark.parametrize(("text", "schedule"), CASES, ids=[c[0] for c in CASES])
def test_one_launch_does_all_phases(text: str, schedule: str) -> None:
    p = problem(text)
    plan = compiler.build(p, BWD_D, SM90, Schedule.parse(schedule))
    (step,) = plan.steps
    verify(step.kernel, "explicit")
    for role in ir.find(step.kernel, ir.Role):
        assert len([x for x in ir.find(role, ir.For) if x.kind == "dealt"]) > 1
    rng = np.random.default_rng(0)
    values = {n: integers(rng, shapes(p)[n], 2) for n in ("dst", "wei")}
    expected = convolve(p, BWD_D, values["dst"], values["wei"])
    for seed in range(3):
        assert np.array_equal(answer(p, BWD_D, [step.kernel], seed, values), expected)
    assert "bwd_d of" in step.source.splitlines()[0]


def test_programs_take_turns() -> None:
    """The tile after the last of a phase goes to the program after the one that had the last."""
    (step,) = compiler.build(problem(CASES[3][0]), BWD_D, SM90, Schedule.parse(CASES[3][1])).steps
    dealt = [x for x in ir.find(ir.find(step.kernel, ir.Role)[0], ir.For) if x.kind == "dealt"]
    assert [loop.stop for loop in dealt] == [4] * 4
    assert [str(loop.start) for loop in dealt] == [
        "program",
        "((program + 2) % 3)",
        "((program + 1) % 3)",
        "program",
    ]


TILES = [  # of a few features, of groups, with a copy of the weight
    ("mb2?ic3ih9?iw12?oc16oh5ow6kh5kw5sh2sw2ph2pw2", "mb.qh.qw:16 ic:16 oc:16 | mma | stages=2 warps=4"),
    ("g16mb2?ic16ih10?oc16oh5kh3sh2ph1", "mb.qh.qw:8 g:16 | fma | warps=4"),
    ("g16mb1?ic16ih10?oc16oh4kh4sh2", "mb.qh.qw:8 g:16 | fma | pack=b"),
]
NINE = "g16mb1?ic16ih10?oc16oh3kh4sh3", TILES[2][1]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("text", "schedule"), [*TILES, NINE], ids=["few", "groups", "copied", "nine phases"]
)
def test_a_program_finds_its_phase(text: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the least sizes, of one tile and of several, some phases with a row less: in the IR's
    interpreter, and in Triton's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plain, names = marked(f"{text} dt=f16 tag=axb")
    like = ConvProblem.parse(plain)
    work = ConvWorkload(like, BWD_D, Epilogue(), names)
    plan, run = (
        runtime_compiler.build(work, t, Schedule.parse(schedule), None, False, CompiledDirection)
        for t in (SM90, executable(SM90, "cpu"))
    )
    assert [s.does for s in plan.steps].count("compute") == 1
    kernel, stride = plan.steps[-1].kernel, like.stride[0]
    assert ir.Kernel.parse(str(kernel)) is kernel
    assert len(ir.find(kernel, ir.If)) >= stride**2 == len(work.computations) == len(plan.formulas())
    assert plan.required is not None
    for at, (mb, h, w) in enumerate([(1, 4, 4), (1, 5, 9), (2, 9, 8)]):
        assert not plan.required.sizes.why_not({"MB": mb, "IH": h, "IW": w})
        o = [(n + 2 * like.pad_lo[0] - like.k[0]) // stride + 1 for n in (h, w)]
        p = like.at(mb, (h, w), tuple(o))
        rng = np.random.default_rng(at)
        values = {n: integers(rng, shapes(p)[n], 2) for n in ("dst", "wei")}
        expected = convolve(p, BWD_D, values["dst"], values["wei"])
        kernels = [s.kernel.at({"MB": mb, "IH": h, "IW": w}) for s in plan.steps]
        assert np.array_equal(answer(p, BWD_D, kernels, at, values), expected), (mb, h, w)
        assert np.array_equal(launched(run, p, values), expected), (mb, h, w)


@pytest.mark.slow
def test_positions_that_are_written_out_stay_apart() -> None:
    """Their compiler would keep the registers of all phases."""
    plain, names = marked(f"{TILES[1][0]} dt=f16 tag=axb")
    work = ConvWorkload(ConvProblem.parse(plain), BWD_D, Epilogue(), names)
    schedule = Schedule.parse("mb.qh:4 qw:2 g:16 | fma | regs=qw")
    assert len(runtime_compiler.build(work, SM90, schedule, None, False, CompiledDirection).steps) == 4


@pytest.mark.slow
def test_a_launch_has_the_programs_of_all_phases() -> None:
    """And its estimate counts the launch once."""
    plain, names = marked(f"{TILES[0][0]} dt=f16 tag=axb")
    work = ConvWorkload(ConvProblem.parse(plain), BWD_D, Epilogue(), names)
    plan = runtime_compiler.build(work, SM90, Schedule.parse(TILES[0][1]), None, False, CompiledDirection)
    (step,) = plan.steps
    assert step.triton.sizes is not None
    for mb, h, w in ((1, 2, 2), (3, 7, 10), (16, 224, 225)):
        tiles = sum(-(-mb * ((h + 1 - r) // 2) * ((w + 1 - q) // 2) // 16) for r in (0, 1) for q in (0, 1))
        assert step.triton.numbers(mb, h, w)[0][0] == tiles
    each = [AtSizes(step.schedule, c, SM90, n > 0) for n, c in enumerate(work.computations)]
    apart = [AtSizes(step.schedule, c, SM90) for c in work.computations]
    counts = [ir.values_of(a.counts, names_of(work))(1, 2, 2) for a in each]
    one, several = (sum(a.us(*c) for a, c in zip(found, counts, strict=True)) for found in (each, apart))
    assert one < several - 3 * SM90.rates.triton.launch_us


def names_of(work: ConvWorkload) -> tuple[str, ...]:
    named = work.computations[0].named
    assert named is not None
    return named.names


def launched(plan: CompiledDirection, p: ConvProblem, values: dict[str, np.ndarray]) -> np.ndarray:
    """The result of a plan in Triton's interpreter."""
    given = {
        n: torch.from_numpy(v).half().contiguous(memory_format=torch.channels_last)
        for n, v in values.items()
    }
    src = torch.full(shapes(p)["src"], torch.nan, dtype=torch.half).contiguous(
        memory_format=torch.channels_last
    )
    plan.launch(src=src, **given)
    return np.asarray(src.float().numpy())


def test_the_page_shows_the_one_launch(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "show",
        f"{EVEN} dt=f16 tag=axb",
        "--prop",
        "bwd_d",
        "--target",
        "sm_90",
        "--schedule",
        CASES[0][1],
        "--stage",
        "together",
    ]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "together: all stride phases in one launch" in told and told.count("dealt programs=3") == 8


def test_longest_sums_first() -> None:
    (step,) = compiler.build(problem(CASES[3][0]), BWD_D, SM90, Schedule.parse(CASES[3][1])).steps
    fetches = ir.find(step.kernel, ir.Role)[1]
    steps = [x.stop for x in ir.find(fetches, ir.For) if x.kind == "serial"]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (EVEN, BLOCKS),  # a program for every tile
        (EVEN, "mb.qh.qw:64 ic:16 oc:16 | mma | programs=3"),  # not explicit
    ],
    ids=["not dealt", "not explicit"],
)
def test_what_stays_apart(text: str, schedule: str) -> None:
    assert len(compiler.build(problem(text), BWD_D, SM90, Schedule.parse(schedule)).steps) == 4


@pytest.mark.slow
def test_phases_whose_own_schedules_differ_take_one_that_is_as_fast_for_all() -> None:
    """A launch of each takes longer than what a common tile loses; given schedules are kept."""
    p = ConvProblem.parse("mb8ic64ih160oc256oh80kh3sh2ph1 dt=bf16:f8e4m3:f8e5m2 tag=nhwc")
    apart = compiler.plan_steps(p, BWD_D, SM90, None, Epilogue())
    schedules = {c for a, c in apart if a.phase}
    assert len(schedules) > 1
    plan = compiler.build(p, BWD_D, SM90, None, Epilogue())
    assert [s.compute.name for s in plan.steps] == ["pack_wei", "bwd_d"]
    own = {a.name: c for a, c in apart}
    kept = compiler.build(p, BWD_D, SM90, None, Epilogue(), lambda a, t: own[a.name])
    assert {s.schedule for s in kept.steps if s.compute.phase} == schedules


def test_phases_are_launched_one_by_one_where_together_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))  # other tests build the same kernel
    check_records.forget()
    text, schedule = CASES[0]
    (step,) = compiler.build(problem(text), BWD_D, SM90, Schedule.parse(schedule)).steps
    check_records.record(step.digest, check_records.WRONG)
    try:
        plan = compiler.build(problem(text), BWD_D, SM90, Schedule.parse(schedule))
        assert len(plan.steps) == 4 and plan.rejected == 1
    finally:
        check_records.forget()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("share", "words"),
    [("%2", "c=box programs=3"), ("", "programs=3"), ("%2", "c=box programs=2 consumers=2")],
    ids=["boxes", "any", "in turns"],
)
def test_sizes_are_arguments_of_one_launch(share: str, words: str) -> None:
    """Also of sizes with fewer tiles than programs. Where a plane may lack its last row (``any``), the
    phases' boxes differ, and results are stored without them."""
    plain, names = marked(f"mb5?ic16ih16?{share}oc32oh8kh3sh2ph1 dt=f16 tag=axb")
    work = ConvWorkload(ConvProblem.parse(plain), BWD_D, Epilogue(), names)
    schedule = Schedule.parse(f"qh:8 qw:8 ic:16 oc:16 | {ROLE} {words}")
    plan = runtime_compiler.build(work, SM90, schedule, None, False, CompiledDirection)
    (step,) = plan.steps
    assert ir.Kernel.parse(str(step.kernel)) is step.kernel
    assert plan.required is not None and plan.required.names == ("MB", "IH", "IW")
    sizes = [(1, 2, 2), (2, 18, 34)] + [(3, 19, 33), (1, 17, 2)] * (not share)
    for at, (mb, h, w) in enumerate(sizes):
        p = problem(f"mb{mb}ic16ih{h}iw{w}oc32oh{(h + 1) // 2}ow{(w + 1) // 2}kh3kw3sh2sw2ph1pw1")
        rng = np.random.default_rng(at)
        values = {n: integers(rng, shapes(p)[n], 2) for n in ("dst", "wei")}
        expected = convolve(p, BWD_D, values["dst"], values["wei"])
        kernel = step.kernel.at({"MB": mb, "IH": h, "IW": w})
        assert np.array_equal(answer(p, BWD_D, [kernel], at, values), expected), (mb, h, w)
    refused = plan.required.sizes.why_not({"MB": 1, "IH": 3, "IW": 4})
    assert refused == ("(IH % 2) == 0 does not hold for IH=3" if share else "")
    assert isinstance(step.kernel.sizes, ir.Sizes) and not any(
        "min(" in str(c) for c in step.kernel.sizes.where
    ), "tiles are counted, not programs"
