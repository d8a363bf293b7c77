"""Short rows at odd addresses: how threads share them, and steps that are written out."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
import torch.nn.functional as F

from bench import short_rows
from transconv.backend_triton import Resources, compile_offline
from transconv.compute import kernels, library, parse
from transconv.compute.library import LibraryFormula, Strided
from transconv.cost import estimate
from transconv.ir import DType, bf16, f16, f32
from transconv.runtime import build_compute
from transconv.runtime.steps import job_of
from transconv.schedule import Schedule, divided, kept, why_not
from transconv.selection.proposals import heuristics
from transconv.target import TARGETS, Target
from transconv.verify.computation import ComputationCase
from transconv.verify.data import torch_dtype

H200 = replace(TARGETS["sm_90"], bandwidth_gbs=4814.0)
SM90, HERE = Target.parse("sm_90"), TARGETS["interpreter"]
WRITTEN = "n:4 k:{k} | fma | unroll=1 late=1 stages=1 warps=1"


def softmax(length: int, dtype: DType = bf16, rows: int = 4096) -> LibraryFormula:
    return library.softmax(Strided.dense((rows, length), dtype), 1)


def formulas(length: int, dtype: DType, gap: int) -> list[LibraryFormula]:
    """Of seven rows, with so many elements between them."""
    x, w = Strided((7, length), (length + gap, 1), dtype), Strided.dense((length,), dtype)
    return [
        library.softmax(x, 1),
        library.log_softmax(x, 1),
        library.layer_norm(x, 1, w, w),
        library.rms_norm(x, 1, w),
        library.reduced("sum", x, [1]),
        library.reduced("amax", x, [1]),
    ]


LAID_OUT = [
    (49, "n:16 k:64 | fma | warps=2", "block"),
    (49, "n:16 k:64 | fma | warps=1", "warp"),
    (49, "n:16 k:16 | fma | late=1 unroll=1 warps=4", "warp"),
    (50, "n:16 k:64 | fma | warps=2", "warp"),
    (52, "n:16 k:128 | fma | warps=4", "warp"),
    (77, "n:8 k:128 | fma | warps=2", "block"),
    (100, "n:8 k:256 | fma | warps=4", "block"),
]


def test_threads_share_rows_as_triton_lays_them_out() -> None:
    """Those of several warps meet in shared memory, others nowhere."""
    jobs = []
    for length, words, said in LAID_OUT:
        made, schedule = parse(softmax(length).text), Schedule.parse(f"{words} stages=1")
        assert divided(schedule, made, SM90) == said
        jobs.append(job_of(build_compute(made, SM90, schedule).steps[0], SM90))
    found = compile_offline([replace(job, words=False) for job in jobs])
    assert all(isinstance(x, Resources) for x in found)
    assert [getattr(x, "shared_bytes", 0) > 0 for x in found] == [said == "block" for *_, said in LAID_OUT]


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(12))
def test_written_steps_are_right(seed: int) -> None:
    """Two formulas at a drawn length, of any type, forward and backward; also of rows with gaps."""
    written_steps(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 60))
def test_written_steps_are_right_at_many_lengths(seed: int) -> None:
    written_steps(seed)


def written_steps(seed: int) -> None:
    """Raises AssertionError where a kernel's result is wrong."""
    draw = Random(seed)
    length, dtype, gap = draw.choice([49, draw.randint(2, 300)]), draw.choice([bf16, f16, f32]), seed % 3
    width = draw.choice([w for w in (1, 2, 4, 8, 16, 32) if w * 16 >= length and w < length])
    schedule = Schedule.parse(WRITTEN.format(k=width).replace(" k:1 ", " "))
    for formula in draw.sample(formulas(length, dtype, gap), 2):
        for text in (formula.text, *(g.text for g in formula.gradients)):
            for made in kernels(parse(text)):
                if why_not(schedule, made, HERE) is None:
                    case = ComputationCase(made, "float", seed)
                    assert not case.launched(build_compute(made, HERE, schedule), "cpu").problem, str(made)


@pytest.mark.parametrize("length", [3, 49, 130])
def test_written_steps_are_torchs(length: int) -> None:
    x = torch.randn(7, length, generator=torch.Generator().manual_seed(length))
    schedule = Schedule.parse(WRITTEN.format(k=2 if length == 3 else 16))
    for formula, theirs in (
        (softmax(length, f32, 7), torch.softmax(x.double(), 1)),
        (library.log_softmax(Strided.dense((7, length), f32), 1), torch.log_softmax(x.double(), 1)),
        (library.layer_norm(Strided.dense((7, length), f32), 1), F.layer_norm(x.double(), (length,))),
    ):
        made, y = parse(formula.text), torch.full_like(x, float("nan"))
        build_compute(made, HERE, schedule).launch(X=x, Y=y)
        assert (y.double() - theirs).abs().max() < 4e-6


def test_rows_of_attention_with_bias_and_mask_are_torchs() -> None:
    """As in windows of Swin, two of them, one image: a bias for each head, a mask for each window."""
    case = short_rows.cases(lengths=(), elements=49 * 49 * 192)[-1]
    made = parse(case.text.replace("w=64", "w=2").replace("i=49", "i=5"))
    draw = torch.Generator().manual_seed(0)
    given = {t.name: torch.randn(t.shape, generator=draw).to(torch_dtype(t.dtype)) for t in made.tensors}
    schedule = WRITTEN.format(k=8).replace("n:4", "n.w.h.i:4")
    build_compute(made, HERE, Schedule.parse(schedule)).launch(**given)
    x, b, m, y = (given[name].double() for name in "XBMY")
    want = torch.softmax(x + b + m[:, None], -1)
    assert (y - want).abs().max() < 2**-8 * want.max()


def test_written_steps_load_a_row_once() -> None:
    made, schedule = parse(softmax(49).text), Schedule.parse(WRITTEN.format(k=8))
    assert kept(schedule, made) == "held"
    assert build_compute(made, SM90, schedule).source.count("tl.load(X") == 7
    rolled = schedule.with_words(unroll=0)
    assert kept(rolled, made) == "again"
    in_place = parse(softmax(49).text.replace("Y[", "X["))
    assert kept(schedule, in_place) == "again"


@pytest.mark.parametrize(("rows", "us"), [(301056, 52.7), (150528, 29.6), (75264, 14.4), (37632, 8.64)])
def test_rows_that_warps_share_cost_more(rows: int, us: float) -> None:
    """``us``: of a tile in two warps on an H200 (bench/results/h200_swin_kernels.csv)."""
    made = parse(softmax(49, rows=rows).text)
    two, one = (
        estimate(Schedule.parse(f"n:16 k:64 | fma | stages=1 warps={n}"), made, H200) for n in (2, 1)
    )
    assert us < two < 1.3 * us and one < us
    chosen = heuristics.default(made, H200)
    assert divided(chosen, made, H200) == "warp" and estimate(chosen, made, H200) <= one


def test_rows_at_multiples_of_sixteen_bytes_are_one_tile() -> None:
    for length in (64, 72, 128):
        chosen = heuristics.default(parse(softmax(length).text), SM90)
        assert not chosen.unroll and kept(chosen, parse(softmax(length).text)) == "held"
