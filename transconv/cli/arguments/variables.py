"""Checks the environment variables before a command starts; an invalid value is refused, and one that
nothing reads is named."""

from __future__ import annotations

from contextlib import suppress

from transconv import knobs
from transconv.selection import schedule_of_user
from transconv.target import why_no_switches


def check() -> None:
    """Raises ValueError for a variable with an invalid value (knobs.py), ScheduleError
    for unknown features and schedule words."""
    knobs.name_unknown()
    for knob in knobs.KNOBS:
        with suppress(OSError, RuntimeError):  # an unreachable cache, which disk_cache reports
            knob.checked()
    if reason := why_no_switches():
        raise ValueError(reason)
    schedule_of_user()
