"""Counts of the maps behind a sum: what they read, what they store beside the sum's own result, and the
functions that they call.

In explicit kernels, tensors as large as the result are read by loads of the consumers, whose registers are
laid out for products, or in boxes that the producer fetches (the word ``behind``); other results leave as
boxes or by lanes. Kernels that Triton lays out load and store 16 bytes at once; they are not counted.
Functions are counted for each element; other arithmetic is short beside the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from transconv.compute import Compute, Read, axis_strides, touched
from transconv.ir import CALLS, Call, View, find
from transconv.schedule import Block, Schedule, boxes_behind, by_tile, result_boxes, sides

TOGETHER = 2  # elements beside one another in a register tile: those of two columns of a row


@dataclass(frozen=True, slots=True)
class EpilogueCost:
    """Of a tile: ``accesses`` of single lanes, ``fetched`` bytes, bytes of other results than the sum's
    that are ``sent`` as boxes or ``stored`` by lanes, instructions of ``called`` functions; of the kernel:
    its ``traffic``, that of ``views``."""

    accesses: float = 0.0
    fetched: float = 0.0
    sent: float = 0.0
    stored: float = 0.0
    traffic: int = 0
    called: float = 0.0
    views: tuple[View, ...] = ()


@lru_cache(maxsize=4096)
def read_behind(schedule: Schedule, compute: Compute) -> EpilogueCost:
    """The counts. What is read when the parts of a sum are added is no load of this kernel."""
    reads, others, called = _behind(compute)
    if not reads and not called and not others:
        return EpilogueCost()
    extents = sides(schedule, compute)
    whole = extents["M"] * extents["N"] * extents["B"]
    large = [v for v in reads if _elements(schedule.blocks, compute, v) == whole]
    boxes = boxes_behind(schedule, compute)
    here = schedule.via == "gluon" and schedule.split_k == 1 and schedule.reduce != "stream"
    loaded = [v for v in large if here and v not in boxes]
    results = result_boxes(schedule, compute)
    written = [v for v in others if _elements(schedule.blocks, compute, v) == whole]
    sent = sum(float(whole * v.tensor.dtype.bytes) for v in written if v in results)
    stored = sum(float(whole * v.tensor.dtype.bytes) for v in written if v not in results) * here
    return EpilogueCost(sum(whole / _at_once(v, schedule, compute) for v in loaded),
                  sum(float(whole * v.tensor.dtype.bytes) for v in boxes), sent, stored,
                  sum(touched(v, compute) for v in (*large, *written)),
                  whole * called * (schedule.split_k == 1), (*large, *written))


@lru_cache(maxsize=512)
def _behind(compute: Compute) -> tuple[list[View], list[View], float]:
    """What is read behind the sum, what is stored beside its result, and the instructions of the functions
    of an element there."""
    steps = compute.sweeps.behind if compute.sum else ()
    calls = {e for s in steps if not isinstance(s, Read) for e in find(s.value, Call)}
    others = [w.view for w in compute.writes if compute.sum and w.view is not compute.c and not w.op]
    return ([s.view for s in steps if isinstance(s, Read)], others,
            sum(CALLS[e.name].instructions for e in calls))


@by_tile
def _elements(tiles: tuple[Block, ...], compute: Compute, view: View) -> int:
    strides = axis_strides(view, compute)
    return prod(b.extent for b in tiles
                if compute.kind(b.first) != "K" and any(strides[a] for a in b.axes))


def _at_once(view: View, schedule: Schedule, compute: Compute) -> int:
    """How many elements a lane loads at once: two, if the columns of the register tile are contiguous."""
    strides = axis_strides(view, compute)
    columns = "M" if schedule.swap else "N"
    along = any(strides[b.last] == 1 and b.extent > 1 for b in schedule.blocks
                if compute.kind(b.first) == columns)
    return TOGETHER if along else 1
