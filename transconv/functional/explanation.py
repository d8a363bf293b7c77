"""``explain``: what a call of a function would launch and why, without launching it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from transconv.calls.settings import settings
from transconv.functional.calls.compiled_launch import aligned, launch, question
from transconv.functional.calls.dispatch import Asking, ExplainedCall, why_torch
from transconv.functional.calls.route import chosen, registry_of
from transconv.functional.calls.symbolic_bind import BoundText, Numbers, PublicFunction, bind
from transconv.support import Unsupported
from transconv.torch_ops.calls.lower_call import waits

Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class TextExplanation:
    """One text of a call: its results, or gradients. ``text``: its first line; ``schedule`` and ``why`` of
    the plan; ``others``: the plans of the same form, each with its estimate or with what it requires and
    these sizes do not meet; ``reason``: why torch computes instead."""

    computes: str
    text: str = ""
    schedule: str = ""
    why: str = ""
    others: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            later = f"; then {self.schedule}" if self.schedule else ""
            return f"{self.computes}: torch, because {self.reason}{later}"
        return "\n".join(
            [
                f"{self.computes}: {self.text}: {self.schedule}",
                f"    {self.why}",
                *(f"    {line}" for line in self.others),
            ]
        )


@dataclass(frozen=True)
class FunctionExplanation:
    """What a call would do: its results, then its gradients."""

    function: str
    parts: tuple[TextExplanation, ...]

    @property
    def native(self) -> bool:
        """Whether generated kernels compute everything."""
        return not any(part.reason for part in self.parts)

    def __str__(self) -> str:
        return "\n".join([self.function, *map(str, self.parts)])


def explain(function: Callable[..., Any], *given: Any, **named: Any) -> FunctionExplanation:
    """The plans that a call ``function(*given, **named)`` of ``transconv.functional`` would use for its
    results and for the gradients of tensors that require them, or every reason why torch would compute
    them. Launches nothing, counts nothing, warns of nothing. Raises the call's errors, TypeError for
    another function."""
    try:
        with Asking():
            function(*given, **named)
    except ExplainedCall as asked:
        f, tensors, numbers = asked.call
    else:
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name} is no function of transconv.functional, or torch computes such calls")
    return FunctionExplanation(f.name, tuple(_parts(f, tensors, numbers)))


def _parts(f: PublicFunction, tensors: Tensors, numbers: Numbers) -> Iterator[TextExplanation]:
    given = [t for t in tensors if t is not None]
    if why := why_torch(f, tensors):
        yield TextExplanation("result", reason=why)
        return
    wanted = tuple([t.requires_grad for t in given]) if torch.is_grad_enabled() else ()
    try:
        bound = bind(f, tensors, numbers, wanted, settings.reach == "any")
    except Unsupported as error:
        yield TextExplanation("result", reason=_said(error))
        return
    yield _part("result", bound.forward, given)
    for step in bound.backward:
        of = dict.fromkeys(step.of.values())
        yield _part(f"gradient of {', '.join(of)}" if of else "gradients", step, given)


def _part(computes: str, step: BoundText, given: Sequence[torch.Tensor]) -> TextExplanation:
    device, is_aligned = given[0].device, aligned(given)
    exact: tuple[str, ...] = ()
    if step.named is not None and settings.reach == "any":
        head = step.named.head.removeprefix("compute ")
        try:
            taken, _ = chosen(step.named, device, is_aligned, "now")
            others = tuple(registry_of(step.named, device, is_aligned).told([*step.named.sizes.values()]))
            return TextExplanation(
                computes, head, str(taken.plan.schedule), taken.why, others, waits(taken.question)
            )
        except Unsupported as error:
            exact = (f"its own sizes, because {_said(error)}",)
    try:
        plan = launch(step.text, device, is_aligned, "now").plan
    except Unsupported as error:
        return TextExplanation(computes, reason=_said(error))
    head = plan.workload.computations[0].name
    return TextExplanation(
        computes, head, str(plan.schedule), plan.why, exact, waits(question(step.text, device, is_aligned))
    )


def _said(error: Unsupported) -> str:
    return f"{error.reason} ({error.message})" if error.message else error.reason
