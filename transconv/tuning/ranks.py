"""Trials over the ranks that torchrun starts: rank 0 searches, deals and writes; all ranks run trials.

Each rank has a pool of processes. A trial goes to the rank with the fewest unfinished ones, and what it
found comes back as soon as it ends. The unfinished trials of a rank that is gone are dealt again. Without
rank 0 the others end with an error. Ranks tell each other through the store of torch.distributed, without
a collective: a rank that is gone shows no sign of life, and nobody waits for it."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from socket import gethostname
from types import TracebackType
from typing import Any

from transconv.support import knobs
from transconv.verify.machine import Pool, Row, Task, WorkerTask

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
MEET_S = 300.0  # in which all ranks start
HURRY_S = 5.0  # for which rank 0 waits for the others after an error; torchrun kills after 30
BEAT_S = 1.0  # between two signs of life of a rank
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # as torchrun sets them


def started() -> bool:
    """Whether this process is one of several ranks."""
    given = knobs.given(*VARIABLES)
    return set(VARIABLES) <= set(given) and given["WORLD_SIZE"] != "1"


def own_gpu() -> None:
    """Let this process and its workers see one GPU: that of its number among the ranks of its machine.
    Before CUDA starts. Raises ValueError where there are more ranks than GPUs."""
    import torch

    at = int(knobs.given("LOCAL_RANK").get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if not count:
        return
    if at >= count:
        raise ValueError(
            f"rank {at} of this machine has no GPU of its own, of {count}; expected at most "
            "one rank for each"
        )
    knobs.adopt(knobs.one_gpu(at, bool(torch.version.hip)))


def own_share(cores: int) -> int:
    """This rank's share of the cores of its machine."""
    return cores // max(1, int(knobs.given("LOCAL_WORLD_SIZE").get("LOCAL_WORLD_SIZE", "1")))


def meet(about: dict[str, str], jobs: int, gone_s: float) -> Ranks:
    """The ranks of this process's environment. Raises ConnectionError if they do not meet."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    with _as_connection_error():
        store, rank, count = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_S))))
    restarts = knobs.given(RESTARTS).get(RESTARTS, "0")  # which find the store with what it has
    return Ranks(PrefixStore(f"transconv/{restarts}", store), rank, count, about, jobs, gone_s)


class Ranks:
    """The messages between ranks, as a context: at its end rank 0 lets the others end. ``store``: one of
    torch.distributed; ``about``: what all ranks must have in common; ``jobs``: processes of this rank that
    compile; ``gone_s``: seconds of silence after which a rank is taken for dead. Methods raise
    ConnectionError if the process is gone that has the store (rank 0, or torchrun)."""

    def __init__(
        self, store: Any, rank: int, count: int, about: dict[str, str], jobs: int, gone_s: float
    ) -> None:
        self.store, self.rank, self.count = store, rank, count
        self.about, self.jobs, self.gone_s = about, jobs, gone_s
        self.over = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: beats, and when they were that many

    def __enter__(self) -> Ranks:
        self.put(f"here/{self.rank}", {"jobs": self.jobs, "about": self.about, "host": gethostname()})
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ConnectionError):
            if self.rank:
                self.put(f"left/{self.rank}", "" if error is None else f"{error or kind}")
            else:
                if error is not None:
                    self.end(f"rank 0 ended with {error or type(error).__name__}")
                elif self.get("end") is None:
                    self.end()
                self._wait(HURRY_S if self.get("end")["error"] else self.gone_s)
        self.over.set()

    def put(self, key: str, what: Any) -> None:
        with _as_connection_error():
            self.store.set(key, json.dumps(what))

    def get(self, key: str) -> Any:
        """What was put there, None if nothing was."""
        with _as_connection_error():
            return json.loads(self.store.get(key)) if self.store.check([key]) else None

    @property
    def writes(self) -> bool:
        """Whether this rank is the first of its machine, so that it writes the cache there."""
        hosts = [(self.get(f"here/{rank}") or {}).get("host") for rank in range(self.count)]
        first: int = hosts.index(gethostname())
        return first == self.rank

    def end(self, error: str = "", rows: Sequence[Row] = ()) -> None:
        """Let the other ranks end, with an error or with the rows that were found."""
        self.put("end", {"error": error, "rows": list(rows)})

    def silent(self, rank: int) -> bool:
        """Whether a rank has shown no sign of life for ``gone_s``."""
        with _as_connection_error():
            beats = self.store.add(f"beat/{rank}", 0)
        now = time.monotonic()
        before, since = self._heard.get(rank, (-1, now))
        if beats != before:
            self._heard[rank] = beats, now
            return False
        return now - since > self.gone_s

    def _beat(self) -> None:
        with suppress(RuntimeError):  # others notice
            while not self.over.is_set():
                self.store.add(f"beat/{self.rank}", 1)
                self.over.wait(BEAT_S)

    def _wait(self, seconds: float) -> None:
        """Until the others have left: they may need this process's store."""
        until = time.monotonic() + seconds
        for rank in range(1, self.count):
            while (
                self.get(f"here/{rank}") is not None
                and self.get(f"left/{rank}") is None
                and not self.silent(rank)
                and time.monotonic() < until
            ):
                time.sleep(0.05)


@contextmanager
def _as_connection_error() -> Iterator[None]:
    """torch's errors of a store are RuntimeErrors of many lines."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the store of torch.distributed: {str(error).splitlines()[0]}") from error


OFTEN = 2  # a trial is given up after so many ranks with it are gone


def serve(groups: dict[str, WorkerTask], ranks: Ranks) -> tuple[int, list[Row]]:
    """Run the trials that rank 0 deals to this one: how many came, and the rows that rank 0 found. Raises
    ConnectionError if rank 0 is gone, ValueError with the error that it ended with."""
    pool = Server(groups, ranks)
    try:
        for task, row in pool.run([]):
            pool.tell(task, row)
    except ConnectionError as error:
        raise ConnectionError(
            f"rank {ranks.rank} stops: rank 0, which deals trials and writes what was "
            f"found, is gone ({error})"
        ) from error
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
        return (
            super()._pending(late)
            or any(other.out for other in self.others)
            or (bool(self.undealt) and not late)
        )

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
                raise ValueError(
                    f"ranks 0 and {other.rank} cannot tune together: {self.between.about} "
                    f"and {here['about']}"
                )
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
        print(
            f"rank {other.rank} is gone ({why}); {len(other.out)} trials that it had are dealt again",
            flush=True,
        )
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
