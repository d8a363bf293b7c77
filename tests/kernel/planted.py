"""Bugs for the kernel language, each as a developer could have made it: a name of a module, and what it
would be then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Bug:
    """``where``: a module of ``transconv.kernel`` and a name in it; ``made``: the wrong one of the right;
    ``quick``: whether the first trials find it; ``first``: the first trial that is looked at."""

    what: str
    where: str
    made: Callable[[Any], Any]
    quick: bool = False
    first: int = 0


def _zero_for_maxima(rows: Any) -> Any:
    return {**rows, "max": replace(rows["max"], neutral=0.0)}


BUGS = (
    Bug(
        "the mask of a second operand is dropped",
        "tiles.values.joined",
        lambda f: lambda *m: f(*m[:1]),
        True,
    ),
    Bug("the neutral element of maxima is 0", "tiles.reductions.ir.REDUCERS", _zero_for_maxima),
    Bug("what is assigned does not become active", "tiles.tile_elements.either", lambda f: lambda a, b: a),
    Bug(
        "lanes beyond the end of a tile are stored", "tiles.arrays.ends", lambda f: lambda shape: (), True
    ),
    Bug(
        "sums take inactive elements for 0",
        "tiles.kernel_builder.Building.is_zero",
        lambda f: lambda *x: True,
        True,
    ),
    Bug(
        "the mask of one branch holds behind both",
        "frontend.blocks.begun",
        lambda f: lambda *x: f(*x[:5]),
        first=240,
    ),
    Bug(
        "a loop without iterations leaves what it would have added",
        "frontend.blocks.afterwards",
        lambda f: lambda held, never: f(held, None),
        first=300,
    ),
    Bug(
        "lanes beyond the end of a tile take part in reductions and products",
        "tiles.reductions.ends",
        lambda f: lambda shape: (),
        first=290,
    ),
    Bug(
        "branches of work-items ignore the one around",
        "frontend.statements.joined",
        lambda f: lambda *m: f(*m[-1:]),
    ),
    Bug("a reduction of nothing is active", "tiles.reductions.at_first", lambda f: lambda *x: ()),
)
