"""aten's convolutions replaced by transconv's, for existing code as it is.

enable(), disable()  aten's convolution and its backward, for every thread and every caller
with use():          the same for the calls of one thread
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from transconv.calls.settings import settings
from transconv.runtime import GPUS, torch_internals
from transconv.torch_ops import arguments, tensor_subclasses
from transconv.torch_ops.arguments import is_wide
from transconv.torch_ops.calls import select_impl
from transconv.torch_ops.calls.call_attributes import request
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor


_lock = threading.Lock()


class _Entries:
    """The devices of each `enable` that is not yet undone, and of each `use` that runs in any thread."""

    def __init__(self) -> None:
        self.enabled: list[tuple[str, ...]] = []
        self.scopes: list[tuple[str, ...]] = []


class _ThreadState(threading.local):
    """The devices of each `use` that runs in this thread."""

    open: tuple[tuple[str, ...], ...] = ()


_entries, _local = _Entries(), _ThreadState()


def _devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(devices, str):
        devices = (devices,)
    # Without an Intel GPU torch has no kernels for one that could be replaced.
    gpus = [d for d in GPUS if d != "xpu" or torch.xpu.is_available()]
    if devices is None:
        return (*gpus, "cpu") if settings.cpu == "interpret" else (*gpus,)
    for device in devices:
        if device not in (*gpus, "cpu"):
            raise ValueError(
                f"transconv cannot replace aten's convolution on '{device}'; expected one of: "
                f"{', '.join((*gpus, 'cpu'))}"
            )
    return tuple(devices)


def enable(devices: Sequence[str] | None = None) -> None:
    """Route aten's convolution and its backward to transconv, for the whole process.

    Reaches every caller below autograd, autocast, vmap and compiled code, in all threads, and code
    compiled before; not models made by torch.jit.trace, which call another operator. Calls nest:
    each needs its `disable`. ``devices`` are "cuda" and, where torch has one, "xpu" (the default), and
    "cpu". While other threads run, aten's calls still pass through here after the last `disable`, on to
    torch's kernels."""
    with _lock:
        _entries.enabled.append(_devices(devices))
        _install()


def disable() -> None:
    """Undo the last `enable`. RuntimeError if there is none."""
    with _lock:
        if not _entries.enabled:
            raise RuntimeError("transconv.disable() without a transconv.enable() before it")
        _entries.enabled.pop()
        _install()


class use(contextlib.ContextDecorator):
    """``with transconv.use():`` routes aten's convolutions of this thread to transconv.

    A backward pass runs in threads of autograd's own. While any scope is open they use transconv
    too; a backward that starts after the scope has ended uses torch's kernels. Both are right.
    ``devices`` are as for `enable`. Nests, and works as a decorator."""

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        self._devices = devices

    def __enter__(self) -> use:
        entry = _devices(self._devices)
        with _lock:
            _entries.scopes.append(entry)
            _install()
        _local.open = (*_local.open, entry)
        return self

    def __exit__(self, *_: object) -> None:
        entry = _local.open[-1]
        _local.open = _local.open[:-1]
        with _lock:
            _entries.scopes.remove(entry)
            _install()


@contextlib.contextmanager
def aten() -> Iterator[None]:
    """Within ``with``, convolutions of this thread are torch's: aten's, within `use` too, and those of the
    operators of this package."""
    state = aten_convolutions.by_torch
    before, state.on = state.on, True
    try:
        yield
    finally:
        state.on = before


_new_library: Any = torch.library.Library
_task: Callable[[], int] = torch_internals.backward_task


def _install() -> None:
    """Replace aten's kernels on the requested devices. They are restored when no scope requests them and
    no other thread runs: a thread that is about to enter a kernel must find it there."""
    entries = (*_entries.enabled, *_entries.scopes)
    wanted = aten_convolutions.replacement.devices = frozenset(d for entry in entries for d in entry)
    for device in wanted - aten_convolutions.replacement.originals.keys():
        key = device.upper()
        library = _new_library("aten", "IMPL")
        aten_convolutions.replacement.originals[device] = aten_convolutions.Original(
            torch_internals.keys_of(key),
            torch.library.get_kernel("aten::convolution", key),
            torch.library.get_kernel("aten::convolution_backward", key),
            library,
        )
        library.impl("convolution", _forward, key, with_keyset=True)
        library.impl("convolution_backward", _backward, key, with_keyset=True)
    # Inside a backward pass autograd's threads run, which Python does not list.
    if threading.active_count() == 1 and _task() == -1:
        for device in aten_convolutions.replacement.originals.keys() - wanted:
            aten_convolutions.replacement.originals[device].library._destroy()
            del aten_convolutions.replacement.originals[device]
    tensor_subclasses.tell(wanted)


def _is_on(device: str) -> bool:
    """Whether transconv computes a call of this thread."""
    if aten_convolutions.by_torch.on:
        return False
    if any(device in entry for entry in _entries.enabled):
        return True
    if any(device in entry for entry in _local.open):
        return True
    # Inside a backward pass: autograd's threads carry no scope of their own.
    return _task() != -1 and any(device in e for e in _entries.scopes)


def _forward(keys: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    device = input.device.type
    kept = aten_convolutions.replacement.originals.get(device)
    if _is_on(device) and (bias is None or bias.dtype == input.dtype or is_wide(bias, input)):
        req = request("aten", 0, *numbers)
        input = arguments.in_any_batch(input, weight)
        route = select_impl.forward_route(req, input, weight, bias, settings.mode)
        if route.compiled is not None or kept is None:
            found: Tensor = route.forward(input, weight, bias)
            return found
        route.calls += 1
    if kept is None:  # the last scope ended between the dispatcher's look-up and this line
        return torch.convolution(input, weight, bias, *numbers)
    found = kept.forward.call_boxed(keys, input, weight, bias, *numbers)
    return found


def _backward(
    keys: Any, grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, *numbers: Any
) -> tuple[Tensor | None, ...]:
    device = input.device.type
    kept = aten_convolutions.replacement.originals.get(device)
    *given, mask = numbers
    if _is_on(device):
        params = request("aten", 0, *given).resolve(input, weight, None)
        return select_impl.backward(params, grad, input, weight, mask, settings.mode)
    if kept is None:
        made = torch.ops.aten.convolution_backward.default(grad, input, weight, bias_sizes, *numbers)
    else:
        made = kept.backward.call_boxed(keys, grad, input, weight, bias_sizes, *numbers)
    return tuple(made)
