"""Results beside that of the sum leave warp-specialized kernels as boxes, too (``c=box``): right after
every pass, from tiles that are put only when the copies before have read them."""

from __future__ import annotations

import pytest

from tests.passes.test_operands_behind_sums import RESIDUAL, Without, layer
from tests.stages import SM90
from transconv import ir
from transconv.compute import parse
from transconv.cost import estimate
from transconv.ir.interp.evaluate import InterpError
from transconv.passes import pipeline
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.verify.computation import ComputationCase, after_every_pass

GLUON = "mma | a=box b=box c=box via=gluon"
BYTES = "    store  Q[n, o, h, w] = i8(nearest(min(max(y*4.0, -128.0), 127.0)))\n"
TRUTH = "    store  Q[n, o, h, w] = y > 0.0\n"


def two(first: bool, dtype: str = "i8", more: str = BYTES, o: int = 48, behind: str = RESIDUAL) -> str:
    """A layer with a second result Q, ``first`` or behind the sum's."""
    text = layer(3, 16, o, 9, 9, behind, kernel=1)
    text = text.replace("    axes", f"    tensor Q {dtype} [n=3, o={o}, h=9, w=9] acdb\n    axes")
    at = text.index("    store") if first else len(text)
    return text[:at] + more + text[at:]


TILE = "h:8 w:8 o:16 c:16"
CASES = {
    "apart": (two(False, behind="    let    y = s*2.0\n"), f"{TILE} | {GLUON} programs=3"),
    "one tile of each program": (two(True), f"{TILE} | {GLUON} behind=box"),
    "in place of the residual, last": (two(True), f"{TILE} | {GLUON} behind=box programs=5 consumers=2"),
    "in place of the residual, first": (two(False), f"{TILE} | {GLUON} behind=box programs=5"),
    "in turns": (two(True), f"{TILE} | {GLUON} programs=2 consumers=2"),
}
LEFT = {
    "truth values": (two(False, "boolean", TRUTH), f"{TILE} | {GLUON} programs=3"),
    "rows that end between multiples of 16 bytes": (two(False, o=40), f"{TILE} | {GLUON} programs=3"),
    "that of the sum by lanes": (two(True), f"{TILE} | {GLUON.replace('c=box', 'c=gather')}"),
}


def kernel(text: str, schedule: str) -> ir.Kernel:
    return pipeline.lower(parse(text), Schedule.parse(schedule), SM90, "conv", "ieee")[-1][1]


def sent(made: ir.Kernel) -> dict[str, str]:
    """The buffers from which tensors are sent, of the first consumer."""
    found: dict[str, str] = {}
    for s in ir.find(made, ir.Send):
        found.setdefault(s.tensor.name, s.piece.buffer.name)
    return found


@pytest.mark.every(6)
@pytest.mark.parametrize("name", [*CASES, *LEFT])
def test_every_pass_gives_the_answer(name: str) -> None:
    text, schedule = (CASES | LEFT)[name]
    compute = parse(text)
    found = after_every_pass(compute, build_compute(compute, SM90, Schedule.parse(schedule)))
    assert not [(stage, judged.problem) for stage, judged in found if judged.problem]
    assert found[-1][0] == "roles"


def test_which_results_are_sent() -> None:
    assert sent(kernel(*CASES["apart"])) == {"Y": "Y_tile", "Q": "Q_tile"}
    assert sent(kernel(*CASES["in turns"])) == {"Y": "Y_tile0", "Q": "Q_tile0"}
    assert sent(kernel(*CASES["in place of the residual, last"])) == {"Y": "Y_tile", "Q": "Q_tile0"}
    assert all("Q" not in sent(kernel(*case)) for case in LEFT.values())


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "func", "says"),
    [
        ("apart", "send_wait", "is written"),
        ("in turns", "send_wait", "is written"),
        ("in place of the residual, last", "send_wait", "is written"),
        ("in place of the residual, first", "fence", "fenced"),
    ],
)
def test_the_interpreter_finds_what_is_missing(name: str, func: str, says: str) -> None:
    text, schedule = CASES[name]
    made = Without(func, "").mutate(kernel(text, schedule))
    case = ComputationCase(parse(text))
    with pytest.raises(InterpError, match=says):
        for _ in range(3):
            case.interpreted(made)


def test_tiles_of_other_results_take_shared_memory() -> None:
    text = two(True).replace("=9", "=128").replace("=48", "=128").replace("c=16", "c=64")
    schedule = "w:128 o:128 c:64 | " + GLUON + " swap=1 programs=64 consumers=2 stages="
    one = text.replace(BYTES, "").replace("tensor Q i8 [n=3, o=128, h=128, w=128] acdb", "")
    at = next(n for n in range(2, 9) if why_not(Schedule.parse(f"{schedule}{n}"), parse(text), SM90))
    assert not why_not(Schedule.parse(f"{schedule}{at}"), parse(one), SM90)
    assert "bytes of shared memory" in str(why_not(Schedule.parse(f"{schedule}{at}"), parse(text), SM90))


def test_the_estimate_counts_them() -> None:
    """The bytes of the second result, which leave faster as boxes."""
    text = two(True).replace("=9", "=128").replace("=48", "=128").replace("c=16", "c=64")
    one = text.replace(BYTES, "").replace("tensor Q i8 [n=3, o=128, h=128, w=128] acdb", "")
    boxes, lanes = (
        Schedule.parse(f"w:128 o:128 c:64 | {way} swap=1 programs=132 consumers=2 stages=2")
        for way in (GLUON, GLUON.replace("c=box", "c=gather"))
    )
    assert estimate(boxes, parse(one), SM90) < estimate(boxes, parse(text), SM90)
    assert estimate(boxes, parse(text), SM90) < estimate(lanes, parse(text), SM90)
