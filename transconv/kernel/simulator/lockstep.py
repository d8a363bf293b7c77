"""Items of a group in lockstep: each runs to its end, or to a barrier, before the next one does.

The first item runs in the calling thread. Only if it reaches a barrier the others get threads of their
own, of which one runs at a time; so the order is the same in every simulation, and a debugger stops where
it is told to.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from transconv.kernel.refusals import Refusal, SourcePlace
from transconv.kernel.simulator.races import WHOLE, Order, users_line


class _Ended(BaseException):
    """Ends an item that waits, after another one failed."""


class Lockstep:
    """Runs ``body(item)`` for items. ``names``: of the items, in messages."""

    def __init__(self, order: Order, items: Sequence[Any], names: Sequence[str],
                 body: Callable[[Any], object]) -> None:
        self.order, self.items, self.names, self.body = order, items, names, body
        self.waits: list[SourcePlace | None] = [None] * len(
            items
        )  # at which barrier; None: ended, or not begun
        self.threads: list[threading.Thread] = []
        self.gates: list[threading.Semaphore] = []
        self.main = threading.Semaphore(0)
        self.failed: BaseException | None = None
        self.ended = False

    def run(self) -> None:
        """Run all items."""
        order = self.order
        here, who = order.here, order.who
        order.epoch += 1
        try:
            for number in range(len(self.items)):
                self.turn(number)
                self.body(self.items[number])
                self.waits[number] = None
                if self.threads:
                    self.others()
                    self.check()
                    break
        finally:
            self.ended = True
            for gate in self.gates:
                gate.release()
            for thread in self.threads:
                thread.join()
            order.item, order.here, order.who = WHOLE, here, who
            order.epoch += 1

    def turn(self, number: int) -> None:
        """From here on this item runs."""
        self.order.item, self.order.here = number, self.items[number]
        self.order.who = self.names[number]

    def barrier(self) -> None:
        """Wait here for all items. Refused if one of them does not come, or waits elsewhere."""
        number = self.order.item
        self.waits[number] = users_line(sys._getframe(1))
        if number and not self.threads:
            self.check()
        elif number:
            self.main.release()
            self.gates[number].acquire()
            if self.ended:
                raise _Ended
        else:
            self.others()
            self.check()
            self.order.epoch += 1
        self.turn(number)

    def others(self) -> None:
        """Let all items but the first run to their next barrier or end."""
        started = bool(self.threads)
        if not started:
            self.gates = [threading.Semaphore(0) for _ in self.items]
            self.threads = [threading.Thread(target=self.alone, args=(n,), daemon=True)
                            for n in range(1, len(self.items))]
        for number in range(1, len(self.items)):
            if not started:
                self.threads[number - 1].start()
            elif self.waits[number] is None:
                continue
            else:
                self.gates[number].release()
            self.main.acquire()
            if self.failed is not None:
                raise self.failed

    def alone(self, number: int) -> None:
        """An item in a thread of its own."""
        self.turn(number)
        try:
            self.body(self.items[number])
        except _Ended:
            return
        except BaseException as error:
            self.failed = error
        self.waits[number] = None
        self.main.release()

    def check(self) -> None:
        """Refuse barriers that not all items reach."""
        first = self.waits[0]
        for number, place in enumerate(self.waits):
            if place != first:
                raise Refusal(f"a barrier that not all items reach: {self.names[0]} {_told(first)}, "
                              f"{self.names[number]} {_told(place)}", "a barrier that all of them reach, "
                              "outside of branches that differ between items")


def _told(place: SourcePlace | None) -> str:
    return "has ended" if place is None else f"waits at {place}"
