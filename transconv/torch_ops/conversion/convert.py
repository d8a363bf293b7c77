"""Replaces torch's convolutions in existing code: a model in place, or aten for the process.

    convert_(model)      the modules of one model, by exchanging their classes; revert_ undoes it
    enable(), disable()  aten's convolution and its backward, for every thread and every caller
    with use():          the same for the calls of one thread
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from transconv.calls import stats
from transconv.calls.settings import settings
from transconv.runtime import torch_internals
from transconv.torch_ops import modules, tensor_subclasses
from transconv.torch_ops.arguments import is_wide
from transconv.torch_ops.calls import precompile, select_impl
from transconv.torch_ops.calls.call_attributes import request
from transconv.torch_ops.conversion import aten_convolutions

Tensor = torch.Tensor
SWITCHED_OFF = "transconv.off was called with its module"


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: names of exchanged modules, and why other convolutions were left; ``did``: in
    words, what became of the former."""

    converted: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    did: str = "converted"

    def __str__(self) -> str:
        done = len(self.converted)
        left = f", {len(self.skipped)} left" if self.did == "converted" else ""
        head = f"{done} convolution{'s' * (done != 1)} {self.did}{left}"
        return "\n".join([head, *(f"  {name}: {why}" for name, why in self.skipped.items())])


def _is_convolution(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.conv._ConvNd)


def convert_(model: torch.nn.Module,
             filter_fn: Callable[[torch.nn.Module, str], bool] | None = None) -> ConversionReport:
    """Let every torch.nn convolution of ``model`` compute with transconv, in place.

    Parameters, buffers, hooks, the state dict and the optimizer's references stay the same.
    ``filter_fn(module, name)`` may leave modules out. Subclasses of torch's modules keep a forward of
    their own, if it ends in `super().forward` or `_conv_forward`; others are left alone with a
    FallbackWarning, once for each class. `enable` reaches those. TypeError for what is no module.
    """
    modules.expect_module(model, "convert_")
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not _is_convolution(module) or modules.is_ours(type(module)):
            continue
        if filter_fn is not None and not filter_fn(module, name):
            skipped[name] = "filter_fn said no"
            continue
        why = SWITCHED_OFF if is_off(module) else modules.why_not(module)
        if not why:
            modules.exchange(module)
            converted.append(name)
            continue
        skipped[name] = why
        if why != SWITCHED_OFF:
            stats.tell_once(f"convert_:{why}", f"transconv.convert_ leaves '{name}' to torch: {why}")
    precompile.note(model)
    precompile.expect(model)
    return ConversionReport(tuple(converted), skipped)


def revert_(model: torch.nn.Module) -> ConversionReport:
    """Undo `convert_`, in place. TypeError for what is no module."""
    modules.expect_module(model, "revert_")
    return ConversionReport(tuple([name for name, module in model.named_modules()
                         if _is_convolution(module) and modules.exchange(module, back=True)]),
                            did="torch's again")


# -- aten's own operators --------------------------------------------------------------------------

_lock = threading.Lock()


class _Entries:
    """The devices of each `enable` that is not yet undone, and of each `use` that runs in any thread."""

    def __init__(self) -> None:
        self.enabled: list[tuple[str, ...]] = []
        self.scopes: list[tuple[str, ...]] = []


class _ThreadState(threading.local):
    """The devices of each `use` that runs in this thread, and whether aten's kernels are torch's."""

    open: tuple[tuple[str, ...], ...] = ()
    aten = False


_entries, _local = _Entries(), _ThreadState()


def _devices(devices: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(devices, str):
        devices = (devices,)
    if devices is None:
        return ("cuda", "cpu") if settings.cpu == "interpret" else ("cuda",)
    for device in devices:
        if device not in ("cuda", "cpu"):
            raise ValueError(f"transconv cannot replace aten's convolution on '{device}'; "
                             "expected one of: cuda, cpu")
    return tuple(devices)


def enable(devices: Sequence[str] | None = None) -> None:
    """Route aten's convolution and its backward to transconv, for the whole process.

    Reaches every caller below autograd, autocast, vmap and compiled code, in all threads, and code
    compiled before; not models made by torch.jit.trace, which call another operator. Calls nest:
    each needs its `disable`. ``devices`` are "cuda" (the default) and "cpu". While other threads run,
    aten's calls still pass through here after the last `disable`, on to torch's kernels.
    """
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
    ``devices`` are as for `enable`. Nests, and works as a decorator.
    """

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        self._devices = devices

    def __enter__(self) -> use:  # noqa: PYI034  (typing.Self is of Python 3.11)
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
    """Within ``with``, aten's convolutions of this thread are torch's, within `use` too."""
    before, _local.aten = _local.aten, True
    try:
        yield
    finally:
        _local.aten = before


class EagerForward:
    """In the place of a module's ``forward``: that of its class, as torch computes it. The operations of a
    graph that it makes are annotated ``by`` torch. A copy or a pickle of the module has one of its own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch.fx.traceback.annotate({"by": SWITCHED_OFF}):
                return type(self.module).forward(self.module, *given, **named)
        with aten():
            return type(self.module).forward(self.module, *given, **named)


def is_off(module: torch.nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), EagerForward)


def off(module: torch.nn.Module, undo: bool = False) -> torch.nn.Module:
    """Leave a module, with all that it has, to torch: in ``torch.compile``, ``transconv.optimize`` and
    ``convert_``, and its forward also in ``enable`` and ``use``. ``undo``: no longer.

    Returns the module. Calls of ``transconv.conv2d`` and the like in its code are as before. TypeError for
    what is no module, ValueError for one with a ``forward`` of its own beside that of its class."""
    modules.expect_module(module, "off")
    for name, part in module.named_modules():
        if undo and is_off(part):
            del part.forward
        elif not undo and not is_off(part):
            if "forward" in vars(part):
                raise ValueError(f"transconv.off: '{name}' has a forward of its own, beside that of its "
                                 "class, which cannot be replaced; call off with the modules in it")
            if _is_convolution(part):
                modules.exchange(part, back=True)
            part.forward = EagerForward(part)
    return module


_new_library: Any = torch.library.Library
_task: Callable[[], int] = torch_internals.backward_task


def _install() -> None:
    """Replace aten's kernels on the requested devices. They are restored when no scope requests them and
    no other thread runs: a thread that is about to enter a kernel must find it there."""
    entries = (*_entries.enabled, *_entries.scopes)
    wanted = aten_convolutions.replaced = frozenset(d for entry in entries for d in entry)
    for device in wanted - aten_convolutions.ORIGINALS.keys():
        key = device.upper()
        library = _new_library("aten", "IMPL")
        aten_convolutions.ORIGINALS[device] = aten_convolutions.Original(
            torch_internals.keys_of(key),
            torch.library.get_kernel("aten::convolution", key),
            torch.library.get_kernel("aten::convolution_backward", key), library)
        library.impl("convolution", _forward, key, with_keyset=True)
        library.impl("convolution_backward", _backward, key, with_keyset=True)
    # Inside a backward pass autograd's threads run, which Python does not list.
    if threading.active_count() == 1 and _task() == -1:
        for device in aten_convolutions.ORIGINALS.keys() - wanted:
            aten_convolutions.ORIGINALS[device].library._destroy()
            del aten_convolutions.ORIGINALS[device]
    tensor_subclasses.tell(wanted)


def _is_on(device: str) -> bool:
    """Whether transconv computes a call of this thread."""
    if _local.aten:
        return False
    if any(device in entry for entry in _entries.enabled):
        return True
    if any(device in entry for entry in _local.open):
        return True
    # Inside a backward pass: autograd's threads carry no scope of their own.
    return _task() != -1 and any(device in e for e in _entries.scopes)


def _forward(keys: Any, input: Tensor, weight: Tensor, bias: Tensor | None,
             *numbers: Any) -> Tensor:
    device = input.device.type
    kept = aten_convolutions.ORIGINALS.get(device)
    if _is_on(device) and (bias is None or bias.dtype == input.dtype or is_wide(bias, input)):
        req = request("aten", 0, *numbers)
        route = select_impl.forward_route(req, input, weight, bias, settings.mode)
        if route.compiled is not None or kept is None:
            found: Tensor = route.forward(input, weight, bias)
            return found
        route.calls += 1
    if kept is None:  # the last scope ended between the dispatcher's look-up and this line
        return torch.convolution(input, weight, bias, *numbers)
    found = kept.forward.call_boxed(keys, input, weight, bias, *numbers)
    return found


def _backward(keys: Any, grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any,
              *numbers: Any) -> tuple[Tensor | None, ...]:
    device = input.device.type
    kept = aten_convolutions.ORIGINALS.get(device)
    *given, mask = numbers
    if _is_on(device):
        params = request("aten", 0, *given).resolve(input, weight, None)
        return select_impl.backward(params, grad, input, weight, mask, settings.mode)
    if kept is None:
        made = torch.ops.aten.convolution_backward.default(grad, input, weight, bias_sizes, *numbers)
    else:
        made = kept.backward.call_boxed(keys, grad, input, weight, bias_sizes, *numbers)
    return tuple(made)
