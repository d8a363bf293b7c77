"""Names the ranks that a GPU waits for in vain, before NCCL ends the process, which names none.

On a GPU the stream waits for rows, not the host: no call of torch can raise the error. A thread looks at
an event behind each exchange once a second, and writes to standard error if one is late.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHARE = 0.8  # of the group's time
SECONDS = 1.0  # between looks
RELAXED = 2  # of the driver's modes of capture
_event: Any = torch.cuda.Event


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class EventWatch:
    """Events in the order in which they are reached, each with what it waits for."""

    def __init__(self, tell: Callable[[str], None] = _tell, clock: Callable[[], float] = time.monotonic):
        self._tell, self._clock = tell, clock
        self._pending: deque[tuple[Any, float, float, str]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, event: Any, does: str, seconds: float) -> None:
        """``event`` is reached when ``does`` is done; the process group waits so many seconds for it."""
        now = self._clock()
        self._pending.append((event, now, now + SHARE * seconds, does))

    def start(self) -> None:
        """Look from now on, as long as the program runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="transconv-watch", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Forget what is done; say what is late, once."""
        try:
            while self._pending and self._pending[0][0].query():
                self._pending.popleft()
        except RuntimeError:  # the device is lost, as torch says: none of these can be asked any more
            self._pending.clear()
        if self._pending and self._clock() > self._pending[0][2]:
            _, since, _, does = self._pending[0]
            self._tell(f"transconv: {does} in a sharded convolution, after {self._clock() - since:.0f} s. "
                       "The other rank is gone, or calls something else.")
            self._pending.clear()

    def _run(self) -> None:
        _allow_captures()
        while True:
            time.sleep(SECONDS)
            self.look()


def _allow_captures() -> None:
    """Let this thread look at events while another one captures a CUDA graph, which the driver would end
    otherwise. Of this thread alone; without a driver nothing is captured."""
    prefix, library = ("hip", "libamdhip64.so") if torch.version.hip else ("cu", "libcuda.so.1")
    with suppress(OSError, AttributeError):
        exchange = getattr(ctypes.CDLL(library), f"{prefix}ThreadExchangeStreamCaptureMode")
        exchange(ctypes.byref(ctypes.c_int(RELAXED)))


watch = EventWatch()


def watch_group(group: Any, device: torch.device, does: str) -> None:
    """Let the thread say that this rank could not do what it ``does`` if the current stream does not come
    so far within the group's time. A graph that is captured waits later, at events that nobody may look
    at."""
    if torch.cuda.is_current_stream_capturing():
        return
    event = _event()
    event.record()
    time = getattr(group._get_backend(device).options, "_timeout", timedelta(minutes=10))
    watch.add(event, f"rank {dist.get_rank()} could not {does}", time.total_seconds())
    watch.start()
