"""Bugs in what rows and their sweeps are made by, each as a developer could have made it: the interpreter
finds it after the pass that it is in, or the verifier refuses the kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.compute.test_sweeps import LAYER_NORM, MOMENTS, SM90, SOFTMAX
from transconv.compute import Compute, Read, kernels, parse
from transconv.errors import StageError
from transconv.ir import (
    ATOMIC_ADD,
    REDUCERS,
    TRUE,
    FuncCall,
    InterpError,
    Load,
    Node,
    Stmt,
    Store,
    VerifyError,
)
from transconv.passes import gridwise, lanewise, reuse
from transconv.runtime import build_compute, forget
from transconv.schedule import Schedule
from transconv.verify.computation import after_every_pass

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


def found(text: str, schedule: str) -> str:
    """What verification says of the kernels of a text; empty if nothing."""
    forget()
    made = parse(text)
    try:
        plan = build_compute(made, SM90, Schedule.parse(schedule) if schedule else None)
        return "; ".join(f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem)
    except (InterpError, StageError, VerifyError) as refused:
        return f"refused: {refused}"


def no_tail(patch: pytest.MonkeyPatch) -> None:
    """Lanes beyond the end of a row take part in its reduction."""
    patch.setattr(gridwise._Guard, "mutate_Update", lambda self, at: at)


def one_name(patch: pytest.MonkeyPatch) -> None:
    """All sweeps bind the same names."""
    patch.setattr(gridwise, "_apart", lambda loop, number, taken: loop)


def one_accumulator(patch: pytest.MonkeyPatch) -> None:
    """The lanes of all reductions are kept in one accumulator."""
    whole = lanewise._Vectorise.mutate_Alloc

    def mutate_Alloc(self: lanewise._Vectorise, alloc: object) -> Stmt:
        self.of_lanes.clear()
        return whole(self, alloc)  # type: ignore[arg-type]

    patch.setattr(lanewise._Vectorise, "mutate_Alloc", mutate_Alloc)


def any_load(patch: pytest.MonkeyPatch) -> None:
    """Loads of one tensor are equal, wherever they look."""
    whole = reuse._Reuse.key

    def key(self: reuse._Reuse, value: object) -> object:
        made = whole(self, value)  # type: ignore[arg-type]
        return replace(made, offset=made.tensor.shape[0] * 0 + reuse.Const(0), mask=TRUE) if isinstance(
            made, Load) else made

    patch.setattr(reuse._Reuse, "key", key)


def from_zero(patch: pytest.MonkeyPatch) -> None:
    """A greatest value begins at 0."""
    patch.setitem(REDUCERS, "max", replace(REDUCERS["max"], neutral=0.0))


def rows_in_another_place(patch: pytest.MonkeyPatch) -> None:
    """What one kernel keeps for the next is read at the row beside it."""
    module = sys.modules["transconv.compute.kernels"]
    whole = module._Cut.computation

    def computation(self: object, ends: object, number: int, every: object) -> Compute:
        made = whole(self, ends, number, every)  # type: ignore[arg-type]

        def moved(step: object) -> object:
            if not isinstance(step, Read) or not step.view.tensor.name.endswith("_kept"):
                return step
            first, *rest = step.view.dims
            dims = replace(first, coord=2 - first.coord), *rest
            return replace(step, view=replace(step.view, dims=dims))

        return replace(made, steps=tuple(moved(s) for s in made.steps)) if number == 1 else made

    patch.setattr(module._Cut, "computation", computation)
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
    patch.setattr(gridwise._Guard, "mutate_FuncCall", lambda self, at: at)


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

BUGS: list[tuple[Plant, str, str]] = [
    (no_tail, SOFTMAX, "k:32 | fma"), (one_name, SOFTMAX, "k:32 | fma | unroll=1"),
    (one_accumulator, MOMENTS, "n:16 k:8 | fma | late=1"),
    (any_load, LAYER_NORM, "n:2 c:4 | fma | unroll=1"), (from_zero, NEGATIVE, "k:128 | fma"),
    (rows_in_another_place, VARIANCE, ""), (stored_instead, ADDED, "n:16 k:4 | fma"),
    (beyond_the_end_too, ADDED, "n:16 k:4 | fma"), (never_cleared, ADDED, "n:16 k:4 | fma")]


@pytest.mark.parametrize(("plant", "text", "schedule"), BUGS, ids=[b[0].__name__ for b in BUGS])
def test_a_bug_is_found(plant: Plant, text: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not found(text, schedule), "wrong without the bug"
    with monkeypatch.context() as patch:
        plant(patch)
        assert found(text, schedule), plant.__doc__
    kernels.cache_clear()
    forget()
