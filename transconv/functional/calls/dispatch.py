"""The dispatch of a call of a public function to kernels or to torch.

For plain eager tensors, the launches of calls with the same properties are looked up. Torch computes calls
under functorch's transforms, with forward derivatives and of tensor subclasses; compilers and dispatch
modes see the operator ``transconv::function``. ``explain`` says what a call would launch and why, without
launching it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from transconv.calls import route_cache, stats
from transconv.calls.guard import ALIGNMENT, at_multiple
from transconv.calls.settings import settings
from transconv.calls.size_policy import SizeChoice, SizeTrial, policy
from transconv.functional.calls import call_forms, first_call_check, torch_operators
from transconv.functional.calls.compiled_launch import aligned, launch, question, refused
from transconv.functional.calls.route import FunctionCall, chosen, find, made_of, note, registry_of
from transconv.functional.calls.symbolic_bind import BoundText, Numbers, PublicFunction, as_tuple, bind
from transconv.functional.calls.torch_operators import apply, apply_in_graph, forward_in_graph, function_of
from transconv.runtime import COMPILING, NEVER, Waiting, torch_internals
from transconv.support import Unsupported
from transconv.torch_ops import transforms
from transconv.torch_ops.calls.call_attributes import is_known, is_plain
from transconv.torch_ops.calls.lower_call import waits
from transconv.torch_ops.operators import library, register_fake


class ExplainedCall(Exception):
    """What a public function makes of its arguments: the function, its tensors after casts, numbers."""

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self.call = call


class Asking(TorchDispatchMode):
    """The mode of ``explain``: while it is the current one, a call raises ``ExplainedCall``; torch's
    operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def asked(self, *call: Any) -> ExplainedCall:
        """What the call raises."""
        return ExplainedCall(*call)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


Tensor = torch.Tensor
Tensors = tuple[Tensor | None, ...]

# Called at every call; each is a plain function.
_compiling = torch.compiler.is_dynamo_compiling
_autocast: Callable[[], bool] = torch_internals.any_autocast
_transforms: Callable[[], bool] = torch_internals.transforms
_modes: Callable[[], int] = torch_internals.dispatch_modes
_tracing: Callable[[], Any] = torch_internals.tracing_state
_grad_enabled = torch.is_grad_enabled
_deterministic: Callable[[], bool] = torch_internals.deterministic


def call(f: PublicFunction, tensors: Tensors, numbers: Numbers, out: Any = None) -> Tensor:
    """A public function's result, a tuple of several; torch's with ``out``. Raises torch's error for a
    wrong call."""
    if out is not None:
        return _written(f, tensors, numbers, out)
    if _compiling():
        return _traced(f, tensors, numbers)  # type: ignore[no-any-return]
    try:
        found = None if _modes() else find(f, tensors, numbers)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no hash, no sizes
        found = None
    return (_general if found is None else found)(f, tensors, numbers)  # type: ignore[no-any-return]


def _general(f: PublicFunction, tensors: Tensors, numbers: Numbers) -> Any:
    """A call without an entry in the fast path."""
    casts = _autocast()
    if casts:
        tensors = _cast(f, tensors)
    if _transforms() or _modes() or _tracing() or forward_ad._current_level >= 0:
        return _watched_call(f, tensors, numbers)
    given: list[Tensor] = []
    looks: list[Any] = []
    bits = 0
    for t in tensors:
        if t is None:
            looks.append(None)
            continue
        if not is_plain(t) or t.is_neg() or t._is_zerotensor():
            return _handed(f, tensors, numbers, _unusual(t))
        given.append(t)
        looks += (t.shape, t.stride(), t.dtype, t.device)
        bits |= t.data_ptr()
    wanted = tuple([t.requires_grad for t in given]) if _grad_enabled() else ()
    key = (f, numbers, *map(type, numbers), wanted, casts, _deterministic(), not bits & ALIGNMENT, *looks)
    try:
        route = route_cache.find(key)
    except TypeError:  # a list among the numbers has no hash
        if not any(isinstance(n, list) for n in numbers):
            return _handed(f, tensors, numbers, "form:numbers")
        return call(f, tensors, tuple(tuple(n) if isinstance(n, list) else n for n in numbers))
    if route is None:
        if tensors[0] is None or not all(map(_is_number, numbers)):
            return _handed(f, tensors, numbers, "form:numbers")  # torch's error or result
        if settings.invariant and bits & ALIGNMENT:
            moved = tuple([None if t is None else at_multiple(t) for t in tensors])
            return _general(f, moved, numbers)
        route = _made(f, tensors, numbers, wanted)
        route = route_cache.keep(key, route)
    elif route.bound is not None and route.over is None and not casts:
        runs = partial(function_of, route) if True in wanted else partial(route.written, False)
        note(f, tensors, numbers, route, runs, _general)
    route.calls += 1
    if route.bound is None:
        return f.by_torch(tensors, numbers)
    try:
        results = apply(route, *given) if True in wanted else route.results(given)
    except IndexError:  # of an index out of range: each function of torch has its own message
        if given[0].device.type == "cpu":
            return f.by_torch(tensors, numbers)
        raise
    if f.finish is not None:
        return f.finish(tensors, numbers, as_tuple(results))
    return results if isinstance(results, Tensor) else results[0]


def _is_number(n: Any) -> bool:
    """Whether an argument has a form that torch's functions take without a conversion."""
    if isinstance(n, tuple):
        return all(m is None or type(m) is int for m in n)
    return n is None or type(n) in (int, float, bool, str, torch.dtype)


def _has_text(n: Any) -> bool:
    """Whether the operator's text can hold a number; torch decides about other forms."""
    if isinstance(n, (tuple, list)):
        return all(map(_has_text, n))
    return n is None or isinstance(n, (int, float, str, torch.dtype, torch.SymInt, torch.SymFloat))


def _watched_call(f: PublicFunction, tensors: Tensors, numbers: Numbers) -> Any:
    """A call that a transform, a mode or a tracer must see."""
    if isinstance(mode := _get_current_dispatch_mode(), Asking):
        raise mode.asked(f, tensors, numbers)
    if _transforms():
        return _handed(f, tensors, numbers, "transform:functorch")
    if forward_ad._current_level >= 0:
        return _handed(f, tensors, numbers, "transform:forward_ad")
    odd = next((t for t in tensors if t is not None and not (isinstance(t, Tensor) and is_known(t))), None)
    if odd is not None:
        return _handed(f, tensors, numbers, _unusual(odd))
    return _traced(f, tensors, numbers)


def _handed(f: PublicFunction, tensors: Tensors, numbers: Numbers, reason: str) -> Any:
    stats.handed_over(reason, f.name)
    try:
        return f.by_torch(tensors, numbers)
    except AttributeError as error:  # torch takes a method of what it is given
        if hasattr(tensors[0], "__torch_function__"):
            raise
        raise AttributeError(f"{error}; expected a tensor, which torch.as_tensor makes") from None


def _written(f: PublicFunction, tensors: Tensors, numbers: Numbers, out: Any) -> Tensor:
    if not _compiling():
        stats.handed_over("form:out", f.name)
    made: Tensor = f.by_torch(tensors, numbers, out=out)
    return made


def _unusual(t: Any) -> str:
    """Why no kernel takes a tensor: it is not plain, or its memory differs from its values."""
    if not isinstance(t, Tensor):
        return f"form:{type(t).__name__}"
    if type(t) not in (Tensor, torch.nn.Parameter):
        return f"subclass:{type(t).__name__}"
    return "layout:view" if is_plain(t) else "layout:sparse"


def _cast(f: PublicFunction, tensors: Tensors) -> Tensors:
    """The casts that torch's autocast makes for this function on a GPU."""
    devices = {t.device.type for t in tensors if isinstance(t, Tensor)} - {"cpu", "meta"}
    device = next(iter(devices), "")  # on CPUs torch casts by another list, and computes
    if not f.autocast or not device or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.float32 if f.autocast == "f32" else torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64
        else t
        for t in tensors
    )


# -- making a route --------------------------------------------------------------------------------


def _made(f: PublicFunction, tensors: Tensors, numbers: Numbers, wanted: tuple[bool, ...]) -> FunctionCall:
    """Decide who computes calls of one kind."""
    given = [t for t in tensors if t is not None]
    why, waits = why_torch(f, tensors), None
    if not why:
        try:
            return _chosen(f, tensors, numbers, wanted, given)
        except Unsupported as error:
            waits = error
    route = FunctionCall(None, "", f.name)
    route.refuse(waits or Unsupported(why), f.name)
    return route


def _chosen(
    f: PublicFunction, tensors: Tensors, numbers: Numbers, wanted: tuple[bool, ...], given: list[Tensor]
) -> FunctionCall:
    """The route of a call that a kernel may compute: of its size or for any, as the sizes before it and
    its calls so far decide, or as was asked. Raises Unsupported where there is none, or none yet."""
    mode, device = settings.mode, given[0].device
    choice = _choice(f, tensors, numbers, wanted, given, mode)
    if choice is None:
        return _launching(f, tensors, numbers, wanted, settings.reach == "any", mode)
    if choice.own:
        try:
            own = _launching(f, tensors, numbers, wanted, False, mode)
        except Unsupported as error:
            if choice.settled and not isinstance(error, Waiting):
                raise
            try:  # one for any size stands in
                route = _launching(f, tensors, numbers, wanted, True, "never" if choice.settled else mode)
            except Unsupported:
                if not (choice.settled and isinstance(error, Waiting)):
                    raise
                error.over = choice.or_general(error.over)
                raise error from None
            if isinstance(error, Waiting):
                route.over = error.over
            elif error.reason not in (COMPILING, NEVER):
                choice.settle(own=False)
            return route
        if not choice.settled:
            # Gradients read what their own forward kernel saved: where there are some, nothing is timed.
            if True in wanted or device.type != "cuda":
                choice.settle(own=True)
            else:
                own.rival = _launching(f, tensors, numbers, wanted, True, mode)
                own.trial = SizeTrial(choice)
                own.over = own.trial.over
        return own
    if choice.among.prepared and not choice.settled:
        with suppress(Unsupported):
            own = _launching(f, tensors, numbers, wanted, False, "never")
            choice.settle(own=True)
            return own
        choice.among.prepared = False
    route = _launching(f, tensors, numbers, wanted, True, mode)
    if not route.any_size:
        choice.settle(own=True)
    else:
        choice.among.general = True
        if choice.is_counting:
            route.over = choice.counted_with(route.over)
    return route


def _choice(
    f: PublicFunction,
    tensors: Tensors,
    numbers: Numbers,
    wanted: tuple[bool, ...],
    given: list[Tensor],
    mode: str,
) -> SizeChoice | None:
    """What is known of the call's size, where that decides which kernel answers."""
    on = given[0].device.type != "cpu" or settings.compile != "auto"
    if settings.reach != "auto" or mode != "background" or _deterministic() or not on:
        return None
    kind, sizes = call_forms.told(f, tensors, numbers, wanted)
    return policy.choices(kind, aligned(given)).of(tuple(sizes))


def _launching(
    f: PublicFunction,
    tensors: Tensors,
    numbers: Numbers,
    wanted: tuple[bool, ...],
    any_size: bool,
    mode: str,
) -> FunctionCall:
    """The route of a call's kernels, for any size or of its own, whose first results are torch's."""
    given = [t for t in tensors if t is not None]
    known = call_forms.find(f, tensors, numbers, wanted) if any_size else None
    apart = any_size or settings.invariant  # one kernel for each gradient
    bound = bind(f, tensors, numbers, wanted, apart) if known is None else known
    route = made_of(bound, given[0].device, aligned(given), mode)
    if route.hands_gradients:
        stats.announce("deterministic:add", what=f"{f.name}_gradient")
    first_call_check.agree(route, tensors, mode)
    if any_size and known is None:
        call_forms.note(bound, tensors, numbers, wanted)
    return route


def why_torch(f: PublicFunction, tensors: Tensors) -> str:
    """Why no kernel may compute a call; empty if one may."""
    given = [t for t in tensors if t is not None]
    whole = [f.whole[i] for i, t in enumerate(tensors) if t is not None and i < len(f.whole)]
    why = refused(given, whole)
    if (
        not why
        and torch.is_autocast_enabled(given[0].device.type)
        and (f.autocast == "torch" or given[0].device.type == "cpu")
    ):
        return "autocast"
    return why


# -- in graphs -------------------------------------------------------------------------------------


def _traced(f: PublicFunction, tensors: Tensors, numbers: Numbers) -> Any:
    """Inside compilers, tracers and modes: always the operator."""
    for t in tensors:
        if t is not None and not isinstance(t, Tensor):
            return f.by_torch(tensors, numbers)
    if tensors[0] is None or not all(map(_has_text, numbers)) or _transformed():
        return f.by_torch(tensors, numbers)
    given = [t for t in tensors if t is not None]
    results = torch_operators.function(torch_operators.spelled(f, tensors, numbers), given)
    return results[0] if f.finish is None else f.finish(tensors, numbers, tuple(results))


@torch_internals.constant_in_graphs
def _transformed() -> bool:
    """Whether functorch's transforms are active, which get torch's functions in compiled code too: the
    operator has no rules for them, and cannot move running statistics below them."""
    return _transforms()


def _function(call: str, given: list[Tensor]) -> list[Tensor]:
    """The operator ``function``, with derivatives where autograd is on."""
    f, tensors, numbers = torch_operators.read(call, given)
    if _autocast() and forward_ad._current_level < 0:
        tensors = list(_cast(f, tuple(tensors)))
    given = [t for t in tensors if t is not None]
    why = "transform:forward_ad" if forward_ad._current_level >= 0 else why_torch(f, tuple(tensors))
    message = ""
    if not why:
        wanted = tuple(t.requires_grad for t in given) if torch.is_grad_enabled() else ()
        try:
            bound = bind(f, tensors, numbers, wanted)
            made = (
                as_tuple(apply_in_graph(bound, *given))
                if True in wanted
                else forward_in_graph(bound, tuple(given))[0]
            )
            return list(made)
        except Unsupported as error:
            why, message = error.reason, error.message
    stats.announce(why, message, f.name)
    return list(as_tuple(f.torch(*tensors, *numbers)))


def _composed(call: str, given: list[Tensor]) -> list[Tensor]:
    """The operator as torch's function."""
    f, tensors, numbers = torch_operators.read(call, given)
    return list(as_tuple(f.torch(*tensors, *numbers)))


library.impl("function", _function, "Autograd")
transforms.compose(library, "function", _composed)
for _key in ("CPU", "CUDA", "XPU"):
    library.impl("function", _function, _key)
register_fake("transconv::function", _function, lib=library)


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
