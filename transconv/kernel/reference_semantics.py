"""What a Python body computes of arrays: the meaning of functions that a chip spells in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from transconv.ir import DTYPES
from transconv.kernel.device_functions import DeviceFunction
from transconv.kernel.simulator.names import seen_by_tiles
from transconv.kernel.simulator.races import Order
from transconv.kernel.simulator.values import Masked, part_of

Array = np.ndarray[Any, np.dtype[Any]]


def meaning_of(body: DeviceFunction | None) -> Callable[..., Array] | None:
    """The function of NumPy arrays that a body of tiles is, with the types of kernels; None without a
    body, and for one that needs the group."""
    if body is None or body.scope is not None:
        return None
    python = body.python

    def meaning(*values: Array) -> Array:
        order = Order()
        held = {t.numpy: t for t in DTYPES.values() if t.torch and t.within is None and t.numpy == t.torch}
        given = np.broadcast_arrays(*values)
        tiles = [Masked(order, v, np.ones(v.shape, bool), held[str(v.dtype)]) for v in given]
        return part_of(seen_by_tiles(python, order)(*tiles)).data
    return meaning
