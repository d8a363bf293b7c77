"""Operators under torch's transforms: vmap, grad and jvp of ``torch.func``, nested in any way,
forward-mode numbers, and ``is_grads_batched``.

    vmap      one call of all examples
    grad      the operator below, and a node that calls its gradients
    jvp       the operator of the primals, and that of their tangents

torch's own rules for registered operators know none of them: tangents would be dropped, and lists of
tensors refused. An operator that is a composition of torch's functions needs no rules of its own
(``compose``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from transconv.calls import stats
from transconv.runtime import torch_internals

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Batched = Callable[[int, Sequence[bool], Sequence[Any]], Sequence[Tensor]]

FRONT = "FuncTorchDynamicLayerFrontMode"  # what sees a call before any of torch.func's transforms does
_unpack: Any = forward_ad.unpack_dual
_make_dual: Any = forward_ad.make_dual
_forward_enabled: Any = forward_ad._is_fwd_grad_enabled
functorch: Any = torch_internals.functorch
_remove_batch_dim: Any = torch_internals.remove_batch_dim
_Kind = functorch.TransformType


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of one operator, of its arguments as ``call`` takes them: tensors and others, in a row.
    ``call`` gives the operator's results. ``kept`` and ``gradients``: of autograd's context, as
    torch.library.register_autograd takes them; behind the context, gradients take which arguments need
    one. ``batched``: the results of a number of examples, from arguments with one more dim before the
    others where a flag says so; each result has that dim. ``tangents``: of the results, from the
    arguments, their tangents (None: no tangent) and the results; without it forward mode is refused."""

    name: str
    call: Callable[..., Tensors]
    kept: Callable[..., None] | None
    gradients: Callable[..., tuple[Tensor | None, ...]] | None
    batched: Batched
    tangents: Callable[..., Sequence[Tensor | None]] | None = None


def compose(library: Any, name: str, function: Callable[..., Any]) -> None:
    """Have torch's transforms see ``function``, of torch's own, in the place of an operator."""

    def seen(*given: Any) -> Any:
        stats.handed_over("transform:functorch", name)
        return function(*given)

    library.impl(name, seen, FRONT)


def known_by(library: Any, name: str, rules: Rules) -> None:
    """Have torch's transforms ask the rules of an operator, which takes and gives what ``call`` does."""

    def seen(*given: Any) -> Any:
        made = transformed(rules, *given)
        return made[0] if len(made) == 1 else made

    def legacy(*given: Any) -> Any:
        made = over_legacy(rules, *given)
        return made[0] if len(made) == 1 else made

    library.impl(name, seen, FRONT)
    library.impl(name, legacy, "Batched")


def transformed(rules: Rules, *given: Any) -> Tensors:
    """The results of a call while transforms of torch.func are active. RuntimeError for one that the
    operator has no rule for."""
    interpreter: Any = torch_internals.transform_level()
    kind = interpreter.key()
    if kind == _Kind.Vmap:
        return _mapped(rules, interpreter, given)
    if kind == _Kind.Jvp and has_tangent(given):
        return pushed(rules, *given)
    if kind not in (_Kind.Grad, _Kind.Jvp):
        raise RuntimeError(
            f"{rules.name} has no rule for torch.func's {kind.name.lower()}; expected vmap, grad or jvp"
        )
    with torch_internals.single_level_autograd():
        return _apply_level(interpreter, rules, *given)


class _Level(_SingleLevelFunction):
    """``apply(interpreter, rules, *given)``: one level of torch.func's grad."""

    @staticmethod
    def forward(interpreter: Any, rules: Rules, *given: Any) -> Tensors:
        level = interpreter.level()
        own = [functorch._unwrap_for_grad(t, level) if isinstance(t, Tensor) else t for t in given]
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
            made = rules.call(*own)
        return tuple(functorch._wrap_for_grad(t, level) for t in made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        _, ctx.rules, *given = inputs
        if ctx.rules.kept is not None:
            ctx.rules.kept(ctx, given, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.rules.gradients is None:
            raise RuntimeError(f"{ctx.rules.name} has no gradient")
        return None, None, *ctx.rules.gradients(ctx, ctx.needs_input_grad[2:], *grads)


_apply_level: Callable[..., Tensors] = _Level.apply  # type: ignore[attr-defined]


def _mapped(rules: Rules, interpreter: Any, given: Sequence[Any]) -> Tensors:
    """One level of vmap."""
    level = interpreter.level()
    on = [
        isinstance(t, Tensor) and functorch.is_batchedtensor(t) and functorch.maybe_get_level(t) == level
        for t in given
    ]
    own = [
        functorch.get_unwrapped(t).movedim(functorch.maybe_get_bdim(t), 0) if there else t
        for t, there in zip(given, on, strict=True)
    ]
    with interpreter.lower():
        if not any(on):
            return rules.call(*own)
        made = rules.batched(interpreter.batch_size(), on, own)
    return tuple(functorch._add_batch_dim(t, 0, level) for t in made)


# -- forward mode ----------------------------------------------------------------------------------


def has_tangent(given: Sequence[Any]) -> bool:
    """Whether one of the arguments carries a tangent that is asked for."""
    return (
        forward_ad._current_level >= 0
        and _forward_enabled()
        and any(isinstance(t, Tensor) and _unpack(t).tangent is not None for t in given)
    )


def refuse_tangents(name: str, given: Sequence[Any], inside: bool = False) -> None:
    """RuntimeError where a tangent would be dropped. ``inside``: of an autograd function without a rule
    for tangents, where torch hides them."""
    if forward_ad._current_level < 0:
        return
    with forward_ad._set_fwd_grad_enabled(inside or _forward_enabled()):
        if has_tangent(given):
            raise RuntimeError(
                f"{name} has no derivative in forward mode; expected reverse mode, or "
                "tensors without tangents"
            )


def pushed(rules: Rules, *given: Any) -> Tensors:
    """The results of a call with tangents."""
    if rules.tangents is None:
        refuse_tangents(rules.name, given)
    assert rules.tangents is not None
    both = [_unpack(t) if isinstance(t, Tensor) else (t, None) for t in given]
    primals = [t for t, _ in both]
    made = rules.call(*primals)
    moving = rules.tangents(primals, [d for _, d in both], made)
    return tuple(y if dy is None else _make_dual(y, dy) for y, dy in zip(made, moving, strict=True))


# -- gradients of many results at once -------------------------------------------------------------


def over_legacy(rules: Rules, *given: Any) -> Tensors:
    """The results of a call of tensors that ``is_grads_batched`` made."""
    level = max(_legacy_level(t) for t in given)
    own: list[Any] = []
    on: list[bool] = []
    for t in given:
        batched = isinstance(t, Tensor) and functorch.is_legacy_batchedtensor(t)
        # A tensor of outer levels alone gets a dim of size 1 here.
        own.append(_remove_batch_dim(t, level, 1, 0) if batched else t)
        on.append(batched)
    size = max((t.shape[0] for t, there in zip(own, on, strict=True) if there), default=1)
    own = [t.expand(size, *t.shape[1:]) if there else t for t, there in zip(own, on, strict=True)]
    return tuple(torch_internals.add_batch_dim(t, 0, level) for t in rules.batched(size, on, own))


def _legacy_level(t: Any) -> int:
    """The innermost level that a tensor of ``is_grads_batched`` has; 0 for any other. It is asked of the
    tensor: backward passes of a GPU run in threads that know of no level."""
    found = level = 0
    while isinstance(t, Tensor) and functorch.is_legacy_batchedtensor(t):
        level += 1
        few, more = (_remove_batch_dim(t, level, n, 0) for n in (1, 2))
        if few.shape[0] == more.shape[0]:  # its own dim; else a new one of as many
            found, t = level, few
    return found


def looped(call: Callable[..., Tensors]) -> Batched:
    """The rule of an operator that takes one example after the other."""

    def batched(size: int, on: Sequence[bool], given: Sequence[Any]) -> Sequence[Tensor]:
        if not size:  # the sizes of no results are those of one
            own = [t.new_zeros(t.shape[1:]) if there else t for t, there in zip(given, on, strict=True)]
            return [t.new_empty(0, *t.shape) for t in call(*own)]
        each = [
            call(*(t[i] if there else t for t, there in zip(given, on, strict=True))) for i in range(size)
        ]
        return [torch.stack(several) for several in zip(*each, strict=True)]

    return batched
