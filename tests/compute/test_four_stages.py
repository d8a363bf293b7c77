"""What the unit tests of the Gen IR look at (docs/four_stages.md), stage by stage and in one to four
dimensions: a table of their 34 matters, each with the test here that covers it."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod
from pathlib import Path

import pytest

import transconv
from transconv.compute import parse
from transconv.errors import ComputeError
from transconv.schedule import Block, Schedule, programs
from transconv.target import TARGETS

TESTS = Path(__file__).resolve().parents[1]
SM90 = TARGETS["sm_90"]
NAMES, SIZES = ("a", "b", "c", "d"), (3, 2, 5, 40)
POINTWISE = "test_a_pointwise_kernel_by_stage"
REDUCED = "test_a_reduction_by_stage"
# file there, matter, test here (and its file where it is another)
MATTERS = (
    (
        "tiling",
        "a kernel that reads no tensors",
        "compute/test_prologues.py::test_results_that_read_nothing",
    ),
    ("tiling", "a small tensor", "test_small_tensors_are_one_tile"),
    ("tiling", "a large tensor has tiles that fill the chip", "test_large_tensors_have_many_tiles"),
    ("tiling", "nothing to copy", "test_nothing_is_stored"),
    ("tiling", "a copy along memory", "test_a_copy_has_one_run_of_lanes"),
    ("tiling", "a copy that transposes", "test_a_copy_that_transposes_has_a_tile_of_two_sides"),
    ("gridwise", "nothing is returned", "test_nothing_is_stored"),
    ("gridwise", "1D: a result and its store", POINTWISE),
    ("gridwise", "2D: a result, its store, a grid", POINTWISE),
    ("gridwise", "the algorithm of a reduction", REDUCED),
    (
        "gridwise",
        "it follows from strides and sizes",
        "compute/test_reduction_words.py::test_what_a_tile_implies",
    ),
    ("blockwise", "tiles", POINTWISE),
    ("blockwise", "what threads of several warps share", REDUCED),
    ("lanewise", "1D: loads, the operation, a store", POINTWISE),
    ("lanewise", "2D: positions within a tile", POINTWISE),
    ("lanewise", "a copy is a load and a store", "test_a_copy_has_one_run_of_lanes"),
    ("lanewise", "a reduction within a thread", REDUCED),
    ("lanewise", "a reduction across threads", REDUCED),
    ("codegen", "the function and its parameters", POINTWISE),
    ("codegen", "loads, the operation, a store", POINTWISE),
    ("codegen", "several steps are expressions of their operands", "test_steps_are_one_kernel"),
    ("codegen", "whole texts", "backend_triton/test_emit.py::test_emitted_text"),
    ("ops", "tile_region", POINTWISE),
    ("ops", "lane_id, local_id", POINTWISE),
    ("ops", "global_id", POINTWISE),
    ("ops", "workgroup_id, workgroup_size", POINTWISE),
    (
        "ops",
        "barrier",
        "backend_triton/test_overlapping_launches.py::test_explicit_kernels_lay_out_barriers_meanwhile",
    ),
    ("ops", "check", "compute/test_views.py::test_an_index_beyond_the_end_is_told_where_asked"),
    ("ops", "pointwise", "test_steps_are_one_kernel"),
    ("ops", "vector_load, vector_store", "test_accesses_are_contiguous_and_aligned"),
    ("ops", "copy", "test_a_copy_has_one_run_of_lanes"),
    ("fuse", "add", POINTWISE),
    ("fuse", "mul and add are one kernel", "test_steps_are_one_kernel"),
    ("fuse", "what only passes a value on is no operation", "test_a_value_that_is_passed_on_is_a_copy"),
)


def test_every_matter_has_its_test() -> None:
    counts = Counter(file for file, _, _ in MATTERS)
    assert counts == {
        "tiling": 6,
        "gridwise": 5,
        "blockwise": 2,
        "lanewise": 5,
        "codegen": 4,
        "ops": 9,
        "fuse": 3,
    }
    for _, matter, test in MATTERS:
        file, _, name = test.rpartition("::")
        path = TESTS / file if file else Path(__file__)
        assert f"def {name}(" in path.read_text(encoding="utf-8"), matter


@lru_cache
def stages(body: str, rank: int, schedule: str) -> dict[str, str]:
    """The kernel after each pass, and its source, of a text with axes ALL, the last of them LAST."""
    names = NAMES[-rank:]
    axes = " ".join(f"{a}={n}" for a, n in zip(names, SIZES[-rank:], strict=True))
    for word, said in (
        ("ALL", ", ".join(names)),
        ("ROWS", ", ".join(names[:-1]) or "0"),
        ("LAST", names[-1]),
        ("DOTS", ".".join(names)),
    ):
        body, schedule = body.replace(word, said), schedule.replace(word, said)
    text = f"compute p{rank}\naxes {axes}\n{body}"
    found = {stage: str(kernel) for stage, kernel in transconv.lower(text, schedule, "sm_90")}
    return found | {"source": transconv.compile(text, target="sm_90", schedule=schedule).source}


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_pointwise_kernel_by_stage(rank: int) -> None:
    found = stages("read x = X[ALL]\nread y = Y[ALL]\nstore Z[ALL] = x + y", rank, "DOTS:32 | fma")
    naive, grid, block, lane, final = (
        found[s] for s in ("naive", "gridwise", "blockwise", "lanewise", "final")
    )
    assert naive.count(" parallel:") == rank and naive.count("store(Z") == 1
    tiles = -(-prod(SIZES[-rank:]) // 32)
    for kernel in (grid, block):
        assert f"for pid in 0..{tiles} grid:" in kernel and "for m in 0..32 tile side=M:" in kernel
    assert "m[0:32]" in lane and " tile " not in lane
    assert (lane.count("= load("), lane.count("store(")) == (2, 1)
    # The tile's places follow one another: one address for all tensors, without a division.
    assert "(pid * 32) + m[0:32]" in final and "//" not in final
    source = found["source"]
    assert f"def p{rank}_" in source and "(X, Y, Z):" in source
    assert (source.count("tl.load("), source.count("tl.store("), source.count(" + y.to(")) == (2, 1, 1)
    assert "tl.program_id(0)" in source and "tl.arange(0, 32)" in source


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "warps"),
    [("LAST:64 | fma | warps=1", "warp"), ("LAST:64 | fma | warps=4", "block"), ("LAST:1 | fma", "lane")],
)
def test_a_reduction_by_stage(rank: int, schedule: str, warps: str) -> None:
    found = stages("read x = X[ALL]\nlet s = sum(x; LAST)\nstore Z[ROWS] = s", rank, schedule)
    assert "register s: f32 = 0.0" in found["gridwise"]
    within = "tl.sum(" in found["source"]
    assert within is (warps != "lane") is ("sum(f32(x), over=" in found["lanewise"])
    steps = 40 if warps == "lane" else 1
    assert ("for step in" in found["final"]) is (steps > 1)
    assert found["source"].count("tl.store(") == 1


def test_small_tensors_are_one_tile() -> None:
    compute = parse("compute p\naxes a=4 b=4\nread x = X[a, b]\nstore Y[a, b] = x + 1")
    assert programs(transconv.compile(compute, target="sm_90").schedule, compute) == 1


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_large_tensors_have_many_tiles(rank: int) -> None:
    names, sizes = NAMES[:rank], (1 << 20, *(8,) * (rank - 1))
    axes, at = " ".join(f"{a}={n}" for a, n in zip(names, sizes, strict=True)), ", ".join(names)
    compute = parse(f"compute p\naxes {axes}\nread x = X[{at}]\nstore Y[{at}] = x + 1")
    schedule = transconv.compile(compute, target="sm_90").schedule
    assert programs(schedule, compute) >= SM90.sms


def test_nothing_is_stored() -> None:
    with pytest.raises(ComputeError, match="store"):
        parse("compute p\naxes a=4\nread x = X[a]")


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_copy_has_one_run_of_lanes(rank: int) -> None:
    found = stages("read x = X[ALL]\nstore Z[ALL] = x", rank, "DOTS:32 | fma")
    assert (found["lanewise"].count("= load("), found["lanewise"].count("store(")) == (1, 1)
    assert found["lanewise"].count("lanes ") == 1


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_copy_that_transposes_has_a_tile_of_two_sides(rank: int) -> None:
    names = NAMES[:rank]
    axes, at = " ".join(f"{a}=64" for a in names), ", ".join(names)
    back = ", ".join(reversed(names))
    made = transconv.compile(
        f"compute p\naxes {axes}\nread x = X[{at}]\nstore Y[{back}] = x + 1", target="sm_90"
    ).schedule
    assert isinstance(made, Schedule) and len(made.blocks) == 2
    assert {b.axes[-1] for b in made.blocks} == {names[0], names[-1]}  # both sides in runs of memory
    assert all(isinstance(b, Block) and b.extent >= 16 for b in made.blocks)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_steps_are_one_kernel(rank: int) -> None:
    found = stages(
        "read x = X[ALL]\nread y = Y[ALL]\nread z = Z[ALL]\nlet m = x*y\nstore R[ALL] = m + z",
        rank,
        "DOTS:32 | fma",
    )
    source = found["source"]
    assert source.count("@triton.jit") == 1
    assert (source.count("tl.load("), source.count("tl.store(")) == (3, 1)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_accesses_are_contiguous_and_aligned(rank: int) -> None:
    """Without a mask, a division or a gap, so that Triton joins neighbours."""
    found = stages("read x = X[ALL]\nstore Z[ALL] = x*2", rank, "DOTS:8 | fma")  # 8 divides every size
    assert "mask=" not in found["source"].split("def ")[1]


def test_a_value_that_is_passed_on_is_a_copy() -> None:
    found = stages("read x = X[ALL]\nlet y = x\nstore Z[ALL] = y", 1, "DOTS:32 | fma")
    final = found["final"]
    assert (final.count("= load("), final.count("store(")) == (1, 1)
    assert "let y = f32(x)" in final and "store(Z, d, f32(y)" in final  # casts alone
