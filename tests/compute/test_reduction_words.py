"""The words ``red=`` and ``row=``: what tiles imply, what they are refused for, what they force."""

from __future__ import annotations

from dataclasses import replace

import pytest

import transconv
from transconv.__main__ import main
from transconv.compute import Compute, parse
from transconv.cost import estimate
from transconv.errors import ScheduleError
from transconv.runtime import Plan, build_compute
from transconv.schedule import Schedule, divided, kept, told, why_not
from transconv.selection import completed
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.verify import computation

SM90 = Target.parse("sm_90")
SOFTMAX = parse("""compute softmax
    axes   n=6 | k=130
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total""")
ROWS = parse("compute rows\n axes n=6 | k=512\n read x = X[n, k]\n store Y[n] = sum(x; k)")
LONG = parse("""compute long
    tensor X bf16 [4, 65536]
    tensor Y bf16 [4, 65536]
    axes   n=4 | k=65536
    read   x = X[n, k]
    let    top = max(x; k)
    let    total = sum(exp(x - top); k)
    store  Y[n, k] = exp(x - top) / total""")
CHAIN = parse("compute chain\n axes n=64\n read x = X[n]\n store Y[n] = x + x")
PRODUCT = parse(
    "compute product\n axes m=32 n=32 | k=32\n read x = X[m, k]\n read w = W[n, k]\n"
    " store Y[m, n] = sum(x*w; k)"
)


@pytest.mark.parametrize(
    ("compute", "text", "said"),
    [
        (SOFTMAX, "k:256 | fma | warps=2", "red=block row=held"),
        (SOFTMAX, "k:256 | fma | warps=1", "red=warp row=held"),
        (SOFTMAX, "k:64 | fma | warps=2", "red=warp row=again"),
        (SOFTMAX, "k:128 | fma | warps=2", "red=block row=again"),
        (SOFTMAX, "k:64 | fma | unroll=1 warps=2", "red=warp row=held"),
        (SOFTMAX, "n:8 | fma | warps=2", "red=lane row=again"),
        (ROWS, "k:512 | fma", "red=block"),
        (ROWS, "k:64 | fma | warps=1", "red=warp"),
        (ROWS, "n:8 k:4 | fma", "red=lane"),
        (ROWS, "k:64 | fma | split_k=4", "red=split"),
        (CHAIN, "n:64 | fma", ""),
        (PRODUCT, "m:16 n:16 k:16", ""),
    ],
)
def test_what_a_tile_implies(compute: Compute, text: str, said: str) -> None:
    """And the words that say so change nothing but the text."""
    schedule = Schedule.parse(text)
    assert told(schedule, compute, SM90) == said
    assert why_not(schedule, compute, SM90) is None
    forced = Schedule.parse(f"{text} {said}")
    assert Schedule.parse(str(forced)) == forced and str(forced).count("=") == str(schedule).count(
        "="
    ) + len(said.split())
    assert why_not(forced, compute, SM90) is None
    plain, same = (build_compute(compute, SM90, s).steps[0].kernel for s in (schedule, forced))
    assert plain.body == same.body


@pytest.mark.parametrize(
    ("compute", "text", "part"),
    [
        (SOFTMAX, "k:256 | fma | red=lane warps=2", "threads of several warps share a row (red=block)"),
        (
            SOFTMAX,
            "k:64 | fma | row=held",
            "a tile has 64 of the 130 elements of a row; expected a tile that covers it, such as k:256",
        ),
        (
            SOFTMAX,
            "k:256 | fma | row=again",
            "the tile covers the row of 130 elements, which is loaded once",
        ),
        (SOFTMAX, "k:64 | fma | red=split", "split_k=3: elements of a row are needed again"),
        (ROWS, "k:64 | fma | row=held", "rows needs every element of a row in one sweep alone"),
        (CHAIN, "n:64 | fma | red=lane", "red=lane: chain reduces nothing"),
        (PRODUCT, "m:16 n:16 k:16 | red=block", "is a product, whose sum split_k divides"),
        (SOFTMAX, "red=split", "elements of a row are needed again"),
        (ROWS, "row=held", "row=held for rows on sm_90"),
    ],
)
def test_what_is_refused(compute: Compute, text: str, part: str) -> None:
    with pytest.raises(ScheduleError) as refusal:
        transconv.compile(compute, "sm_90", text)
    assert part in str(refusal.value) and "\n" not in str(refusal.value)


FORCED = [(c, w) for c in (SOFTMAX, ROWS) for w in ("red=lane", "red=warp", "red=block")]
FORCED += [
    (SOFTMAX, "row=held"),
    (SOFTMAX, "row=again"),
    (SOFTMAX, "red=warp row=again"),
    (ROWS, "red=split"),
    (ROWS, "red=split reduce=atomic"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("compute", "words"), FORCED, ids=lambda x: getattr(x, "name", x))
def test_words_without_a_tile_get_one(compute: Compute, words: str) -> None:
    """Kernels that are divided so mean what the text means, after every pass."""
    plan = build_compute(compute, SM90, Schedule.parse(words))
    chosen = plan.steps[0].schedule
    for word in words.split():
        name, value = word.split("=")
        found = {"red": divided(chosen, compute, SM90), "row": kept(chosen, compute)}
        assert found.get(name, chosen.word(name)) == value
    assert [j.problem for _, j in computation.after_every_pass(compute, plan) if j.problem] == []
    assert len(plan.steps) == (2 if words == "red=split" else 1)


def test_split_rows_meet_in_a_second_kernel() -> None:
    plan = build_compute(ROWS, SM90, Schedule.parse("k:64 | fma | red=split"))
    assert [s.compute.does for s in plan.steps] == ["compute", "add"]
    assert plan.steps[0].schedule.split_k > 1 and not plan.steps[0].schedule.varies
    atomic = build_compute(ROWS, SM90, Schedule.parse("red=split reduce=atomic"))
    assert len(atomic.steps) == 1 and atomic.steps[0].schedule.varies


@pytest.mark.parametrize(("compute", "tile"), [(ROWS, "k:64 | fma"), (PRODUCT, "m:16 n:16 k:16 | mma")])
def test_additions_in_place_have_a_price(compute: Compute, tile: str) -> None:
    """Of a split sum that of clearing the result, in the place of a second kernel."""

    def us(words: str) -> float:
        return estimate(Schedule.parse(f"{tile} | {words}"), compute, SM90)

    slow = replace(SM90, rates=replace(SM90.rates, issue=replace(SM90.rates.issue, adds_clocks=1e6)))
    assert us("split_k=2 reduce=atomic") != us("split_k=2")
    assert estimate(Schedule.parse(f"{tile} | split_k=2 reduce=atomic"), compute, slow) > 1000


def test_additions_to_few_places_follow_one_another() -> None:
    def us(places: int, store: str = "+=") -> float:
        made = parse(
            f"compute added\n tensor Y f32 [{places}]\n axes n=65536\n read x = X[n]\n"
            f" store Y[n // {65536 // places}] {store} x"
        )
        return estimate(Schedule.parse("n:1024 | fma"), made, SM90)

    assert us(1) > us(64) > us(4096)
    assert us(65536) > us(65536, "=") + 2


@pytest.mark.slow
def test_split_rows_of_several_sweeps_are_parts() -> None:
    """Where the elements of a row are needed again, its parts are kernels one after another."""

    def names(plan: Plan) -> list[str]:
        return [s.compute.name for s in plan.steps]

    short = parse(str(LONG).replace("n=4", "n=4096").replace("[4,", "[4096,"))
    assert names(build_compute(short, SM90)) == ["long"]
    parts = names(build_compute(short, SM90, Schedule.parse("red=split")))
    assert parts[:3] == ["long_1", "long_2", "long_3"]


def test_a_row_is_read_again() -> None:
    held, again = (
        build_compute(SOFTMAX, SM90, Schedule.parse(f"row={way}")).source for way in ("held", "again")
    )
    assert held.count("tl.load(X") == 1 and again.count("tl.load(X") == 3


def test_nothing_is_chosen_otherwise_without_the_words() -> None:
    for compute in (SOFTMAX, ROWS, CHAIN, PRODUCT):
        schedule = heuristics.default(compute, SM90)
        assert schedule.red == schedule.row == ""
        assert completed(schedule, compute, SM90) is schedule


@pytest.mark.slow
def test_show_says_how_rows_are_divided(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["show", str(SOFTMAX), "--target", "sm_90", "--stage", "schedule", "--schedule", "row=again"])
        == 0
    )
    assert "reduced    red=block row=again\n" in capsys.readouterr().out
