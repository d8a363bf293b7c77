"""Deals trials over ranks: rank 0 searches, deals and writes; all ranks run trials.

Each rank has a pool of processes. A trial goes to the rank with the fewest unfinished ones, and what it
found comes back as soon as it ends. The unfinished trials of a rank that is gone are dealt again. Without
rank 0 the others end with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transconv.tuning.ranks import Ranks
from transconv.verify.pool import Pool, Row, Task, WorkerTask

OFTEN = 2  # a trial is given up after so many ranks with it are gone


def serve(groups: dict[str, WorkerTask], ranks: Ranks) -> tuple[int, list[Row]]:
    """Run the trials that rank 0 deals to this one: how many came, and the rows that rank 0 found. Raises
    ConnectionError if rank 0 is gone, ValueError with the error that it ended with."""
    pool = Server(groups, ranks)
    try:
        for task, row in pool.run([]):
            pool.tell(task, row)
    except ConnectionError as error:
        raise ConnectionError(f"rank {ranks.rank} stops: rank 0, which deals trials and writes what was "
                              f"found, is gone ({error})") from error
    assert pool.end is not None
    if pool.end["error"]:
        raise ValueError(f"rank {ranks.rank} stops: {pool.end['error']}")
    return pool.got, pool.end["rows"]


class Server(Pool):
    """The pool of another rank than 0."""

    def __init__(self, groups: dict[str, WorkerTask], ranks: Ranks) -> None:
        super().__init__(groups)
        self.between, self.got, self.told = ranks, 0, 0
        self.end: dict[str, Any] | None = None
        self.known: dict[int, tuple[Task, int, int]] = {}  # by id: a task, its chain, its place there

    def _pending(self, late: bool) -> bool:
        return self.end is None

    def exchange(self, late: bool, over: bool) -> Iterable[tuple[Task, Row]]:
        mine = self.between
        while (chain := mine.get(f"deal/{mine.rank}/{self.got}")) is not None:
            task: Task | None = None
            for at, (group, payload, limit) in reversed(list(enumerate(chain))):
                task = Task(group, payload, limit, then=task)
                self.known[id(task)] = task, self.got, at
            assert task is not None
            self.add(task)
            self.got += 1
        self.end = mine.get("end")
        if self.end is None and mine.silent(0):
            raise ConnectionError(f"no sign of life for {mine.gone_s:.0f} s")
        return ()

    def tell(self, task: Task, row: Row) -> None:
        """Send what a task found to rank 0."""
        _, chain, at = self.known[id(task)]
        mine = self.between
        mine.put(f"told/{mine.rank}/{self.told}", {"chain": chain, "at": at, "row": row})
        self.told += 1


@dataclass(slots=True)
class RemoteRank:
    """What rank 0 knows of another rank."""

    rank: int
    depth: int = 0  # of unfinished trials at most; 0: it is not there
    dealt: int = 0
    heard: int = 0
    gone: bool = False
    out: dict[int, Task] = field(default_factory=dict)  # unfinished trials by their numbers


class Dealer(Pool):
    """The pool of rank 0. Tasks of the first group are dealt, with those that follow them."""

    def __init__(self, groups: dict[str, WorkerTask], ranks: Ranks) -> None:
        super().__init__(groups)
        self.first = next(iter(groups))
        self.between, self.ranks = ranks, ranks.count
        self.others = [RemoteRank(rank) for rank in range(1, ranks.count)]
        self.undealt: deque[Task] = deque()
        self.lost: dict[int, int] = {}  # by id of a task: how many ranks were gone with it

    def add(self, task: Task) -> None:
        if task.group == self.first:
            self.undealt.append(task)
        else:
            super().add(task)

    def _pending(self, late: bool) -> bool:
        return (super()._pending(late) or any(other.out for other in self.others)
                or bool(self.undealt) and not late)

    def exchange(self, late: bool, over: bool) -> Iterator[tuple[Task, Row]]:
        for other in self.others:
            if not other.gone:
                yield from self._heard(other)
                yield from self._lost_with(other)
            if over:
                other.out.clear()
        if not late:
            self._deal()

    def _heard(self, other: RemoteRank) -> Iterator[tuple[Task, Row]]:
        """What a rank has found, in its order."""
        here = self.between.get(f"here/{other.rank}") if not other.depth else None
        if here is not None:
            if here["about"] != self.between.about:
                raise ValueError(f"ranks 0 and {other.rank} cannot tune together: {self.between.about} "
                                 f"and {here['about']}")
            other.depth = here["jobs"] + 2
        while (found := self.between.get(f"told/{other.rank}/{other.heard}")) is not None:
            other.heard += 1
            task, last = other.out[found["chain"]], found["row"].get("error") in ("timeout", "crash")
            for _ in range(found["at"]):
                assert task.then is not None
                task = task.then
            if last or task.then is None:
                del other.out[found["chain"]]
            yield task, found["row"]

    def _lost_with(self, other: RemoteRank) -> Iterator[tuple[Task, Row]]:
        """Deal the trials of a rank again that is gone or has ended."""
        left = self.between.get(f"left/{other.rank}") if other.depth else None
        other.gone = bool(other.depth) and (left is not None or self.between.silent(other.rank))
        if not other.gone:
            return
        why = left or f"no sign of life for {self.between.gone_s:.0f} s"
        print(f"rank {other.rank} is gone ({why}); {len(other.out)} trials that it had are dealt again",
              flush=True)
        for task in other.out.values():
            self.lost[id(task)] = self.lost.get(id(task), 0) + 1
            if self.lost[id(task)] < OFTEN:
                self.undealt.append(task)
            else:
                yield task, {"error": "crash"}
        other.out.clear()

    def _deal(self) -> None:
        """Each rank gets as many trials as keep its processes busy, the one with the fewest first."""
        while self.undealt:
            mine = sum(map(len, self.queues.values())) + sum(w.task is not None for w in self.workers)
            free = [o for o in self.others if not o.gone and len(o.out) < o.depth]
            other = min(free, key=lambda o: len(o.out), default=None)
            if mine < self.groups[self.first].processes + 2 and (other is None or mine <= len(other.out)):
                super().add(self.undealt.popleft())
            elif other is None:
                return
            else:
                task = other.out[other.dealt] = self.undealt.popleft()
                chain, at = [], task
                while True:
                    chain.append((at.group, at.payload, at.limit_s))
                    if at.then is None:
                        break
                    at = at.then
                self.between.put(f"deal/{other.rank}/{other.dealt}", chain)
                other.dealt += 1
