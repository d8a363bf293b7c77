"""The cost model: counts of work, rates of a chip, and estimated microseconds.

In: a schedule, a computation, a target. Out: an estimate. Knows: schedule and what is below it."""

from transconv.cost.fetches import along_sum, within_groups
from transconv.cost.issue import ACCESS
from transconv.cost.model import AtSizes, CostFormula, estimate, of_phases, takes_turns
from transconv.cost.registers import spills
from transconv.cost.symbolic_cost import Lines, Number
from transconv.cost.work import ASYNCHRONOUS, Work, count, is_small

__all__ = [
    "ACCESS",
    "ASYNCHRONOUS",
    "AtSizes",
    "CostFormula",
    "Lines",
    "Number",
    "Work",
    "along_sum",
    "count",
    "estimate",
    "is_small",
    "of_phases",
    "spills",
    "takes_turns",
    "within_groups",
]
