"""Elements that a sweep over a row loads again: from which cache they come, and how long that takes."""

from __future__ import annotations

from transconv.target import Target

NEAR, FAR = 4.0, 1.4  # the bandwidths of the L1 and L2 caches relative to that of memory
NEAR_NS, FAR_NS, LATENCY_NS = 60.0, 300.0, 600.0  # of a load: from them, and from memory
ROOM = 0.6  # the fraction of the L2 cache that holds elements until they are read again


def loaded(again: float, steps: int, beside: int, turned: bool, target: Target) -> tuple[float, float]:
    """Of what a step loads again: bytes of memory that take as long, and the latency in nanoseconds.
    ``beside``: programs of a multiprocessor at a time; ``turned``: each sweep begins where the last one
    ended."""
    if not again:
        return 0.0, NEAR_NS
    rows = again * steps * beside
    cache = target.shared_bytes if target.backend == "cuda" else 0
    over = rows * target.sms / (ROOM * target.l2_bytes)
    near = min(1.0, cache / rows)
    if not turned:  # rows of several programs are not all read at a time
        near = min(1.0, max(0.0, 2 - rows / cache)) if again * steps < cache else 0.0
    either = max(near, min(1.0, 1 / over) if turned else float(over < 1))
    far, lost = either - near, 1 - either
    return again * (near / NEAR + far / FAR + lost), near * NEAR_NS + far * FAR_NS + lost * LATENCY_NS
