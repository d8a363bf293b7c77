"""The machine of checks: a GPU, or Triton's interpreter on the CPU; and worker processes with time limits.

A task that hangs or crashes fails alone. Workers are grouped: a group has a function, a number of
processes, and their environment. A task may name a task that follows it (compile, then time), which joins
its group's queue when the first has answered, with a result or an exception; after one that hung or
crashed it is dropped.

Ctrl-C and SIGTERM stop a long run cleanly: whoever catches KeyboardInterrupt to say what was done so far
ends with ``code`` of it."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from transconv.support import ScheduleError, knobs

if TYPE_CHECKING:
    from transconv.target import Target


def device() -> str:
    """Where kernels run: the GPU; or the CPU under Triton's interpreter, which is switched on here
    and must be before anything imports triton."""
    from transconv.target import detect  # not at the top: a worker starts without it

    if detect().backend == "interpreter":
        knobs.use_interpreter()
    return "cpu" if knobs.interpret() else "cuda"


def described(where: str) -> str:
    """The name of the device, in a sentence that says on what kernels ran."""
    if where == "cpu":
        return "the CPU, in Triton's interpreter"
    import torch

    return str(torch.cuda.get_device_name())


def executable(target: Target, where: str) -> Target:
    """The target as it runs here: kernels made for a chip can be interpreted by Triton, 16-bit
    operands then need casts, and explicit kernels cannot be. Through OpenCL those for Intel GPUs run as
    they are. Raises ScheduleError for others there."""
    from transconv.target import TARGETS

    if where == "cuda" or target.backend == "interpreter":
        return target
    if knobs.opencl():
        if target.backend != "xpu":
            raise ScheduleError(f"OpenCL executes kernels for Intel GPUs, not for {target}; expected pvc")
        return target
    return replace(
        target,
        name=f"{target.name}-interpreted",
        upcast16=True,
        features=target.features - {"wgmma"},
        precisions=TARGETS["interpreter"].precisions,
    )


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


Row = dict[str, Any]
STARTUP_S = 240.0
END_S = 5.0  # for all idle workers to end by themselves
LOOK_S = 0.5  # between two looks at a time limit that is farther away
IDLE_S = 0.02  # between two looks for what other processes did, with no worker at work


@dataclass(slots=True)
class Task:
    """Something to do: the keyword arguments of the group's function. ``weight`` counts against
    the pool's capacity (bytes of GPU memory, say) while it runs."""

    group: str
    payload: Row
    limit_s: float = 120.0
    weight: float = 0.0
    then: Task | None = None


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The work of a group of workers: ``function`` is ``module:name``; it takes a payload and returns a
    row (or raises)."""

    function: str
    processes: int
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Worker:
    group: str
    process: Any
    pipe: Connection
    ready: bool = False
    task: Task | None = None
    deadline: float = 0.0


def _serve(pipe: Connection, function: str, environment: dict[str, str]) -> None:
    """The child: read a payload, answer with a row, until one is None or the pipe closes."""
    leave_to_parent()
    knobs.adopt(environment)
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    pipe.send(None)
    while True:
        try:
            payload = pipe.recv()
        except EOFError:
            return
        if payload is None:
            return
        try:
            row = call(**payload)
        except Exception as error:
            row = {
                "error": f"{type(error).__name__}: {error}".strip()[:2000],
                "trace": traceback.format_exc()[-4000:],
            }
            if is_fatal(error):
                row["fatal"] = True
        try:
            pipe.send(row)
        except BrokenPipeError:  # the parent's time was up
            return
        if row.get("fatal"):
            return


_FATAL = re.compile(
    r"(cuda|hip) error|acceleratorerror|triton error \[(cuda|hip)\]|out of memory"
    r"|an illegal (memory access|instruction)"
)


def is_fatal(error: Exception) -> bool:
    """Whether the process has lost the GPU: after a fault every later call fails too, so that the next
    task would fail without a reason of its own."""
    return bool(_FATAL.search(f"{type(error).__name__} {error}".lower()))


class Pool:
    """Runs tasks; ``run`` yields (task, row) as they end. A row has ``error`` if there is none:
    ``timeout``, ``crash`` or the exception's text. ``start``: ``fork`` starts workers at once, with
    that this process has imported, which must not have touched a GPU."""

    ranks = 1  # how many processes have a pool that shares the tasks

    def __init__(
        self, groups: dict[str, WorkerTask], capacity: float = float("inf"), start: str = "spawn"
    ) -> None:
        self.groups, self.capacity = groups, capacity
        self.context: Any = multiprocessing.get_context(start)
        self.workers: list[_Worker] = []
        self.queues: dict[str, deque[Task]] = {name: deque() for name in groups}

    def _start(self, group: str) -> None:
        here, there = self.context.Pipe()
        spec = self.groups[group]
        process = self.context.Process(
            target=_serve, daemon=True, args=(there, spec.function, spec.environment)
        )
        if self.context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # its first start lets signals through again
        with held_back():
            process.start()
            self.workers.append(_Worker(group, process, here, deadline=time.monotonic() + STARTUP_S))
        there.close()

    def _stop(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.pipe.close()
        worker.process.kill()
        worker.process.join(10)

    def add(self, task: Task) -> None:
        """Queue a task; also while ``run`` is being iterated."""
        self.queues[task.group].append(task)

    def exchange(self, late: bool, over: bool) -> Iterable[tuple[Task, Row]]:
        """For a pool that shares tasks with those of other processes, which ``run`` asks at least twice a
        second: takes and hands over tasks, and returns what ended elsewhere. ``late``: no task may start
        any more; ``over``: none is waited for."""
        return ()

    def run(
        self, tasks: Iterable[Task], budget_s: float = float("inf"), grace_s: float = 20.0
    ) -> Generator[tuple[Task, Row], None, None]:
        """No task starts after ``budget_s``; those under way get ``grace_s`` more."""
        end = time.monotonic() + budget_s
        for task in tasks:
            self.add(task)
        try:
            while self._pending(time.monotonic() >= end):
                yield from self.exchange(time.monotonic() >= end, time.monotonic() >= end + grace_s)
                self._fill(time.monotonic() >= end)
                for worker in self._ready():
                    yield from self._answer(worker)
                now = time.monotonic()
                for worker in [
                    w
                    for w in self.workers
                    if now > min(w.deadline, end + grace_s if w.task else w.deadline)
                ]:
                    what = "timeout" if now > worker.deadline else "out of budget"
                    yield from self._lost(worker, what)
        finally:
            self._end()

    def _end(self) -> None:
        """Have idle workers end, which gives back what they hold: a killed one leaves its semaphores to
        Python, which warns of them. All at once: one that held a GPU takes a while."""
        for worker in self.workers:
            if worker.task or not worker.ready:
                worker.process.kill()
            else:
                with suppress(OSError):  # it has died
                    worker.pipe.send(None)
        end = time.monotonic() + END_S
        for worker in list(self.workers):
            worker.process.join(max(0.0, end - time.monotonic()))
            self._stop(worker)

    def _pending(self, late: bool) -> bool:
        return any(w.task for w in self.workers) or (not late and any(self.queues.values()))

    def _fill(self, late: bool) -> None:
        """Start workers that are missing and give tasks to idle ones."""
        used = sum(w.task.weight for w in self.workers if w.task)
        for group, queue in self.queues.items():
            if late or not queue:
                continue
            mine = [w for w in self.workers if w.group == group]
            wanted = self.groups[group].processes
            # Tasks that follow count, too, so that their group starts early.
            for _ in range(min(wanted, len(queue) + sum(1 for w in mine if w.task)) - len(mine)):
                self._start(group)
            for worker in mine:
                if not queue or not worker.ready or worker.task:
                    continue
                task = queue[0]
                if used and used + task.weight > self.capacity:
                    break
                queue.popleft()
                used += task.weight
                worker.task = task
                worker.deadline = time.monotonic() + task.limit_s
                try:
                    worker.pipe.send(task.payload)
                except OSError:
                    worker.deadline = 0.0

    def _ready(self) -> list[_Worker]:
        if not self.workers:
            time.sleep(IDLE_S)
            return []
        left = min(w.deadline for w in self.workers) - time.monotonic()
        found = wait([w.pipe for w in self.workers], timeout=min(max(left, 0.0), LOOK_S))
        return [w for w in self.workers if w.pipe in found]

    def _answer(self, worker: _Worker) -> Iterator[tuple[Task, Row]]:
        try:
            row = worker.pipe.recv()
        except (EOFError, OSError):
            yield from self._lost(worker, "crash")
            return
        if row is None:
            worker.ready, worker.deadline = True, float("inf")
            return
        task, worker.task, worker.deadline = worker.task, None, float("inf")
        if row.get("fatal"):
            self._stop(worker)
        assert task is not None
        if task.then is not None:
            self.add(task.then)
        yield task, row

    def _lost(self, worker: _Worker, why: str) -> Iterator[tuple[Task, Row]]:
        task = worker.task
        self._stop(worker)
        if task is not None:
            yield task, {"error": why}
        elif not worker.ready:
            print(f"a worker of group {worker.group} did not start ({why})", file=sys.stderr)
            raise RuntimeError(f"workers of group {worker.group} do not start: {why}")


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def code(stop: KeyboardInterrupt) -> int:
    """The exit code of a command that was stopped, as shells have it: 128 and the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated in the main thread."""
    try:
        before = signal.signal(signal.SIGTERM, _terminate)
    except ValueError:  # in another thread, which cannot say what signals do
        yield
        return
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that Python does not know
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, signals are blocked. A process that is started inside inherits this, and unblocks them
    itself (``leave_to_parent``)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """For a worker: ignore the signals. The parent handles them and kills its workers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
