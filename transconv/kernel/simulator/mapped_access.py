"""Loads and stores by a mapping in the simulator, and arrays with a layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from transconv.ir import convert
from transconv.kernel.mappings import Mapping, colliding
from transconv.kernel.refusals import Refusal
from transconv.kernel.simulator.arrays import MemoryPart
from transconv.kernel.simulator.numerics import Array
from transconv.kernel.simulator.values import Masked, part_of
from transconv.kernel.tiles.arrays import filling


def _places(view: MemoryPart, mapping: Any, shape: tuple[int, ...]) -> list[Array]:
    """The indices of a tile's elements in an array."""
    if not isinstance(mapping, Mapping):
        raise Refusal("mapping= of another kind", "create_mapping", "create_mapping(lambda i, j: (j, i))")
    if view.order.inside:
        raise Refusal(f"a mapping inside of {view.order.who}", "the scope of the group")
    made = mapping.places(np.indices(shape))
    if len(made) != view.ndim:
        raise Refusal(f"a mapping that gives {len(made)} indices for an array of {view.ndim} dimensions",
                      "one for each dimension")
    return [np.broadcast_to(part_of(m).data, shape) for m in made]


def load_by(view: MemoryPart, shape: tuple[int, ...] | None, mapping: Any, vector: bool,
            fill: Any = None) -> Masked:
    """The elements at the places of a mapping; inactive where there is none."""
    if shape is None:
        raise Refusal("a mapping without a shape", "shape=(...)",
                      "group.load(X, shape=(16, 16), mapping=m)")
    made = view.gathered(_places(view, mapping, shape), True)
    if fill is not None:
        filling(fill, view.dtype)
        made = made.filled(fill)
    made.vector = vector
    return made


def store_by(view: MemoryPart, value: Any, mapping: Any) -> None:
    """Write active elements to the places of a mapping. Refused where two of them have one place."""
    part = part_of(value)
    at = _places(view, mapping, part.data.shape)
    if collision := colliding([p.ravel() for p in at], part.data.shape, view.shape):
        raise Refusal(f"a store to {view.memory.trace.name} by a mapping in which {collision}",
                      "mappings with a place for each element", "create_mapping(lambda i, j: (j, i))")
    chosen, inside = view.chosen(at, True)
    active = part.active[inside]
    place = tuple(i[active] for i in chosen)
    view.writable()
    view.data[place] = convert(np.asarray(part.data[inside][active]), view.dtype)
    view.memory.trace.write(np.asarray(view.places[place]))
