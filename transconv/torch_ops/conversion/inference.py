"""``inference``: frozen models whose weights are copied once into the order that kernels read.

    handle = transconv.inference(model)     begins; the handle reports the memory of the copies
    handle.refresh()                        drops the copies, after writes that torch does not count
    handle.end()                            ends it: every call copies; leaving a `with` block does so, too

A copy serves the same weight object while its version counter and its address are those at the time of the
copy; else the call copies again. Only eager calls make copies: those of a graph or a capture might be in
the graph's own pool. A capture copies inside the graph, as a replay cannot check copies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn.parameter import is_lazy

from transconv.runtime import Copy, WeightPrepack, is_capturing, torch_internals
from transconv.support import TensorError, knobs
from transconv.torch_ops import arguments

Tensor = torch.Tensor
Start = Callable[..., None]

_lock = threading.Lock()
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
    if None in made or is_capturing(weight.device):
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
    if held is None or held.ref() is not weight or weight.requires_grad or is_capturing(weight.device):
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
                "transconv.inference returned after such writes"
            )


def starter(
    halves: WeightPrepack[Any], device: int, aligned: bool, names: tuple[str, ...], whole: Start
) -> Start:
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


class Inference:
    """The weights of a model that are copied once, and the memory of the copies. ``skipped``: the other
    convolutions, with reasons."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.skipped: dict[str, str] = {}
        self._weights: dict[int, Tensor] = {}
        self._collect()
        self._watch()

    def refresh(self) -> None:
        """Drop every copy and look for the weights anew: after writes that no version counter sees
        (through `.data`, by a kernel, by FSDP), and after a weight was assigned. ValueError as from
        `inference`."""
        before, self._weights = self._weights, {}
        try:
            self._collect()
        finally:
            for weight in before.values():
                leave(weight)
        self._watch()

    def end(self) -> None:
        """Copy at every call again, and free the copies."""
        for weight in self._weights.values():
            leave(weight)
        self._weights.clear()

    def __enter__(self) -> Inference:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def bytes(self) -> int:
        """The memory of all copies so far, in addition to the weights: the first calls make the copies."""
        return sum(copied(w)[1] for w in self._weights.values())

    def __str__(self) -> str:
        each = [copied(w)[0] for w in self._weights.values()]
        size = sum(w.nbytes for w in self._weights.values())
        head = (
            f"{len(each)} weights ({size} bytes), {sum(map(bool, each))} of them copied once in "
            f"another order ({self.bytes} bytes more), {len(self.skipped)} left"
        )
        return "\n".join([head, *(f"  {name}: {why}" for name, why in self.skipped.items())])

    __repr__ = __str__

    def _collect(self) -> None:
        self.skipped = {}
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.modules.conv._ConvNd):
                weight: Any = module._parameters.get("weight")
                if why := _why_not(weight):
                    self.skipped[name] = why
                elif weight.requires_grad:
                    raise ValueError(
                        f"transconv.inference: the weight of '{name}' requires a gradient, expected a "
                        "frozen model; call model.requires_grad_(False) before"
                    )
                else:
                    self._weights[id(weight)] = weight

    def _watch(self) -> None:
        names = {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False)}
        for weight in self._weights.values():
            watch(weight, names.get(id(weight), "weight"))


def _why_not(weight: Any) -> str:
    """Why a weight cannot be watched; empty if it can."""
    if weight is None:
        return "its weight is computed at every call"
    if is_lazy(weight):
        return "it has no weight before its first call"
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of layout {weight.layout}"
    if weight.is_inference():
        return "its weight was made under torch.inference_mode, where torch counts no writes"
    return ""


def inference(model: torch.nn.Module) -> Inference:
    """Let the convolutions of a frozen model copy their weights once, not at every call.

    Some kernels, mainly those for channels first, read a copy of the weight in another memory order. The
    first eager call of each kind of input makes the copy, and later calls in any thread use it, as long as
    torch has counted no write to the weight and its address is the same. So `load_state_dict`, writes in
    place, `.to()`, an assigned weight and `requires_grad_()` never give old results. After writes that
    torch does not count, call `refresh()`. In a captured CUDA graph weights are copied at every replay.
    The model does not change: its state dict, copies and pickles do not contain the copies. Raises
    ValueError if a weight requires a gradient, TypeError for what is no module."""
    arguments.expect_module(model, "inference")
    return Inference(model)
