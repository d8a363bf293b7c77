"""The cost model: counts of work, rates of a chip, and estimated microseconds.

In: a schedule, a computation, a target. Out: an estimate. Knows: schedule and what is below it.
"""

from transconv.cost.fetches import aligned as aligned
from transconv.cost.fetches import along_sum as along_sum
from transconv.cost.fetches import within_groups as within_groups
from transconv.cost.issue import ACCESS as ACCESS
from transconv.cost.model import AtSizes as AtSizes
from transconv.cost.model import CostFormula as CostFormula
from transconv.cost.model import estimate as estimate
from transconv.cost.registers import spills as spills
from transconv.cost.symbolic_cost import Lines as Lines
from transconv.cost.symbolic_cost import Number as Number
from transconv.cost.work import ASYNCHRONOUS as ASYNCHRONOUS
from transconv.cost.work import Work as Work
from transconv.cost.work import count as count
from transconv.cost.work import is_small as is_small
