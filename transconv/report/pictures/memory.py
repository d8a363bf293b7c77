"""A picture of a kernel's shared memory: its buffers, and how much a program may use."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from transconv.ir import Kernel, Shared, SmemRing, walk
from transconv.report.pictures import svg
from transconv.schedule import Scheduled, shared_bytes

WIDTH = 640.0


@dataclass(frozen=True)
class SharedMemoryRing:
    """Boxes of shared memory under one name. ``bytes`` of all ``slots``."""

    name: str
    slots: int
    bytes: int
    shape: str


def rings(kernel: Kernel) -> list[SharedMemoryRing]:
    """The buffers that an explicit kernel allocates; none where Triton does it."""
    found = [s.what for s in walk(kernel) if isinstance(s, Shared) and isinstance(s.what, SmemRing)]
    return [SharedMemoryRing(b.name, b.slots, b.slots * b.members * b.box_bytes,
                 f"{b.slots} x {b.members} x {b.type}{list(b.extents)}" if b.members > 1 else
                 f"{b.slots} x {b.type}{list(b.extents)}") for b in found]


def implied(whole: Scheduled) -> list[SharedMemoryRing]:
    """The buffers that Triton's software pipeline needs for its operands."""
    schedule, compute = whole.schedule, whole.main
    if schedule.unit != "mma" or compute.b is None:
        return []
    return [SharedMemoryRing("operands in flight", schedule.stages, shared_bytes(schedule, compute),
                 f"{schedule.stages} stages of both operands' tiles")]


def draw(found: list[SharedMemoryRing], limit: int) -> Markup:
    """A bar as long as the memory, with a piece for every slot of every ring."""
    height, top, x = 34.0, 18.0, 0.0
    parts: list[Markup] = [svg.rect(0, top, WIDTH, height, "ground", round_=3)]
    per = WIDTH / max(limit, sum(r.bytes for r in found), 1)
    for i, ring in enumerate(found):
        each = ring.bytes / max(1, ring.slots) * per
        for slot in range(ring.slots):
            parts.append(svg.rect(x + slot * each, top, max(0.5, each - 1), height, f"slab hue{i % 8}",
                                  f"{ring.name}[{slot}]: {ring.bytes // max(1, ring.slots)} bytes"))
        if ring.bytes * per > 7 * len(ring.name):
            parts.append(svg.text(x + 2, 12, ring.name, "tick"))
        x += ring.bytes * per
    used = sum(r.bytes for r in found)
    words = f"{used} of {limit} bytes of shared memory, {used / limit:.0%}"
    parts.append(svg.text(WIDTH - 2, top + height + 14, words, "tick", "end"))
    return svg.drawing(WIDTH, top + height + 20, words, *parts, kind="wide")
