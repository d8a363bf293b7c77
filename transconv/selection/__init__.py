"""Which schedule a computation gets: proposals, estimates, tuned rows and the nearest tuned problems.

In: a computation of a workload, a target. Out: schedules, best first, and why. Knows: cost, schedule.
"""

from transconv.selection.choice import schedule_of_user
from transconv.selection.forced import completed
from transconv.selection.keys import files_digest
from transconv.selection.listing import Listed, estimated, shortlist, stamp
from transconv.selection.listing import forget as forget_lists
from transconv.selection.parts import HELD, spread
from transconv.selection.rows import Row
from transconv.selection.store import register_reader, workload_of
from transconv.selection.transfer import believable, fitted

__all__ = ["HELD", "Listed", "Row", "believable", "completed", "estimated", "files_digest", "fitted",
           "forget_lists", "register_reader", "schedule_of_user", "shortlist", "spread",
           "stamp", "workload_of"]
