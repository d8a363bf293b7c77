"""Agreement of the ranks of a mesh, asked once: the calls, and what schedules follow from; and
which ranks a GPU waits for in vain, before NCCL ends the process, which names none.

A choice of a schedule follows from the computation, the chip, the versions, the environment and the tuned
rows. Ranks whose rows differ take those of the mesh's first rank; whatever else differs is an error.

On a GPU the stream waits for rows, not the host: no call of torch can raise the error. A thread looks at
an event behind each exchange once a second, and writes to standard error if one is late."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from transconv.runtime import is_capturing
from transconv.selection import files_digest, tuning_db
from transconv.support import __version__, knobs, triton_version

SAME = (knobs.schedule, knobs.sizes, knobs.passes, knobs.features)
MOST = 1 << 12  # texts of one mesh that are remembered


def agree(mesh: Any, text: str) -> None:
    """RuntimeError on every rank of the mesh unless all ranks call it with one text, and would choose the
    same schedules. Asked once for each text; ranks that disagree after that wait for each other until
    torch.distributed's time is over."""
    known = _agreed(mesh)
    if text in known:
        return
    compare(mesh, text)
    if len(known) >= MOST:
        known.clear()  # all ranks of a mesh do, at the same call
    known.add(text)


def compare(mesh: Any, text: str) -> None:
    """RuntimeError on every rank of the mesh, with what each has, unless all call it with one text."""
    if not _is_same(mesh, text):
        told = "; ".join(f"rank {rank} has {other}" for rank, other in gathered(mesh, text))
        raise RuntimeError(f"the ranks of a mesh disagree about a sharded computation: {told}")


@functools.cache
def _agreed(mesh: Any) -> set[str]:
    """The texts that the ranks of a mesh agreed on, which choose the same schedules."""
    agree_on_schedules(mesh)
    return set()


def agree_on_schedules(mesh: Any) -> None:
    """Let all ranks of a mesh choose the same schedules for the same computations: with the tuned rows of
    the first one, if theirs differ. RuntimeError on every rank, which names the ranks, where versions or
    the variables differ that schedules follow from."""
    set_ = (f"{name}='{text}'" for name, text in (knob.given for knob in SAME) if text)
    about = ", ".join(
        (
            f"transconv {__version__} ({files_digest()[:8]})",
            f"Triton {triton_version()}",
            "no tuned schedules" if knobs.tuned() == "0" else "tuned schedules",
            *set_,
        )
    )
    if not _is_same(mesh, about):
        told = "; ".join(f"rank {rank} has {text}" for rank, text in gathered(mesh, about))
        raise RuntimeError(f"the ranks of a mesh would compute with different kernels: {told}")
    own = tuning_db.write_rows(tuning_db.all_of_user())
    if _is_same(mesh, own):
        return
    found = gathered(mesh, _digest(own))
    first, digest = found[0]
    others = ", ".join(str(rank) for rank, other in found if other != digest)
    if dist.get_rank() == first:
        warnings.warn(
            f"the tuned schedules of rank {first} differ from those of {others}; all ranks use "
            f"those of rank {first}",
            RuntimeWarning,
            stacklevel=2,
        )
    tuning_db.adopt(tuning_db.read_rows(_of_first(mesh, own)))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _is_same(mesh: Any, text: str) -> bool:
    """Whether all ranks have one text; each gets the same answer."""
    number = _digest(text)
    both = torch.tensor([number, -number], dtype=torch.int64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    most, least = both.tolist()
    return bool(most == -least)


def gathered(mesh: Any, what: Any) -> list[tuple[int, Any]]:
    """What each rank of the mesh has, with its number, that of the first place in the mesh first."""
    found = [(dist.get_rank(), what)]
    for dim in reversed(range(mesh.ndim)):
        parts: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(parts, found, group=mesh.get_group(dim))
        found = [pair for part in parts for pair in part]
    return found


def _of_first(mesh: Any, text: str) -> str:
    """The text of the rank at the first place in the mesh."""
    box = [text]
    for dim in range(mesh.ndim):
        dist.broadcast_object_list(box, group=mesh.get_group(dim), group_src=0)
    return box[0]


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
            self._tell(
                f"transconv: {does} in a sharded computation, after {self._clock() - since:.0f} s. "
                "The other rank is gone, or calls something else."
            )
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
    if is_capturing(device):
        return
    event = _event()
    event.record()
    time = getattr(group._get_backend(device).options, "_timeout", timedelta(minutes=10))
    watch.add(event, f"rank {dist.get_rank()} could not {does}", time.total_seconds())
    watch.start()
