"""What computes each kind of call: the launches of a bound formula, or the reason why torch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from transconv.errors import Unsupported
from transconv.functional.bound import Bound, Step, Values
from transconv.functional.launches import Launch, Memory, deterministic, launch
from transconv.runtime import COMPILING, allocator
from transconv.torch_ops import stats
from transconv.torch_ops.route import ALIGNMENT, current_device
from transconv.torch_ops.settings import settings

Tensor = torch.Tensor

_empty = allocator.quickest()


class Started:
    """A step with its launch: from values to values."""

    __slots__ = ("device", "given", "launch", "of", "stored", "text")

    def __init__(self, step: Step, device: torch.device, is_aligned: bool) -> None:
        self.launch: Launch = launch(step.text, device, is_aligned, settings.mode)
        self.text, self.device = step.text, device
        self.given = step.given
        self.stored: list[tuple[str, Memory]] = [*step.stored.items()]
        self.of = step.of

    def run(self, values: Values) -> None:
        """Launch, and add the stores to the values."""
        found = self.launch
        given = [values[name] for name in self.given]
        if found.begin is not None and current_device() == found.device:
            made = [_empty(m.shape, m.strides, m.dtype) for _, m in self.stored]
            found.begin(*given, *made)
        else:
            made = [torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=self.device)
                    for _, m in self.stored]
            found.start([*given, *made])
        for (name, _), t in zip(self.stored, made, strict=True):
            values[name] = t


class Route:
    """``bound`` is None where torch computes, for ``reason``."""

    __slots__ = ("adds", "back", "bound", "calls", "calls_back", "gradients", "kept", "name", "order",
                 "reason", "saved", "step")

    def __init__(self, bound: Bound | None, reason: str, name: str) -> None:
        self.bound, self.reason, self.name = bound, reason, name
        self.step: Started | None = None
        self.order: list[int] = []  # the operands' indices, in the launch's order
        self.kept: list[int] = []  # indices of the results among the stores
        self.saved: list[int] = []  # indices of the gradients' inputs among operands and stores
        self.gradients: list[Started] = []
        self.calls = self.calls_back = 0
        self.adds = bound is not None and bound.adds
        # For one launch of all gradients: indices of its operands among the saved tensors and the
        # result's gradient, and of its stores by operand.
        self.back: tuple[list[int], list[int | None]] | None = None

    @property
    def hands_gradients(self) -> bool:
        """Whether torch computes gradients: deterministic ones are required, and ours are not."""
        return self.adds and (deterministic() or not self.gradients)

    def routes(self) -> list[Route]:
        """Itself: what the table of routes counts."""
        return [self]

    def count(self) -> None:
        """Move the calls so far into the totals."""
        calls, back = self.calls, self.calls_back
        self.calls = self.calls_back = 0
        if calls:
            stats.add(not self.reason, self.reason or self.name, calls)
        if back:
            stats.add(True, f"{self.name}_gradient", back)

    def results(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of the operands, where no gradient is needed."""
        step = self.step
        assert step is not None
        found = step.launch
        if found.begin is None or current_device() != found.device:
            return self.forward(given)[0]
        made = [_empty(*memory) for _, memory in step.stored]
        found.begin(*[given[i] for i in self.order], *made)
        return [made[i] for i in self.kept]

    def bound_run(self) -> Callable[..., object] | None:
        """``results`` as a function of single operands, without further checks; a single result comes
        alone. None before the first launch. Counts."""
        step = self.step
        begin = None if step is None else step.launch.begin
        if step is None or begin is None:
            return None
        device = step.launch.device if torch.cuda.device_count() > 1 else None
        if len(step.stored) > 1 or self.order != [*range(len(self.order))]:
            def several(*given: Tensor) -> Sequence[Tensor]:
                self.calls += 1
                return self.results(given)
            return several
        shape, strides, dtype = step.stored[0][1]
        empty = _empty

        def run(*given: Tensor) -> object:
            self.calls += 1
            if device is not None and current_device() != device:
                return self.results(given)
            made = empty(shape, strides, dtype)
            begin(*given, made)
            return made
        return run

    def bound_saving(self) -> Callable[..., tuple[Any, Sequence[Tensor]]] | None:
        """``saving`` without further checks; a single result is returned alone. None before the first
        launch. Counts."""
        step = self.step
        begin = None if step is None else step.launch.begin
        if step is None or begin is None:
            return None
        empty, order, kept, saved = _empty, self.order, self.kept, self.saved
        device = step.launch.device if torch.cuda.device_count() > 1 else None
        memory = [m for _, m in step.stored]
        first = memory[0]
        alone = len(memory) == 1 and order == [*range(len(order))]

        def start(given: tuple[Tensor, ...]) -> tuple[Any, Sequence[Tensor]]:
            self.calls += 1
            if device is not None and current_device() != device:
                results, found = self.saving(given)
                return results if len(results) > 1 else results[0], found
            if alone:
                made = empty(*first)
                begin(*given, made)
                known = (*given, made)
                return made, [known[i] for i in saved]
            stored = [empty(*m) for m in memory]
            begin(*[given[i] for i in order], *stored)
            known = (*given, *stored)
            kept_of = stored[kept[0]] if len(kept) == 1 else tuple([stored[i] for i in kept])
            return kept_of, [known[i] for i in saved]
        return start

    def saving(self, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The results of the operands, and the values that gradients need, in the bound's order."""
        bound, step = self.bound, self.step
        assert bound is not None and step is not None
        found = step.launch
        if found.begin is None or current_device() != found.device:
            results, values = self.forward(given)
            return results, [values[name] for name in bound.saved]
        made = [_empty(m.shape, m.strides, m.dtype) for _, m in step.stored]
        found.begin(*[given[i] for i in self.order], *made)
        known = (*given, *made)
        return tuple([made[i] for i in self.kept]), [known[i] for i in self.saved]

    def forward(self, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Values]:
        """The results of the operands, and all values by name."""
        bound, step = self.bound, self.step
        assert bound is not None and step is not None
        values = dict(zip(bound.operands, given, strict=True))
        step.run(values)
        return tuple([values[name] for name in bound.results]), values

    def gradients_of(self, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the operands from the saved values, None where none is wanted. The result's
        gradient is copied if its strides differ from the result's."""
        bound = self.bound
        assert bound is not None
        self.calls_back += 1
        memory = bound.forward.stored[bound.results[0]]
        if (grad.stride() != memory.strides or grad.is_neg() or grad._is_zerotensor()
                or grad.data_ptr() & ALIGNMENT):
            grad = torch.empty_strided(memory.shape, memory.strides, dtype=memory.dtype,
                                       device=grad.device).copy_(grad)
        step = self.gradients[0]
        begin = step.launch.begin
        if self.back is not None and begin is not None and current_device() == step.launch.device:
            order, found = self.back
            known = (*saved, grad)
            made = [_empty(*m) for _, m in step.stored]
            begin(*[known[i] for i in order], *made)
            return tuple([None if i is None else made[i] for i in found])
        values = dict(zip(bound.saved, saved, strict=True))
        values["G"] = grad
        for step in self.gradients:
            step.run(values)
        return tuple([values[f"d{n}"] if on else None
                      for n, on in zip(bound.operands, bound.wanted, strict=True)])


def made_of(bound: Bound, device: torch.device, is_aligned: bool) -> Route:
    """Raises Unsupported where a text has no kernel."""
    route = Route(bound, "", bound.function.name)
    backward = () if route.adds and deterministic() else bound.backward
    waits: Unsupported | None = None
    for step in (bound.forward, *backward):  # request all before waiting for the first
        try:
            launch(step.text, device, is_aligned, settings.mode)
        except Unsupported as error:
            if error.reason != COMPILING:
                raise
            waits = waits or error
    if waits is not None:
        raise waits
    route.step = Started(bound.forward, device, is_aligned)
    stored = [name for name, _ in route.step.stored]
    route.order = [bound.operands.index(name) for name in route.step.given]
    route.kept = [stored.index(name) for name in bound.results]
    known = [*bound.operands, *stored]
    route.saved = [known.index(name) for name in bound.saved]
    route.gradients = [Started(step, device, is_aligned) for step in backward]
    if len(route.gradients) == 1:
        back = route.gradients[0]
        known, stored = [*bound.saved, "G"], [name for name, _ in back.stored]
        route.back = ([known.index(name) for name in back.given],
                      [stored.index(f"d{n}") if on else None
                       for n, on in zip(bound.operands, bound.wanted, strict=True)])
    return route
