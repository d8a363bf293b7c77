"""What computes each kind of call: the launches of a bound formula, or the reason why torch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from transconv.calls import stats
from transconv.calls.guard import ALIGNMENT, StartableKernel, check_of, current_device, means_more
from transconv.calls.route_cache import Route
from transconv.calls.size_policy import SizeTrial
from transconv.functional.calls import call_entries
from transconv.functional.calls.compiled_launch import TensorMemory, deterministic
from transconv.functional.calls.form_registry import SizedLaunchChoice, launched
from transconv.functional.calls.symbolic_bind import BoundCall, BoundText, Values
from transconv.runtime import COMPILING, torch_internals
from transconv.support import Unsupported

Tensor = torch.Tensor

_empty = torch_internals.quickest()


class Started:
    """A step with its launch: from values to values."""

    __slots__ = ("device", "any_size", "given", "launch", "of", "stored", "text",
                 "waits")

    def __init__(self, step: BoundText, found: SizedLaunchChoice, device: torch.device) -> None:
        self.launch, self.text, self.any_size, self.waits = found
        self.device = device
        self.given = step.given
        self.stored: list[tuple[str, TensorMemory]] = [*step.stored.items()]
        self.of = step.of

    def run(self, values: Values) -> None:
        """Launch, and add the stores to the values."""
        made = [torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=self.device)
                for _, m in self.stored]
        self.launch.start([*[values[name] for name in self.given], *made])
        for (name, _), t in zip(self.stored, made, strict=True):
            values[name] = t

    def begun(self) -> StartableKernel | None:
        """What starts the launch without checks; None before the first one."""
        begin, names = self.launch.begin, tuple(name for name, _ in self.stored)
        return begin and StartableKernel(
            begin, self.given, names, tuple(memory for _, memory in self.stored)
        )


class FunctionCall(Route):
    """The route of a bound formula, of which ``bound`` is None where torch computes."""

    __slots__ = ("adds", "bound", "calls_back", "entry_back", "function", "gradients", "only_on", "rival",
                 "step", "trial")

    def __init__(self, bound: BoundCall | None, reason: str, name: str) -> None:
        super().__init__(reason)
        self.bound, self.function = bound, name
        self.step: Started | None = None
        self.gradients: list[Started] = []
        self.entry_back: Callable[..., tuple[Any, ...] | None] | None = None  # see written_back
        self.calls_back = 0
        self.adds = bound is not None and bound.adds
        # While its kernel is timed against one for any size: the trial, and the route of that one.
        self.trial: SizeTrial | None = None
        self.rival: FunctionCall | None = None
        self.only_on: int | None = None  # the device that must be the current one, if there are several

    @property
    def hands_gradients(self) -> bool:
        """Whether torch computes gradients: deterministic ones are required, and ours are not."""
        return self.adds and (deterministic() or not self.gradients)

    @property
    def name(self) -> str:
        return self.function

    @property
    def any_size(self) -> bool:
        return self.step is not None and self.step.any_size

    def count(self) -> None:
        if self.rival is not None:
            self.rival.count()
        super().count()
        back, self.calls_back = self.calls_back, 0
        if back:
            sized = all(step.any_size for step in self.gradients)
            stats.add(True, f"{self.name}_gradient" + " any size" * sized, back)

    def results(self, given: Sequence[Tensor]) -> Any:
        """The results of the operands, where no gradient is needed; a single one may come alone."""
        run = self.written(False)
        return self.forward(given)[0] if run is None else run(*given)

    def written(self, saves: bool) -> Callable[..., Any] | None:
        """A function of single operands, without checks, to the results; a single one alone. With
        ``saves`` of autograd's context before them, which keeps what gradients need. None before the first
        launch, and while another device is the current one."""
        if self.only_on is not None and self.only_on != current_device():
            return None
        bound, step, found = self.bound, self.step, self.functions.get(saves)
        if found is None and bound is not None and step is not None and (begun := step.begun()):
            found = self.functions[saves] = call_entries.launching(
                _empty, bound.operands, begun, bound.results, bound.saved if saves else None)
            if self.trial is not None and self.rival is not None:
                found = self.functions[saves] = self.trial.alternating(found, self._by(self.rival, saves))
        return found

    def _by(self, rival: FunctionCall, saves: bool) -> Callable[..., Any] | None:
        """``written`` of another route, which then counts the call."""
        found = rival.written(saves)

        def run(*given: Any) -> Any:
            self.calls -= 1
            rival.calls += 1
            return found(*given) if found is not None else None

        return found and run

    def written_back(self, saved: Sequence[Tensor],
                     grad: Tensor) -> Callable[..., tuple[Any, ...] | None] | None:
        """``gradients_of`` as a function of the result's gradient and the saved values, for tensors like
        these. None before the first launches, and for tensors that no guard tells from others."""
        bound, begun = self.bound, [step.begun() for step in self.gradients]
        there = [one for one in begun if one is not None]
        check = check_of(grad, *saved) if bound is not None and len(there) == len(begun) else None
        if bound is None or check is None:
            return None
        results = [f"d{n}" if on else "None" for n, on in zip(bound.operands, bound.wanted, strict=True)]
        return call_entries.gradients(self, _empty, call_entries.guard_of(self, check, back=True),
                                      bound.saved, there, results)

    def forward(self, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Values]:
        """The results of the operands, and all values by name."""
        bound, step = self.bound, self.step
        assert bound is not None and step is not None
        values = dict(zip(bound.operands, given, strict=True))
        step.run(values)
        return tuple([values[name] for name in bound.results]), values

    def gradients_of(self, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the operands from the saved values, None where none is wanted. The result's
        gradient is copied if its strides differ from the result's, as are values that hooks of autograd
        kept in other memory."""
        bound = self.bound
        assert bound is not None
        self.calls_back += 1
        like = bound.memory | bound.forward.stored
        values = {name: _as_kept(t, like[name], self.aligned)
                  for name, t in zip(bound.saved, saved, strict=True)}
        values["G"] = _as_kept(grad, like[bound.results[0]], self.aligned)
        for step in self.gradients:
            step.run(values)
        return tuple([values[f"d{n}"] if on else None
                      for n, on in zip(bound.operands, bound.wanted, strict=True)])


def made_of(bound: BoundCall, device: torch.device, is_aligned: bool, mode: str) -> FunctionCall:
    """Raises Unsupported where a text has no kernel, or none yet as the mode has it."""
    route = FunctionCall(bound, "", bound.function.name)
    backward = () if route.adds and deterministic() else bound.backward
    waits: Unsupported | None = None
    found: list[Started] = []
    for at, step in enumerate((bound.forward, *backward)):  # request all before waiting for the first
        try:
            one = launched(step, partial(_text, bound, at), device, is_aligned, mode)
            found.append(Started(step, one, device))
        except Unsupported as error:
            if error.reason != COMPILING:
                raise
            waits = waits or error
    if waits is not None:
        raise waits
    route.step, *route.gradients = found
    route.aligned = is_aligned
    if overs := [step.waits for step in found if step.waits is not None]:
        route.over = lambda: any(over() for over in overs)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        route.only_on = device.index
    return route


def _text(bound: BoundCall, at: int) -> str:
    """The text of a step for its exact sizes."""
    exact = bound.exact()
    return (exact.forward, *exact.backward)[at].text


def _as_kept(t: Tensor, memory: TensorMemory, is_aligned: bool) -> Tensor:
    """The tensor, copied unless its memory is as kernels read it."""
    moved = is_aligned and t.data_ptr() & ALIGNMENT
    if t.stride() == memory.strides and not moved and not means_more(t):
        return t
    return torch.empty_strided(memory.shape, memory.strides, dtype=memory.dtype, device=t.device).copy_(t)
