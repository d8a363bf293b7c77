"""Boxes: the interpreter gives the reference's answer after every pass, and refusals say why."""

from __future__ import annotations

import itertools

import pytest

from tests.stages import SM90, SM100, launches_of, wrong_stages
from transconv import ir
from transconv.conv import ConvWorkload, Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.schedule.tiles.boxes import Box, box_of
from transconv.simplify import simplify
from transconv.target.records import Target

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
BOXED = "a=box b=box c=box swap=1"
CASES = [
    ("mb4ic16ih7oc24oh7kh3ph1", FWD, f"mb:2 oh:4 ow:4 oc:16 ic:16 | {BOXED} programs=3"),
    ("mb4ic24ih7oc24oh7kh3ph1", FWD, f"mb:2 oh:4 ow:4 oc:16 ic:16 | {BOXED} programs=3"),
    ("mb4ic24ih7oc24oh7kh3ph1", FWD, "mb:2 oh:4 ow:4 oc:16 ic:16 | b=box c=box programs=3"),
    ("mb4ic16ih6oc32oh6kh1", FWD, f"mb.oh.ow:16 oc:16 ic:16 | {BOXED} programs=2"),
    ("mb4ic16ih7oc16oh7kh3ph1", BWD_D, f"mb:2 ih:2 iw:4 oc:16 ic:16 | {BOXED} programs=5"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", BWD_D, "mb:2 qh:2 qw:4 oc:16 ic:16 | a=box b=box swap=1"),
    ("mb4ic16ih8oc16oh8kh1", BWD_W, "mb.oh.ow:16 oc:16 ic:16 | a=box b=box swap=1"),
    ("mb16ic16ih3oc16oh3kh3ph1", BWD_W, "mb:16 oc:16 ic:16 | a=box b=box swap=1"),
    ("g2mb4ic32ih8oc32oh8kh3ph1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16 | a=box b=box swap=1 split_k=3"),
    ("mb4ic16iw18oc16ow16kw3", FWD, f"mb:1 ow:16 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh4kh4sh2ph1", BWD_D, f"mb:1 qh:4 qw:4 oc:16 ic:16 | {BOXED}"),
    ("mb4ic16ih8oc16oh4kh3sh2ph1", BWD_W, "mb:1 oh:4 ow:4 oc:16 ic:16 | a=box swap=1"),
    ("mb2ic16ih9oc16oh3kh3sh3ph0", FWD, f"mb:2 oh:4 ow:2 oc:16 ic:16 | {BOXED} programs=2"),
    ("mb2ic16id4oc16od4kd3pd1", FWD, f"mb:1 od:2 oh:2 ow:4 oc:16 ic:16 | {BOXED}"),
    ("mb2ic16ih9oc16oh9kh3ph2dh1", FWD, f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}"),
    ("mb2ic4ih10oc16oh4kh4sh2ph0", FWD, f"mb:1 oh:4 ow:4 oc:16 kw.ic:16 | {BOXED}"),
    ("mb2ic4ih12oc16oh5kh3sh2ph0", FWD, "oh:2 ow:8 oc:16 kw.ic:16 | a=box c=box swap=1 programs=3"),
    ("mb2ic3ih24oc24oh3kh8sh8ph0", FWD, f"mb:2 oh:2 ow:4 oc:16 kw.ic:16 | {BOXED}"),
    ("mb2ic8ih11oc16oh9kh3ph0", FWD, "oh:2 ow:8 oc:16 kw.ic:16 | a=box c=box swap=1"),
    ("mb2ic3ih24oc24oh3kh8sh8ph0", BWD_D, f"mb:2 qh:2 qw:4 oc:16 rw.ic:32 | {BOXED}"),
    ("mb2ic4ih10oc16oh4kh4sh2ph0", BWD_W, "mb:1 oh:4 ow:4 oc:16 kw.ic:16 | a=box swap=1"),
    ("mb2ic3ih24oc24oh3kh8sh8ph0", BWD_W, "mb:2 oh:2 ow:4 oc:16 kw.ic:32 | a=box swap=1 split_k=2"),
    ("mb2ic4iw22oc16ow8kw8sw2pw0", FWD, f"mb:2 ow:8 oc:16 kw.ic:32 | {BOXED}"),
]


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("text", "prop", "schedule"), CASES, ids=[f"{i}-{c[1]}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_every_pass_keeps_the_meaning_of_boxes(text: str, prop: Prop, schedule: str) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag=axb")
    steps = compiler.plan_steps(p, prop, SM100, Schedule.parse(schedule), Epilogue())
    assert wrong_stages(p, prop, launches_of(steps, target=SM100)) == []


# Images of odd size, in steps of 2: some planes lack a row, which no lane may look at.
ODD = [
    ("mb2ic16ih9oc16oh4kh3sh2ph0", FWD, "oh:4 ow:4 oc:16 ic:16 | mma | a=box b=box c=box swap=1", ""),
    ("mb2ic16ih9oc16oh4kh4sh2ph1", FWD, "mb:2 oh:2 ow:4 oc:16 ic:16 | mma | a=box b=box swap=1", ""),
    (
        "mb2ic64ih9oc64oh4kh3sh2ph0",
        BWD_W,
        "ic:64 oc:64 oh:4 ow:4 | mma | a=box b=box swap=1 via=gluon stages=2 warps=4",
        "",
    ),
    (
        "mb2ic64ih9oc64oh4kh3sh2ph0",
        BWD_W,
        "kh.kw.ic:64 oc:64 oh:4 ow:4 | mma | a=box b=box swap=1 via=gluon stages=2 warps=4",
        "",
    ),
    (
        "mb2ic64ih9oc64oh4kh3sh2ph0",
        BWD_W,
        "kh.kw.ic:128 oc:64 oh:4 ow:4 | mma | a=box b=box swap=1 via=gluon stages=2 warps=4",
        "9 is no multiple of 2",
    ),  # lanes beyond the ninth tap
    (
        "mb2ic16ih9oc16oh4kh3sh2ph0",
        FWD,
        "oh:8 ow:4 oc:16 ic:16 | mma | a=box b=box swap=1",
        "9 is no multiple of 2",
    ),  # rows beyond the fourth
    ("mb2ic16ih9oc16oh5kh3sh2ph1", FWD, "oh:1 ow:1 oc:16 ic:16 mb:16 | mma | a=box b=box swap=1", ""),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("text", "prop", "schedule", "reason"), ODD)
def test_planes_that_lack_a_row(text: str, prop: Prop, schedule: str, reason: str) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag=axb")
    said = why_not(Schedule.parse(schedule), computes(p, prop)[0], SM90)
    if reason:
        assert said is not None and reason in said
        return
    assert said is None
    steps = compiler.plan_steps(p, prop, SM90, Schedule.parse(schedule), Epilogue())
    assert wrong_stages(p, prop, launches_of(steps)) == []


@pytest.mark.parametrize("prop", [FWD, BWD_W])
@pytest.mark.parametrize(("groups", "features"), [(1, 16), (2, 16), (3, 8), (2, 48)])
def test_no_lane_is_behind_the_tensor(groups: int, features: int, prop: Prop) -> None:
    """Whatever dimensions are merged: of all boxes at all their places, lanes behind a block's end among
    them, those that the engine takes for inside are in the tensor's memory."""
    found = 0
    for kw, sw, more in itertools.product((1, 2, 3), (2, 3, 4), range(3)):
        iw = 2 * sw + kw + more
        p = ConvProblem.parse(
            f"g{groups}mb2ic{groups * features}iw{iw}oc{groups * 16}kw{kw}sw{sw}pw0 dt=f32 tag=axb"
        )
        compute = computes(p, prop)[0]
        view = compute.reads[0].view
        for extents in itertools.product((16, 32, 64), (2, 4)):
            schedule = Schedule.parse("ic:{} oc:16 ow:{} | mma | a=box".format(*extents))
            box = box_of(view, schedule, compute)
            if isinstance(box, str):
                continue
            found += 1
            axes = {v.name for c in box.coords for v in ir.free_vars(c)}
            steps = {b.first: b.extent for b in schedule.blocks}
            begins = [range(0, compute.size(a), steps.get(a, 1)) for a in sorted(axes)]
            strides = box.tensor.layout.strides() or ()
            for at in itertools.product(*begins):
                values = {ir.Var(a): ir.Const(n) for a, n in zip(sorted(axes), at, strict=True)}
                last = 0
                for coord, extent, size, stride in zip(
                    box.coords, box.extents, box.tensor.shape, strides, strict=True
                ):
                    begin = int(simplify(ir.substitute(coord, values)).value)  # type: ignore[union-attr]
                    last += min(begin + extent - 1, size - 1) * stride
                assert last < view.tensor.layout.span, (str(p), str(schedule), at)
    assert found


@pytest.mark.every(10)
@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("mb2ic64ih9oc16oh4kh3sh2ph0", "mb:2 qh:4 qw:4"),
        ("mb4ic64ih10oc16oh3kh4sh3ph0", "mb:4 qh:2 qw:2"),
        ("mb4ic64iw11oc16ow3kw4sw3pw0", "mb:4 qw:4"),
        ("mb2ic64ih9iw7oc16oh5ow3kh2kw3sh2sw2ph1pw0", "mb:1 qh:4 qw:4"),
    ],
)
@pytest.mark.parametrize(
    ("words", "target"), [("", SM100), ("via=gluon stages=2", SM90)], ids=["tl", "gluon"]
)
def test_phases_of_odd_sizes_are_stored_in_boxes(text: str, tile: str, words: str, target: Target) -> None:
    """Each box covers one plane and knows its number of rows, so that nothing is written into the next
    image."""
    p = ConvProblem.parse(f"{text} dt=f16 tag=axb")
    schedule = Schedule.parse(f"{tile} ic:64 oc:16 | mma | a=box b=box c=box swap=1 {words}")
    phases = [x for x in computes(p, Prop.BWD_D) if all(axis.size for axis in x.axes)]
    assert phases and [why_not(schedule, x, target) for x in phases] == [None] * len(phases)
    steps = compiler.plan_steps(p, Prop.BWD_D, target, schedule, Epilogue())
    assert wrong_stages(p, Prop.BWD_D, launches_of(steps, target=target)) == []


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("text", "prop", "schedule"),
    [
        ("g2mb2ic48ih6oc48oh6kh3ph1 dt=f16 tag=axb", FWD, "oh:8 ow:8 oc:32 ic:16 | mma | c=box via=gluon"),
        (
            "g3mb2ic144iw64oc72ow64kw3pw1 dt=f16 tag=axb",
            Prop.BWD_D,
            "iw:64 ic:32 oc:16 | mma | c=box via=gluon",
        ),
        ("g2mb2ic96iw70oc96ow70kw3pw1 dt=s8:s8:s32 tag=axb", FWD, "ow:64 oc:64 ic:64 | mma | via=gluon"),
        (
            "g3mb2ic144iw70oc144ow70kw3pw1 dt=bf16 tag=axb",
            FWD,
            "ow:64 oc:64 ic:64 | mma | c=box via=gluon",
        ),
        (
            "g2mb2ic96iw64oc96ow64kw3pw1 dt=bf16 tag=axb",
            BWD_W,
            "ic:64 oc:64 ow:16 | mma | swap=1 via=gluon",
        ),
    ],
)
def test_a_box_of_a_group_ends_with_it(text: str, prop: Prop, schedule: str) -> None:
    """A tile that is wider than a group, or no part of it, has zeros beyond and stores nothing there."""
    p, chosen = ConvProblem.parse(text), Schedule.parse(f"{schedule} a=box b=box stages=2")
    assert why_not(chosen, computes(p, prop)[0], SM90) is None
    steps = compiler.plan_steps(p, prop, SM90, chosen, Epilogue())
    assert wrong_stages(p, prop, launches_of(steps, target=SM90)) == []


REFUSALS = [
    (
        "mb4ic16ih9oc16oh5kh3sh2ph1",
        FWD,
        "mb:1 oh:4 ow:4 oc:16 ic:16",
        "axb",
        "src: lane oh moves along ih as oh*2 + kh - 1, a box steps by 1 and 9 is no multiple of 2",
    ),
    ("mb4ic3ih8oc16oh8kh3ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16", "axb", "multiple of 16 bytes"),
    (
        "mb4ic16ih8oc16oh8kh3ph1",
        FWD,
        "mb.oh.ow:16 oc:16 ic:16",
        "axb",
        "do not follow one another in memory",
    ),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, "mb:1 oh:2 ow:8 oc:16 ic:16", "abx", "not at 16 bytes"),
    ("mb4ic16ih8oc16oh8kh3ph1", FWD, "mb:1 oh:4 ow:4 oc:16 ic:16", "aBx16b", "blocked layout"),
    (
        "mb4ic16ih8oc16oh8kh3ph1",
        BWD_W,
        "mb:1 oh:4 ow:4 oc:16 ic:16",
        "axb",
        "b=box: a left operand of more than two dimensions goes through registers",
    ),
    (
        "mb1ic40ih8oc48oh8kh3ph1",
        Prop.BWD_D,
        "ih:8 iw:8 ic:32 oc:16",
        "axb",
        "b=box: a left operand of more than two dimensions goes through registers",
    ),
    ("mb4ic16ih8oc16oh8kh1", BWD_W, "mb:2 oh:2 ow:8 oc:16 ic:16", "abx", "apart in memory"),
    (
        "mb4ic16ih12oc16oh12kh3ph1",
        BWD_W,
        "mb:1 oh:8 ow:2 oc:16 ic:16",
        "axb",
        "block oh:8 does not divide 12",
    ),
    ("mb2ic4ih12oc16oh6kh4sh2ph1", FWD, "oh:4 ow:4 oc:16 kw.ic:16", "axb", "kw and ow both move along iw"),
    (
        "mb2ic3ih10oc16oh4kh4sh2ph0",
        FWD,
        "oh:4 ow:4 oc:16 kw.ic:16",
        "axb",
        "is not a multiple of 16 bytes",
    ),
]


@pytest.mark.parametrize(("text", "prop", "schedule", "tag", "reason"), REFUSALS)
def test_refusals_say_why(text: str, prop: Prop, schedule: str, tag: str, reason: str) -> None:
    p = ConvProblem.parse(f"{text} dt=f16 tag={tag}:axb:{tag}")
    compute = computes(p, prop)[0]
    said = why_not(Schedule.parse(f"{schedule} | a=box b=box swap=1"), compute, SM90)
    assert said is not None and reason in said


@pytest.mark.parametrize(
    ("text", "tile", "strides"),
    [
        ("mb4ic4ih10oc16oh4kh4sh2ph0 dt=f16 tag=axb", "oh:4 ow:4 oc:16 kw.ic:16", (400, 80, 40, 8, 1)),
        ("mb4ic8ih11oc16oh9kh3ph0 dt=f16 tag=axb", "oh:4 ow:4 oc:16 kw.ic:16", (968, 88, 8, 1)),
    ],
)
def test_windows_of_images_whose_number_is_an_argument(
    text: str, tile: str, strides: tuple[int, ...]
) -> None:
    """Their strides are those of the image, which no size of a box tells."""
    schedule = Schedule.parse(f"{tile} | mma | a=box b=gather c=box swap=1 stages=2")
    of_four = ConvWorkload(ConvProblem.parse(text), FWD)
    for workload in (of_four, of_four.of_any_batch()[0]):
        compute = workload.computations[0]
        box = box_of(compute.a, schedule, compute)
        assert isinstance(box, Box)
        assert (box.tensor.at({"MB": 4}) if compute.named else box.tensor).layout.strides() == strides


def test_the_target_must_have_a_copy_engine() -> None:
    from transconv.target.records import TARGETS

    compute = computes(ConvProblem.parse("mb4ic16ih8oc16oh8kh3ph1 dt=f16 tag=axb"), FWD)[0]
    schedule = Schedule.parse(f"mb:1 oh:4 ow:4 oc:16 ic:16 | {BOXED}")
    assert why_not(schedule, compute, SM90) is None
    assert why_not(schedule, compute, TARGETS["sm_80"]) == "sm_80 has no copy engine for boxes"
    assert isinstance(box_of(compute.b, schedule, compute), Box)  # type: ignore[arg-type]
