"""Which schedule a computation gets: proposals, estimates, tuned rows and the nearest tuned problems.

In: a computation of a workload, a target. Out: schedules, best first, and why. Knows: cost, schedule."""

from transconv.selection.candidates import HELD, Listed, completed, estimated, shortlist, spread, stamp
from transconv.selection.choice import schedule_of_user
from transconv.selection.same_bits import chain, conversion, grouped_alike, grouping, with_same_bits
from transconv.selection.same_bits import forget as forget_lists
from transconv.selection.transfer import believable, fitted
from transconv.selection.tuning_db import TuningRecord, files_digest, register_reader, workload_of

__all__ = [
    "HELD",
    "Listed",
    "TuningRecord",
    "believable",
    "chain",
    "completed",
    "conversion",
    "estimated",
    "files_digest",
    "fitted",
    "forget_lists",
    "grouped_alike",
    "grouping",
    "register_reader",
    "schedule_of_user",
    "shortlist",
    "spread",
    "stamp",
    "with_same_bits",
    "workload_of",
]
