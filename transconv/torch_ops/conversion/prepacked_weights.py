"""Copies of frozen weights, made once in the order that kernels read.

Only weights registered by conversion/inference.py are copied. A copy is used for the same weight object as
long as its version counter and its address are those at the time of the copy; otherwise the call copies
again, as every call does for other weights. Only eager calls make copies: inside a compiled graph or a
capture their memory might belong to the graph's own pool. A capture never reads them, because a replay
cannot check whether they are current: it copies inside the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from transconv.conv import CompiledDirection
from transconv.runtime import Copy, WeightPrepack, torch_internals
from transconv.support import TensorError, knobs

Tensor = torch.Tensor
Halves = WeightPrepack[CompiledDirection]

_stream: Callable[[int], int] = getattr(torch_internals, "raw_stream", lambda index: 0)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """A weight as it was when it was copied, and its copies, each with the stream it belongs to.
    ``memory`` keeps the address from being given to another tensor meanwhile."""

    version: int
    address: int
    memory: Any
    copies: dict[str, tuple[Tensor, int]] = field(default_factory=dict)


class _Weight:
    """A weight that was named, ``named`` by its identity. ``compares``: every use of a copy is checked
    against a new one. ``listeners`` are told of each whose copies have to be made, or are dropped."""

    __slots__ = ("compares", "name", "ref", "state")
    named: ClassVar[dict[int, _Weight]] = {}
    listeners: ClassVar[list[Callable[[int], None]]] = []

    def __init__(self, weight: Tensor, name: str) -> None:
        key = id(weight)
        self.ref = weakref.ref(weight, lambda gone: _forget(key, gone))
        self.name = name
        self.compares = knobs.verify()
        self.state = _state(weight)


def _captured(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


_lock = threading.Lock()


def _state(weight: Tensor) -> _State:
    return _State(weight._version, weight.data_ptr(), weight.untyped_storage())


def _forget(key: int, gone: object) -> None:
    held = _Weight.named.get(key)
    if held is not None and held.ref is gone:
        _Weight.named.pop(key, None)


def on_change(listener: Callable[[int], None]) -> None:
    """Call ``listener`` with the identity of every weight whose copies have to be made, or are dropped."""
    _Weight.listeners.append(listener)


def _tell(key: int) -> None:
    for listener in _Weight.listeners:
        listener(key)


def watch(weight: Tensor, name: str) -> None:
    """Copy a weight only once. Existing copies of it are dropped."""
    with _lock:
        _Weight.named[id(weight)] = _Weight(weight, name)
    _tell(id(weight))


def leave(weight: Tensor) -> None:
    """A weight is copied at every call again."""
    held = _Weight.named.get(id(weight))
    if held is not None and held.ref() is weight:
        _Weight.named.pop(id(weight), None)
        _tell(id(weight))


def copied(weight: Tensor) -> tuple[int, int]:
    """How many copies there are of a weight, and their bytes."""
    held = _Weight.named.get(id(weight))
    made = [] if held is None or held.ref() is not weight else [*held.state.copies.values()]
    return len(made), sum(t.nbytes for t, _ in made)


def find(halves: WeightPrepack[Any], weight: Tensor) -> tuple[Tensor, ...] | None:
    """The copies that ``halves.rest`` takes, in their order; None where they have to be made anew."""
    held = _Weight.named.get(id(weight))
    if held is None or held.ref() is not weight or weight.requires_grad:
        return None
    state = held.state
    if weight._version != state.version or weight.data_ptr() != state.address:
        held.state = _state(weight)
        _tell(id(weight))
        return None
    made = [state.copies.get(c.key) for c in halves.copies]
    if None in made or _captured(weight):
        return None
    if held.compares:
        _compare(halves.copies, weight, held.name, state)
    return tuple([_used(*m) for m in made if m is not None])


def _used(copy: Tensor, stream: int) -> Tensor:
    """A copy that a kernel of the current stream is about to read: memory that is freed while another
    stream reads it must not be given away before."""
    if copy.is_cuda and _stream(copy.get_device()) != stream:
        copy.record_stream(torch.cuda.current_stream(copy.device))
    return copy


def lay_out(halves: WeightPrepack[Any], weight: Tensor) -> None:
    """Make the copies of a weight that was named, for eager calls to find."""
    held = _Weight.named.get(id(weight))
    if held is None or held.ref() is not weight or weight.requires_grad or _captured(weight):
        return
    find(halves, weight)  # drops what is stale
    state = held.state
    if all(c.key in state.copies for c in halves.copies):
        return
    with _lock:
        for copy in halves.copies:
            if copy.key not in state.copies:
                state.copies[copy.key] = _made(copy, weight)


def _made(copy: Copy, weight: Tensor) -> tuple[Tensor, int]:
    """A copy that is complete: kernels of any stream may read it."""
    if not weight.is_cuda:
        return copy.make(weight.detach()), 0
    with torch.cuda.device(weight.device):
        made = copy.make(weight.detach())
        torch.cuda.current_stream().synchronize()
        return made, _stream(weight.get_device())


def _compare(copies: tuple[Copy, ...], weight: Tensor, name: str, state: _State) -> None:
    for copy in copies:
        kept, _ = state.copies[copy.key]
        if not torch.equal(kept.view(torch.uint8), copy.make(weight.detach()).view(torch.uint8)):
            raise TensorError(
                f"{name}: the copy that kernels read differs from the weight, which was written to "
                "past its version counter (through .data, or by a kernel); call refresh() of what "
                "transconv.inference returned after such writes")


def starter(halves: Halves, device: int, aligned: bool, names: tuple[str, ...],
            whole: Callable[..., None]) -> Callable[..., None]:
    """As ``whole``, the plan's start function of the tensors ``names``, but without the copies of a
    weight where they are there."""
    begin = halves.rest.starter(device, aligned, (*names, *(c.name for c in halves.copies)))
    if begin is None:
        return whole
    start, at = begin, names.index("wei")

    def run(*given: Tensor) -> None:
        made = find(halves, given[at])
        if made is None:
            whole(*given)
        else:
            start(*given, *made)

    return run
