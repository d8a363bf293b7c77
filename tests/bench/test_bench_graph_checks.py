"""``python -m bench graph-checks``: what the parts of a first call take, each without those within it."""

from __future__ import annotations

import threading
import time

import pytest

from bench import graph_checks


class Work:
    """Takes a second of a clock that stands still else, and another one in a part."""

    now = 0.0

    def outer(self) -> str:
        Work.now += 1.0
        return self.inner()

    def inner(self) -> str:
        Work.now += 1.0
        return "done"


def test_parts_are_counted_without_those_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: Work.now)
    clock = graph_checks.PartClock()
    for name in ("outer", "inner"):
        monkeypatch.setattr(Work, name, getattr(Work, name))  # as it was, afterwards
        clock.watch(Work, name, name)
    assert Work().outer() == "done"
    thread = threading.Thread(target=Work().inner)
    thread.start()
    thread.join()
    assert clock.seconds == {"outer": 1.0, "inner": 2.0}


def test_every_part_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []
    monkeypatch.setattr(
        graph_checks.PartClock,
        "watch",
        lambda self, owner, name, part: watched.append(part) if hasattr(owner, name) else None,
    )
    graph_checks.watched()
    assert tuple(watched) == graph_checks.PARTS
