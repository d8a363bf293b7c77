"""Converts Python's and NumPy's scalars to constants of expressions."""

from __future__ import annotations

from typing import Any, Union

import numpy as np

Number = Union[int, float, bool, "np.integer[Any]", "np.floating[Any]", np.bool_]


def number_of(value: object) -> int | float | bool:
    """The Python number that a scalar is. TypeError for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    raise TypeError(f"the operand {value!r} ({type(value).__name__}) is neither an IR expression nor a "
                    "number")
