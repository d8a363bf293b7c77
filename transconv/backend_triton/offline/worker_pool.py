"""Stage 11c. A pool of child processes that exist while there is work and end with the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from transconv.backend_triton.offline.worker import Child

IDLE_S = 20.0  # a process without work ends after this time
LIMIT_S = 600.0  # seconds that one job may take
Done = Callable[[dict[str, Any]], None]
Take = Callable[[], bool]
"""True once, for the first caller: unless a process has begun the job, it is the caller's."""


class Compilers:
    """Hands jobs to at most ``workers`` children of a module. Daemon threads wait for the answers: the
    end of the program waits for none, and ``close`` kills the children. ``first``: a job for each new
    child, before it takes one out of the queue."""

    def __init__(self, module: str, environment: Mapping[str, str | None], workers: int,
                 first: dict[str, Any] | None = None) -> None:
        self.module, self.environment, self.workers = module, environment, max(1, workers)
        self.first = first
        self.jobs: SimpleQueue[tuple[Take, dict[str, Any], Done]] = SimpleQueue()
        self.lock = threading.Lock()
        self.children: set[Child] = set()
        self.closed = False

    def begin(self) -> None:
        """Start the children before there are jobs, for which they wait ``IDLE_S``."""
        with self.lock:
            while len(self.children) < self.workers and not self.closed:
                self._start()

    def submit(self, job: dict[str, Any], done: Done) -> Take:
        """Queue a job; ``done`` is called with the answer in another thread, never after ``close``.
        What comes back takes the job out of the queue."""
        take: Take = partial(threading.Lock().acquire, False)  # the first who acquires it has the job
        with self.lock:
            self.jobs.put((take, job, done))
            if len(self.children) < self.workers and not self.closed:
                self._start()
        return take

    def _start(self) -> None:
        child = Child(self.module, self.environment)
        self.children.add(child)
        threading.Thread(target=self._serve, args=(child, self.first), daemon=True,
                         name="transconv-compiler").start()

    def _serve(self, child: Child, first: dict[str, Any] | None) -> None:
        if first is not None:
            _asked(child, first)
        while True:
            try:
                take, job, done = self.jobs.get(timeout=IDLE_S)
            except Empty:
                with self.lock:
                    if not self.jobs.empty():
                        continue
                    self.children.discard(child)
                child.close()
                return
            if not take():
                continue
            answer = _asked(child, job)
            if self.closed:
                return
            done(answer)

    def close(self) -> None:
        """End all children, also during jobs."""
        self.closed = True
        with self.lock:
            children, self.children = self.children, set()
        for child in children:  # all at once
            child.kill()
        for child in children:
            child.close()


def _asked(child: Child, job: dict[str, Any]) -> dict[str, Any]:
    """The child's answer; that it died, where the system starts no process."""
    try:
        return child.ask(job, LIMIT_S)
    except OSError as error:
        return {"reason": f"no process was started: {error}", "log": "", "died": True}
