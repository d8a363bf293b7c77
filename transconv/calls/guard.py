"""Guarded entries of repeated calls, and their cache. An entry is a function for one kind of call, written
out as text: it compares a call with the one that it was made for, and runs what computes it.

    compared    type, dtype, device, sizes, strides, requires_grad and dispatch keys of all tensors, by one
                guard of torch's compiler, which also sees the thread's modes; torch's switches that the
                kernels obey; alignment of all addresses; the current device, where there are several
    run         lines of the kind of call
    otherwise   the next entry, and at last the slow path

The text mentions only what has to be compared, bound to local names. A key of the cache only finds an
entry, which checks everything that its route depends on, so a reused address does no harm. Calls that
never come back earn few entries: the longer none is found again, the longer the next one waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import forward_ad

from transconv.runtime import torch_internals
from transconv.support import defined

Tensor = torch.Tensor
Check = Callable[..., bool]
Part = str | Sequence[str]

ALIGNMENT = 15  # pointers that share these zero bits may be read 16 bytes at a time
current_device = torch_internals.current_device()

# Read at every call; each is a plain function in C.
grad_enabled = torch.is_grad_enabled
modes: Callable[[], int] = torch_internals.dispatch_modes
function_modes: Callable[[], bool] = torch_internals.function_modes
# Whether `is_grads_batched` made a gradient: a view of many, without memory of its own.
is_batched: Callable[[Tensor], bool] = torch_internals.functorch.is_legacy_batchedtensor
_deterministic: Callable[[], bool] = torch_internals.deterministic
_cudnn_deterministic: Callable[[], bool] = torch_internals.cudnn_deterministic


def means_more(tensor: Tensor) -> bool:
    """Whether the memory of a plain tensor differs from its values: a negated view (the imaginary part of
    a conjugate, say) holds the opposite, and torch's ZeroTensors have no memory."""
    return tensor.is_neg() or tensor._is_zerotensor()


def at_multiple(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy with its strides that begins at a multiple of 16 bytes. In invariant mode all
    operands do: a sample's place in its batch must not decide which kernel is asked for."""
    return t.clone() if t.data_ptr() & ALIGNMENT else t


def check_of(*tensors: Tensor, free: int = 0) -> Check | None:
    """A function that says whether other tensors have the same properties as these; the first ``free``
    ones may have any sizes and strides, but dimension 1 as large. None for tensors whose memory no kernel
    may read as it is, for a tensor that is passed twice, and where torch has no such guard."""
    if any(means_more(t) for t in tensors):
        return None
    sizes: list[list[int | None]] = [[*t.shape] for t in tensors]
    strides: list[list[int | None]] = [[*t.stride()] for t in tensors]
    for at in range(free):
        strides[at] = [None] * len(strides[at])
        sizes[at] = [None, sizes[at][1], *strides[at][2:]]
    try:
        made = torch_internals.TensorGuards(
            *tensors,
            dynamic_dims_sizes=sizes if free else None,
            dynamic_dims_strides=strides if free else None,
        )
        check: Check = made.check
        return check if check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def device_of(devices: Sequence[int]) -> int | None:
    """The device that must be the current one for kernels bound to these; None where there is only one."""
    return devices[0] if devices and torch.cuda.device_count() > 1 else None


class Condition(NamedTuple):
    """A condition that is asked at every call: an expression, and what it mentions."""

    text: str
    known: Mapping[str, Any]


def deterministic(now: bool, cudnn: bool) -> Condition:
    """That the same bits are asked for as they are ``now``; ``cudnn``: its own switch counts, too."""
    if cudnn:
        return Condition(
            f"(_deterministic() or _cudnn_deterministic()) is {now}",
            {"_deterministic": _deterministic, "_cudnn_deterministic": _cudnn_deterministic},
        )
    return Condition(f"_deterministic() is {now}", {"_deterministic": _deterministic})


NO_MODES = Condition("not modes()", {"modes": modes})
NO_FUNCTION_MODES = Condition("not function_modes()", {"function_modes": function_modes})
NO_DUALS = Condition("forward_ad._current_level < 0", {"forward_ad": forward_ad})
NO_GRADIENTS = Condition("not grad_enabled()", {"grad_enabled": grad_enabled})


class CallGuard(NamedTuple):
    """What a call is compared with: ``check`` takes its tensors, ``conditions`` take nothing: torch's
    modes, and the switches that the kernels obey."""

    check: Check
    conditions: tuple[Condition, ...]
    aligned: bool
    device: int | None

    def tests(self, tensors: Sequence[str], addressed: Sequence[str] | None = None) -> list[str]:
        """Expressions about ``tensors``, by their names in the text; ``addressed``: those whose alignment
        counts, if it is not that of all."""
        bits = " | ".join(f"{t}.data_ptr()" for t in (tensors if addressed is None else addressed)) or "0"
        return [
            f"check({', '.join(tensors)})",
            *(c.text for c in self.conditions),
            f"{'not ' * self.aligned}({bits}) & {ALIGNMENT}",
            *["current_device() == device"] * (self.device is not None),
        ]

    def known(self) -> dict[str, Any]:
        """What they mention."""
        asked = {name: value for c in self.conditions for name, value in c.known.items()}
        if self.device is not None:
            asked |= {"current_device": current_device, "device": self.device}
        return {**asked, "check": self.check}


def written(
    head: str, parts: Sequence[Part], otherwise: str, known: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function ``head`` of the parts: a line, or conditions under which the parts that follow run;
    where one does not hold, or no part returns, ``otherwise``."""
    lines, depth = [f"def {head}:"], 1
    for part in parts:
        if isinstance(part, str):
            lines.append("    " * depth + part)
        elif part:
            lines.append("    " * depth + f"if ({' and '.join(part)}):")
            depth += 1
    if otherwise:
        lines.append("    " + otherwise)
    return _factory("\n".join(lines), tuple(known))(**known)


@lru_cache(maxsize=4096)
def _factory(text: str, names: tuple[str, ...]) -> Callable[..., Callable[..., Any]]:
    """A function of what a text mentions, by ``names``, to the function that it defines."""
    inner = "\n".join(f"    {line}" for line in text.splitlines())
    name = text.split("(", 1)[0].removeprefix("def ")
    made: Callable[..., Callable[..., Any]] = defined(
        f"def make({', '.join(names)}):\n{inner}\n    return {name}", "make"
    )
    return made


@lru_cache
def start_of(count: int) -> Callable[..., Callable[..., Any]]:
    """What makes, of a route, shape, strides, the start of a plan, a dtype and an allocation, the function
    of ``count`` tensors that makes the result, starts the plan, and counts the call on the route."""
    given = ", ".join(f"t{i}" for i in range(count))
    return _factory(
        f"def start({given}):\n    route.calls += 1\n    made = empty(shape, strides, dtype)\n"
        f"    begin({given}, made)\n    return made",
        ("route", "shape", "strides", "begin", "dtype", "empty"),
    )


class StartableKernel(NamedTuple):
    """A launch that can be started: its operands by their names in the function, and its stores, each with
    shape, strides and dtype."""

    begin: Callable[..., None]
    given: tuple[str, ...]
    stored: tuple[str, ...]
    memory: Sequence[tuple[Any, Any, Any]]

    def lines(self, at: int) -> list[str]:
        """Allocate the stores and start the launch, the ``at``-th of a function."""
        return [
            *(
                f"{name} = empty(shape_{at}_{i}, strides_{at}_{i}, dtype_{at}_{i})"
                for i, name in enumerate(self.stored)
            ),
            f"begin_{at}({', '.join([*self.given, *self.stored])})",
        ]

    def known(self, at: int) -> dict[str, Any]:
        """What the lines mention, but for the allocation ``empty``."""
        known: dict[str, Any] = {f"begin_{at}": self.begin}
        for i, (shape, strides, dtype) in enumerate(self.memory):
            known |= {f"shape_{at}_{i}": shape, f"strides_{at}_{i}": strides, f"dtype_{at}_{i}": dtype}
        return known


def listed(names: Sequence[str]) -> str:
    """A tuple of names, which may be one or none."""
    return f"({''.join(f'{name}, ' for name in names)})"


Call = Callable[..., Any]

CHAIN = 3  # entries under one key: other sizes, training and inference
KINDS = 4096  # keys kept; beyond it all are dropped
PATIENCE = 2  # calls with a known route before an entry is made; doubles when entries had to go
MOST_PATIENCE = 1 << 12


class CallCache:
    """The entries of one front end, and the calls that found none. ``patience``: calls with a known route
    before the first entry; ``chain``: entries under one key."""

    every: ClassVar[list[CallCache]] = []

    def __init__(self, patience: int = PATIENCE, chain: int = CHAIN) -> None:
        self.entries: dict[Hashable, Call] = {}
        self.find = self.entries.get
        self.patience, self.chain = patience, chain
        self._visits: dict[Hashable, list[int]] = {}  # calls since an entry, calls to wait for, entries
        self._elsewhere: list[MutableMapping[Any, Any]] = []  # entries that others hold, such as routes
        self.every.append(self)

    def due(self, key: Hashable, chain: int = 0) -> int:
        """Count a call that found no entry. 0: no entry is due; 1: the first, or a replacement of all; n:
        one before the n - 1 existing ones, of which there are at most ``chain``, if it is given."""
        visits = self._visits.get(key)
        if visits is None:
            if len(self._visits) >= KINDS:
                self.clear()
            visits = self._visits[key] = [0, self.patience, 0]
        visits[0] += 1
        if visits[0] < visits[1]:
            return 0
        visits[0] = 0
        if visits[2] >= (chain or self.chain):  # wait longer: sizes that do not repeat get no entries
            visits[1], visits[2] = min(2 * max(visits[1], PATIENCE), MOST_PATIENCE), 0
        visits[2] += 1
        return visits[2]

    def is_varied(self, key: Hashable) -> bool:
        """Whether entries under a key had to go, as there were too many kinds of calls."""
        visits = self._visits.get(key)
        return visits is not None and visits[1] > self.patience

    def others(self, key: Hashable, place: int, onward: Call) -> Call:
        """What an entry in this place (see ``due``) goes on with: entries so far, or the slow path."""
        return self.entries.get(key, onward) if place > 1 else onward

    def keep(self, key: Hashable, entry: Call) -> None:
        """Make an entry, with those that it goes on with, the only one of its key."""
        if len(self.entries) >= KINDS:
            self.clear()
        self.entries[key] = entry

    def keep_in(self, held: MutableMapping[Any, Any], key: Hashable, entry: Call) -> None:
        """Keep an entry in a mapping that is cleared with the others."""
        if all(one is not held for one in self._elsewhere):
            self._elsewhere.append(held)
        held[key] = entry

    def drop(self, key: Hashable) -> None:
        """Drop the entries of a key, if there are any."""
        self.entries.pop(key, None)

    def clear(self) -> None:
        """Drop all entries."""
        self.entries.clear()
        for held in self._elsewhere:
            held.clear()
        self._elsewhere.clear()
        self._visits.clear()


def forget() -> None:
    """Drop all entries of all front ends: what they run may be another now."""
    for cache in CallCache.every:
        cache.clear()
