"""The torch operators that compiled graphs contain, and the derivatives of calls.

    transconv::compute    the stores of a computation's text, of what it reads in order; differentiable by
                          the texts of its gradients (computation.py)
    transconv::function   a function of ``transconv.functional`` by its name and numbers; differentiable

While a graph is traced the second becomes the first, of the texts of its formula and of its gradients, or
torch's operations where no kernel may take the tensors. Outside of graphs gradients are kernels of a
route, by autograd functions; torch's operations where gradients are differentiated themselves."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from math import frexp, ldexp, nan
from typing import Any, ParamSpec

import numpy as np
import torch

from transconv.calls import stats
from transconv.calls.autograd import by_torch, class_of
from transconv.calls.guard import is_batched
from transconv.calls.settings import settings
from transconv.compute import execute, one_line
from transconv.functional.calls.compiled_launch import (
    HELD,
    TensorMemory,
    aligned,
    deterministic,
    launch_of_batch,
    program,
    refused,
)
from transconv.functional.calls.route import FunctionCall
from transconv.functional.calls.symbolic_bind import BoundCall, BoundText, PublicFunction, Values, as_tuple
from transconv.runtime import torch_internals
from transconv.support import TensorError, Unsupported
from transconv.torch_ops.calls.call_attributes import is_plain
from transconv.torch_ops.operators import library, register_fake

Tensor = torch.Tensor

_below_autograd: Any = torch_internals.below_autograd

library.define("compute(str text, Tensor[] given) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
library.define("function(str call, Tensor[] given) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
compute: Callable[[str, Sequence[Tensor]], list[Tensor]] = torch.ops.transconv.compute.default
function: Callable[[str, Sequence[Tensor]], list[Tensor]] = torch.ops.transconv.function.default


# -- one text --------------------------------------------------------------------------------------


def _compute(text: str, given: list[Tensor]) -> list[Tensor]:
    found = program(text)
    given = [as_wanted(name, t, m) for t, (name, m) in zip(given, found.given.items(), strict=True)]
    return _computed(text, given, given[0].device)


@torch_internals.outside_graphs
def of_nothing(text: str, device: torch.device) -> list[Tensor]:
    """The stores of a text that reads no tensor. A graph cannot hold it as an operator: torch finds the
    device of one by its tensors."""
    return _computed(one_line(text), [], device)


def _computed(text: str, given: list[Tensor], device: torch.device) -> list[Tensor]:
    made = _stores(text, device)
    return made if store(text, given, made) else by_numpy(text, given, device)


def store(text: str, given: Sequence[Tensor], made: Sequence[Tensor], waits: bool = True) -> bool:
    """Launch a text that stores into these tensors, which lie as it says. False, with the reason
    announced, where no kernel may take them. ``waits``: for compilation, or as the user's mode has it."""
    found = program(text)
    why = refused(given or made, [True] * max(len(given), len(found.stored)), HELD)
    message = ""
    if not why:
        whole, mode = aligned(given or made) and aligned(made), "now" if waits else settings.mode
        try:
            launch_of_batch(text, made[0].device, whole, mode).start([*given, *made])
        except Unsupported as error:
            why, message = error.reason, error.message
        else:
            stats.add(True, found.compute.name, 1)
            return True
    stats.announce(why, message, f"the computation {found.compute.name}")
    stats.add(False, why, 1)
    return False


def by_numpy(text: str, given: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """A text computed in f64 by NumPy: slow, on any device. ``device``: of the results; default: that of
    the first tensor that is read."""
    device = given[0].device if device is None else device
    found = program(text)
    wide = [t.detach().cpu() for t in given]
    arrays = {
        name: (t.double() if t.is_floating_point() else t).numpy()
        for name, t in zip(found.given, wide, strict=True)
    }
    answers = execute(found.compute, arrays)
    made = []
    for name, m in found.stored.items():
        like = torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=device)
        made.append(like.copy_(torch.from_numpy(np.array(answers[name].value, order="C"))))
    return made


def as_wanted(name: str, t: Tensor, m: TensorMemory) -> Tensor:
    """The tensor, copied if its strides differ. Raises TensorError for another type or shape."""
    if t.stride() == m.strides and t.shape == m.shape and t.dtype is m.dtype and not t.is_neg():
        return t
    if t.dtype is not m.dtype or tuple(t.shape) != m.shape:
        raise TensorError(
            f"{name}: expected {m.dtype} of shape {m.shape}, got {t.dtype} of shape {tuple(t.shape)}"
        )
    if t.is_neg():
        t = t.resolve_neg()
    if all(n == 1 or a == b for n, a, b in zip(m.shape, t.stride(), m.strides, strict=True)):
        return t
    span = 1 + sum((n - 1) * s for n, s in zip(m.shape, m.strides, strict=True))
    return t.new_empty(span).as_strided(m.shape, m.strides).copy_(t)


def _fake_compute(text: str, given: list[Tensor]) -> list[Tensor]:
    """The stores, without values."""
    return [
        given[0].new_empty_strided(m.shape, m.strides, dtype=m.dtype)
        for m in program(text).stored.values()
    ]


def _stores(text: str, device: torch.device) -> list[Tensor]:
    """Memory for the stores."""
    return [
        torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device=device)
        for m in program(text).stored.values()
    ]


for _key in ("CPU", "CUDA", "XPU"):
    library.impl("compute", _compute, _key)
register_fake("transconv::compute", _fake_compute, lib=library)


# -- a step of a function in a graph ---------------------------------------------------------------


def run(bound: BoundCall, step: BoundText, values: Values) -> None:
    """Add a step's stores to the values, by the operator, so that a graph can hold it. Refused in
    invariant mode: the text of one sample leaves out the axis that it has in others."""
    if settings.invariant:
        raise Unsupported(
            "invariant:operator", f"{bound.function.name} in a graph: its text is of one batch"
        )
    seen = bound.seen
    views = [(values[name], seen[name]) for name in step.given]
    given = [t.reshape(s.shape).permute(s.order).reshape(s.sizes) for t, s in views]
    with _below_autograd():
        made = compute(step.text, given)
    for (name, memory), t in zip(step.stored.items(), made, strict=True):
        order = seen[name].order
        back = [order.index(i) for i in range(len(order))]
        values[name] = t.reshape([seen[name].shape[i] for i in order]).permute(back).reshape(memory.shape)


# -- a function by its name ------------------------------------------------------------------------

Fields = ParamSpec("Fields")
FUNCTIONS: dict[str, PublicFunction] = {}


def _registering(make: Callable[Fields, PublicFunction]) -> Callable[Fields, PublicFunction]:
    def declare(*fields: Fields.args, **named: Fields.kwargs) -> PublicFunction:
        f = make(*fields, **named)
        return FUNCTIONS.setdefault(f.name, f)

    return declare


declare = _registering(PublicFunction)
"""A public function, registered under its name for graphs."""


def spelled(f: PublicFunction, tensors: Sequence[Tensor | None], numbers: Sequence[Any]) -> str:
    """A call without its tensors, as ``read`` has it: ``layer_norm 101 ((6,), 1e-05,)``. The digits say
    which tensors are given: torch's tracer takes no list with None."""
    there = "".join(str(int(t is not None)) for t in tensors)
    return f"{f.name} {there} ({''.join(f'{_spelled(n)}, ' for n in numbers)})"


def _spelled(n: Any) -> str:
    if isinstance(n, (tuple, list)):
        return f"({''.join(f'{_spelled(part)}, ' for part in n)})"
    if isinstance(n, torch.dtype):
        return f"'{n}'"
    if isinstance(n, str):
        return f"'{n}'"
    if n is None or isinstance(n, bool):
        return str(n)
    if isinstance(n, float) and n != n:
        return "'nan'"
    # Symbolic numbers get their value in this call; of floats only their halves do.
    return str(ldexp(*frexp(n))).replace("inf", "1e999") if isinstance(n, float) else str(int(n))


def read(
    call: str, given: Sequence[Tensor]
) -> tuple[PublicFunction, list[Tensor | None], tuple[Any, ...]]:
    """Parse a text of ``spelled``: the function, its tensors and numbers. RuntimeError for other texts."""
    try:
        name, there, numbers = call.split(" ", 2)
        left = iter(given)
        tensors = [next(left) if digit == "1" else None for digit in there]
        if [*left] or {*there} - {*"01"}:
            raise ValueError
        return FUNCTIONS[name], tensors, tuple(_typed(n) for n in ast.literal_eval(numbers))
    except (KeyError, StopIteration, SyntaxError, ValueError):
        raise RuntimeError(
            'expected a call such as "softmax 1 (1, None,)" and as many tensors, got '
            f"{call!r} and {len(given)}"
        ) from None


def _typed(n: Any) -> Any:
    if n == "nan":
        return nan
    return getattr(torch, n[6:]) if isinstance(n, str) and n.startswith("torch.") else n


_grad_enabled = torch.is_grad_enabled
_modes: Callable[[], int] = torch_internals.dispatch_modes
_compiling = torch.compiler.is_compiling
_transforms: Callable[[], bool] = torch_internals.transforms


class Apply(torch.autograd.Function):
    """The autograd function of a call, ``apply(how, *operands)``: how is a Route, or a Bound inside a
    graph."""

    @staticmethod
    def forward(ctx: Any, how: Any, *given: Tensor) -> Any:
        ctx.how = how
        routed = isinstance(how, FunctionCall)
        if routed and (run := how.written(True)) is not None:
            return run(ctx, *given)
        results, values = how.forward(given) if routed else forward_in_graph(how, given)
        bound: BoundCall = how.bound if routed else how
        ctx.save_for_backward(*[values[name] for name in bound.saved])
        if len(results) > 1:
            ctx.mark_non_differentiable(*results[len(bound.flows) :])
            return results
        return results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *_gradients(ctx.how, ctx.saved_tensors, grads)


apply: Any = super(torch.autograd.Function, Apply).apply
apply_in_graph: Any = Apply.apply


def function_of(route: FunctionCall) -> Callable[..., Any] | None:
    """The differentiable call of one route on operands, without look-ups; None before the first launch."""
    forward = route.written(True)
    if forward is None:
        return None

    count = len(route.bound.flows) if route.bound is not None else 1

    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors
        entry = route.entry_back
        if entry is not None and not _compiling():
            if (found := entry(*grads[:count], *saved)) is not None:
                return found
        return _gradients(route, saved, grads)

    return class_of(forward, backward, f"{''.join(map(str.title, route.name.split('_')))}Function")


def _gradients(how: Any, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of the operands of a Route, or of a Bound, from those of its results."""
    routed = how.__class__ is FunctionCall
    bound: BoundCall = how.bound if routed else how
    grads = grads[: len(bound.flows)]
    again, batched = _grad_enabled(), any(map(is_batched, grads))
    if not again and not batched and routed and not how.hands_gradients and not any(map(_watched, grads)):
        found: tuple[Tensor | None, ...] = how.gradients_of(saved, grads)
        if how.entry_back is None:  # for gradients like these
            how.entry_back = how.written_back(saved, grads)
        return found
    values = dict(zip(bound.saved, saved, strict=True))
    if again:
        what = f"the gradient of {bound.function.name} that has a gradient itself"
        stats.refuse_invariant("torch", f"torch would compute {what}")
        return _again(bound, values, grads)
    handed = how.hands_gradients if routed else bound.adds and deterministic()
    if batched or handed:
        stats.handed_over(
            "deterministic:add" if handed else "transform:batched", f"{bound.function.name}_gradient"
        )
        return _again(bound, values, grads, differentiable=False)
    bound = bound.exact()
    for flow, name, grad in zip(bound.flows, bound.results, grads, strict=False):
        values[flow] = grad.expand(bound.forward.stored[name].shape)
    for step in bound.backward:
        run(bound, step, values)
    return tuple(
        values.get(f"d{n}") if on else None for n, on in zip(bound.operands, bound.wanted, strict=True)
    )


def _watched(grad: Tensor) -> bool:
    """Whether the gradient's operations are traced or differentiated, or it is no plain tensor."""
    return bool(_modes() or _compiling() or _transforms() or not is_plain(grad))


def _again(
    bound: BoundCall, values: Values, grads: Sequence[Tensor], differentiable: bool = True
) -> tuple[Tensor | None, ...]:
    """Gradients in torch's operations, which themselves can be differentiated if ``differentiable``."""
    f = bound.function
    if f.again is not None:
        return f.again(values, bound.numbers, grads[0])
    given = [
        values[name]
        if name in values
        else torch.zeros((), dtype=m.dtype, device=grads[0].device).expand(m.shape)
        for name, m in bound.memory.items()
    ]
    return tuple(
        by_torch(
            lambda *own: as_tuple(f.torch(*bound.spread(own), *bound.numbers))[: len(grads)],
            given,
            bound.wanted,
            grads,
            differentiable,
        )
    )


def forward_in_graph(bound: BoundCall, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Values]:
    """The results of a formula by its operator, and all values by name."""
    values = dict(zip(bound.operands, given, strict=True))
    run(bound, bound.forward, values)
    return tuple(values[name] for name in bound.results), values
