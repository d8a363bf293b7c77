"""What threads beside the program do to the interpreter that they share with it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from transconv.support import lasting, soon_turns


@pytest.fixture
def searches() -> Iterator[None]:
    """Python searches for cycles, as it does outside of tests."""
    frozen, thresholds, on = gc.get_freeze_count(), gc.get_threshold(), gc.isenabled()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    gc.enable()
    yield
    gc.set_threshold(*thresholds)
    if not on:
        gc.disable()
    if frozen:
        gc.freeze()


@pytest.mark.usefixtures("searches")
def test_objects_that_stay_begin_no_search() -> None:
    """A quarter of all objects is new, which has Python look through all for cycles, here not."""
    pauses: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            pauses.append(about["generation"])

    gc.collect()
    many = max(20_000, len(gc.get_objects()))
    gc.callbacks.append(note)
    try:
        with lasting():
            kept = [[n] for n in range(many)]
        assert pauses == []
        young = [[n] for n in range(20_000)]  # searched among themselves
        assert 2 not in pauses and 0 in pauses
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled() and not gc.get_freeze_count()
    assert len(kept) == many and len(young) == 20_000


@pytest.mark.usefixtures("searches")
def test_what_the_program_froze_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with lasting():
        kept = [[n] for n in range(100)]
    assert gc.get_freeze_count() == frozen > 0 and kept
    gc.unfreeze()


def test_turns_are_sooner_while_any_thread_works() -> None:
    usual = sys.getswitchinterval()
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with soon_turns:
            begun.set()
            end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    with soon_turns:
        pass
    assert sys.getswitchinterval() < usual  # the other one still works
    end.set()
    thread.join()
    assert sys.getswitchinterval() == usual


def test_a_call_waits_less_for_its_turn() -> None:
    """Twenty turns behind a thread that never gives any away."""

    def took(within: bool) -> float:
        end = threading.Event()

        def busy() -> None:
            if within:
                with soon_turns:
                    while not end.is_set():
                        pass
            else:
                while not end.is_set():
                    pass

        thread = threading.Thread(target=busy)
        thread.start()
        start = time.perf_counter()
        for _ in range(20):
            time.sleep(0)  # leaves its turn, as a library does
        spent = time.perf_counter() - start
        end.set()
        thread.join()
        return spent

    assert min(took(True) for _ in range(3)) < 0.7 * min(took(False) for _ in range(3))
