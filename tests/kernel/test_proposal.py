"""The examples of the API's proposal, as it writes them: what they compute in the simulator."""

# mypy: ignore-errors

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.kernel.cases import floats
from tests.kernel.proposal_cases import CASES, by_hand, of_groups, of_items, of_other_groups
from tests.kernel.test_engines import check, copies, interpreted
from transconv.kernel import Group, KernelFunction, kernel


def distances(function: KernelFunction, group: Group, x1, x2):
    d = np.full((len(x1), len(x2)), -1, np.float32)
    function.simulate(group, x1, x2, d)
    return d


def test_the_pairwise_distances_have_the_same_bits() -> None:
    x1, x2 = floats(5, 21), floats(9, 21, seed=1)
    wanted = np.sqrt(((x1[:, None] - x2[None]) ** 2).sum(2))
    group = Group((5, 9), (4, 8))
    first = distances(by_hand, group, x1, x2)
    np.testing.assert_allclose(first, wanted, 1e-5)
    for function in (of_items, of_other_groups):
        np.testing.assert_array_equal(distances(function, group, x1, x2), first)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_the_bits_of_compiled_distances() -> None:
    """Up to 16 columns all three add in the order of a loop, as the simulator does; of more, reductions
    add as trees, both in the same order."""
    for columns in (3, 21):
        x1, x2, group = floats(5, columns), floats(9, columns, seed=1), Group((5, 9), (4, 8))
        found = []
        for function in (by_hand, of_items, of_other_groups):
            found.append(np.full((5, 9), -1, np.float32))
            function(group, x1, x2, found[-1])
        np.testing.assert_array_equal(found[0], distances(by_hand, group, x1, x2))
        np.testing.assert_array_equal(found[1], found[2])
        if columns <= 16:
            np.testing.assert_array_equal(found[1], found[0])
        np.testing.assert_allclose(found[1], found[0], 1e-6)


@pytest.mark.slow
def test_the_third_as_it_is_written() -> None:
    """It takes rows of both arrays at one place and transposes: one group, one set of points."""
    x = floats(9, 21)
    group = Group((9, 9), (12, 12))
    np.testing.assert_array_equal(distances(of_groups, group, x, x), distances(by_hand, group, x, x))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_in_the_simulator(case) -> None:
    given = copies(case)
    case.kernel.simulate(case.group, *given)
    check(case, given)


@pytest.mark.every(2)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_in_tritons_interpreter(case) -> None:
    given = copies(case)
    case.kernel(case.group, *given)
    check(case, given)


@pytest.mark.every(2)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_as_written_and_after_all_passes(case) -> None:
    low = case.kernel.lower(case.group, *copies(case), target="sm_90")
    for _, made in (low.stages[0], low.stages[-1]):
        check(case, interpreted(case, made))


@pytest.mark.parametrize("name", ["masked", "unmask", "soften_mask"])
def test_nothing_makes_an_element_inactive(name: str) -> None:
    @kernel
    def asks(group, X):
        getattr(group.load(X), name)

    with pytest.raises(AttributeError, match=name):
        asks.simulate(Group(1), np.zeros(3, np.float32))
