"""Routes of functions: the launches of a bound formula, or the reason why torch computes a kind of call.

Kernels may take sizes as arguments. A form (compute/library/page.py) is the same for all sizes of a
kind of call. It has a registry of plans (runtime/registry.py): where one axis is reduced, each holds rows
up to a length, and the last reads them again in steps.

Repeated calls have entries, found by the function, its numbers and the first tensor's sizes, checked by
one guard (calls/guard.py), which does not see whether gradients are on:

    launching   allocate the results, launch, and keep in autograd's context what gradients need
    gradients   the guard of the saved tensors and the result's gradient, then all launches
    note        the guard of a call, then one of these
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from transconv.calls import guard, size_policy, stats
from transconv.calls.guard import (
    ALIGNMENT,
    CallCache,
    CallGuard,
    Check,
    StartableKernel,
    check_of,
    current_device,
    grad_enabled,
    listed,
    means_more,
    written,
)
from transconv.calls.route_cache import Route
from transconv.calls.settings import settings
from transconv.calls.size_policy import SizeTrial
from transconv.compute import Alone, library
from transconv.functional.calls.call_forms import BatchForm, batch_forms
from transconv.functional.calls.compiled_launch import TensorMemory, deterministic, launch, program
from transconv.functional.calls.symbolic_bind import (
    BoundCall,
    BoundText,
    Numbers,
    PublicFunction,
    Values,
    texts,
)
from transconv.runtime import COMPILING, ChosenPlan, Launch, Plan, PlanRequest, Registry, torch_internals
from transconv.support import Unsupported
from transconv.torch_ops.calls.lower_call import or_unsupported, target_of

Tensor = torch.Tensor

_empty = torch_internals.quickest()


class Started:
    """A step with its launch: from values to values."""

    __slots__ = ("any_size", "device", "given", "launch", "of", "stored", "text", "waits")

    def __init__(self, step: BoundText, found: SizedLaunchChoice, device: torch.device) -> None:
        self.launch, self.text, self.any_size, self.waits = found
        self.device = device
        self.given = step.given
        self.stored: list[tuple[str, TensorMemory]] = [*step.stored.items()]
        self.of = step.of

    def run(self, values: Values) -> None:
        """Launch, and add the stores to the values."""
        made = [
            torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=self.device)
            for _, m in self.stored
        ]
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

    __slots__ = (
        "adds",
        "bound",
        "calls_back",
        "entry_back",
        "function",
        "gradients",
        "only_on",
        "rival",
        "step",
        "trial",
    )

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
            kept, flows = bound.saved if saves else None, len(bound.flows)
            run = launching(_empty, bound.operands, begun, bound.results, kept, flows)
            found = self.functions[saves] = run
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

    def written_back(
        self, saved: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Callable[..., tuple[Any, ...] | None] | None:
        """``gradients_of`` as a function of the results' gradients and the saved values, for tensors like
        these. None before the first launches, and for tensors that no guard tells from others."""
        bound, begun = self.bound, [step.begun() for step in self.gradients]
        there = [one for one in begun if one is not None]
        check = check_of(*grads, *saved) if bound is not None and len(there) == len(begun) else None
        if bound is None or check is None:
            return None
        results = [f"d{n}" if on else "None" for n, on in zip(bound.operands, bound.wanted, strict=True)]
        found = guard_of(self, check, back=True)
        return gradients(self, _empty, found, bound.saved, there, results, bound.flows)

    def forward(self, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Values]:
        """The results of the operands, and all values by name."""
        bound, step = self.bound, self.step
        assert bound is not None and step is not None
        values = dict(zip(bound.operands, given, strict=True))
        step.run(values)
        return tuple([values[name] for name in bound.results]), values

    def gradients_of(self, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of the operands from the saved values, None where none is wanted. A result's
        gradient is copied if its strides differ from the result's, as are values that hooks of autograd
        kept in other memory."""
        bound = self.bound
        assert bound is not None
        self.calls_back += 1
        like = bound.memory | bound.forward.stored
        values = {
            name: _as_kept(t, like[name], self.aligned) for name, t in zip(bound.saved, saved, strict=True)
        }
        for flow, name, grad in zip(bound.flows, bound.results, grads, strict=False):
            values[flow] = _as_kept(grad, like[name], self.aligned)
        for step in self.gradients:
            step.run(values)
        return tuple(
            [values[f"d{n}"] if on else None for n, on in zip(bound.operands, bound.wanted, strict=True)]
        )


def made_of(bound: BoundCall, device: torch.device, is_aligned: bool, mode: str) -> FunctionCall:
    """Raises Unsupported where a text has no kernel, or none yet as the mode has it."""
    route = FunctionCall(bound, "", bound.function.name)
    backward = () if route.adds and deterministic() else bound.backward
    of_batch = batch_forms(bound) if settings.invariant else None
    waits: Unsupported | None = None
    found: list[Started] = []
    for at, step in enumerate((bound.forward, *backward)):  # request all before waiting for the first
        try:
            one = (
                launched(step, partial(_text, bound, at), device, is_aligned, mode)
                if of_batch is None
                else launched_of_batch(of_batch[at], device, is_aligned, mode)
            )
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


log = logging.getLogger("transconv.functional")


class FormRegistry(Registry[Plan]):
    """The plans of one form on a device. ``texts``: those of its questions."""

    def __init__(self, named: library.LibraryText, device: torch.device, aligned: bool) -> None:
        target, same = target_of(device), deterministic()
        self.texts = {
            PlanRequest(Alone(program(text).compute), target, same, aligned): text for text in texts(named)
        }
        super().__init__([*self.texts], Plan, "call", named.head.removeprefix("compute "))


def chosen(
    named: library.LibraryText, device: torch.device, aligned: bool, mode: str
) -> tuple[ChosenPlan[Plan], str]:
    """The plan for the sizes of a call, and its text. Raises Unsupported, with a reason, where there is
    none, or none yet as the mode has it."""
    registry = registry_of(named, device, aligned)
    with or_unsupported(registry.title):
        found: ChosenPlan[Plan] = registry.choose(tuple(named.sizes.values()), mode)
    return found, registry.texts[found.question]


def registry_of(named: library.LibraryText, device: torch.device, aligned: bool) -> FormRegistry:
    """The registry of a form. Raises Unsupported where there is none."""
    key = texts(named), device.type, device.index, aligned, deterministic()
    return size_policy.registry_of(key, lambda: FormRegistry(named, device, aligned))


class SizedLaunchChoice(NamedTuple):
    """The launch of a step and its text; ``any_size``: sizes are arguments of its kernels; ``waits``, if a
    process compiles another one: whether it may be chosen by now."""

    launch: Launch
    text: str
    any_size: bool = False
    waits: Callable[[], bool] | None = None


def launched(
    step: BoundText, exact: Callable[[], str], device: torch.device, aligned: bool, mode: str
) -> SizedLaunchChoice:
    """What launches a step: kernels for any size, if it is bound for any. What has no form for any size,
    or sizes that no plan is for, gets a kernel for its exact sizes, of the text ``exact``. Raises as
    launch."""
    if step.named is not None:
        try:
            taken, text = chosen(step.named, device, aligned, mode)
            if log.isEnabledFor(logging.INFO):
                log.info("%s: %s", text.partition("\n")[0], taken.why)
            return SizedLaunchChoice(
                launch(text, device, aligned, mode).at(step.named.sizes), text, True, taken.waits
            )
        except Unsupported as error:
            if not size_policy.leaves_exact(error):
                raise
            log.info("%s: %s", step.named.head, error)
    text = exact()
    return SizedLaunchChoice(launch(text, device, aligned, mode), text)


def launched_of_batch(
    form: BatchForm, device: torch.device, aligned: bool, mode: str
) -> SizedLaunchChoice:
    """What launches a step in invariant mode: the kernel for any number of samples, at that of a call."""
    made = launch(form.text, device, aligned, mode)
    return SizedLaunchChoice(made.at(form.sizes) if form.sizes else made, form.text)


Tensors = tuple[Tensor | None, ...]
Call = Callable[[PublicFunction, Tensors, Numbers], Any]
Empty = Callable[[Sequence[int], Sequence[int], Any], Any]

_deterministic: Callable[[], bool] = torch_internals.deterministic

CALLS = CallCache(patience=1, chain=4)  # other strides and types, training and inference


def find(f: PublicFunction, tensors: Tensors, numbers: Numbers) -> Call | None:
    """The entries of calls of this kind. TypeError and AttributeError for what has no hash or no sizes."""
    return CALLS.find((f, numbers, len(tensors), tensors[0].shape))  # type: ignore[union-attr]


def note(
    f: PublicFunction,
    tensors: Tensors,
    numbers: Numbers,
    route: Any,
    runs: Callable[[], Callable[..., Any] | None],
    onward: Call,
) -> None:
    """Make an entry for a call that found its route on the slow path, ``onward``. ``runs`` makes what
    computes it, None before its first launch."""
    first, given = tensors[0], [t for t in tensors if t is not None]
    if first is None:
        return
    key = (f, numbers, len(tensors), first.shape)
    place = CALLS.due(key)
    check = check_of(*given) if place else None
    if check is not None and (run := runs()) is not None:
        grads = grad_enabled() if any(t.requires_grad for t in given) else None
        CALLS.keep(
            key,
            entry(
                route,
                run,
                CALLS.others(key, place, onward),
                guard_of(route, check),
                [t is not None for t in tensors],
                [*map(type, numbers)],
                grads,
                f.finish,
                len(route.bound.results),
            ),
        )


def guard_of(route: Any, check: Check, back: bool = False) -> CallGuard:
    """What calls of a route are compared with; ``back``: those of its gradients."""
    seen = (guard.NO_GRADIENTS, guard.NO_MODES, guard.NO_DUALS) if back else (guard.NO_DUALS,)
    return CallGuard(
        check, (*seen, guard.deterministic(_deterministic(), cudnn=False)), route.aligned, route.only_on
    )


def launching(
    empty: Empty,
    operands: Sequence[str],
    begun: StartableKernel,
    results: Sequence[str],
    saved: Sequence[str] | None,
    flows: int = 1,
) -> Callable[..., Any]:
    """A function of the operands, after autograd's context where ``saved`` says what to keep there, to the
    results, the first ``flows`` of which have gradients; a single one alone."""
    lines = begun.lines(0)
    if saved is not None:
        lines.append(f"ctx.to_save = {listed(saved)}")  # as save_for_backward does
    if saved is not None and len(results) > flows:
        lines.append(f"ctx.non_differentiable = {listed(results[flows:])}")
    return written(
        f"run({', '.join([*['ctx'] * (saved is not None), *operands])})",
        lines,
        f"return {results[0] if len(results) == 1 else listed(results)}",
        {"empty": empty, **begun.known(0)},
    )


def gradients(
    route: Any,
    empty: Empty,
    found: CallGuard,
    saved: Sequence[str],
    begun: Sequence[StartableKernel],
    results: Sequence[str],
    flows: Sequence[str] = ("G",),
) -> Callable[..., tuple[Any, ...] | None]:
    """A function of the results' gradients ``flows`` and the saved tensors, to the operands' gradients
    ``results``; None for tensors of another kind than those of the guard."""
    known: dict[str, Any] = {"route": route, "empty": empty, **found.known()}
    lines = ["route.calls_back += 1"]
    for at, one in enumerate(begun):
        lines += one.lines(at)
        known |= one.known(at)
    names = [*flows, *saved]
    return written(
        f"run({', '.join(names)})",
        [found.tests(names), *lines, f"return {listed(results)}"],
        "return None",
        known,
    )


def entry(
    route: Any,
    run: Callable[..., Any],
    others: Callable[..., Any],
    found: CallGuard,
    given: Sequence[bool],
    types: Sequence[type],
    grads: bool | None,
    finish: Callable[..., Any] | None,
    results: int,
) -> Call:
    """A function of a Function, its tensors (``given``: which are not None) and its numbers of ``types``:
    ``run`` where the call is of the same kind, else ``others``. ``grads``: whether gradients are on; None
    where it does not matter."""
    tensors = [f"t{i}" for i in range(len(given))]
    there = [t for t, on in zip(tensors, given, strict=True) if on]
    numbers = [f"n{i}" for i in range(len(types))]
    tests = [
        *found.tests(there),
        *(f"{t} is None" for t in tensors if t not in there),
        # Numbers are equal already; here True differs from 1.
        *(f"{n}.__class__ is c_{n}" for n in numbers),
        *[f"grad_enabled() is {grads}"] * (grads is not None),
    ]
    made = f"run({', '.join(there)})"
    if finish is not None:
        made = f"finish(tensors, numbers, {made if results > 1 else f'({made},)'})"
    elif results > 1:
        made += "[0]"
    return written(
        "call(f, tensors, numbers)",
        [
            f"{listed(tensors)} = tensors",
            *[f"{listed(numbers)} = numbers"] * bool(numbers),
            tests,
            "route.calls += 1",
            f"return {made}",
        ],
        "return others(f, tensors, numbers)",
        {
            "route": route,
            "run": run,
            "others": others,
            "finish": finish,
            "grad_enabled": grad_enabled,
            **found.known(),
            **{f"c_{n}": kind for n, kind in zip(numbers, types, strict=True)},
        },
    )
