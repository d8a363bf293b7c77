"""Warp-specialised kernels: roles that wait for each other give the reference's answer in any order of
execution, and what would hang or race on a device is reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.reference import convolve, integers, pack, unpack
from tests.stages import SM90, shapes
from transconv import ir
from transconv.backend_triton.emitters.kernel_text import emit
from transconv.conv import Epilogue
from transconv.conv.compiler import plan_steps
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.ir.interp.evaluate import InterpError, Memory
from transconv.ir.interp.kernel import run
from transconv.ir.rules.verifier import verify
from transconv.passes import pipeline
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule

FWD, BWD_D, BWD_W = Prop.FWD, Prop.BWD_D, Prop.BWD_W
ROLE = "a=box b=box via=gluon"
CONSUMERS = f"{ROLE} consumers=2"
KEPT = f"{ROLE} keep=b programs=2"
STREAM = f"{ROLE} reduce=stream group_m=1"
CASES = [
    ("mb2ic32ih8oc24oh8kh3ph1", FWD, f"mb:1 oh:8 ow:8 oc:16 ic:16 | {ROLE} c=box stages=3"),
    ("mb2ic32ih8oc24oh8kh3ph1", FWD, f"mb:1 oh:8 ow:8 oc:16 ic:16 | {ROLE} c=box stages=2 programs=3"),
    ("mb2ic32ih8oc64oh8kh3ph1", FWD, f"mb:1 oh:4 ow:4 oc:64 ic:16 | {ROLE} c=box swap=1 programs=3"),
    ("mb2ic32ih8oc24oh8kh3ph1", FWD, f"mb:1 oh:8 ow:8 oc:16 ic:16 | {ROLE} split_k=3 programs=2"),
    ("g2mb2ic32ih7oc48oh7kh3ph2dh1", FWD, f"mb:2 oh:8 ow:4 oc:16 ic:16 | {ROLE}"),
    ("mb64ic16iw9oc16ow7kw3", FWD, f"mb:64 oc:16 ic:16 | {ROLE} c=box programs=2"),
    ("mb2ic16ih8oc32oh4kh4sh2ph1", BWD_D, f"mb:2 qh:8 qw:4 oc:16 ic:16 | {ROLE} c=box"),
    ("mb2ic64ih8oc32oh8kh3ph1", BWD_W, f"ic:64 oc:16 oh:4 ow:4 | {ROLE}"),
    ("mb2ic16ih8oc64oh8kh3ph1", BWD_W, f"ic:16 oc:64 oh:4 ow:4 | {ROLE} swap=1 split_k=2 programs=3"),
    ("mb2ic16ih8oc64oh8kh3ph1", BWD_W, f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {ROLE} swap=1 split_k=2"),
    ("mb2ic32ih8oc64oh8kh3ph1", BWD_W, f"kw.ic:64 oc:64 oh:4 ow:4 | {ROLE} swap=1 programs=2"),
    ("mb2ic16ih16oc64oh16kh3ph1", BWD_W, f"ic:16 oc:64 oh:4 ow:4 | {ROLE} swap=1 split_k=5"),
    ("mb4ic16ih4oc64oh4kh1", FWD, f"mb.oh.ow:64 oc:16 ic:16 | {ROLE} programs=3"),
    ("g2mb2ic96ih8oc32oh8kh3ph1", BWD_W, f"kh.kw.ic:64 oc:16 oh:4 ow:4 | {ROLE} split_k=3"),
    ("mb2ic32ih8oc24oh8kh3ph1", FWD, f"oh:8 ow:8 oc:16 ic:16 | {CONSUMERS} c=box stages=2 programs=1"),
    ("mb5ic32ih8oc24oh8kh3ph1", FWD, f"oh:8 ow:8 oc:16 ic:16 | {CONSUMERS} c=box stages=4 programs=3"),
    ("mb7ic16ih8oc24oh8kh1", FWD, f"oh:8 ow:8 oc:16 ic:16 | {CONSUMERS} stages=5 programs=3"),
    ("mb2ic32ih8oc64oh8kh3ph1", FWD, f"oh:4 ow:4 oc:64 ic:16 | {CONSUMERS} c=box swap=1 programs=3"),
    ("mb2ic32ih8oc24oh8kh3ph1", FWD, f"oh:8 ow:8 oc:16 ic:16 | {CONSUMERS} split_k=3 programs=2"),
    ("g2mb2ic32ih7oc48oh7kh3ph2dh1", FWD, f"mb:2 oh:8 ow:4 oc:16 ic:16 | {CONSUMERS} programs=2"),
    ("mb2ic64ih8oc32oh8kh3ph1", BWD_W, f"ic:64 oc:16 oh:4 ow:4 | {CONSUMERS} programs=5"),
    (
        "mb2ic16ih8oc64oh8kh3ph1",
        BWD_W,
        f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {CONSUMERS} swap=1 split_k=2 programs=2",
    ),
    ("mb2ic32ih8oc40oh8kh3ph1", FWD, f"mb:1 oh:8 ow:8 oc:16 ic:16 | {STREAM} programs=4 c=box"),
    ("mb3ic32ih8oc24oh8kh3ph1", FWD, f"oh:8 ow:8 oc:16 ic:16 | {STREAM} programs=7"),
    ("mb2ic32ih8oc64oh8kh3ph1", BWD_W, f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {STREAM} programs=7 swap=1"),
    ("mb2ic32ih8oc32oh4kh3sh2ph1", BWD_W, f"kh.kw.ic:64 oc:32 oh:4 ow:4 | {ROLE}"),
    ("mb3ic32ih8oc16oh8kh3ph1", FWD, f"oh:8 ow:8 oc:16 ic:16 | {KEPT} c=box stages=2"),
    ("mb5ic16ih8oc24oh8kh3ph1", FWD, f"oh:8 ow:8 oc:32 ic:16 | {KEPT} stages=3"),
    ("mb3ic32ih8oc64oh8kh3ph1", FWD, f"oh:4 ow:4 oc:64 ic:16 | {KEPT} c=box swap=1 consumers=2"),
    ("mb5ic16ih8oc32oh8kh3ph1", BWD_D, f"ih:8 iw:8 ic:16 oc:16 | {KEPT} c=box consumers=2 stages=5"),
    ("mb6ic16ih8oc32oh4kh3sh2ph1", BWD_D, f"mb:4 qh:4 qw:4 oc:16 ic:16 | {KEPT} c=box"),
    ("mb2ic16ih8oc64oh8kh1", BWD_W, f"ic:16 oc:64 oh:4 ow:4 | {ROLE} keep=a programs=1 swap=1"),
]

# f32: what lies along K is multiplied as it landed, everything else is transposed first.
TURNED = [
    ("mb2ic32ih8oc24oh8kh3ph1", FWD, f"mb:1 oh:8 ow:8 oc:16 ic:16 | {ROLE} c=box stages=3", []),
    ("mb2ic32ih8oc16oh8kh3ph1", BWD_D, f"mb:1 ih:8 iw:8 ic:16 oc:16 | {ROLE} stages=3", ["wei"]),
    (
        "mb2ic64ih8oc24oh8kh3ph1",
        BWD_D,
        f"ih:4 iw:4 ic:64 oc:32 | {ROLE} c=box swap=1 stages=2 programs=3",
        ["wei"],
    ),
    ("mb2ic16ih8oc32oh4kh3sh2ph1", BWD_D, f"mb:2 qh:8 qw:4 oc:16 ic:16 | {ROLE} c=box", ["wei"]),
    ("mb2ic64ih8oc32oh8kh3ph1", BWD_W, f"ic:64 oc:32 oh:4 ow:4 | {ROLE}", ["src", "dst"]),
    (
        "mb2ic16ih8oc64oh8kh3ph1",
        BWD_W,
        f"ic:16 oc:64 oh:4 ow:8 | {ROLE} swap=1 split_k=2 programs=3",
        ["src", "dst"],
    ),
    (
        "mb2ic16ih8oc64oh8kh3ph1",
        BWD_W,
        f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {ROLE} swap=1 split_k=2",
        ["src", "dst"],
    ),
    (
        "g2mb2ic64ih8oc128oh8kh3ph1",
        BWD_W,
        f"kw.ic:64 oc:64 oh:4 ow:4 | {ROLE} swap=1 programs=5",
        ["src", "dst"],
    ),
    (
        "mb2ic32ih8oc64oh8kh3ph1",
        BWD_W,
        f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {STREAM} programs=7 swap=1",
        ["src", "dst"],
    ),
    ("mb2ic32ih8oc32oh4kh3sh2ph1", BWD_W, f"kh.kw.ic:64 oc:32 oh:4 ow:4 | {ROLE}", ["src", "dst"]),
]

# Two transposers in turns: several tiles of an odd number of steps, two slots, one step a tile.
TWO = [
    ("mb3ic16ih4oc64oh4kh3ph1", BWD_W, f"ic:16 oc:64 oh:4 ow:4 | {ROLE} transposers=2 swap=1 programs=2"),
    (
        "mb2ic16ih8oc64oh8kh3ph1",
        BWD_W,
        f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {ROLE} transposers=2 swap=1 stages=3",
    ),
    (
        "mb2ic16ih8oc64oh8kh3ph1",
        BWD_W,
        f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {ROLE} transposers=2 swap=1 split_k=3 stages=2",
    ),
    (
        "mb2ic64ih8oc24oh8kh3ph1",
        BWD_D,
        f"ih:4 iw:4 ic:64 oc:32 | {ROLE} transposers=2 c=box swap=1 stages=5 programs=3",
    ),
    ("mb2ic32ih8oc16oh8kh1", BWD_D, f"ih:8 iw:8 ic:16 oc:16 | {ROLE} transposers=2 programs=1"),
    (
        "mb2ic32ih8oc64oh8kh3ph1",
        BWD_W,
        f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {STREAM} transposers=2 programs=7 swap=1",
    ),
]


def kernels(p: ConvProblem, prop: Prop, schedule: str) -> list[ir.Kernel]:
    steps = plan_steps(p, prop, SM90, Schedule.parse(schedule), Epilogue())
    return [pipeline.lower(compute, chosen, SM90, "conv", "ieee")[-1][1] for compute, chosen in steps]


def answer(
    p: ConvProblem, prop: Prop, launches: list[ir.Kernel], seed: int, values: dict[str, np.ndarray]
) -> np.ndarray:
    layouts = {n: getattr(p, n).layout for n in ("src", "wei", "dst")}
    c = prop.result
    buffers = {n: pack(v, layouts[n]) for n, v in values.items()}
    for t in (t for k in launches for t in k.params if t.name not in buffers):
        buffers[t.name] = np.full(t.layout.span, np.nan, t.dtype.numpy)
    buffers[c] = np.full(layouts[c].span, np.nan, layouts[c].dtype.numpy)
    memory = Memory(buffers)
    for kernel in launches:
        memory.new_launch()
        run(kernel, memory, seed=seed)
    return unpack(memory.buffers[c], layouts[c], shapes(p)[c])


@pytest.mark.every(15)
@pytest.mark.parametrize(
    ("text", "prop", "schedule"), CASES, ids=[f"{c[1]}-{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_whoever_goes_first_the_answer_is_right(text: str, prop: Prop, schedule: str) -> None:
    right_in_any_order(ConvProblem.parse(f"{text} dt=f16 tag=axb"), prop, schedule)


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("text", "prop", "schedule", "transposed"),
    TURNED,
    ids=[f"{i}-{c[1]}-{c[0]}" for i, c in enumerate(TURNED)],
)
def test_what_lies_across_the_sum_is_transposed(
    text: str, prop: Prop, schedule: str, transposed: list[str]
) -> None:
    launches = right_in_any_order(ConvProblem.parse(f"{text} dt=f32 tag=axb"), prop, schedule)
    rings = [s.what.name for s in ir.find(launches[0], ir.Shared)]
    assert [r for r in rings if r.endswith("_transposed")] == [f"{t}_transposed" for t in transposed]
    assert ("transposer" in [r.name for r in ir.find(launches[0], ir.Role)]) == bool(transposed)


@pytest.mark.every(4)
@pytest.mark.parametrize(("text", "prop", "schedule"), TWO, ids=[f"{c[1]}-{c[0]}" for c in TWO])
def test_two_transposers_take_turns(text: str, prop: Prop, schedule: str) -> None:
    launches = right_in_any_order(ConvProblem.parse(f"{text} dt=f32 tag=axb"), prop, schedule, seeds=8)
    names = [r.name for r in ir.find(launches[0], ir.Role)]
    assert names[-3:] == ["even_transposer", "odd_transposer", "producer"]


def test_two_transposers_are_refused_in_words() -> None:
    (text, prop, plain, _), p16 = TURNED[4], ConvProblem.parse("mb2ic64ih8oc32oh8kh3ph1 dt=f16 tag=axb")
    schedule = Schedule.parse(f"{plain} transposers=2")
    for p, given, reason in (
        (p16, schedule, "transposes no operands in shared memory"),
        (
            ConvProblem.parse(f"{text} dt=f32 tag=axb"),
            replace(schedule, warps=8),
            "two groups beside 8 warps leave too few registers",
        ),
    ):
        assert reason in str(why_not(given, next(iter(computes(p, prop))), SM90))


def right_in_any_order(p: ConvProblem, prop: Prop, schedule: str, seeds: int = 3) -> list[ir.Kernel]:
    """The kernels of an explicit schedule, whose answer is the reference's whoever goes first."""
    values = drawn(p, prop)
    expected = convolve(p, prop, values[prop.operands[0]], values[prop.operands[1]])
    launches = kernels(p, prop, schedule)
    for kernel in launches:
        verify(kernel, "explicit")
    assert ir.find(launches[0], ir.Roles)
    for seed in range(seeds):
        assert np.array_equal(answer(p, prop, launches, seed, values), expected)
    return launches


def drawn(p: ConvProblem, prop: Prop) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: integers(rng, shapes(p)[n], 2) for n in prop.operands}


class _Without(ir.Mutator):
    """A kernel without the functions of one name, or those of them that are about one barrier."""

    def __init__(self, name: str, barrier: str = "") -> None:
        self.name, self.barrier = name, barrier

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt | None:
        about = getattr(at.args[0], "name", "") if at.args else ""
        return None if at.func.name == self.name and about == self.barrier else at


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "barrier", "said"),
    [
        ("fence", "", "is multiplied before it is fenced"),
        ("wait", "taken", "is written"),
        ("wait", "landed", "is used"),
        ("wait", "transposed", "is used and nothing is in it"),
        ("arrive", "transposed", "the roles wait for one another"),
    ],
)
def test_a_turn_that_is_not_waited_for_is_reported(name: str, barrier: str, said: str) -> None:
    text, prop, schedule, _ = TURNED[4]
    p = ConvProblem.parse(f"{text} dt=f32 tag=axb")
    broken = [_Without(name, barrier).mutate(k) for k in kernels(p, prop, schedule)]
    with pytest.raises(ir.InterpError, match=said):
        for seed in range(20):
            answer(p, prop, broken, seed, drawn(p, prop))


class _LandedFirst(ir.Mutator):
    """A kernel whose transposers wait for ``landed`` before ``taken``."""

    def __init__(self) -> None:
        self.other: dict[ir.FuncCall, ir.FuncCall] = {}

    def mutate_Role(self, at: ir.Role) -> ir.Stmt:
        if not at.name.endswith("transposer"):
            return at
        taken, landed = (s for s in ir.find(at, ir.FuncCall) if s.func is ir.WAIT)
        self.other = {taken: landed, landed: taken}
        return self.generic(at)

    def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt:
        return self.other.get(at, at)


def test_a_phase_that_nobody_watched_is_not_waited_for_by_parity() -> None:
    """Of three slots, each of two transposers sees every other phase. A copy that lands late, after one
    fetched behind it, makes its predecessor's phase pass for its own."""
    text, prop, schedule = TWO[1]
    p = ConvProblem.parse(f"{text} dt=f32 tag=axb")
    broken = [_LandedFirst().mutate(k) for k in kernels(p, prop, schedule)]
    with pytest.raises(ir.InterpError, match="is used before its copy has landed"):
        for seed in range(40):
            answer(p, prop, broken, seed, drawn(p, prop))


@pytest.mark.parametrize(
    ("math", "k", "said"),
    [
        ("ieee", 32, "multiplies f32 as tf32 alone, not ieee"),
        ("tf32x3", 32, "multiplies f32 as tf32 alone, not tf32x3"),
        ("tf32", 64, "is transposed in rows of 128 bytes"),
        ("tf32", 32, ""),
    ],
)
def test_what_explicit_kernels_do_with_f32(math: str, k: int, said: str) -> None:
    p = ConvProblem.parse(f"mb8ic64ih8oc64oh8kh3ph1 dt=f32 tag=axb math={math}")
    schedule = Schedule.parse(f"ic:64 oc:64 mb:{k // 16} oh:4 ow:4 | {ROLE} stages=2")
    (compute,) = computes(p, BWD_W)
    reason = why_not(schedule, compute, SM90)
    assert (said in reason) if said and reason else reason is None and not said


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("words", "math"),
    [(ROLE, "tf32"), ("a=box b=box", "tf32"), ("a=box b=box", "ieee"), ("a=gather b=box", "tf32")],
)
@pytest.mark.parametrize("fine", ["src", "wei"])
def test_boxes_of_f32_are_rounded_to_what_is_multiplied(words: str, math: str, fine: str) -> None:
    """1 + 3*2^-12 is not a tf32 number; 1 + 2^-10 is the nearest, cut off it would be 1."""
    p = ConvProblem.parse(f"mb1ic32ih8oc64oh8kh3ph1 dt=f32 tag=axb math={math}")
    rng = np.random.default_rng(0)
    values = {n: integers(rng, shapes(p)[n], 1) for n in FWD.operands}
    rounded = math == "tf32" and not (fine == "src" and "a=gather" in words)
    near = {
        n: v * (1 + 2.0**-10 if rounded else 1 + 3 * 2.0**-12) if n == fine else v
        for n, v in values.items()
    }
    values[fine] = values[fine] * (1 + 3 * 2.0**-12)
    launches = kernels(p, FWD, f"mb:1 oh:8 ow:8 oc:64 ic:16 | {words} swap=1")
    expected = convolve(p, FWD, near["src"], near["wei"])
    assert np.array_equal(answer(p, FWD, launches, 0, values), expected)
    noted = {t.name for t in launches[0].params if "fetched as tf32" in str(t)}
    assert (fine in noted) == rounded and "dst" not in noted


def test_no_branch_for_whole_tiles_that_nobody_has() -> None:
    """Triton 3.6 crashes on a statement whose condition is known to be false (an offline compile shows
    it)."""
    p = ConvProblem.parse("mb3ic16ih4iw8oc32oh4ow8kh4kw1ph1pw0 dt=f16 tag=axb")
    blocks = f"oh:8 ow:16 oc:64 ic:32 | {STREAM} swap=1"
    short, long = (kernels(p, FWD, f"{blocks} programs={n}")[0] for n in (132, 2))
    assert not ir.find(short, ir.If) and ir.find(long, ir.If)


@pytest.mark.parametrize(
    ("words", "epilogue"), [(f"{STREAM} programs=7", ""), (f"{ROLE} programs=3 behind=box", "res")]
)
def test_who_fetches_knows_no_lanes(words: str, epilogue: str) -> None:
    """Also where names over lanes have left the loop over the tiles of a program, unsimplified: the
    producer's warp copies whole boxes and needs no lanes."""
    p = ConvProblem.parse("mb3ic32ih8oc24oh8kh3ph1 dt=f16 tag=axb")
    schedule = Schedule.parse(f"mb:2 oh:8 ow:8 oc:16 ic:16 | {words}")
    steps = plan_steps(p, FWD, SM90, schedule, Epilogue.parse(epilogue))
    switches = {"simplify": False}
    kernel = pipeline.lower(*steps[0], SM90, "conv", "ieee", switches)[-1][1]
    roles = {r.name: r for r in ir.find(kernel, ir.Role)}
    named = {n: {s for s in ir.find(r, ir.Let) if ir.find(s.value, ir.Lane)} for n, r in roles.items()}
    assert named["consumer"] and not named["producer"]


@pytest.mark.parametrize(("channels", "legal"), [(8, False), (16, True)])
def test_boxes_side_by_side_need_rows_that_can_be_swizzled(channels: int, legal: bool) -> None:
    """Eight channels are 16 bytes, for which shared memory has no layout across boxes."""
    p = ConvProblem.parse(f"g4mb2ic{4 * channels}ih8oc{4 * channels}oh8kh3ph1 dt=f16 tag=axb")
    schedule = Schedule.parse(f"kh.kw.ic:64 oc:64 oh:4 ow:4 | {ROLE} split_k=2")
    (compute,) = computes(p, BWD_W)
    assert (why_not(schedule, compute, SM90) is None) == legal


def test_consumers_take_turns_at_the_tiles_of_a_program() -> None:
    """Each consumer has every second tile, and a place of its own to store it from."""
    p = ConvProblem.parse("mb5ic32ih8oc24oh8kh3ph1 dt=f16 tag=axb")
    (kernel,) = kernels(p, FWD, f"oh:8 ow:8 oc:16 ic:16 | {CONSUMERS} c=box programs=3")
    evens, odds, fetches = ir.find(kernel, ir.Role)
    loops = [next(x for x in ir.find(r, ir.For) if x.kind == "dealt") for r in (evens, odds, fetches)]
    assert [(str(x.start), x.programs) for x in loops] == [
        ("program", 6),
        ("(program + 3)", 6),
        ("program", 3),
    ]
    assert ir.find(evens, ir.Put)[0].piece.buffer is not ir.find(odds, ir.Put)[0].piece.buffer


def without(kernel: ir.Kernel, name: str, barrier: str) -> ir.Kernel:
    """The kernel without its calls of a function at a barrier."""

    class Without(ir.Mutator):
        def mutate_FuncCall(self, at: ir.FuncCall) -> ir.Stmt | None:
            found = at.func.name == name and getattr(at.args[0], "name", "") == barrier
            return None if found else at

    made: ir.Kernel = Without().mutate(kernel)
    assert made is not kernel
    return made


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("wait", "before its copy has landed|nothing is in it|while it is still being read"),
        ("arrive", "role odds waits for phase 0 of baton"),
    ],
)
def test_without_the_baton_a_consumer_is_a_round_early_or_waits_for_ever(name: str, fault: str) -> None:
    """Nine steps a tile and three slots: the second consumer begins at phase 3, which a new barrier takes
    for the one before the first."""
    p = ConvProblem.parse("mb5ic16ih8oc24oh8kh3ph1 dt=f16 tag=axb")
    (kernel,) = kernels(p, FWD, f"oh:8 ow:8 oc:16 ic:16 | {CONSUMERS} c=box stages=3 programs=3")
    values = {n: np.ones(shapes(p)[n], np.float32) for n in ("src", "wei")}
    with pytest.raises(InterpError, match=fault):
        for seed in range(8):
            answer(p, FWD, [without(kernel, name, "baton")], seed, values)


def test_every_barrier_is_made_and_no_slot_that_it_does_not_have() -> None:
    p = ConvProblem.parse("mb5ic32ih8oc24oh8kh3ph1 dt=f16 tag=axb")
    (kernel,) = kernels(p, FWD, f"oh:8 ow:8 oc:16 ic:16 | {CONSUMERS} c=box stages=5 programs=3")
    lines = emit(kernel).splitlines()
    loop = lines.index("    for slot in gl.static_range(5):")
    assert [x.strip() for x in lines[loop + 1 : loop + 4]] == [
        "mbarrier.init(landed.index(slot), count=1)",
        "mbarrier.init(free.index(slot), count=1)",
        "mbarrier.init(baton.index(0), count=1)",
    ]
    assert lines[loop + 3].startswith("    mbarrier")
    assert sum("mbarrier.init" in x for x in lines) == 3


@pytest.mark.every(2)
@pytest.mark.parametrize(("split", "programs"), [(2, 8), (3, 8), (1, 0)])
def test_parts_of_sums_are_dealt_out_like_tiles(split: int, programs: int) -> None:
    """5 tiles are fewer than 8 programs, their parts are more."""
    p = ConvProblem.parse("mb5ic32ih8oc16oh8kh3ph1 dt=f16 tag=axb")
    kernel = kernels(p, FWD, f"oh:8 ow:8 oc:16 ic:16 | {ROLE} split_k={split} programs=8")[0]
    dealt = [x.programs for x in ir.find(kernel, ir.For) if x.kind == "dealt"]
    assert dealt == [programs] * 2 * (programs > 0)


def test_what_is_kept_is_fetched_once() -> None:
    p = ConvProblem.parse("mb5ic16ih8oc24oh8kh3ph1 dt=f16 tag=axb")
    kernel = kernels(p, FWD, f"oh:8 ow:8 oc:32 ic:16 | {KEPT} stages=3")[0]
    buffers = {s.what.name: s.what.slots for s in ir.find(kernel, ir.Shared)}
    assert buffers == {"src_ring": 3, "wei_kept": 9, "landed": 3, "free": 3, "kept": 9}
    (fetches,) = (r for r in ir.find(kernel, ir.Role) if r.name == "producer")
    once, *_, dealt = ir.statements(fetches.body)
    assert [f.tensor.name for f in ir.find(once, ir.Fetch)] == ["wei"]
    assert [f.tensor.name for f in ir.find(dealt, ir.Fetch)] == ["src"]
    text = emit(kernel)
    assert "wei_kept = gl.allocate_shared_memory(wei_box.dtype, [9, " in text
    assert "mbarrier.wait(kept.index(step), 0)" in text


def test_what_is_kept_has_its_names_without_the_passes_that_shorten() -> None:
    p = ConvProblem.parse("mb1ic32id4ih3iw32oc32od2oh3ow32kd3kh1kw1dd0dh1dw0 dt=f16 tag=ndhwc")
    schedule = Schedule.parse(
        f"ic:16 oc:64 oh.ow:32 | {ROLE} swap=1 programs=5 consumers=2 keep=b stages=4"
    )
    (compute,) = computes(p, BWD_W)
    switches = {"lets": False, "unroll": True, "widen": False}
    kernel = pipeline.lower(compute, schedule, SM90, "conv", "ieee", switches)[-1][1]
    verify(kernel, "explicit")
    values = {n: integers(np.random.default_rng(0), shapes(p)[n], 2) for n in ("src", "dst")}
    assert np.array_equal(
        answer(p, BWD_W, [kernel], 0, values), convolve(p, BWD_W, values["src"], values["dst"])
    )


@pytest.mark.parametrize(
    ("prop", "dtype", "schedule", "reason"),
    [
        (FWD, "f16", f"oh:8 ow:8 oc:32 ic:16 | {ROLE} keep=b", "only a persistent explicit kernel"),
        (
            FWD,
            "f16",
            "oh:8 ow:8 oc:32 ic:16 | a=box b=box programs=2 keep=b",
            "only a persistent explicit",
        ),
        (FWD, "f16", f"oh:8 ow:8 oc:32 ic:16 | {KEPT} split_k=3", "part of a split sum"),
        (FWD, "f16", f"oh:8 ow:8 oc:32 ic:16 | {ROLE} keep=a programs=2", "multiply 5 different pieces"),
        (FWD, "f16", f"oh:8 ow:8 oc:16 ic:16 | {KEPT}", "multiply 2 different pieces"),
        (BWD_D, "f32", f"ih:8 iw:8 oc:32 ic:16 | {KEPT}", "transposes operands"),
    ],
)
def test_why_nothing_is_kept(prop: Prop, dtype: str, schedule: str, reason: str) -> None:
    (compute,) = computes(ConvProblem.parse(f"mb5ic16ih8oc24oh8kh3ph1 dt={dtype} tag=axb"), prop)
    told = why_not(Schedule.parse(schedule), compute, SM90)
    assert told is not None and reason in told


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("consumers=2 via=tl", "only kernels with via=gluon"),
        (f"{ROLE} consumers=3 programs=3", "by one consumer, or by two in turns"),
        (f"{CONSUMERS} programs=3 warps=8", "warp group has 4 warps"),
        (f"{CONSUMERS}", "fewer than the 10 tiles"),
        (f"{CONSUMERS} programs=10", "fewer than the 10 tiles"),
        (f"{CONSUMERS} programs=3 split_k=4", "sums of different lengths"),
        (f"{STREAM} consumers=2 programs=3", "too few to alternate"),
    ],
)
def test_why_consumers_cannot_take_turns(words: str, reason: str) -> None:
    p = ConvProblem.parse("mb5ic32ih8oc24oh8kh3ph1 dt=f16 tag=axb")
    (compute,) = computes(p, FWD)
    told = why_not(Schedule.parse(f"oh:8 ow:8 oc:16 ic:16 | {words}"), compute, SM90)
    assert told is not None and reason in told
