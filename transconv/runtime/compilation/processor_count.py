"""Beside the compiler. How many processes may compile beside a program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transconv import knobs
from transconv.runtime import plan_cache

ENOUGH, MOST = 4, 31  # cores for which processes compile ahead of need, and these processes
FEWEST, MOST_BESIDE = 2, 16  # processes that compile in the background
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processors in each period


def cores() -> int:
    """How many cores this process may use: of those that it may run on, as many as its container's share
    of time is worth."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _worth()))


def _worth() -> int:
    try:
        quota, period = map(int, QUOTA.read_text().split())
        return quota // period
    except (OSError, ValueError, ZeroDivisionError):  # no container, or one without a quota: "max"
        return sys.maxsize


def helpers() -> int:
    """How many processes may compile what this one will soon ask for: one for each core but its own, at
    most ``MOST``, as far as other processes of the same launcher leave them. None with fewer than
    ``ENOUGH`` cores, or where they could not leave what they make."""
    share = cores() // knobs.local_processes()
    if share < ENOUGH or not plan_cache.keeps() or plan_cache.DRAWER.path("plan") is None:
        return 0
    return min(MOST, share - 1)


def beside() -> int:
    """How many processes may compile while the program computes: for three of four cores, as they run at a
    lower priority and the program keeps few of them busy, as far as other processes of the same launcher
    leave them."""
    return min(MOST_BESIDE, max(FEWEST, cores() // knobs.local_processes() * 3 // 4))
