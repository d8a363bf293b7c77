"""Which schedule a computation gets: proposals, estimates, tuned rows and the nearest tuned problems.

In: a computation of a workload, a target. Out: schedules, best first, and why. Knows: cost, schedule.
"""

from transconv.selection.candidates import HELD as HELD
from transconv.selection.candidates import Listed as Listed
from transconv.selection.candidates import completed as completed
from transconv.selection.candidates import estimated as estimated
from transconv.selection.candidates import forget_lists as forget_lists
from transconv.selection.candidates import shortlist as shortlist
from transconv.selection.candidates import spread as spread
from transconv.selection.candidates import stamp as stamp
from transconv.selection.choice import schedule_of_user as schedule_of_user
from transconv.selection.same_bits import grouped_alike as grouped_alike
from transconv.selection.same_bits import with_same_bits as with_same_bits
from transconv.selection.transfer import believable as believable
from transconv.selection.transfer import fitted as fitted
from transconv.selection.tuning_db import TuningRecord as TuningRecord
from transconv.selection.tuning_db import files_digest as files_digest
from transconv.selection.tuning_db import register_reader as register_reader
from transconv.selection.tuning_db import workload_of as workload_of
