"""Which addresses kernels form and reach: proofs for golden and drawn kernels, the same verdict as at all
points where a condition of a mask is left out, and stray addresses that nothing else finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.backend_triton.test_emit import CASES as GOLDEN
from transconv.compute import Compute, parse
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Epilogue, Prop, compiler, marked
from transconv.ir import (
    For,
    Kernel,
    Load,
    Lt,
    Mutator,
    Node,
    Var,
    VerifyError,
    all_of,
    conjuncts,
    find,
    verify,
)
from transconv.passes import levels, lower, told_addresses
from transconv.passes.footprints import Footprint, footprints, is_within, verify_addresses, why_not_inside
from transconv.passes.scalar import index_width
from transconv.runtime import build, build_compute
from transconv.schedule import Schedule
from transconv.simplify import range_at_points
from transconv.support import AddressError, TransconvError, knobs
from transconv.target import TARGETS
from transconv.verify import matrix
from transconv.verify.computation import ComputationCase
from transconv.verify.fuzz import compute_trial, conv_trial

SM90 = TARGETS["sm_90"]
GATHERED = "fma | a=gather b=gather | stages=1 warps=4"


def kernels_of(compute: Compute, schedule: str) -> list[Kernel]:
    return [s.kernel for s in build_compute(compute, SM90, Schedule.parse(schedule)).steps]


def unproved(kernels: list[Kernel]) -> list[str]:
    return [f"{k.name}: {f.why_not}" for k in kernels for f in footprints(k) if f.why_not]


@pytest.mark.every(4)
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden_kernels(name: str) -> None:
    text, prop, schedule, epilogue, launch = GOLDEN[name]
    made = compiler.build(
        ConvProblem.parse(text), Prop(prop), SM90, Schedule.parse(schedule), Epilogue.parse(epilogue)
    )
    kernel = made.steps[launch].kernel
    assert unproved([kernel]) == []
    told = told_addresses(kernel)
    assert all(t.name in told for t in kernel.params)


@pytest.mark.slow
@pytest.mark.parametrize("target", [t.name for t in TARGETS.values() if t.backend != "interpreter"])
def test_every_kernel_of_the_matrix(target: str) -> None:
    """Golden problems in all directions, two of them for any size, as each chip's heuristics have them."""
    chip, seen = TARGETS[target], 0
    for case in matrix.CASES.values():
        plain, names = marked(case.problem)
        if any(map(chip.why_not_held, ConvProblem.parse(plain).dtypes)):
            continue
        for way in case.ways:
            after = Epilogue.parse(case.epilogue if way is Prop.FWD else "")
            plan = matrix._plan(case, ConvWorkload(ConvProblem.parse(plain), way, after, names), chip)
            kernels = [s.kernel for s in plan.steps]
            assert unproved(kernels) == [], case.name
            seen += len(kernels)
    assert seen > 50


def drawn(kind: str, number: int) -> list[Kernel]:
    """The kernels of a drawn trial; none where it is refused for another reason."""
    try:
        if kind == "convolution":
            trial = conv_trial.draw_trial(7, number)
            return [s.kernel for s in trial.case("numpy").plan(trial.schedule).steps]
        return [s.kernel for s in compute_trial.draw_trial(7, number).plan().steps]
    except TransconvError as error:
        assert "addresses" not in str(error), error
        return []


@pytest.mark.parametrize("kind", ["convolution", "computation"])
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 1000, 8))]
)
def test_drawn_kernels(kind: str, first: int) -> None:
    """2,000 in all, of which 16 are not slow."""
    assert unproved([k for i in range(first, first + 8) for k in drawn(kind, i)]) == []


PADDED = "mb2ic5ih6oc7oh6kh3ph1 dt=f32"
STRIDED = "mb2ic3ih7oc4oh4kh3sh2ph1 dt=f16 tag=axb"
SMALL = (
    (PADDED, Prop.FWD, "mb.oh.ow:16 oc:16 kw.ic:16 | mma | a=gather b=gather | stages=2 warps=4"),
    (PADDED, Prop.BWD_W, "kw.ic:16 oc:16 mb.oh.ow:16 | mma | split_k=3 stages=2 warps=4"),
    (STRIDED, Prop.BWD_D, "mb.qh.qw:16 ic:16 oc:16 | mma | stages=2 warps=4"),
    ("g6mb2ic6ih5oc6oh5kh3ph1 dt=f16 tag=axb", Prop.FWD, f"mb.oh.ow:8 g:4 | {GATHERED}"),
)


def without_a_condition(at: Footprint) -> Iterator[Footprint]:
    """The access with all conditions of its mask, and without one of them."""
    parts = conjuncts(at.mask)
    yield at
    yield from (replace(at, mask=all_of(parts[:i] + parts[i + 1 :])) for i in range(len(parts)))


@pytest.mark.every(2)
@pytest.mark.parametrize(("problem", "prop", "words"), SMALL)
def test_a_proof_says_what_all_points_do(problem: str, prop: Prop, words: str) -> None:
    """Of each access, and of it without one condition of its mask: it is inside by the proof if and only
    if it is at all points; of what is formed, which no mask bounds, the interval is that of all points."""
    made = compiler.build(ConvProblem.parse(problem), prop, SM90, Schedule.parse(words))
    found = {True: 0, False: 0}
    for kernel in (s.kernel for s in made.steps):
        for access in footprints(kernel):
            for at in without_a_condition(access):
                want = range_at_points(at.offset, conjuncts(at.mask), at.facts)
                assert want is not None
                inside = is_within(want, at.room)
                assert bool(at.proof[0]) is inside, (str(access.stmt), str(at.mask))
                assert is_within(want, at.proof[1]) or want.low > want.high
                found[inside] += 1
            assert access.formed == range_at_points(access.offset, [], access.facts)
    assert found[True] >= 3 and found[False] >= 3, found


class Spoiled(Mutator):
    """Loads of a tensor with another mask."""

    def __init__(self, name: str, old: Node, new: Node) -> None:
        self.name, self.old, self.new = name, old, new

    def mutate_Load(self, at: Load) -> Load:
        if at.tensor.name != self.name:
            return at
        kept = [self.new if c is self.old else c for c in conjuncts(at.mask)]
        return replace(at, mask=all_of([c for c in kept if c is not None]))


GATHER = parse(
    "compute gather\ntensor X f32 [9, 4]\ntensor I i32 [6]\ntensor Y f32 [6, 4]\naxes m=6 n=4\n"
    "read i = I[m]\nread x = X[i, n]\nstore Y[m, n] = x"
)
ANY = parse(
    "compute scaled\nsizes N=1000 in 1..1000000\ntensor X f32 [N]\ntensor Y f32 [N]\naxes n=N\n"
    "read x = X[n]\nstore Y[n] = x*2"
)


def test_a_stray_of_an_index_is_found_by_the_proof_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read at an index of another tensor loses a bound. With indices that are inside, all rules of the
    IR hold, the interpreter finds no access outside, and results are right."""
    (kernel,) = kernels_of(GATHER, f"m:4 n:4 | {GATHERED}")
    load = next(x for x in find(kernel, Load) if x.tensor.name == "X")
    bound = next(c for c in conjuncts(load.mask) if isinstance(c, Lt) and "9" in str(c))
    stray = Spoiled("X", bound, None).rebuilt(kernel)
    verify(stray, levels()["final"])
    case = ComputationCase(GATHER)
    inside = dict(case.given) | {"I": np.array([0, 8, 3, 3, 7, 1])}
    monkeypatch.setitem(case.__dict__, "given", inside)
    assert case.interpreted(stray).problem == ""
    assert unproved([kernel]) == []
    with pytest.raises(VerifyError, match="addresses-are-inside"):
        verify_addresses(stray)


def test_a_stray_of_large_sizes_is_found_by_the_proof_alone() -> None:
    """A mask admits an element more for each 65,536: no size that is tried shows it."""
    (kernel,) = kernels_of(ANY, f"n:128 | {GATHERED}")
    (load,) = find(kernel, Load)
    (bound,) = conjuncts(load.mask)
    assert isinstance(bound, Lt)
    stray = Spoiled("X", bound, Lt(bound.a, bound.b + Var("N") // 65536)).rebuilt(kernel)
    verify(stray, levels()["final"])
    for n in (1, 2, 127, 128, 129, 1000, 65535):
        assert ComputationCase(ANY.at(N=n)).interpreted(stray.at({"N": n})).problem == ""
    assert unproved([kernel]) == []
    assert "is not bounded by the sizes" in unproved([stray])[0]


def test_a_size_that_can_only_be_one_number() -> None:
    """Of 1 to 8 and a multiple of 8: the kernel has it as 8, the tensors by its name."""
    made = parse(
        "compute grid\nsizes M=24 in 8..1000000, N=12 in 4..12, C=8 in 1..8, M % 8 == 0, C % 8 == 0\n"
        "tensor X f32 [M, N*2, C]\ntensor Y f32 [N*2, M, C + 2]\naxes m=M n=N c=C\n"
        "read x = X[m, n*2, c]\nstore Y[n*2, m, c + 1] = x*2"
    )
    assert unproved(kernels_of(made, f"m.n.c:128 | {GATHERED}")) == []


CLIPPED = "mb8?ic8ih56?oc8oh56kh3ph1"
GRADIENTS = (
    "kw.ic:32 oc:16 oh:4 ow:16 | mma | a=gather b=gather | split_k=41 stages=4 warps=4",
    "kw.ic:16 oc:16 oh.ow:64 | mma | a=gather b=gather | stages=4 warps=4",
    "kw.ic:16 oc:16 oh.ow:64 | mma | a=gather b=gather | split_k=8 stages=4 warps=4",
    "kw.ic:16 oc:16 ow:64 | mma | a=gather b=gather | split_k=8 stages=4 warps=4",
)


class Longer(Mutator):
    """Loops of a kind with one more iteration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def mutate_For(self, at: For) -> For:
        made = replace(at, body=self.mutate(at.body))
        if at.kind != self.kind:
            return made
        return replace(made, stop=at.stop + 1, until=None if at.until is None else at.until + 1)


@pytest.mark.parametrize(
    "words",
    [GRADIENTS[1], *(pytest.param(w, marks=pytest.mark.slow) for w in GRADIENTS if w != GRADIENTS[1])],
)
def test_tiles_of_several_axes_in_parts_are_proved_for_all_sizes(words: str) -> None:
    """A loop over tiles of images, rows and columns that ends with its part or with the last tile. Without
    a condition of a mask there is a proof if and only if all points of some sizes are inside, and none
    with an iteration more."""
    plain, names = marked(CLIPPED)
    work = ConvWorkload(ConvProblem.parse(plain), Prop.BWD_W, open=names)
    kernel = build(work, SM90, Schedule.parse(words), None, False, CompiledDirection).steps[0].kernel
    assert kernel.sizes is not None and unproved([kernel]) == []
    each = [
        footprints(kernel.at({"MB": mb, "IH": ih, "IW": iw})) for mb, ih, iw in ((1, 5, 19), (2, 6, 3))
    ]
    found = {True: 0, False: 0}
    for access, *at in zip(footprints(kernel), *each, strict=True):
        for i, less in enumerate(without_a_condition(access) if access.does == "load" else ()):
            inside = all(reaches_inside([*without_a_condition(a)][i]) for a in at)
            assert bool(less.proof[0]) is inside, str(less.mask)
            found[inside] += 1
    assert found[True] >= 2 and found[False] >= 6, found
    longer = Longer("serial").rebuilt(kernel)
    verify(longer, levels()["final"])
    assert len(unproved([longer])) == 2


def test_an_operand_along_an_open_size_has_it() -> None:
    """Of the example it has one element, of other sizes a row's."""
    plain, names = marked("mb2?ic5ih1?oc8oh1kh3ph1")
    work = ConvWorkload(ConvProblem.parse(plain), Prop.FWD, Epilogue.parse("add:f32:4"), names)
    schedule = Schedule.parse(f"mb.oh.ow:16 oc:8 | {GATHERED}")
    kernel = build(work, SM90, schedule, None, False, CompiledDirection).steps[0].kernel
    assert unproved([kernel]) == unproved([kernel.at({"MB": 1, "IH": 7, "IW": 3})]) == []
    loads = [a for a in footprints(kernel.at({"MB": 1, "IH": 7, "IW": 3})) if a.tensor.name == "arg0"]
    assert [(a.tensor.shape, a.proof[1].hi) for a in loads] == [((1, 1, 7, 1), 6)]


def reaches_inside(at: Footprint) -> bool:
    want = range_at_points(at.offset, conjuncts(at.mask), at.facts)
    assert want is not None
    return is_within(want, at.room)


def test_an_access_without_a_mask_is_proved_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRANSCONV_VERIFY a schedule whose kernel could stray is refused."""
    text = parse(
        "compute doubled\ntensor X f32 [256]\ntensor Y f32 [256]\naxes n=256\n"
        "read x = X[n]\nstore Y[n] = x*2"
    )
    schedule = Schedule.parse(f"n:128 | {GATHERED}")
    (kernel,) = kernels_of(text, str(schedule))
    assert all(f.proof[0] == "ranges" for f in footprints(kernel)) and not why_not_inside(kernel)
    narrow = index_width.narrow

    def moved(kernel: Kernel) -> Kernel:
        class Moved(Mutator):
            def mutate_Load(self, at: Load) -> Load:
                return replace(at, offset=at.offset + 1)

        return Moved().rebuilt(narrow(kernel))

    monkeypatch.setattr(index_width, "narrow", moved)
    with monkeypatch.context() as patch:
        patch.setattr(knobs, "verify", lambda: False)
        with pytest.raises(
            AddressError, match=r"is in 1\.\.256; expected one in the memory of X, of 0\.\.255"
        ):
            lower(text, schedule, SM90, "doubled")


def test_what_is_printed() -> None:
    """A padded convolution forms addresses around its image under a mask."""
    (kernel,) = (
        s.kernel
        for s in compiler.build(
            ConvProblem.parse("mb2ic8ih8oc8kh3ph1"), Prop.FWD, SM90,
            Schedule.parse("mb.oh.ow:16 oc:16 kw.ic:32 | mma | stages=4 warps=4"),
        ).steps
    )  # fmt: skip
    assert told_addresses(kernel).splitlines() == [
        "addresses  in elements of each tensor's memory",
        "    load  src          0..1023 of 0..1023, by ranges; masked lanes form -9..1033",
        "    load  wei          0..575 of 0..575, by ranges; masked lanes form 0..1152",
        "    store dst          0..1023 of 0..1023, by ranges; masked lanes form 0..1535",
    ]
    (sized,) = kernels_of(ANY, f"n:128 | {GATHERED}")
    assert "0..999 of 0..999, by ranges for all sizes" in told_addresses(sized)
