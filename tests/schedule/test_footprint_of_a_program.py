"""The box of each tensor that one program reads or writes: that of the shared-memory promotion of a first
layer, and of drawn problems and schedules that of all elements that are touched."""

from __future__ import annotations

from math import prod
from random import Random

import numpy as np
import pytest

from transconv.__main__ import main
from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.ir import Evaluator, Memory, View
from transconv.schedule import Schedule, footprint
from transconv.target import TARGETS
from transconv.verify.fuzz import legal_schedules

FIRST_LAYER = "mb128ic4ih224oc64oh112kh7sh2ph3 dt=f16 tag=nChw4c:oIhw4i:nchw"


def boxes(compute: Compute, schedule: str) -> dict[str, tuple[int, ...]]:
    chosen = Schedule.parse(schedule)
    return {v.tensor.name: footprint(chosen, compute, v) for v in compute.views()}


def test_a_first_layer_is_promoted_as_the_emitter_of_mlir_does() -> None:
    """16 by 16 results of 64 features, a window of 7 at stride 2: memref<1x1x37x37xvector<4xf16>> and
    memref<64x1x7x7xvector<4xf16>>."""
    (compute,) = computes(ConvProblem.parse(FIRST_LAYER), Prop.FWD)
    found = boxes(compute, "mb:1 oh:16 ow:16 oc:64 ic:4 | mma")
    assert found == {"src": (1, 4, 37, 37), "wei": (64, 4, 7, 7), "dst": (1, 64, 16, 16)}


def touched(schedule: Schedule, compute: Compute, view: View) -> tuple[int, ...]:
    """The extents by going through all points of all programs."""
    sizes = {x.name: x.size for x in compute.axes}
    within = {a: b for b in schedule.blocks for a in b.axes if compute.kind(a) != "K"}
    points = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    at = dict(zip(sizes, points, strict=True))
    program = np.zeros(points.shape[1], np.int64)
    for axis, size in sizes.items():
        if compute.kind(axis) == "K":
            continue
        block = within.get(axis)
        if block is None:
            program = program * size + at[axis]
        elif axis == block.first:
            flat = np.ravel_multi_index([at[a] for a in block.axes], [sizes[a] for a in block.axes])
            program = (
                program * (prod(sizes[a] for a in block.axes) // block.extent + 1) + flat // block.extent
            )
    run = Evaluator(Memory({}), {}, 1)
    run.env.update({x.var: at[x.name] for x in compute.axes})
    _, each = np.unique(program, return_inverse=True)
    found = []
    for dim in view.dims:
        coord = np.broadcast_to(run.compute(dim.coord), program.shape)
        low, high = np.full(each.max() + 1, 1 << 40), np.full(each.max() + 1, -1 << 40)
        np.minimum.at(low, each, coord)
        np.maximum.at(high, each, coord)
        found.append(int((high - low).max()) + 1)
    return tuple(found)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 200, 20))]
)
def test_boxes_of_drawn_programs_are_those_of_all_their_points(first: int) -> None:
    seen = 0
    for number in range(first, first + 20):
        rng = Random(f"footprints {number}")
        sizes = {
            "mb": (1, 2, 3),
            "ic": (2, 4),
            "ih": (5, 6, 8, 12),
            "oc": (3, 4),
            "kh": (1, 3),
            "sh": (1, 2),
        }
        drawn = {name: rng.choice(n) for name, n in (sizes | {"ph": (0, 1), "dh": (0, 1)}).items()}
        problem = ConvProblem.parse("".join(f"{name}{n}" for name, n in drawn.items()))
        for compute in computes(problem, rng.choice([*Prop])):
            schedule = legal_schedules.schedule(rng, [compute], TARGETS["sm_90"])
            for view in compute.views() if schedule else ():
                assert footprint(schedule, compute, view) == touched(schedule, compute, view), (
                    f"{problem} {schedule} {view}"
                )
                seen += 1
    assert seen >= 30


def test_a_coordinate_that_is_no_sum_may_be_anywhere() -> None:
    compute = parse(
        "compute gathered\ntensor I i32 [8]\ntensor X f32 [50, 9]\naxes m=8 n=9\nread i = I[m]\n"
        "read x = X[i, n // 3]\nstore Y[m, n] = x"
    )
    assert boxes(compute, "m:2 n:4 | fma") == {"I": (2,), "X": (50, 9), "Y": (2, 4)}


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "sm_90", "--schedule", "mb:1 oh:16 ow:16 oc:64 kw.ic:32 | mma"]
    assert main(["show", FIRST_LAYER, *words]) == 0
    printed = capsys.readouterr().out
    assert "src          1 x 4 x 37 x 37 of mb=128 x ic=4 x ih=224 x iw=224" in printed
    assert "wei          64 x 4 x 7 x 7 of oc=64 x ic=4 x kh=7 x kw=7" in printed
