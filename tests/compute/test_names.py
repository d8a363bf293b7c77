"""The names that steps mention, by changing one at a time what could mention them."""

from __future__ import annotations

import pytest

from transconv.compute import parse
from transconv.compute.names import fresh, used
from transconv.ir import Var

TEXT = """compute p
    axes   a=3 b=4 c=5 | k=6
    read   x = X[{0}, {1}] where {2} < 2
    let    y = x * {3}
    let    s = sum(y; k)
    store  Y[{0}, {1}] where {2} < 2 = s + {4}"""


@pytest.mark.parametrize("place", range(5))
def test_every_place_of_a_name_counts(place: int) -> None:
    """A name that stands in one place alone is among those of the steps with that place, and no others."""
    words = [("a", "b", "a", "a", "a")[i] if i != place else "c" for i in range(5)]
    read, let, _, store = parse(TEXT.format(*words)).steps
    mentioned = [Var("c") in used(step) for step in (read, let, store)]
    assert mentioned == [place < 3, place == 3, place != 3]
    assert "x" in {v.name for v in used(let)} and "s" in {v.name for v in used(store)}
    assert "x" not in {v.name for v in used(read)}


def test_a_fresh_name_is_taken_by_nothing() -> None:
    assert fresh("x", ["y"]) == "x" and fresh("x", ["x", "y"]) == "x_" and fresh("x", ["x_", "x"]) == "x__"
