"""The supported chips: one record each, with matrix instructions and rates.

In: a name or a device. Out: a Target. Knows: element types and the environment, nothing of computations.
"""

from transconv.target.matrix_units import Mma
from transconv.target.records import (
    L2_GBS,
    TARGETS,
    Constants,
    Issue,
    Rates,
    Target,
    detect,
    expect_release,
    of_card,
    register,
    unregister,
    why_no_switches,
)

__all__ = [
    "L2_GBS",
    "TARGETS",
    "Constants",
    "Issue",
    "Mma",
    "Rates",
    "Target",
    "detect",
    "expect_release",
    "of_card",
    "register",
    "unregister",
    "why_no_switches",
]
