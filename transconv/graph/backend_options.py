"""The options of the backend of torch.compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transconv.calls.settings import settings
from transconv.graph.autotuner import SECONDS

RESTS = ("inductor", "eager")
CAPTURING = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that ask for CUDA graphs
TUNING = ("max-autotune", "max-autotune-no-cudagraphs")  # and those that ask for trials


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """``rest``: who computes what kernels do not; ``upsampling``: whether convolutions of upsampled images
    become ones of the small image; ``cudagraphs``: whether launches are recorded; ``invariant``: whether a
    sample's bits do not depend on its batch; ``tune``: seconds in which schedules are timed first."""

    rest: str
    upsampling: str
    cudagraphs: bool
    invariant: bool
    tune: float


def options_of(
    mode: str | None, options: Mapping[str, Any] | None, upsampling: Sequence[str]
) -> BackendOptions:
    """Those of a call of torch.compile. Raises ValueError for options that are unknown."""
    given = dict(options or {})
    made = BackendOptions(
        given.pop("rest", "inductor"),
        given.pop("upsampling", "auto"),
        given.pop("cudagraphs", mode in CAPTURING),
        given.pop("invariant", settings.invariant),
        given.pop("tune", SECONDS if mode in TUNING else 0.0),
    )
    switches = {type(made.cudagraphs), type(made.invariant)}
    timed = type(made.tune) in (int, float) and 0 <= made.tune < float("inf")
    known = made.rest in RESTS and made.upsampling in upsampling
    if given or not known or not timed or switches != {bool}:
        raise ValueError(
            f'options {options}; expected {{"rest": one of {", ".join(RESTS)}, '
            f'"upsampling": one of {", ".join(upsampling)}, '
            '"cudagraphs": True or False, "invariant": True or False, "tune": seconds, 0 or more}'
        )
    return made
