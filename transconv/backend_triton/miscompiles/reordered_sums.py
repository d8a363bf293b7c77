"""Finds sums in loops whose elements Triton's ``optimize-thread-locality`` puts into other rows.

The pass lets each thread sum its own elements of a row across the steps of a loop. To that end it gives
the tile an axis more, with a reshape that may reorder a thread's registers:

    tt.reshape %x allow_reorder efficient_layout : tensor<64x8xf32, #before> -> tensor<64x1x8xf32, #after>

Register i of the source becomes register i of the destination. Where a thread holds elements of several
rows and those of one row do not lie side by side in its registers, rows exchange elements. Triton mended
the pass in August 2026 (triton-lang/triton#11186); its release 3.6 has the mistake.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from math import prod

_RESHAPE = re.compile(r"tt\.reshape %\S+ allow_reorder efficient_layout : "
                      r"tensor<([\dx]+)x\w+, (#\w+)> -> tensor<([\dx]+)x\w+, (#\w+)>")
_BLOCKED = re.compile(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], "
                      r"threadsPerWarp = \[([\d, ]+)\], warpsPerCTA = \[([\d, ]+)\], "
                      r"order = \[([\d, ]+)\]", re.MULTILINE)

Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A blocked layout: elements of a thread, threads of a warp and warps along each axis; ``order`` lists
    the axes, the fastest first."""

    registers: Place
    threads: Place
    warps: Place
    order: Place

    def held(self, shape: Place, thread: int) -> list[Place]:
        """The places of the elements that a thread of the block holds, by register."""
        lane, warp = thread % prod(self.threads), thread // prod(self.threads)
        at = [0] * len(shape)
        for a in self.order:
            lane, in_warp = divmod(lane, self.threads[a])
            warp, in_block = divmod(warp, self.warps[a])
            at[a] = (in_block * self.threads[a] + in_warp) * self.registers[a]
        tile = [r * t * w for r, t, w in zip(self.registers, self.threads, self.warps, strict=True)]
        slow = self.order[::-1]  # the last range of a product moves fastest
        steps = [range(max(1, shape[a] // tile[a])) for a in slow]
        inner = [range(self.registers[a]) for a in slow]
        found = []
        for step, one in product(product(*steps), product(*inner)):
            place = [0] * len(shape)
            for a, s, i in zip(slow, step, one, strict=True):
                place[a] = (at[a] + s * tile[a] + i) % shape[a]
            found.append(tuple(place))
        return found


def reorders(ttgir: str) -> bool:
    """Whether rows exchange elements in a kernel's TTGIR text; false where a layout is not blocked."""
    layouts = {name: Blocked(*(tuple(int(n) for n in part.split(",")) for part in parts))
               for name, *parts in _BLOCKED.findall(ttgir)}
    for source, of_source, made, of_made in _RESHAPE.findall(ttgir):
        old, new = layouts.get(of_source), layouts.get(of_made)
        if old is not None and new is not None and _exchanges(old, _shape(source), new, _shape(made)):
            return True
    return False


def _exchanges(old: Blocked, source: Place, new: Blocked, made: Place) -> bool:
    """Whether a register's element belongs to another row after the reshape."""
    rows = len(source) - 1  # axes before the one that is summed
    threads = prod(old.threads) * prod(old.warps)
    return any(before[:rows] != after[:rows]
               for thread in range(threads)
               for before, after in zip(old.held(source, thread), new.held(made, thread), strict=False))


def _shape(text: str) -> Place:
    return tuple(int(n) for n in text.split("x"))
