"""Checks the environment variables before a command starts; an invalid value is refused."""

from __future__ import annotations

from contextlib import suppress

from transconv import knobs
from transconv.selection import schedule_of_user
from transconv.target import why_no_switches


def check() -> None:
    """Raises ValueError for a variable with an invalid value (knobs.py), ScheduleError
    for words that no chip and no schedule has."""
    for knob in knobs.KNOBS:
        with suppress(OSError, RuntimeError):  # a cache that cannot be reached; disk_cache says so
            knob.checked()
    if reason := why_no_switches():
        raise ValueError(reason)
    schedule_of_user()
