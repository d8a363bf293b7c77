"""Requests for plans, and why one may have no kernel yet.

Requests that are only recorded: those of a model, before its kernels are compiled."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from transconv.compute import Workload
from transconv.selection import workload_of
from transconv.support import Unsupported
from transconv.target import Target

COMPILING = "compiling"
"""The reason why torch computes a call while its kernel is being compiled."""
NEVER = "compile:never"
"""The reason why torch computes a call whose kernel is not compiled, with mode ``never``."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a plan. ``aligned``: its tensors begin at multiples of 16 bytes."""

    workload: Workload
    target: Target
    deterministic: bool = False
    aligned: bool = True

    @property
    def job(self) -> dict[str, Any]:
        """The request as a JSON object, for a compiling process."""
        w, t = self.workload, self.target
        counts = "sms", "l2_bytes", "bandwidth_gbs", "tflops", "l2_gbs"
        return {
            "front": type(w).__module__,
            "problem": w.text,
            "direction": w.direction,
            "behind": w.behind,
            "target": t.name,
            "features": sorted(t.features),
            "counts": {n: getattr(t, n) for n in counts},
            "deterministic": self.deterministic,
            "aligned": self.aligned,
        }

    @staticmethod
    def of_job(job: dict[str, Any]) -> PlanRequest:
        """The request of a JSON object (``job``), whose module registers the parser of its texts. Raises
        ValueError for a text that cannot be read back, and as ``Target.parse``."""
        importlib.import_module(job["front"])
        workload = workload_of(job["problem"], job["direction"], job["behind"])
        if workload is None:
            raise ValueError(f"{job['problem']} cannot be read back")
        target = replace(Target.parse(job["target"]), features=frozenset(job["features"]), **job["counts"])
        return PlanRequest(workload, target, job["deterministic"], job["aligned"])

    def of_any_batch(self) -> PlanRequest:
        """The request for any number of samples (``Workload.of_any_batch``), with the same bits."""
        return replace(self, workload=self.workload.of_any_batch()[0], deterministic=True)

    def __str__(self) -> str:
        return f"{self.workload.title} for {self.target}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests for one kind of call, which a process answers in their order: they share kernels, and what
    there is ``Room`` for depends on the plans before. ``most``: kernels of all of them (0: any number);
    ``each``: about how many kernels have to be chosen for one."""

    questions: tuple[PlanRequest, ...]
    most: int = 0
    each: int = 1

    @property
    def work(self) -> int:
        """About how many kernels have to be chosen: what takes a process the longest."""
        return len(self.questions) * self.each

    @property
    def job(self) -> dict[str, Any]:
        """The requests as a JSON object; one alone as that of the question."""
        if len(self.questions) == 1:
            return self.questions[0].job
        return {"batch": [q.job for q in self.questions], "most": self.most}


@dataclass(slots=True)
class Room:
    """How many kernels there may be (``most``; 0: any number), and the digests of those there are."""

    most: int
    there: set[str] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Whether no plan is added any more: one that has no other kernels would add nothing."""
        return 0 < self.most <= len(self.there)

    def takes(self, digests: AbstractSet[str]) -> bool:
        """Whether a plan of these kernels may be added; the first one always."""
        return not (self.most and self.there) or len(self.there | digests) <= self.most


class Waiting(Unsupported):
    """A request whose kernels are not there yet. ``over``: whether it may be answered otherwise by now;
    while it says no, the same request has the same answer."""

    def __init__(self, message: str, over: Callable[[], bool]) -> None:
        super().__init__(COMPILING, message)
        self.over = over

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str]]:
        return Unsupported, (self.reason, self.message)


_lock = threading.Lock()
_collected: dict[PlanRequest, Batch] | None = None


def collect(batch: Batch) -> None:
    """Record requests that belong together, while ``collecting`` does."""
    with _lock:
        if _collected is not None:
            for question in batch.questions:
                _collected.setdefault(question, batch)


def is_collecting() -> bool:
    """Whether questions are only noted at this moment (``collecting``)."""
    return _collected is not None


@contextmanager
def collecting() -> Iterator[dict[PlanRequest, Batch]]:
    """Within ``with``, record the requests of all threads, each with those it belongs to, and refuse them.
    RuntimeError if nested."""
    global _collected
    with _lock:
        if _collected is not None:
            raise RuntimeError("the calls of another model are being recorded; expected one at a time")
        _collected = {}
    try:
        yield _collected
    finally:
        _collected = None


def _forked() -> None:
    """After a fork, no thread is left that holds the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
