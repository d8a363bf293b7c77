"""A thread in which kernels that processes have compiled are made ready for calls.

The first call of a kernel reads its plan, loads it on the GPU and checks its first result: some ten
milliseconds of the processor, and more where a library loads kernels of its own for the check. This thread
does so before, on data of its own, and only then the kernel counts as compiled. What fails there is left
to the call.

It pauses after each task, and within long ones after each part (``rest``), by the processor time that was
spent (``RESTS``): threads of one interpreter take turns, and so do those that have CUDA load a kernel. A
patient task is one for whose kernel no call waits, as another kernel answers it: it comes after all
others, and its pauses are the longest.

The thread has a stream of its own, which neither waits for the program's nor is waited for by it. It may
load kernels and allocate memory while another thread captures a CUDA graph: CUDA forbids that to all
threads, unless one says that only its own captures concern it. torch's streams come from a pool that is
soon used again, and the program may capture one of them: this stream is the driver's."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from queue import Empty, PriorityQueue
from typing import Any, NamedTuple

from transconv.backend_triton import torch_module
from transconv.support import soon_turns
from transconv.target import Target, detect

NAME = "transconv-rehearsal"
START_S = 0.5  # until it begins: a program's first calls load what torch needs, for which they would wait
RESTS = (2, 8)  # a pause by the time of the work before it: of a task, of a patient one
REST_S = 0.4  # the longest pause
IDLE_S = 20.0  # the thread ends after this time without tasks
CLOSING_S = 10.0  # how long the end of the program waits for a task that has begun
SHARE = 8  # of the memory that is free: data of the thread take no more than one of so many parts
log = logging.getLogger("transconv.ready")
Work = Callable[[], object]


class RehearsalTask(NamedTuple):
    """Some work on a device, in the order of ``patient`` and ``number``; ``ended`` is called behind it,
    also if it failed."""

    patient: bool
    number: int
    device: Any
    work: Work
    ended: Work


class RehearsalThread:
    """The thread and its tasks. It is there while there are some, and ends with the program."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Without thread and tasks: after a fork, these are the parent's."""
        self.tasks: PriorityQueue[RehearsalTask] = PriorityQueue()
        self.added = 0
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.closed = False
        self.rested = 0.0  # the thread's time at its last rest
        self.times = RESTS[0]  # how long rests are, by the time of the work

    def add(self, device: Any, work: Work, ended: Work = lambda: None, patient: bool = False) -> None:
        """Have the thread do some work, after what it was given before; what is ``patient`` comes after
        all that is not."""
        with self.lock:
            if not self.closed:
                self.added += 1
                self.tasks.put(RehearsalTask(patient, self.added, device, work, ended))
                if self.thread is None:
                    self.thread = threading.Thread(target=self._serve, daemon=True, name=NAME)
                    self.thread.start()

    def hand(
        self, device: Any, given: Sequence[Any], work: Callable[[list[Any]], object], ended: Work
    ) -> None:
        """Have the thread do some work on copies of what a call was given, of its tensors as they are
        now."""
        torch, there = torch_module(), None
        copies = [copied(t) if isinstance(t, torch.Tensor) else t for t in given]
        if device.type == "cuda":
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(device))
        self.add(device, partial(_on_copies, device, there, work, copies), ended)

    def _serve(self) -> None:
        time.sleep(START_S)
        while True:
            try:
                task = self.tasks.get(timeout=IDLE_S)
            except Empty:
                with self.lock:
                    if not self.tasks.empty():
                        continue
                    self.thread = None
                return
            if self.closed:
                return
            self.rested, self.times = time.thread_time(), RESTS[task.patient]
            _do(task)
            del task  # with what it was given
            self.rest()

    def rest(self) -> None:
        """In this thread, a pause by the time of the work since the last one; in others nothing."""
        if threading.current_thread() is self.thread:
            time.sleep(min(REST_S, self.times * max(0.0, time.thread_time() - self.rested)))
            self.rested = time.thread_time()

    def close(self) -> None:
        """Drop what has not begun, and wait for what has: a thread must not be at work on the GPU when the
        interpreter ends."""
        with self.lock:
            self.closed, thread = True, self.thread
        if thread is not None:
            self.tasks.put(RehearsalTask(False, -1, None, _nothing, _nothing))  # it wakes up
            thread.join(CLOSING_S)


def _nothing() -> None:
    pass


def _do(task: RehearsalTask) -> None:
    try:
        with soon_turns, aside(task.device):
            task.work()
    except Exception as error:  # the call meets it if it is about the kernel
        log.debug("not made ready: %s", error, exc_info=True)
    finally:
        task.ended()


def _on_copies(device: Any, there: Any, work: Callable[[list[Any]], object], copies: list[Any]) -> None:
    """Some work behind what the program had its stream do; all of it is done when the copies are freed."""
    stream = torch_module().cuda.current_stream(device) if there is not None else None
    try:
        if stream is not None:
            stream.wait_event(there)
        work(copies)
    finally:
        if stream is not None:
            stream.synchronize()


def span(t: Any) -> int:
    """How many elements a tensor's memory has, from its first to its last one."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def copied(t: Any) -> Any:
    """A copy that lies as a tensor does, and begins as many bytes behind a multiple of 16."""
    shift = t.data_ptr() % 16 // t.element_size()
    memory = torch_module().empty(span(t) + shift, dtype=t.dtype, device=t.device)
    memory[shift:].copy_(t.detach().as_strided((span(t),), (1,)))
    return memory.as_strided(t.shape, t.stride(), shift)


def bytes_of(given: Sequence[Any]) -> int:
    """Of the copies of what a call was given."""
    tensor = torch_module().Tensor
    return sum(span(t) * t.element_size() for t in given if isinstance(t, tensor))


def room(device: Any) -> int:
    """The bytes that the thread may take beside the program; those of a CPU are not counted."""
    if device.type != "cuda":
        return 1 << 62
    free: int = torch_module().cuda.mem_get_info(device)[0]
    return free // SHARE


def device_of(target: Target) -> Any:
    """The current GPU, if the program uses it and kernels for the target run on it; else None."""
    torch = torch_module()
    if target.backend != "cuda" or not torch.cuda.is_initialized():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return device if detect(device).arch == target.arch else None


thread = RehearsalThread()


NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the default stream does not wait for it
LOWEST = 0  # priority, that of streams without one
OWN_CAPTURES = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextmanager
def aside(device: Any) -> Iterator[None]:
    """Within ``with``, the thread works on a GPU's stream for such threads, and records no gradients.
    RuntimeError where the driver does not allow it."""
    torch = torch_module()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.mem_get_info(device)  # binds the GPU's context to the thread
            stack.enter_context(torch.cuda.stream(_stream(device)))
            stack.enter_context(_capturing_alone())
        yield


@cache
def _stream(device: Any) -> Any:
    made = ctypes.c_void_p()
    _call("cuStreamCreateWithPriority", ctypes.byref(made), NON_BLOCKING, LOWEST)
    return torch_module().cuda.ExternalStream(made.value, device=device)


@contextmanager
def _capturing_alone() -> Iterator[None]:
    """Captures of other threads do not concern this one."""
    mode = ctypes.c_int(OWN_CAPTURES)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:  # what it was before
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _call(name: str, *given: Any) -> None:
    """A function of the driver's library. RuntimeError for what is not there, or fails."""
    try:
        code: int = getattr(ctypes.CDLL("libcuda.so.1"), name)(*given)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{name}: {error}") from error
    if code:
        raise RuntimeError(f"{name} returned {code}")
