"""``explain``: what a call would launch and why, without launching it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from transconv.calls import stats
from transconv.calls.guard import ALIGNMENT
from transconv.calls.settings import settings
from transconv.conv import ConvProblem, Epilogue, Prop, compiler
from transconv.support import Unsupported
from transconv.target import Target
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import autocast
from transconv.torch_ops.calls import layer_keys, lower_call
from transconv.torch_ops.calls.call_attributes import check_bias, parse
from transconv.torch_ops.functional import FUNCTIONS, Padding, Sizes

if TYPE_CHECKING:
    from transconv.conv import CompiledDirection, LayerRegistry
    from transconv.runtime import ChosenPlan

Tensor = torch.Tensor


@dataclass(frozen=True)
class TensorExplanation:
    """One tensor that a call or its backward computes. ``schedule`` is the text of the plan, ``why``
    says why it was chosen; ``reasons`` say why torch computes this one, until the kernel is compiled
    where there is a schedule."""

    computes: str  # "result", "input gradient", "weight gradient"
    direction: Prop
    problem: ConvProblem | None = None
    schedule: str = ""
    reasons: tuple[str, ...] = ()
    why: str = ""

    @property
    def native(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        head = f"{self.computes} ({self.direction})"
        if self.reasons:
            later = f"; then {self.schedule}" if self.schedule else ""
            return f"{head}: torch, because {'; '.join(self.reasons)}{later}"
        return f"{head}: {self.schedule}\n    {self.why}"


@dataclass(frozen=True)
class Explanation:
    """What a call would do: its result, then the gradients, each by a plan or by torch."""

    parts: tuple[TensorExplanation, ...]
    unbatched: bool = False

    @property
    def native(self) -> bool:
        """Whether generated kernels compute everything."""
        return all(part.native for part in self.parts)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason for torch, each once."""
        return tuple(dict.fromkeys(r for part in self.parts for r in part.reasons))

    def __str__(self) -> str:
        problem = self.parts[0].problem
        said = [f"    {r}: {why}" for r in self.reasons if (why := stats.sentence(r))]
        return "\n".join([*([str(problem)] if problem else []), *map(str, self.parts), *said])


def explain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: Sizes = 0,
    target: Target | str | None = None,
) -> Explanation:
    """The plans that conv1d/2d/3d (or conv_transpose, if ``transposed``) would use for these arguments.

    Names the plan of the result and of both gradients, or every reason why torch would compute
    them. ``target``: a chip, such as "sm_90", for which the answer is, with tensors of any device, also of
    torch's ``meta``; by default that of the tensors. Launches nothing, counts nothing, warns of nothing.
    Raises the call's errors, ScheduleError for an unknown target."""
    for t in (input, weight):
        if not isinstance(t, Tensor):
            raise TypeError(
                f"transconv.explain: expected the tensors of a call, input and weight, got "
                f"{type(t).__name__}; of a model, transconv.graph.report tells"
            )
    f = FUNCTIONS.get((weight.dim() - 2, transposed))
    if f is None:
        raise RuntimeError(f"expected a weight of 3, 4 or 5 dimensions, but got {list(weight.shape)}")
    parsed = parse(f, stride, padding, output_padding, dilation, groups)
    if parsed is None:
        raise TypeError(
            "stride, padding, output_padding and dilation must be ints or tuples of ints, groups an int"
        )
    input, weight, bias = autocast(input, weight, bias)
    strides_, padding_, output_padding_, dilation_, groups = parsed
    check_bias(f, input, bias, padding)
    unbatched = not arguments.batched(f.name, f.ndims, input.shape)
    x = input.unsqueeze(0) if unbatched else input
    p = arguments.resolve_call(
        x, weight, bias, strides_, padding_, dilation_, transposed, output_padding_, groups
    )
    arguments.check_tensors(x, weight, bias)
    chip = Target.parse(target) if isinstance(target, str) else target
    return Explanation(tuple(_parts(x, weight, bias, p, chip)), unbatched)


def _parts(
    x: Tensor, w: Tensor, b: Tensor | None, p: arguments.Params, chip: Target | None
) -> list[TensorExplanation]:
    why = tuple(r for r in lower_call.reasons(x, w) if chip is None or not r.startswith("device:"))
    if why:  # where it is the layout, there are no strides to look at
        return [
            TensorExplanation(name, direction, reasons=why)
            for name, direction in zip(layer_keys.COMPUTED, layer_keys.directions(p), strict=True)
        ]
    channels_last = arguments.channels_last_result(x, w)
    flags = lower_call.flags(x.dtype)
    aligned = not any(t is not None and not t.is_meta and t.data_ptr() & ALIGNMENT for t in (x, w, b))
    parts = []
    for name, direction, given in layer_keys.computed(x, w, p):
        bias = b if name == "result" else None
        epilogue = "" if bias is None else "bias"
        problem = lower_call.describe(x.dtype, *given, p, flags.math)
        request = problem, direction, x.device, epilogue, aligned, flags.deterministic
        of_any_size = partial(
            layer_keys.choose_plan,
            direction,
            p,
            x.dtype,
            given,
            channels_last,
            x.device,
            epilogue,
            None if bias is None else bias.dtype,
            aligned,
            flags,
        )
        try:
            schedule, won, waits = (
                _scheduled(of_any_size, request) if chip is None else _on_chip(chip, *request)
            )
            parts.append(
                TensorExplanation(name, direction, problem, schedule, (waits,) if waits else (), won)
            )
        except Unsupported as error:
            reason = f"{error.reason} ({error.message})" if error.message else error.reason
            parts.append(TensorExplanation(name, direction, problem, reasons=(reason,)))
    return parts


def _on_chip(
    chip: Target,
    problem: ConvProblem,
    prop: Prop,
    _: torch.device,
    epilogue: str,
    aligned: bool,
    deterministic: bool,
) -> tuple[str, str, str]:
    """As ``_scheduled``, for another chip than that of the tensors."""
    with lower_call.or_unsupported(f"{problem} {prop}"):
        made = compiler.plan(
            problem,
            prop,
            chip,
            epilogue=Epilogue.parse(epilogue),
            aligned=aligned,
            deterministic=deterministic,
            mode="text",
        )
    return str(made.schedule), made.why, ""


def _scheduled(
    of_any_size: Callable[[str], tuple[ChosenPlan[CompiledDirection], LayerRegistry]],
    request: tuple[Any, Any, Any, Any, Any, Any],
) -> tuple[str, str, str]:
    """The schedule of a call, why it was chosen, and why torch would compute meanwhile; nothing is
    compiled. ``request``: the arguments of ``lower_call.question``."""
    if settings.reach == "any":
        for mode in ("now",) if settings.mode == "now" else ("never", "now"):
            with suppress(Unsupported):
                chosen, _ = of_any_size(mode)
                return str(chosen.plan.schedule), chosen.why, lower_call.waits(chosen.question)
    made = lower_call.planned(*request, mode="text")
    waits = lower_call.waits(lower_call.question(*request))
    if waits:
        with suppress(Unsupported):
            chosen, _ = of_any_size("never")
            return str(chosen.plan.schedule), f"{chosen.why}; it stands in: {waits}", ""
    return str(made.schedule), made.why, waits
