"""The ranks that torchrun starts, and what they tell each other through the store of torch.distributed.

There is no collective: a rank that is gone shows no sign of life, and nobody waits for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from socket import gethostname
from types import TracebackType
from typing import Any

from transconv import knobs
from transconv.verify.pool import Row

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
        raise ValueError(f"rank {at} of this machine has no GPU of its own, of {count}; expected at most "
                         "one rank for each")
    name = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    seen = knobs.given(name).get(name, "")
    knobs.adopt({name: seen.split(",")[at] if seen else str(at)})


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
    """What ranks tell each other, as a context: at its end rank 0 lets the others end. ``store``: one of
    torch.distributed; ``about``: what all ranks must have in common; ``jobs``: processes of this rank that
    compile; ``gone_s``: seconds of silence after which a rank is taken for dead. Methods raise
    ConnectionError if the process is gone that has the store (rank 0, or torchrun)."""

    def __init__(self, store: Any, rank: int, count: int, about: dict[str, str], jobs: int,
                 gone_s: float) -> None:
        self.store, self.rank, self.count = store, rank, count
        self.about, self.jobs, self.gone_s = about, jobs, gone_s
        self.over = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: beats, and when they were that many

    def __enter__(self) -> Ranks:
        self.put(f"here/{self.rank}", {"jobs": self.jobs, "about": self.about, "host": gethostname()})
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
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
            while (self.get(f"here/{rank}") is not None and self.get(f"left/{rank}") is None
                   and not self.silent(rank) and time.monotonic() < until):
                time.sleep(0.05)


@contextmanager
def _as_connection_error() -> Iterator[None]:
    """torch's errors of a store are RuntimeErrors of many lines."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the store of torch.distributed: {str(error).splitlines()[0]}") from error
