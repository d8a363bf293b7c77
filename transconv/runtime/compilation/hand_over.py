"""Beside the compiler. A thread that makes what processes have compiled ready to be taken over.

The first call of a kernel reads its plan, loads it on the GPU, and checks its first result: some ten
milliseconds of the processor, and more where a library loads kernels of its own for the check. In the
background none of that has to be done by a call: this thread does it first, on a stream of its own and
with data of its own, and only then a request counts as answered.

It works in pieces, with as long a pause behind each: threads of one interpreter take turns, and a call of
the program may wait for its turn some milliseconds at a time. What fails is left to the call, which does
the same on its own data.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from transconv.backend_triton import aside, torch_module
from transconv.target import Target, detect

if TYPE_CHECKING:
    import torch

IDLE_S = 20.0  # the thread ends after this time without work
START_S = 0.5  # until it begins: a program's first calls load what torch needs, for which they would wait
REST_S = 0.1  # the longest pause behind a piece of work
CLOSING_S = 10.0  # how long the end of the program waits for a piece that has begun
log = logging.getLogger("transconv.ready")
Work = Callable[[], None]


class Piece(NamedTuple):
    """Some work on a device; ``ended`` is called behind it, also if it failed."""

    device: torch.device
    work: Work
    ended: Work


class HandOver:
    """The thread and its work. It is there while there is work, and ends with the program."""

    def __init__(self) -> None:
        self.pieces: SimpleQueue[Piece | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.closed = False

    def add(self, device: torch.device, work: Work, ended: Work = lambda: None) -> None:
        """Have the thread do some work behind what it was given before."""
        with self.lock:
            if not self.closed:
                self.pieces.put(Piece(device, work, ended))
                if self.thread is None:
                    self.thread = threading.Thread(target=self._serve, daemon=True,
                                                   name="transconv-hand-over")
                    self.thread.start()

    def _serve(self) -> None:
        time.sleep(START_S)
        while True:
            try:
                piece = self.pieces.get(timeout=IDLE_S)
            except Empty:
                with self.lock:
                    if not self.pieces.empty():
                        continue
                    self.thread = None
                return
            if piece is None or self.closed:
                return
            began = time.thread_time()
            _do(piece)
            time.sleep(min(REST_S, time.thread_time() - began))

    def wait(self) -> None:
        """Until all is done that it was given before."""
        done = threading.Event()
        self.add(torch_module().device("cpu"), lambda: None, done.set)
        while not done.wait(0.1) and not self.closed:
            pass

    def close(self) -> None:
        """Drop what has not begun, and wait for what has: a thread must not be at work on the GPU when the
        interpreter ends."""
        with self.lock:
            self.closed, thread = True, self.thread
        if thread is not None and thread is not threading.current_thread():
            self.pieces.put(None)
            thread.join(CLOSING_S)


def _do(piece: Piece) -> None:
    try:
        with aside(piece.device):
            piece.work()
    except Exception as error:  # the call meets it if it is about the kernel
        log.debug("not made ready: %s", error, exc_info=True)
    finally:
        piece.ended()


def device_of(target: Target) -> torch.device | None:
    """The current GPU, if the program uses it and kernels for the target run on it; else None."""
    torch = sys.modules.get("torch")
    if torch is None or target.backend != "cuda" or not torch.cuda.is_initialized():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    found: torch.device | None = device if detect(device).name == target.name else None
    return found


thread = HandOver()


def _forked() -> None:
    """After a fork, the thread is the parent's."""
    global thread
    thread = HandOver()


def close() -> None:
    """End the thread."""
    thread.close()


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
