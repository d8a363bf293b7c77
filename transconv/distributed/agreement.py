"""What the ranks of a mesh must have in common, asked once: the calls, and what schedules follow from.

A choice of a schedule follows from the computation, the chip, the versions, the environment and the tuned
rows. Ranks whose rows differ take those of the mesh's first rank; whatever else differs is an error.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from typing import Any

import torch
import torch.distributed as dist

from transconv import knobs
from transconv.selection import files_digest
from transconv.selection.tuning_db import record, store
from transconv.target import triton_version
from transconv.version import __version__

SAME = (knobs.schedule, knobs.sizes, knobs.passes, knobs.features)
MOST = 1 << 12  # texts of one mesh that are remembered


def agree(mesh: Any, text: str) -> None:
    """RuntimeError on every rank of the mesh unless all ranks call it with one text, and would choose the
    same schedules. Asked once for each text; ranks that disagree after that wait for each other until
    torch.distributed's time is over."""
    known = _agreed(mesh)
    if text in known:
        return
    if not _is_same(mesh, text):
        raise RuntimeError("the ranks of a mesh disagree about a sharded convolution. Rank "
                           f"{dist.get_rank()} has: {text}")
    if len(known) >= MOST:
        known.clear()  # all ranks of a mesh do, at the same call
    known.add(text)


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
    about = ", ".join((f"transconv {__version__} ({files_digest()[:8]})", f"Triton {triton_version()}",
                       "no tuned schedules" if knobs.tuned() == "0" else "tuned schedules", *set_))
    if not _is_same(mesh, about):
        told = "; ".join(f"rank {rank} has {text}" for rank, text in gathered(mesh, about))
        raise RuntimeError(f"the ranks of a mesh would compute with different kernels: {told}")
    own = record.write_rows(store.all_of_user())
    if _is_same(mesh, own):
        return
    found = gathered(mesh, _digest(own))
    first, digest = found[0]
    others = ", ".join(str(rank) for rank, other in found if other != digest)
    if dist.get_rank() == first:
        warnings.warn(f"the tuned schedules of rank {first} differ from those of {others}; all ranks use "
                      f"those of rank {first}", RuntimeWarning, stacklevel=2)
    store.adopt(record.read_rows(_of_first(mesh, own)))


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
