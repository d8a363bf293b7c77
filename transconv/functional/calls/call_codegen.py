"""Functions of warm calls, written out for their number of tensors: a call makes no list and looks nothing
up. What they run is bound when they are made.

    launching   allocate the results, launch, and keep in autograd's context what gradients need
    gradients   the guard of the saved tensors and the result's gradient, then all launches
    entry       the guard of a call, then one of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import is_grad_enabled
from torch._C import _get_deterministic_algorithms, _len_torch_dispatch_stack
from torch.autograd import forward_ad

from transconv.functional.calls.compiled_launch import TensorMemory
from transconv.ir import defined
from transconv.torch_ops.calls.route import ALIGNMENT, current_device

Empty = Callable[[Sequence[int], Sequence[int], Any], Any]
ALIGNED = f"& {ALIGNMENT}"


class StartableKernel(NamedTuple):
    """A launch that can be started: its operands by their names in the function, and its stores."""

    begin: Callable[..., None]
    given: tuple[str, ...]
    stored: tuple[str, ...]
    memory: tuple[TensorMemory, ...]


def launching(empty: Empty, operands: Sequence[str], begun: StartableKernel, results: Sequence[str],
              saved: Sequence[str] | None) -> Callable[..., Any]:
    """A function of the operands, after autograd's context where ``saved`` says what to keep there, to the
    results; a single one alone."""
    lines = [f"def run({_listed(['ctx'] * (saved is not None) + [*operands])}):"]
    lines += _launch(0, begun)
    if saved is not None:
        lines.append(f"    ctx.to_save = ({_listed(saved)})")  # as save_for_backward does
    if saved is not None and len(results) > 1:
        lines.append(f"    ctx.non_differentiable = ({_listed(results[1:])})")
    lines.append(f"    return {results[0] if len(results) == 1 else f'({_listed(results)})'}")
    return _made("\n".join(lines), {"empty": empty} | _bound(0, begun))


def gradients(route: Any, empty: Empty, check: Callable[..., bool], saved: Sequence[str],
              begun: Sequence[StartableKernel], results: Sequence[str], aligned: bool,
              device: int | None) -> Callable[..., tuple[Any, ...] | None]:
    """A function of the result's gradient ``G`` and the saved tensors, to the operands' gradients
    ``results``; None for tensors of another kind than those that ``check`` was made for."""
    names = ["G", *saved]
    lines = [f"def run({_listed(names)}):",
             f"    if ({_same(names, names, aligned, device)} and not is_grad_enabled()",
             "            and not _len_torch_dispatch_stack()):",
             "        route.calls_back += 1"]
    known = {"route": route, "empty": empty, "check": check} | _switches(device)
    for at, one in enumerate(begun):
        lines += [f"    {line}" for line in _launch(at, one)]
        known |= _bound(at, one)
    lines += [f"        return ({_listed(results)})", "    return None"]
    return _made("\n".join(lines), known)


def entry(route: Any, run: Callable[..., Any], others: Callable[..., Any], check: Callable[..., bool],
          given: Sequence[bool], types: Sequence[type], grads: bool | None, aligned: bool,
          device: int | None, finish: Callable[..., Any] | None, results: int) -> Callable[..., Any]:
    """A function of a Function, its tensors (``given``: which are not None) and its numbers of ``types``:
    ``run`` where the call is of the same kind, else ``others``. ``grads``: whether gradients are on; None
    where it does not matter."""
    tensors = [f"t{i}" for i in range(len(given))]
    there = [t for t, on in zip(tensors, given, strict=True) if on]
    numbers = [f"n{i}" for i in range(len(types))]
    lines = ["def call(f, tensors, numbers):", f"    {_listed(tensors)} = tensors",
             *([f"    {_listed(numbers)} = numbers"] if numbers else []),
             f"    if ({_same(there, there, aligned, device)}"]
    lines += [f"            and {t} is None" for t in tensors if t not in there]
    # Numbers are equal already; here True differs from 1.
    lines += [f"            and {n}.__class__ is c_{n}" for n in numbers]
    if grads is not None:
        lines.append("            and is_grad_enabled() is grads")
    made = f"run({_listed(there)})"
    if finish is not None:
        made = f"finish(tensors, numbers, {made if results > 1 else f'({made},)'})"
    elif results > 1:
        made += "[0]"
    lines += ["            ):", "        route.calls += 1", f"        return {made}",
              "    return others(f, tensors, numbers)"]
    known = {"route": route, "run": run, "others": others, "check": check, "grads": grads,
             "finish": finish, **{f"c_{n}": kind for n, kind in zip(numbers, types, strict=True)}}
    return _made("\n".join(lines), known | _switches(device))


def _same(checked: Sequence[str], addressed: Sequence[str], aligned: bool, device: int | None) -> str:
    """The condition that tensors are like those of the guard, under the same switches."""
    bits = " | ".join(f"{name}.data_ptr()" for name in addressed) or "0"
    return (f"check({_listed(checked)}) and forward_ad._current_level < 0 "
            "and _get_deterministic_algorithms() is deterministic"
            + (f" and not ({bits}) {ALIGNED}" if aligned else f" and ({bits}) {ALIGNED}")
            + (" and current_device() == device" if device is not None else ""))


def _switches(device: int | None) -> dict[str, Any]:
    return {"forward_ad": forward_ad, "is_grad_enabled": is_grad_enabled, "device": device,
            "current_device": current_device, "_len_torch_dispatch_stack": _len_torch_dispatch_stack,
            "_get_deterministic_algorithms": _get_deterministic_algorithms,
            "deterministic": _get_deterministic_algorithms()}


def _launch(at: int, begun: StartableKernel) -> list[str]:
    """Allocate the stores and start a launch."""
    return [*(f"    {name} = empty(shape_{at}_{i}, strides_{at}_{i}, dtype_{at}_{i})"
              for i, name in enumerate(begun.stored)),
            f"    begin_{at}({_listed([*begun.given, *begun.stored])})"]


def _bound(at: int, begun: StartableKernel) -> dict[str, Any]:
    known: dict[str, Any] = {f"begin_{at}": begun.begin}
    for i, m in enumerate(begun.memory):
        known |= {f"shape_{at}_{i}": m.shape, f"strides_{at}_{i}": m.strides, f"dtype_{at}_{i}": m.dtype}
    return known


def _listed(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _made(text: str, known: dict[str, Any]) -> Callable[..., Any]:
    """The function of a text whose free names are ``known``, as local ones: they are found fastest."""
    made: Callable[..., Any] = _factory(text, tuple(known))(**known)
    return made


@lru_cache(maxsize=1024)
def _factory(text: str, names: tuple[str, ...]) -> Callable[..., Callable[..., Any]]:
    inner = "\n".join(f"    {line}" for line in text.splitlines())
    name = text.split("(", 1)[0].removeprefix("def ")
    made: Callable[..., Callable[..., Any]] = defined(
        f"def make({', '.join(names)}):\n{inner}\n    return {name}", "make")
    return made
