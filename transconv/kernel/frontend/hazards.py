"""Refuses kernels that read what they write, but for the same elements before it, as ``x = x + 1`` reads.
Threads of a group would need a barrier between, and groups run in no order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transconv.ir import Expr
from transconv.kernel.refusals import Refusal, SourcePlace


@dataclass(frozen=True, slots=True)
class ArrayAccess:
    """A read or write of an array: its line, and the loops at run time around it."""

    array: str
    writes: bool
    place: SourcePlace
    loops: tuple[str, ...]
    offset: Expr
    atomic: bool = False


def check_order(accesses: Sequence[ArrayAccess], alike: Mapping[str, str]) -> None:
    """Refuse a read behind a write of the same memory. ``alike``: for each name of an array the first name
    of the same memory. Raises KernelError at the line of the read."""
    written: dict[str, ArrayAccess] = {}
    for access in accesses:
        memory = alike.get(access.array, access.array)
        if access.writes:
            written.setdefault(memory, access)
    seen: dict[str, ArrayAccess] = {}
    for access in accesses:
        memory = alike.get(access.array, access.array)
        first = written.get(memory)
        if access.writes:
            seen.setdefault(memory, access)
        elif first is not None and (memory in seen or _again(access, first)):
            raise _refusal(access, first).at(access.place)
    for access in (a for a in accesses if not a.writes):
        for write in (w for w in accesses if w.writes):
            same = alike.get(access.array, access.array) == alike.get(write.array, write.array)
            if same and (access.offset is not write.offset or write.atomic):
                raise _elsewhere(access, write).at(access.place)


def _elsewhere(read: ArrayAccess, write: ArrayAccess) -> Refusal:
    return Refusal(f"a read of other elements of {read.array} than line {write.place.line} writes, which "
                   "another group or thread may have written before", "reads of the elements that are "
                   "written, of the same shape; results in another array", "group.store(Y[i:], x)")


def _again(read: ArrayAccess, write: ArrayAccess) -> bool:
    """Whether a loop brings a read back after a write."""
    return bool(set(read.loops) & set(write.loops))


def _refusal(read: ArrayAccess, write: ArrayAccess) -> Refusal:
    other = "" if read.array == write.array else f", which shares memory with {write.array}"
    return Refusal(f"a read of {read.array}{other} after line {write.place.line} stores to it",
                   "reads before the first store; keep the value under a name, or launch a second kernel",
                   "y = x * 2.0; group.store(Y[i:], y); z = y + 1.0")
