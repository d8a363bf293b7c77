"""The simulator: kernels as Python on NumPy, items in their order, what it refuses and where."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel.cases import Case
from tests.kernel.test_engines import ALL, check, copies
from transconv.kernel import Group, KernelError, kernel
from transconv.kernel.frontend import methods
from transconv.kernel.simulator.execution import simulate
from transconv.kernel.simulator.group import SimulatedGroup


@pytest.mark.every(2)
@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_cases(case: Case) -> None:
    given = copies(case)
    case.kernel.simulate(case.group, *given)
    check(case, given)


def test_it_has_every_method_of_a_group() -> None:
    assert all(hasattr(SimulatedGroup, name) for name in methods.METHODS)


FOUR = Group(4, 4)


def run(function: Callable[..., Any], group: Group, **arguments: Any) -> None:
    simulate(function, group, arguments)


def refusal(function: Callable[..., Any], group: Group = FOUR, **arguments: Any) -> str:
    """The error, in which ``L`` and a number stand for the lines of the function."""
    with pytest.raises(KernelError) as caught:
        run(function, group, **(arguments or {"X": np.arange(4.0, dtype=np.float32)}))
    first = function.__code__.co_firstlineno
    said = str(caught.value)
    for line in range(first, first + 20):
        said = said.replace(f"test_simulator.py:{line}", f"L{line - first}")
    return said


def rotated(group: Any, X: Any, Y: Any) -> None:
    t = group.empty(shape=group.shape, dtype=np.float32)

    @group.workitems
    def inner(item: Any) -> None:
        (i,), (n,) = item.local_id(), group.shape
        t[i] = X[item.global_id()[0]] * 2.0
        item.barrier()
        Y[item.global_id()[0]] = t[(i + 1) % n]
        item.barrier()
        t[i] = 0.0

    inner()
    group.store(Y[group.work_offset()[0] + 1 :], group.load(X)[:1])


def test_items_run_to_barriers_in_their_order() -> None:
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    run(rotated, Group(8, 4), X=x, Y=y)
    assert y.tolist() == [2, 0, 6, 0, 10, 0, 14, 8]


def test_subgroups() -> None:
    def kernel(group: Any, Y: Any) -> None:
        @group.subgroups
        def inner(sub: Any) -> None:
            n, size = sub.subgroup_id(), sub.size()
            group.store(Y[group.work_offset()[0] + n * size :], group.vfull((size,), np.int32, n))

        inner()

    y = np.full(14, -1, np.int32)
    run(kernel, Group(14, 8, 4), Y=y)
    assert y.tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 2


def races(group: Any, X: Any) -> None:
    @group.workitems
    def inner(item: Any) -> None:
        (i,) = item.local_id()
        X[(i + 1) % 4] = X[i] + 1.0

    inner()


def between_groups(group: Any, X: Any) -> None:
    group.store(X[:1], group.ones(shape=(1,)))


def reads_of_others(group: Any, X: Any) -> None:
    (i,) = group.id()
    x = group.load(X[i:], shape=(2,))
    group.store(X[i:], x[:1])


def on_tiles(group: Any, X: Any) -> None:
    t = group.zeros(shape=(4,))

    @group.workitems
    def inner(item: Any) -> None:
        t[0] = 1.0

    inner()


def some_wait(group: Any, X: Any) -> None:
    @group.workitems
    def inner(item: Any) -> None:
        if item.local_id()[0] != 2:
            group.barrier()

    inner()


def first_ends(group: Any, X: Any) -> None:
    @group.workitems
    def inner(item: Any) -> None:
        if item.local_id()[0]:
            group.barrier()

    inner()


def elsewhere(group: Any, X: Any) -> None:
    @group.workitems
    def inner(item: Any) -> None:
        if item.local_id()[0] < 3:
            group.barrier()
        else:
            group.barrier()

    inner()


@pytest.mark.parametrize(
    ("function", "group", "said"),
    [
        (
            races,
            FOUR,
            "L4: found a race: an element of X is read by work-item (1,) here, and written by "
            "work-item (0,) at L4",
        ),
        (
            between_groups,
            Group(2, 1),
            "L1: found a race: an element of X is written by group (1,) here, and "
            "written by group (0,) at L1",
        ),
        (
            reads_of_others,
            Group(2, 1),
            "L3: found a race: an element of X is written by group (1,) here, and "
            "read by group (0,) at L2",
        ),
        (
            on_tiles,
            FOUR,
            "L5: found a race: an element of a tile of shape (4,) is written by work-item (1,)",
        ),
        (
            some_wait,
            Group(4, 4),
            "L4: found a barrier that not all items reach: work-item (0,) waits at L4, "
            "work-item (2,) has ended",
        ),
        (
            first_ends,
            Group(4, 4),
            "L4: found a barrier that not all items reach: work-item (0,) has ended, "
            "work-item (1,) waits at L4",
        ),
        (elsewhere, Group(4, 4), "work-item (0,) waits at L4, work-item (3,) waits at L6"),
    ],
)
def test_races_and_barriers(function: Any, group: Group, said: str) -> None:
    assert said in refusal(function, group)


def test_a_barrier_orders_what_would_race() -> None:
    def kernel(group: Any, X: Any) -> None:
        @group.workitems
        def inner(item: Any) -> None:
            (i,) = item.local_id()
            before = X[i]
            item.barrier()
            X[(i + 1) % 4] = before + 1.0

        inner()

    x = np.arange(4, dtype=np.float32)
    run(kernel, Group(4, 4), X=x)
    assert x.tolist() == [4, 1, 2, 3]


def vector_changes(group: Any, X: Any) -> None:
    x = group.vload(X)
    x[0] = 1.0


def mask_changes(group: Any, X: Any) -> None:
    x = group.load(X)
    x.mask[0] = True


def allocates(group: Any, X: Any) -> None:
    @group.workitems
    def inner(item: Any) -> None:
        group.zeros(shape=(4,))

    inner()


def decides(group: Any, X: Any) -> None:
    if X[7] > 0.0:
        pass


def vector_out(group: Any, X: Any) -> None:
    np.add(group.load(X), 1.0, out=group.vzeros(shape=(4,)))


def mismatched(group: Any, X: Any) -> None:
    group.load(X) + group.load(X[1:])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (vector_changes, "L2: found an assignment to elements of a vector"),
        (mask_changes, "L2: found an assignment to elements of a vector"),
        (allocates, "L3: found group.zeros by work-item (0,); allowed: tiles at the scope of the group"),
        (decides, "L1: found a decision by an inactive element"),
        (vector_out, "L1: found out= of another kind"),
        (mismatched, "L1: found the shapes"),
    ],
)
def test_refusals(function: Any, said: str) -> None:
    assert said in refusal(function)


@kernel.func
def bell(x: Any) -> Any:
    return math.exp(-x * x)


def test_functions_of_python_on_tiles() -> None:
    def kernel(group: Any, X: Any, Y: Any) -> None:
        x = group.load(X, shape=(8,))
        group.store(Y, math.erf(max(x, 0.5, -x)) + sum(x) + max(x) * min(2, 3) + sum((1, 2)) + bell(x))

    x, y = np.linspace(-2, -1, 5, dtype=np.float32), np.zeros(8, np.float32)
    run(kernel, Group(1), X=x, Y=y)
    np.testing.assert_allclose(y[:5], [math.erf(-v) - 7.5 - 2.0 + 3 + math.exp(-v * v) for v in x], 1e-5)
    assert not y[5:].any()


def test_nothing_is_reduced_to_something_inactive() -> None:
    def kernel(group: Any, X: Any, Y: Any) -> None:
        group.store(Y, X[0].sum()[None])

    y = np.full(1, 7, np.float32)
    run(kernel, Group(1), X=np.zeros((2, 0), np.float32), Y=y)
    assert y.tolist() == [7]


def test_a_breakpoint_stops_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(group: Any, X: Any) -> None:
        @group.workitems
        def inner(item: Any) -> None:
            group.barrier()
            breakpoint()

        inner()

    seen = []
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: seen.append(sys._getframe(1).f_locals["item"].local_id())
    )
    run(kernel, Group(3, 3), X=np.zeros(3, np.float32))
    assert seen == [(0,), (1,), (2,)]


def test_errors_of_python_stay() -> None:
    def kernel(group: Any, X: Any) -> None:
        @group.workitems
        def inner(item: Any) -> None:
            group.barrier()
            if item.local_id() == (2,):
                raise LookupError("mine")
            group.barrier()

        inner()

    with pytest.raises(LookupError, match="mine"):
        run(kernel, Group(4, 4), X=np.zeros(3, np.float32))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_tensors_of_torch(dtype: torch.dtype) -> None:
    def kernel(group: Any, X: Any, Y: Any) -> None:
        x = group.load(X, shape=(8,))
        group.store(Y, x + x if X.dtype.kind != "bool" else ~x)

    x = torch.tensor([1.1, 0, -3, 5, 2]).to(dtype)
    y = torch.zeros(5).to(dtype)
    run(kernel, Group(1), X=x, Y=y)
    wanted = ~x if dtype is torch.bool else (x.double() * 2).to(dtype)
    assert torch.equal(y.double(), wanted.double())
