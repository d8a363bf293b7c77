"""The pictures compared with what they show, element by element: elements read, phases, padding, steps
of roles."""

from __future__ import annotations

import re
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, Prop, computes
from transconv.passes import lower
from transconv.report import grid, planes, timeline
from transconv.report.planes import FILLED, FIRST, LATER, Plane, first_tile, plane_of
from transconv.schedule import Schedule, Scheduled
from transconv.target import TARGETS

SM90 = TARGETS["sm_90"]
STRIDED = ConvProblem.parse("mb2ic16ih12oc32oh6kh3sh2ph1 dt=f16 tag=nhwc")


def planes_of(compute: Compute, schedule: str) -> list[Plane]:
    seen = Scheduled(compute, Schedule.parse(schedule), SM90).grouped
    tile = first_tile(seen, Schedule.parse(schedule))
    found = [plane_of(r.view, seen, tile) for r in seen.reads]
    found += [plane_of(w.view, seen, tile, True) for w in seen.writes]
    return [p for p in found if p is not None]


def places(plane: Plane, *states: int) -> set[tuple[int, int]]:
    chosen = np.argwhere(np.isin(plane.state, states))
    return {(int(y) + plane.top, int(x) + plane.left) for y, x in chosen}


def test_a_strided_window_reads_what_the_relation_says() -> None:
    source, weights, result = planes_of(computes(STRIDED, Prop.FWD)[0], "mb.oh.ow:16 oc:32 ic:16 | mma")
    tile = [divmod(i, 6) for i in range(16)]
    asked = {
        (oh * 2 + kh - 1, ow * 2 + kw - 1) for oh, ow in tile for kh, kw in product(range(3), repeat=2)
    }
    first = {(oh * 2 - 1, ow * 2 - 1) for oh, ow in tile}
    inside = {(y, x) for y, x in asked if 0 <= y < 12 and 0 <= x < 12}
    assert source.dims == ("ih", "iw") and source.phases == (2, 2)
    assert places(source, FIRST, LATER) == inside and places(source, FILLED) == asked - inside
    assert places(source, FIRST) == first & inside
    assert (source.touched, source.outside) == (len(inside), len(asked - inside))
    at = source.phase[5 - source.top, 4 - source.left]
    assert dict(source.legend)[int(at)] == "ih mod 2 = 1, iw mod 2 = 0" and len(source.legend) == 4
    assert places(result, FIRST) == set(tile) and result.phases == (1, 1)
    assert weights.touched == 9 and [r.text for r in result.ranges][:2] == ["mb: 0 of 2", "oc: all 32"]


def test_phases_of_a_data_gradient_share_the_result() -> None:
    found: list[tuple[int, int]] = []
    for compute in computes(STRIDED, Prop.BWD_D):
        assert compute.phase
        *_, weights, result = planes_of(compute, "mb:2 qh:6 qw:6 ic:16 oc:32 | mma")
        assert weights.dims == ("kh", "kw") and weights.touched == weights.needed
        assert len(result.legend) == 1
        found += places(result, FIRST)
    assert sorted(found) == list(product(range(12), repeat=2)), "each element belongs to one phase"


def test_maps_and_reductions_have_planes() -> None:
    reads, stores = planes_of(
        parse(
            "compute pool\n tensor x f16 [n=2, c=8, h=9, w=9]\n"
            " axes n=2 c=8 oh=5 ow=5 | kh=3 kw=3\n"
            " read a = x[n, c, oh*2 + kh - 1, ow*2 + kw - 1] else -inf\n"
            " let m = max(a; kh kw)\n store y[n, c, oh, ow] = m"
        ),
        "ow:4 kw:3 | fma",
    )
    assert reads.dims == ("h", "w") and reads.fill == float("-inf") and reads.outside == 9 + 2
    assert (reads.touched, stores.touched, reads.needed) == (2 * 8, 4, 2 * 3)
    gathered = parse(
        "compute rows\n tensor I i64 [3]\n tensor X f32 [4, 20]\n axes n=3 k=20\n"
        " read i = I[n]\n read x = X[i, k]\n store Y[n, k] = x"
    )
    texts = [r.text for p in planes_of(gathered, "k:8 | fma") for r in p.ranges]
    assert any("decided by an index tensor" in t for t in texts)


def test_large_planes_are_scaled_and_say_so() -> None:
    left, *_ = planes_of(
        parse(
            "compute product\n axes m=512 n=256 | k=128\n read a = A[m, k]\n"
            " read b = B[k, n]\n store C[m, n] = sum(a*b; k)"
        ),
        "m:128 n:64 k:64 | mma",
    )
    assert left.scale == 9 and left.touched == 128 * 128
    assert "A cell stands for 9 x 9 elements" in planes.said(left)
    assert (places(left, FIRST) - {(y, x) for y in range(15) for x in range(8)}) == set()


def test_a_grid_knows_tiles_waves_and_steps() -> None:
    problem = ConvProblem.parse("mb32ic64ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc")
    compute = computes(problem, Prop.FWD)[0]
    whole = Scheduled(compute, Schedule.parse("mb.oh.ow:128 oc:64 ic:64 | mma | split_k=3"), SM90)
    d = grid.dealt(whole)
    assert (d.rows, d.columns, d.parts, d.tiles, d.steps, d.steps_each) == (196, 2, 3, 1176, 9, 3)
    assert d.waves == 9 and d.extents == {"B": 1, "M": 128, "N": 64, "K": 64}
    said = "1176 tiles (196 along rows x 2 along columns x 3 parts of the sum)"
    assert said in str(grid.draw(whole, None))


def test_roles_take_turns_as_their_barriers_say() -> None:
    schedule = Schedule.parse(
        "mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box | c=box stages=3 warps=4 via=gluon"
    )
    problem = ConvProblem.parse("mb2ic128ih16oc64oh16kh3ph1 dt=bf16 tag=nhwc")
    compute = computes(problem, Prop.FWD)[0]
    whole = Scheduled(compute, schedule, SM90)
    line = timeline.play(lower(compute, schedule, SM90, "k")[-1][1], whole)
    assert line is not None and not line.stopped
    spans = line.spans
    products = [s for s in spans if s.kind == "multiply"]
    assert len(products) == 18, "one product for each step of the sum"
    assert all(a.end <= b.start + 1e-6 for a, b in pairwise(products))
    for number, p in enumerate(products):
        slots = re.findall(r"\w+\[\d\]", p.said)
        assert len(slots) == 2 and all(s.endswith(f"[{number % 3}]") for s in slots)
        for slot in slots:
            filled = [s for s in spans if s.row == slot and s.kind == "landing" and s.end <= p.start]
            assert len(filled) == number // 3 + 1, f"{slot} is filled once for each round"


def test_kernels_without_roles_have_no_timeline() -> None:
    compute = computes(STRIDED, Prop.FWD)[0]
    schedule = Schedule.parse("mb.oh.ow:32 oc:32 ic:16 | mma")
    whole = Scheduled(compute, schedule, SM90)
    assert timeline.play(lower(compute, schedule, SM90, "k")[-1][1], whole) is None


def test_templates_are_in_the_package() -> None:
    folder = Path(grid.__file__).parent / "templates"
    assert {p.name for p in folder.iterdir()} == {
        "page.html.j2",
        "parts.html.j2",
        "style.css",
        "script.js",
        "tables.html.j2",
    }
    said = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f'"*/templates/**/*.{end}"' in said for end in ("j2", "css", "js"))
