"""What the regions of a graph have in common, and how values come to one that is the whole graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from transconv.graph.fusion.groups import Price
from transconv.graph.symbols import Symbols
from transconv.target import Target


@dataclass(frozen=True, slots=True)
class Setting:
    """What the regions of a graph have in common. ``rest``: who computes what kernels do not; ``changed``
    is called where a region runs otherwise than it was reported."""

    device: torch.device
    target: Target
    rates: Price
    rest: str
    symbols: Symbols
    changed: Callable[[], None]
    upsampling: str = "auto"  # one of region_kernels.UPSAMPLING
    batch: tuple[str, ...] = ()  # the numbers of samples, in invariant mode
    pieces: Callable[[Any], Any] | None = None  # of a region's launches: what runs it in pieces


class Wired(NamedTuple):
    """Of one part that is a whole graph: which placeholders are its inputs, which are results, and each
    result's place among these and the part's outputs; -1 for a value that is known."""

    inputs: list[int]
    used: list[int]
    results: list[tuple[int, Any]]
