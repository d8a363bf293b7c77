"""The options of the backend of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from transconv.calls.settings import settings

RESTS = ("inductor", "eager")
CAPTURING = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that ask for CUDA graphs
TUNING = ("max-autotune", "max-autotune-no-cudagraphs")  # and those that ask for trials
SECONDS = 120.0  # of trials for one graph, unless the caller gives another budget


class CutMemory(Protocol):
    """A tensor in memory, as far as a bound marks it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    digit: int


class RankGroup(Protocol):
    """The ranks that run a plan, each its own pieces (distributed/halo.py)."""

    @property
    def number(self) -> int: ...
    @property
    def count(self) -> int: ...
    def agree(self, text: str) -> None: ...
    def compare(self, text: str) -> None: ...
    def largest(self, found: tuple[int, ...]) -> tuple[int, ...]: ...
    def exchange(
        self, sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """A bound of a graph's memory: ``bytes``, as the caller ``told`` it; ``over``: the axis of images
    along which pieces are cut, ``n``, ``d``, ``h`` or ``w``; empty: the outermost one of several
    positions, or another one that takes less. ``plans``: what was found for regions, by these; ``made``:
    references to what those of forward graphs returned; ``left``: bytes that are there at least while
    torch computes a region, by its operations; ``host``: bytes of pinned host memory in which tensors may
    wait, None: half of what is free; ``links``: what copies to it, by device; ``ranks``: those that pieces
    are dealt over, None: there is one."""

    bytes: int
    told: str
    over: str = ""
    host: int | None = 0
    links: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    plans: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    made: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)
    left: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    ranks: RankGroup | None = field(default=None, repr=False)

    @property
    def count(self) -> int:
        """The number of ranks."""
        return 1 if self.ranks is None else self.ranks.count

    def lengths(self, shapes: Iterable[tuple[int, ...]]) -> dict[str, int]:
        """The axes along which images of these shapes may be cut, outermost first, each with the most
        positions of it."""
        found = dict.fromkeys((self.over,) if self.over else "ndhw", 0)
        for shape in shapes:
            for name, n in zip(AXES.get(len(shape), ()), shape, strict=False):
                found |= {name: max(n, found[name])} if name in found else {}
        return {name: n for name, n in found.items() if n > 1}


def mark(memory: CutMemory, over: str) -> None:
    """Note along which digit an image is cut; other tensors have none."""
    for d, name in enumerate(AXES.get(len(memory.shape), ())):
        if name == over and name and memory.shape[d] > 1:
            memory.digit = memory.shape[d] * memory.strides[d]


AXES = {3: ("n", "", "w"), 4: ("n", "", "h", "w"), 5: ("n", "", "d", "h", "w")}
"""The axes of images by their number of dims; channels have no name."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The options of the backend. ``rest``: who computes what kernels do not; ``upsampling``: whether
    convolutions of upsampled images become ones of the small image; ``cudagraphs``: whether launches are
    recorded; ``invariant``: whether a sample's bits do not depend on its batch; ``tune``: seconds in which
    schedules are timed first; ``within``: the bound within which it runs in pieces."""

    rest: str
    upsampling: str
    cudagraphs: bool
    invariant: bool
    tune: float
    within: MemoryBound | None = None


def options_of(
    mode: str | None, options: Mapping[str, Any] | None, upsampling: Sequence[str]
) -> BackendOptions:
    """Those of a call of torch.compile. Raises ValueError for options and modes that are unknown."""
    if mode not in (None, "default", *CAPTURING, *TUNING):
        raise ValueError(
            f"mode {mode!r}; expected one of: {', '.join(('default', *CAPTURING, *TUNING[1:]))}"
        )
    given = dict(options or {})
    made = BackendOptions(
        given.pop("rest", "inductor"),
        given.pop("upsampling", "auto"),
        given.pop("cudagraphs", mode in CAPTURING),
        given.pop("invariant", settings.invariant),
        given.pop("tune", SECONDS if mode in TUNING else 0.0),
        given.pop("within", None),
    )
    switches = {type(made.cudagraphs), type(made.invariant)}
    known = made.rest in RESTS and made.upsampling in upsampling
    if given or not known or not is_time(made.tune) or switches != {bool}:
        raise ValueError(
            f'options {options}; expected {{"rest": one of {", ".join(RESTS)}, '
            f'"upsampling": one of {", ".join(upsampling)}, '
            '"cudagraphs": True or False, "invariant": True or False, "tune": seconds, 0 or more}'
        )
    return made


def is_time(seconds: object) -> bool:
    """Whether that is a number of seconds: finite, 0 or more."""
    return type(seconds) in (int, float) and 0 <= seconds < float("inf")  # type: ignore[operator]


def compiled_alone(
    call: Callable[..., Any], name: str, how: Any = "transconv", **words: Any
) -> Callable[..., Any]:
    """A call through torch's compiler, ``words`` for it too: a function with code of its own, to which
    compiled code is tied, so that models of one class do not share its limit."""

    def alone(*given: Any, **named: Any) -> Any:
        return call(*given, **named)

    code = alone.__code__.replace(co_name=f"optimized_{name}_{id(alone):x}")
    function: Any = type(alone)
    own = function(code, alone.__globals__, code.co_name, None, alone.__closure__)
    made: Callable[..., Any] = torch.compile(own, backend=how, **words)
    return made
