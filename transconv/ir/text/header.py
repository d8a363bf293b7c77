"""The header of a kernel's text: abbreviations of names that the text repeats.

    kernel scale(x: f16, y: f16):
        sizes M=8 in 1..99, N=64 in 8..4096, N % 8 == 0    arguments: example, range, requirements
        # x: 8a64b [m=8 n=64]                              the tensors, in the order of the call
        # x_copy: 64a8b [n=64 m=8], copy of x
        # z: 8a64b [m=8 n=64], any [M, N]                  its sizes are arguments; 8 and 64 are examples
        lanes m[0:8 axis=1 M] n[0:64 axis=2 N]             the body writes m[0:8]
        box x = [m[0:8], n[0:64]]                          the position of each lane in boxes of x
        piece ring = [m[0:8], n[0:64]] of 0                the same in slots of ring, and which box
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transconv.ir.access import BoxLoad, MemoryRead
from transconv.ir.explicit import SlotTile
from transconv.ir.expr import Expr, Lane, Var
from transconv.ir.stmt import BoxStore, Kernel
from transconv.ir.tensor import Tensor
from transconv.ir.visit import find, lanes_of, walk

Within = tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """Lanes by name and extent, ``within`` of boxes by tensor, ``member, within`` of pieces by buffer.
    The body prints these only where they differ from the header."""

    lanes: dict[tuple[str, int], Lane]
    boxes: dict[str, Within]
    pieces: dict[str, tuple[Expr, Within]]

    @staticmethod
    def of(kernel: Kernel) -> Header:
        """The header of a kernel: its first lane of each name, box of each tensor and piece of each buffer
        whose positions depend on lanes alone."""
        boxes: dict[str, Within] = {}
        boxed: list[BoxLoad | BoxStore] = [*find(kernel, BoxLoad), *find(kernel, BoxStore)]
        for box in boxed:
            if _over_lanes(box.within):
                boxes.setdefault(box.tensor.name, box.within)
        slots: dict[str, tuple[Expr, Within]] = {}
        for piece in sorted(find(kernel, SlotTile), key=lambda p: not lanes_of(p.member)):
            if _over_lanes((piece.member, *piece.within)):
                slots.setdefault(piece.buffer.name, (piece.member, piece.within))
        return Header({(x.name, x.extent): x for x in reversed(find(kernel, Lane))}, boxes, slots)

    def suffix(self, lane: Lane) -> str:
        """A lane's axis and kind; empty where the header has this lane."""
        return "" if self.lanes.get((lane.name, lane.extent)) is lane else axis_and_kind(lane)


def axis_and_kind(lane: Lane) -> str:
    """`` axis=1 M``: what the text of a lane has after its name and extent."""
    return f" axis={lane.axis}" + (f" {lane.kind}" if lane.kind else "")


def tensor_line(t: Tensor) -> str:
    """The header's line about a tensor: everything but its type."""
    words = ((t.copy_of, f"copy of {t.copy_of}"), (t.parts_of, f"parts of {t.parts_of}"),
             (t.planes, "planes"), (t.number, "number"),
             (t.extents, f"any [{', '.join(map(str, t.extents))}]"),
             (t.pitches, f"apart [{', '.join(map(str, t.pitches))}]"),
             (t.every, f"every [{', '.join(map(str, t.every))}]"))
    return ", ".join([str(t), *(text for holds, text in words if holds)])


def _over_lanes(exprs: Iterable[Expr]) -> bool:
    """Whether expressions mention only lanes and constants, so that the header can print them."""
    return not any(isinstance(n, (Var, MemoryRead, SlotTile)) for e in exprs for n in walk(e))
