"""Which schedule a computation gets: proposals, estimates, tuned rows and their neighbours.

In: a computation of a workload, a target. Out: schedules, best first, and why. Knows: cost, schedule.
"""

from transconv.selection.choice import believable, fitted, schedule_of_user
from transconv.selection.listing import Listed, estimated, shortlist
from transconv.selection.parts import spread
from transconv.selection.rows import Row
from transconv.selection.store import register_reader

__all__ = ["Listed", "Row", "believable", "estimated", "fitted", "register_reader",
           "schedule_of_user", "shortlist", "spread"]
