"""Ranks that are threads of one process, whose messages are queues: for what is computed and exchanged,
without processes. Memory that nothing was stored to is not a number."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import Any
from unittest.mock import patch

import torch

from transconv.distributed import agreement, halo
from transconv.distributed.halo import MeshRanks
from transconv.graph.pieces.piece_execution import PartMemory, PieceRun
from transconv.graph.pieces.step_graph import StepMemory, TensorPart

SECONDS = 60.0
Tensor = torch.Tensor


@dataclass
class Mail:
    """What is on its way between so many ranks, and what each has said."""

    count: int
    queues: dict[tuple[int, int], Queue[Tensor]] = field(default_factory=lambda: defaultdict(Queue))
    said: dict[int, Any] = field(default_factory=dict)
    bytes: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.count)


@dataclass(frozen=True, eq=False)
class Place:
    """Stands in for a mesh, and for its group, on one of its ranks."""

    mail: Mail
    number: int

    def get_local_rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.mail.count

    def get_group(self) -> Place:
        return self

    def gathered(self, what: Any) -> list[tuple[int, Any]]:
        self.mail.barrier.wait(SECONDS)
        self.mail.said[self.number] = what
        self.mail.barrier.wait(SECONDS)
        found = sorted(self.mail.said.items())
        self.mail.barrier.wait(SECONDS)
        return found


class QueuedSent:
    """Stands in for messages."""

    def __init__(self, place: Place) -> None:
        self.place, self.wanted = place, list[tuple[Tensor, int]]()

    def send(self, run: Tensor, peer: int, *_: Any) -> None:
        self.place.mail.bytes += run.nbytes
        self.place.mail.queues[self.place.number, peer].put(run.clone())

    def receive(self, run: Tensor, peer: int, *_: Any) -> None:
        self.wanted.append((run, peer))

    def start(self) -> None:
        pass

    def wait(self) -> None:
        for run, peer in self.wanted:
            run.copy_(self.place.mail.queues[peer, self.place.number].get(timeout=SECONDS))


def poisoned(run: PieceRun, memory: StepMemory, part: TensorPart) -> PartMemory:
    """Memory whose bytes are ones, as those of floats that are no numbers."""
    made = empty(run, memory, part)
    made.tensor.view(torch.uint8).fill_(255)
    return made


empty = PieceRun.empty


@contextmanager
def mailed() -> Iterator[None]:
    """Inside, ranks are threads."""
    with (
        patch.object(halo, "Sent", QueuedSent),
        patch.object(
            agreement, "_is_same", lambda place, text: len({t for _, t in place.gathered(text)}) == 1
        ),
        patch.object(agreement, "gathered", lambda place, what: place.gathered(what)),
        patch.object(PieceRun, "empty", poisoned),
    ):
        yield


def on_ranks(count: int, work: Callable[[MeshRanks], Any]) -> tuple[list[Any], int]:
    """What each of so many ranks has made, and the bytes that they sent."""
    mail = Mail(count)

    def one(number: int) -> Any:
        try:
            return work(MeshRanks(Place(mail, number)))
        except BaseException:
            mail.barrier.abort()
            raise

    with mailed(), ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(one, number) for number in range(count)]
        errors = [f.exception() for f in futures]
    own = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    for error in (*own, *(e for e in errors if e is not None)):
        raise error
    return [f.result() for f in futures], mail.bytes
