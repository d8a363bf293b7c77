"""The names that steps mention, by changing one at a time what could mention them."""

from __future__ import annotations

import pytest

from transconv.compute import parse
from transconv.compute.analysis.store_conflicts import _told
from transconv.compute.steps import fresh, used
from transconv.ir import Var, value_at

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


@pytest.mark.parametrize(
    "coord", ["a*4 + b", "a*4 + b*2", "a*3 + b", "b*3 + a", "a + b", "b", "a*8 + b*2 + a"]
)
def test_axes_that_a_coordinate_tells(coord: str) -> None:
    """Of these alone each place has one position; an axis of one position changes nothing."""

    def of(text: str) -> tuple[set[str], list[int]]:
        made = parse(
            f"compute p\n tensor Y f32 [99]\n axes a=3 b=4 c=1\n read x = X[a, b]\nstore Y[{text}] = x"
        )
        at = made.c.dims[0].coord
        return _told(made, at), [
            value_at(at, {"a": a, "b": b, "c": 0}) for a in range(3) for b in range(4)
        ]

    told, places = of(coord)
    assert told in (set(), {"a", "b"}, {"b"}) and (told != {"a", "b"} or len({*places}) == 12)
    for one in (" + c", " + c*9"):
        assert of(f"{coord}{one}")[0] - {"c"} == told
