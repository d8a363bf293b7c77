"""What threads beside the program do to the interpreter that they share with it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from transconv.support import soon_turns

PROGRAM = """
import gc

from transconv.support import lasting

pauses = []
gc.callbacks.append(lambda phase, about: pauses.append(about["generation"]) if phase == "start" else None)
gc.collect()
pauses.clear()
if {frozen}:
    gc.freeze()
before = gc.get_freeze_count()
with lasting():
    kept = [[n] for n in range(40_000)]
assert gc.isenabled() and (pauses == [] or {frozen}), pauses
assert (gc.get_freeze_count() > before // 2) is (before > 0) is {frozen}
young = [[n] for n in range(20_000)]  # searched among themselves
assert 0 in pauses and (2 not in pauses or {frozen}), pauses
assert len(kept) > len(young)
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_that_stay_begin_no_search(frozen: bool) -> None:
    """Twice as many as there were have Python look through all for cycles, here not; and what a
    program froze stays so. Programs of their own have few objects besides."""
    subprocess.run([sys.executable, "-c", PROGRAM.format(frozen=frozen)], check=True)


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
