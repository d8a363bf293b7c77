"""The options of the backend of torch.compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transconv.calls.settings import settings

RESTS = ("inductor", "eager")
CAPTURING = "reduce-overhead"  # the mode of torch.compile that asks for CUDA graphs


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """``rest``: who computes what kernels do not; ``upsampling``: whether convolutions of upsampled images
    become ones of the small image; ``cudagraphs``: whether launches are recorded; ``invariant``: whether a
    sample's bits do not depend on its batch."""

    rest: str
    upsampling: str
    cudagraphs: bool
    invariant: bool


def options_of(
    mode: str | None, options: Mapping[str, Any] | None, upsampling: Sequence[str]
) -> BackendOptions:
    """Those of a call of torch.compile. Raises ValueError for options that are unknown."""
    given = dict(options or {})
    made = BackendOptions(
        given.pop("rest", "inductor"),
        given.pop("upsampling", "auto"),
        given.pop("cudagraphs", mode == CAPTURING),
        given.pop("invariant", settings.invariant),
    )
    switches = {type(made.cudagraphs), type(made.invariant)}
    if given or made.rest not in RESTS or made.upsampling not in upsampling or switches != {bool}:
        raise ValueError(
            f'options {options}; expected {{"rest": one of {", ".join(RESTS)}, '
            f'"upsampling": one of {", ".join(upsampling)}, '
            '"cudagraphs": True or False, "invariant": True or False}'
        )
    return made
