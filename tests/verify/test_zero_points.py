"""Zero points of convolutions: results, words, and what is refused."""

from __future__ import annotations

import re

import pytest

from tests.verify.judging import interpreted, judged
from transconv import ir
from transconv.conv import ConvProblem, Epilogue, Prop, compensation, compiler
from transconv.errors import ScheduleError, Unsupported
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.verify.case import ProblemCase

ZEROS = [
    ("mb2ic16ih7oc24oh7kh3ph1 dt=s8:s8:s32 tag=nhwc", "zero:src"),
    ("mb2ic16ih8oc24oh4kh3sh2ph1 dt=u8:s8:s8 tag=nhwc", "zero:src:per_ic+zero:wei+bias"),
    ("g4mb1ic16iw9oc8ow5kw3sw2pw1 dt=u8:s8:s32", "zero:src:per_ic"),
    ("g8mb2ic8ih6oc8oh6kh3ph1 dt=u8:u8:u8", "zero:src"),
    ("mb1ic3id4ih4iw4oc5od4oh4ow4kd3kh3kw3pd1ph1pw1 dt=s8:s8:f32", "zero:src+zero:wei"),
    ("mb1ic4ih12oc8oh20kh3ph6 dt=s8:u8:s32", "zero:wei:per_oc"),
    ("mb1ic4ih12oc8oh12kh5ph4dh1 dt=s8:s8:s32", "zero:src:per_ic"),
    ("mb2ic20iw8oc17ow4kw3sw2pw1 dt=u8:s8:s32", ""),
    ("g2mb1ic32iw5oc32ow5kw3pw1 dt=u8:s8:s32", "zero:src:per_ic"),
    ("mb1ic16iw6oc16ow6kw3pw1 dt=s8:u8:s32", "zero:src"),
    ("mb1ic16iw6oc20ow6kw3pw1 dt=u8:u8:s32", "zero:src+zero:wei:per_oc"),
]


# Of transposed convolutions: all phases in one product, a product for each, several at once, one position.
TRANSPOSED = [
    ("mb2ic24ih7oc16oh7kh3ph1 dt=s32:s8:s8 tag=nhwc", "zero:dst"),
    ("mb2ic24ih8oc16oh4kh3sh2ph1 dt=s8:s8:u8 tag=nhwc", "zero:dst:per_oc+zero:wei+bias"),
    ("g4mb1ic16iw19oc8ow10kw4sw2pw1 dt=s32:u8:s8", "zero:dst:per_oc"),
    ("mb1ic4iw17oc8ow5kw4sw4pw1 dt=s32:s8:s8", "zero:dst+zero:wei:per_ic"),
    ("mb1ic4iw24oc8ow7kw3sw3pw1dw1 dt=s32:s8:s8", "zero:dst"),
    ("mb1ic3id4ih4iw4oc5od1oh1ow1kd4kh4kw4 dt=f32:s8:s8", "zero:dst+zero:wei"),
    ("mb1ic4iw30oc8ow11kw5sw3pw2 dt=s32:s8:u8", "zero:dst:per_oc"),
    ("mb1ic16iw14oc16ow5kw5sw3pw1 dt=s32:u8:u8", "zero:dst"),
    ("mb1ic16iw10oc20ow5kw4sw2pw1 dt=s32:s8:u8", ""),
]


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("problem", "prop", "words"),
    [*((p, "fwd", w) for p, w in ZEROS), *((p, "bwd_d", w) for p, w in TRANSPOSED)],
)
def test_zero_points(problem: str, prop: str, words: str) -> None:
    assert judged(problem, prop, words, numpy=True).reason == ""


@interpreted
@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "words"), ZEROS[1::3])
def test_zero_points_in_tritons_interpreter(problem: str, words: str) -> None:
    assert judged(problem, "fwd", words, numpy=False).reason == ""


def test_a_given_schedule_is_that_of_the_product() -> None:
    given = "mb.oh.ow:32 oc:32 ic:16 | mma | stages=2"
    case = ProblemCase(ConvProblem.parse(ZEROS[0][0]), Prop.FWD, "zero:src", "cpu", numpy=True)
    plan = case.plan(given)
    assert [s.compute.name for s in plan.steps] == ["zero_src", "fwd"] and plan.schedule.unit == "mma"
    assert plan.steps[0].compute.sizes == {"oh": 3, "ow": 3, "oc": 24, "kh": 3, "kw": 3, "ic": 16}
    assert case.judge(plan, "exact", 1).reason == ""


def test_padding_that_counts_as_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compensation, "_inside", lambda *_: ir.TRUE)
    assert "wrong" in judged("mb1ic3ih6oc5oh6kh3ph1 dt=s8:s8:s32", "fwd", "zero:src", numpy=True).reason
    assert "wrong" in judged("mb1ic3ih6oc5oh6kh3ph1 dt=s32:s8:s8", "bwd_d", "zero:dst", numpy=True).reason


def test_zero_points_without_a_border() -> None:
    """What they add is the same in all places: its address varies along channels alone."""
    schedule = "mb.oh.ow:128 oc:64 ic:64 | mma | a=box b=box | c=box swap=1 stages=4 warps=4 via=gluon"
    *_, main = compiler.build(
        ConvProblem.parse("mb32ic64ih7oc64oh7kh1 dt=s8:s8:bf16 tag=nhwc"),
        Prop.FWD,
        TARGETS["sm_90"],
        Schedule.parse(schedule),
        Epilogue.parse("zero:src"),
    ).steps
    assert re.search(r"gl\.load\(src_zero_sums \+ [^,]*\)$", main.source, re.MULTILINE)


@pytest.mark.parametrize(
    ("problem", "prop", "words", "reason"),
    [
        ("mb1ic8ih5oc8oh5kh3ph1 dt=f16", "fwd", "zero:src", "zero points are for integers; src is f16"),
        (
            "mb1ic8ih5oc8oh5kh3ph1 dt=s8",
            "bwd_d",
            "zero:src",
            "bwd_d multiplies dst by weights; expected its",
        ),
        (
            "mb1ic8ih5oc8oh5kh3ph1 dt=s8:s32:s8",
            "bwd_w",
            "zero:dst",
            "products with weights; bwd_w has none",
        ),
        ("mb1ic8ih5oc8oh5kh3ph1 dt=s8", "fwd", "zero:wei:per_ic", "fwd sums over the channels of src"),
        ("g2mb1ic8ih5oc8oh5kh3ph1 dt=s8", "fwd", "zero:wei", "for one group; there are 2"),
    ],
)
def test_refused_zero_points(problem: str, prop: str, words: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        judged(problem, prop, words, numpy=True)


def test_words_of_zero_points() -> None:
    assert str(Epilogue.parse("zero:wei+zero:src:common+relu")) == "zero:src+zero:wei+relu"
    assert str(Epilogue.parse("zero:dst:per_oc")) == "zero:dst:per_oc"
    with pytest.raises(ScheduleError, match="'zero:dst:per_ic' is no zero point"):
        Epilogue.parse("zero:dst:per_ic")
