"""Planted bugs in reductions of rows, their sweeps and parts, stores that add, prologues and sizes as
arguments, each as a developer could have made it: bisection names the stage."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.compute.test_sweeps import LAYER_NORM, MOMENTS, SM90, SOFTMAX
from transconv.compute import Compute, Read, kernels, parse
from transconv.errors import ScheduleError
from transconv.ir import (
    ATOMIC_ADD,
    REDUCERS,
    TRUE,
    Const,
    For,
    FuncCall,
    Kernel,
    Load,
    Node,
    Stmt,
    Store,
    Var,
    find,
    substitute,
)
from transconv.passes.lowering import gridwise, lanewise, split_k, tile_statistics
from transconv.passes.scalar import cse, hoist
from transconv.runtime import forget
from transconv.schedule import Schedule, finishes, word_rules
from transconv.selection.candidates import spread
from transconv.verify.bisect.stage_search import Blame, blame_compute

VARIANCE = """compute variance
    axes   n=3 p=4 | k=8
    read   x = X[n, p*8 + k]
    let    m = sum(x; k) / 8
    let    d = sum((x - m)**2; k)
    let    mean = sum(m; p) / 4
    let    whole = sum(d + 8*(m - mean)**2; p)
    store  V[n] = whole"""

NEGATIVE = """compute negative
    axes   n=3 | k=77
    read   x = X[n, k]
    let    y = x - 2
    let    top = max(y; k)
    store  Y[n, k] = y - top"""

Plant = Callable[[pytest.MonkeyPatch], None]


def found(text: str, schedule: str) -> Blame:
    """What bisection says of the kernels of a text."""
    forget()
    finishes.cache_clear()
    kernels.cache_clear()
    spread.cache_clear()
    made = parse(text)
    sizes = {s.name: s.like + 5 for s in made.named.each} if made.named else None
    try:
        return blame_compute(
            made, SM90, Schedule.parse(schedule) if schedule else None, parts=("ir",), sizes=sizes
        )
    except ScheduleError as refused:  # by the rule that a bug takes away
        return Blame("", "", "", str(refused))


def no_tail(patch: pytest.MonkeyPatch) -> None:
    """Lanes beyond the end of a row take part in its reduction."""
    patch.setattr(gridwise.Guard, "mutate_Update", lambda self, at: at)


def one_name(patch: pytest.MonkeyPatch) -> None:
    """All sweeps bind the same names."""
    patch.setattr(gridwise, "_renamed", lambda loop, number, taken: loop)


def one_accumulator(patch: pytest.MonkeyPatch) -> None:
    """The lanes of all reductions are kept in one accumulator."""
    whole = lanewise._Vectorise.mutate_Alloc

    def mutate_Alloc(self: lanewise._Vectorise, alloc: object) -> Stmt:
        self.of_lanes.clear()
        return whole(self, alloc)  # type: ignore[arg-type]

    patch.setattr(lanewise._Vectorise, "mutate_Alloc", mutate_Alloc)


def any_load(patch: pytest.MonkeyPatch) -> None:
    """Loads of one tensor are equal, wherever they look."""
    whole = cse._Reuse.key

    def key(self: cse._Reuse, value: object) -> object:
        made = whole(self, value)  # type: ignore[arg-type]
        return (
            replace(made, offset=made.tensor.shape[0] * 0 + Const(0), mask=TRUE)
            if isinstance(made, Load)
            else made
        )

    patch.setattr(cse._Reuse, "key", key)


def from_zero(patch: pytest.MonkeyPatch) -> None:
    """A greatest value begins at 0."""
    patch.setitem(REDUCERS, "max", replace(REDUCERS["max"], neutral=0.0))


def rows_in_another_place(patch: pytest.MonkeyPatch) -> None:
    """What one kernel keeps for the next is read at the row beside it."""
    module = sys.modules["transconv.compute.kernel_split"]
    whole = module.Cut.computation

    def computation(self: object, ends: object, number: int, every: object) -> Compute:
        made = whole(self, ends, number, every)  # type: ignore[arg-type]

        def moved(step: object) -> object:
            if not isinstance(step, Read) or not step.view.tensor.name.endswith("_kept"):
                return step
            first, *rest = step.view.dims
            dims = replace(first, coord=2 - first.coord), *rest
            return replace(step, view=replace(step.view, dims=dims))

        return replace(made, steps=tuple(moved(s) for s in made.steps)) if number == 1 else made

    patch.setattr(module.Cut, "computation", computation)
    kernels.cache_clear()


def stored_instead(patch: pytest.MonkeyPatch) -> None:
    """What is to be added is stored."""
    whole = lanewise._Vectorise.mutate

    def mutate(self: lanewise._Vectorise, at: Node) -> Node | None:
        if isinstance(at, FuncCall) and at.func is ATOMIC_ADD:
            return whole(self, Store(*at.args))  # type: ignore[arg-type]
        return whole(self, at)

    patch.setattr(lanewise._Vectorise, "mutate", mutate)


def beyond_the_end_too(patch: pytest.MonkeyPatch) -> None:
    """Lanes beyond the end add, too."""
    patch.setattr(gridwise.Guard, "mutate_FuncCall", lambda self, at: at)


def never_cleared(patch: pytest.MonkeyPatch) -> None:
    """Sums begin with what is there."""
    patch.setattr(Compute, "added", ())


ADDED = """compute added
    tensor I i64 [21]
    axes   n=21 k=5
    tensor Y f32 [4, 5]
    read   i = I[n]
    read   g = G[n, k]
    store  Y[i, k] += g"""


def parts_of_one_mean(patch: pytest.MonkeyPatch) -> None:
    """Deviations of parts are joined as if all parts had one mean."""
    module = sys.modules["transconv.compute.analysis.rfactor"]
    whole = module._Parted.squares

    def squares(self: object, step: object, x: object, total: object, mean: object) -> object:
        *before, last = whole(self, step, x, total, mean)  # type: ignore[arg-type]
        return [*before, replace(last, value=before[-1].var)]

    patch.setattr(module._Parted, "squares", squares)


def parts_of_one_top(patch: pytest.MonkeyPatch) -> None:
    """Powers of parts are added as if all parts had one maximum."""
    module = sys.modules["transconv.compute.analysis.rfactor"]
    whole = module._Parted.powers

    def powers(self: object, step: object, value: object, top: object) -> object:
        *before, last = whole(self, step, value, top)  # type: ignore[arg-type]
        return [*before, replace(last, value=before[-1].var)]

    patch.setattr(module._Parted, "powers", powers)


def first_of_any_part(patch: pytest.MonkeyPatch) -> None:
    """The place of an extreme is taken from every part, not only from those that contain it."""
    module = sys.modules["transconv.compute.analysis.rfactor"]
    whole = module._Parted.place_of

    def place_of(self: object, step: object, extreme: object) -> object:
        first, last = whole(self, step, extreme)
        return [first, replace(last, value=last.value.yes)]

    patch.setattr(module._Parted, "place_of", place_of)


def last_not_rounded(patch: pytest.MonkeyPatch) -> None:
    """The kernel that rounds what was added to 16 bits leaves out the last row."""
    module = sys.modules["transconv.compute.kernel_split"]
    whole = module._rounded

    def rounded(compute: Compute, narrow: object) -> Compute:
        made: Compute = whole(compute, narrow)
        first, *rest = made.axes
        return replace(made, axes=(replace(first, size=first.size - 1), *rest))

    patch.setattr(module, "_rounded", rounded)
    kernels.cache_clear()


def prologue_beyond_the_end(patch: pytest.MonkeyPatch) -> None:
    """What is computed before it is multiplied counts as 0 beyond the end of a sum, like a read."""
    patch.setattr(word_rules, "_uneven", lambda schedule, compute: None)
    # What the rule said of the tile before is remembered.
    patch.setattr(word_rules, "_why_not_tile", word_rules._why_not_tile.__wrapped__)
    no_tail(patch)


def grid_of_the_example(patch: pytest.MonkeyPatch) -> None:
    """A kernel that takes sizes as arguments starts the programs of its example alone."""
    whole = gridwise.gridwise

    def planted(*given: object) -> Kernel:
        made: Kernel = whole(*given)  # type: ignore[arg-type]
        (grid,) = [x for x in find(made, For) if x.kind == "grid"]
        return replace(made, body=replace(grid, stop=1, until=None))

    patch.setattr(gridwise, "gridwise", planted)


def first_store_alone(patch: pytest.MonkeyPatch) -> None:
    """Parts of a sum are stored where the first result is, before there is a sum."""
    whole = split_k._Partials.__init__

    def planted(self: split_k._Partials, *given: object) -> None:
        whole(self, *given)  # type: ignore[arg-type]
        self.last = given[3][0]  # type: ignore[index]

    patch.setattr(split_k._Partials, "__init__", planted)


def rows_beyond_the_end_count(patch: pytest.MonkeyPatch) -> None:
    """Rows of a tile beyond the end of the result take part in its statistics."""
    patch.setattr(tile_statistics.Reducing, "masked", lambda self, op, value, mask: value)


def rows_of_a_tile_are_not_added(patch: pytest.MonkeyPatch) -> None:
    """Of the rows that a program adds up behind its last tile, the greatest is taken."""
    whole = tile_statistics.Reducing.reduced
    patch.setattr(
        tile_statistics.Reducing,
        "reduced",
        lambda self, op, value, over: whole(
            self, "max" if isinstance(value, Var) and value.name.endswith("_all") else op, value, over
        ),
    )


def first_tile_for_all(patch: pytest.MonkeyPatch) -> None:
    """What differs from tile to tile is loaded once, too, for the first tile of a program."""
    whole = hoist._Hoist.dealt

    def planted(self: hoist._Hoist, loop: For, body: Stmt) -> Stmt:
        loads = {x: substitute(x, {loop.var: loop.start}) for x in find(body, Load)}
        return whole(self, loop, substitute(body, loads))

    patch.setattr(hoist._Hoist, "dealt", planted)


def one_mean_of_all_tiles(patch: pytest.MonkeyPatch) -> None:
    """Squared deviations of tiles are added up as if all tiles had one mean."""
    module = sys.modules["transconv.schedule.tiles.partial_results"]
    patch.setattr(module, "_between", lambda i, steps, read, *rest: read.var)


LONG = """compute long
    axes   n=2 | k=2048
    read   x = X[k, n]
"""
ROUNDED = ADDED.replace("tensor Y f32", "tensor Y f16")
PROLOGUE = """compute prologue
    axes   m=16 n=16 | k=20
    read   x = X[m, k]
    read   w = W[n, k]
    store  Y[m, n] = sum((x*2 - 1)*(w - 1); k)"""
TWO = """compute two
    axes   m=16 n=16 | k=32
    read   x = X[m, k]
    read   w = W[n, k]
    let    s = sum(x*w; k)
    read   r = R[m]
    store  D[m, n] = s
    store  C[m, n] = r + 1"""
STATISTICS = """compute statistics
    axes   m=20 n=16 | k=32
    read   x = X[m, k]
    read   w = W[n, k]
    let    s = sum(x*w; k)
    let    y = s + 1
    store  Y[m, n] = y
    store  M[n // 2] sum= y
    store  D[n // 2] squares= y"""
CARRIED = """compute carried
    axes   n=20 | k=12
    read   x = X[n, k]
    let    s = sum(x; k)
    store  Y[n, k] = x - s
    store  W[k] sum= x"""
SIZED = "compute sized\n sizes M=4 in 1..64\n axes m=M k=3\n read x = X[m, k]\n store Y[m, k] = x + 1"

BUGS: list[tuple[Plant, str, str, str]] = [
    (no_tail, SOFTMAX, "k:32 | fma", "gridwise"),
    (one_name, SOFTMAX, "k:32 | fma | unroll=1", "unroll"),
    (one_accumulator, MOMENTS, "n:16 k:8 | fma | late=1", "lanewise"),
    (any_load, LAYER_NORM, "n:2 c:4 | fma | unroll=1", "reuse"),
    (from_zero, NEGATIVE, "k:128 | fma", "naive"),
    (rows_in_another_place, VARIANCE, "", "compute"),
    (stored_instead, ADDED, "n:16 k:4 | fma", "lanewise"),
    (beyond_the_end_too, ADDED, "n:16 k:4 | fma", "gridwise"),
    (never_cleared, ADDED, "n:16 k:4 | fma", "naive"),
    (
        parts_of_one_mean,
        LONG + " let t = sum(x; k)\n let mean = t / 2048\n let d = x - mean\n store V[n] = sum(d*d; k)",
        "red=split",
        "compute",
    ),
    (
        parts_of_one_top,
        LONG + " let top = max(x; k)\n store Y[n] = sum(exp(x - top); k)",
        "red=split",
        "compute",
    ),
    (first_of_any_part, LONG + " store Y[n] = argmax(x; k)", "red=split", "compute"),
    (last_not_rounded, ROUNDED, "", "compute"),
    (prologue_beyond_the_end, PROLOGUE, "m:16 n:16 k:16 | mma", "gridwise"),
    (grid_of_the_example, SIZED, "m:4 | fma", "gridwise"),
    (first_store_alone, TWO, "m:16 n:16 k:16 | fma | split_k=2", "blockwise"),
    (rows_beyond_the_end_count, STATISTICS, "m:16 n:16 k:16 | fma", "lanewise"),
    (one_mean_of_all_tiles, STATISTICS, "m:16 n:16 k:16 | fma", "gridwise"),
    (rows_of_a_tile_are_not_added, CARRIED, "n:4 k:16 | fma | late=1 programs=2", "lanewise"),
    (first_tile_for_all, CARRIED, "n:4 k:16 | fma | stages=2 programs=2", "hoist"),
]


@pytest.mark.parametrize("plant", dict.fromkeys(b[0] for b in BUGS), ids=lambda b: b.__name__)
def test_what_a_bug_replaces_is_there(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
    kernels.cache_clear()


@pytest.mark.every(3)
@pytest.mark.parametrize(("plant", "text", "schedule", "stage"), BUGS, ids=[b[0].__name__ for b in BUGS])
def test_a_bug_is_found(
    plant: Plant, text: str, schedule: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the stage that it is in is named."""
    right = found(text, schedule)
    assert not right, right.text
    with monkeypatch.context() as patch:
        plant(patch)
        blamed = found(text, schedule)
    kernels.cache_clear()
    finishes.cache_clear()
    forget()
    assert blamed.stage == stage, blamed.text
