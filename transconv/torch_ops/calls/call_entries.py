"""Entries of repeated calls of convolutions: found by their weight, checked by one guard.

A layer calls with the same weight, the same numbers and mostly the same sizes. Its second call leaves an
entry under the identity of the weight: a guarded function (calls/guard.py) that compares the numbers by
identity and all tensors by torch's guard, and runs the route. The function that was called, by identity,
says whether there is a residual.

    note            one kind of call, whose route is known
    note_by_key     all sizes of a layer whose kernels change or are many: routes are found by their keys
    note_layer      all sizes of a layer, whose kernels take sizes as arguments: the guard leaves out sizes
                    and strides of the input, which find the route or make it (calls/route.py)
    note_backward   gradients, of one route or of all sizes of a layer
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from transconv.calls import guard, route_cache
from transconv.calls.guard import CallGuard, Condition, Part, check_of, device_of, function_modes, written
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.torch_ops.calls import layer_keys, lower_call
from transconv.torch_ops.calls.route import BackwardRoutes, ConvCall
from transconv.torch_ops.conversion import inference

Tensor = torch.Tensor
Call = Callable[..., Tensor]  # the arguments of dispatch(), and a residual if the function adds one
Tensors = Sequence[Tensor | None]

CALLS = guard.CallCache()
find = CALLS.find
# A weight whose copies are to be made takes the slow path.
inference.on_change(CALLS.drop)

ARGUMENTS = "(f, x, w, b, s, p, o, d, g, r{})"
# The arguments that are compared by identity, those that differ most first, and their places among the
# numbers: stride, padding, output_padding, dilation and groups.
NUMBERS = {"p": 1, "s": 0, "g": 4, "d": 3, "f": -1, "o": 2}
WATCHED = (guard.NO_MODES, guard.NO_FUNCTION_MODES, guard.NO_DUALS)
WATCHED_BACK = (guard.NO_GRADIENTS, guard.NO_MODES, guard.NO_DUALS)


def onward(
    f: Any, x: Any, w: Any, b: Any, s: Any, p: Any, o: Any, d: Any, g: Any, r: Any = None
) -> Tensor:
    """The end of a chain of entries: the slow path of the function that was called."""
    made: Tensor = f.general(f, x, w, b, s, p, o, d, g, *() if r is None else (r,))
    return made


def switches(flags: lower_call.Flags, dtype: torch.dtype, *routes: ConvCall) -> tuple[Condition, ...]:
    """torch's numeric switches as they are, those that the kernels of ``routes`` obey: the others are not
    read at every call. Where torch computes, or without routes, all are."""
    plans = [r.compiled for r in routes]
    obeyed = frozenset[str]().union(*(p.obeys for p in plans if p is not None))
    every = not routes or None in plans
    found = []
    if every or "deterministic" in obeyed:
        found.append(guard.deterministic(flags.deterministic, cudnn=True))
    if dtype is torch.float32 and (every or "precision" in obeyed):
        found.append(
            Condition(
                f'(precision("cuda", "conv") == "tf32") is {flags.math == "tf32"}',
                {"precision": lower_call.read_precision},
            )
        )
    return tuple(found)


def only_on(*routes: ConvCall | None) -> int | None:
    """The device that must be the current one; None where there is only one."""
    return device_of([r.device for r in routes if r is not None and r.start is not None])


class _Entry:
    """The text of an entry for calls like one: ``given`` and ``used`` are input, weight, bias and residual
    as the caller gave them and as autocast cast them, to the type ``cast`` (None outside of it)."""

    def __init__(
        self,
        function: Any,
        given: Tensors,
        used: Tensors,
        numbers: tuple[Any, ...],
        cast: torch.dtype | None,
    ) -> None:
        x, _, bias, residual = given
        there = [(n, t, u) for n, t, u in zip("xwbr", given, used, strict=True) if t is not None]
        self.given = [n for n, _, _ in there]
        cast_ones = [n for n, t, u in there if u is not t and cast is not None]
        # torch's guard takes no tensor twice: an input that is the residual, too, is looked at once.
        twice = residual is x and residual is not None
        self.checked = [n for n in self.given if n != "r" or not twice]
        self.tensors = [t for n, t, _ in there if n in self.checked and t is not None]
        self.addressed = [n for n in self.checked if n not in cast_ones]
        self.used = [f"cast_{n}" if n in cast_ones else n for n in self.given]
        self.casts = {n: f"cast_{n} = {n}.to(cast)" for n in cast_ones}
        self.trains = any(t.requires_grad for t in self.tensors)
        self.tests = [
            *(f"{n} is same_{n}" for n in NUMBERS),
            *["b is None"] * (bias is None),
            *["r is x"] * twice,
        ]
        self.known = {f"same_{n}": function if at < 0 else numbers[at] for n, at in NUMBERS.items()}
        self.late: list[str] = []
        if cast is not None and x is not None:
            self.late = ["autocast(device_type) is cast"]
            self.known |= {
                "autocast": torch.get_autocast_dtype,
                "device_type": x.device.type,
                "cast": cast,
            }

    def written(self, found: CallGuard, parts: Sequence[Part], others: Call, **known: Any) -> Call:
        """The entry that runs the parts."""
        tests = [*self.tests, *found.tests(self.checked, self.addressed), *self.late]
        return written(
            f"call{ARGUMENTS.format('=None')}",
            [tests, *parts],
            f"return others{ARGUMENTS.format('')}",
            {**self.known, **found.known(), **known, "others": others, "grad_enabled": guard.grad_enabled},
        )


def _can_be_kept(numbers: tuple[Any, ...]) -> bool:
    """Whether no mode looks on, and no number is a list, which can change under its identity."""
    return not function_modes() and not any(isinstance(n, list) for n in numbers)


def note(
    autograd: Callable[[ConvCall, bool, torch.dtype | None], Call],
    function: Any,
    given: Tensors,
    used: Tensors,
    numbers: tuple[Any, ...],
    route: ConvCall,
    flags: lower_call.Flags,
    aligned: bool,
    cast: torch.dtype | None,
) -> None:
    """A call took the slow path: after a few, make an entry for its kind.

    ``autograd(route, biased, cast)`` makes the differentiable call; ``given`` are input, weight, bias and
    residual, ``used`` what autocast made of them, and ``cast`` the type that it gives, None outside of it;
    ``numbers`` are stride, padding, output_padding, dilation and groups as the caller gave them. A
    residual under autocast is never remembered, nor a route that waits for a kernel: it is asked at each
    call."""
    x, weight, bias, residual = given
    if (
        route.over is not None
        or not _can_be_kept(numbers)
        or (residual is not None and cast is not None)
        or x is None
        or weight is None
    ):
        return
    place = CALLS.due(id(weight))
    if not place:
        return
    entry = _Entry(function, given, used, numbers, cast)
    check = check_of(*entry.tensors)
    if check is None:
        return
    dtype = x.dtype if used[0] is None else used[0].dtype
    found = CallGuard(check, (*WATCHED, *switches(flags, dtype, route)), aligned, only_on(route))
    parts: list[Part] = []
    known: dict[str, Any] = {"run": route.bound()}
    if entry.trains:  # the differentiable call casts weight and bias itself
        casts_more = bool({"w", "b"} & set(entry.casts))
        known["apply"] = autograd(route, bias is not None, cast if casts_more else None)
        first = entry.used[0]
        if "x" in entry.casts:
            parts.append(entry.casts["x"])
        parts.append(f"if grad_enabled(): return apply({', '.join([first, *entry.given[1:]])})")
    parts += [line for n, line in entry.casts.items() if line not in parts]
    parts.append(f"return run({', '.join(entry.used)})")
    CALLS.keep(id(weight), entry.written(found, parts, CALLS.others(id(weight), place, onward), **known))


def note_by_key(
    applies: tuple[Call, Call],
    function: Any,
    given: Tensors,
    used: Tensors,
    numbers: tuple[Any, ...],
    route: ConvCall,
    key: Any,
    flags: lower_call.Flags,
    aligned: bool,
    cast: torch.dtype | None,
) -> bool:
    """The same where entries for one kind of call do not do: while another kernel may come, or after too
    many sizes. The entry finds what calls of any size run by what differs in the ``key`` of their routes;
    False where it is not the one to make. ``applies``: as in ``note_layer``; the rest as in ``note``."""
    x, w, b, _ = used
    if x is None or w is None or route.start is None or not _can_be_kept(numbers):
        return False
    req, _, _, *same = key
    changes = route.over is not None or CALLS.is_varied(id(given[1]))
    if (
        not changes
        or route_cache.find_layer(layer_keys.layer_key(req, x, w, b, flags, aligned)) is not None
    ):
        return False
    if CALLS.due(id(given[1])):
        entry = _Entry(function, given, used, numbers, cast)
        first = entry.used[0]
        _keep_for_sizes(
            entry,
            given,
            used,
            route,
            flags,
            aligned,
            applies,
            f"find((req, {first}.shape, {first}.stride(), *same))",
            {"find": route_cache.find, "req": req, "same": same},
        )
    return True


def note_layer(
    applies: tuple[Call, Call],
    function: Any,
    given: Tensors,
    used: Tensors,
    numbers: tuple[Any, ...],
    route: ConvCall,
    key: Hashable,
    flags: lower_call.Flags,
    aligned: bool,
    cast: torch.dtype | None,
) -> None:
    """Make the entry of a layer, whose route for a new size was just made from another one: ``key`` is
    what its calls share. ``applies``: the differentiable calls of any route, without and with casts that
    are made already; the rest as in ``note``."""
    x, w = given[:2]
    if (
        x is None
        or w is None
        or used[0] is None
        or not _can_be_kept(numbers)
        or not CALLS.due((id(w), "sizes"), 1)
    ):
        return  # after a few sizes: a weight that does not come back gets no entry
    entry, layer = _Entry(function, given, used, numbers, cast), route_cache.find_layer(key)
    if layer is not None:
        first = entry.used[0]
        _keep_for_sizes(
            entry,
            given,
            used,
            route,
            flags,
            aligned,
            applies,
            f"known(({first}.shape, {first}.stride())) or find({first}, w)",
            {"known": layer.known.get, "find": layer.forward},
        )


def _keep_for_sizes(
    entry: _Entry,
    given: Tensors,
    used: Tensors,
    route: ConvCall,
    flags: lower_call.Flags,
    aligned: bool,
    applies: tuple[Call, Call],
    found_by: str,
    known: dict[str, Any],
) -> None:
    """Keep an entry for all sizes of the input, the only one of the weight: ``found_by`` is the expression
    that finds the route, of what is ``known``."""
    check, sums = check_of(*entry.tensors, free=1), used[0]
    if check is None or sums is None:
        return
    found = CallGuard(check, (*WATCHED, *switches(flags, sums.dtype)), aligned, only_on(route))
    names = [*entry.used, *["None"] * (given[2] is None)]
    applied = f"apply({', '.join(names)}, route)"
    if {"w", "b"} & set(entry.casts):
        applied = f"apply_cast({', '.join([names[0], 'w', 'b', *names[1:]])}, route)"
    parts: list[Part] = [
        *(line for n, line in entry.casts.items() if n == "x"),
        f"route = {found_by}",
        ["route is not None", "route.start is not None", "not (route.adds_bias or route.copies)"],
        *(line for n, line in entry.casts.items() if n != "x"),
        *[f"if grad_enabled(): return {applied}"] * entry.trains,
        f"return route.start({', '.join(entry.used)})",
    ]
    CALLS.keep(
        id(given[1]), entry.written(found, parts, onward, **known, apply=applies[0], apply_cast=applies[1])
    )


def _find_key(*key: Any) -> Any:
    return route_cache.find(key)


def note_backward(
    route: ConvCall,
    wanted: tuple[bool, ...],
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    routes: BackwardRoutes,
    flags: lower_call.Flags,
    aligned: bool,
    key: Any,
) -> None:
    """Gradients took the slow path: after a few, make an entry for their kind, one per forward
    route and wanted subset, or for all sizes of a layer. ``key``: of the routes."""
    layer, each = routes.layer, routes.routes()
    # The gradients' entries of a layer are those of all its sizes: none is for one size alone. While other
    # kernels may come, what each call finds under its key decides.
    changes = layer is None and any(r.over is not None for r in each)
    by_key = layer is None and settings.reach == "auto" and (changes or route.any_size)
    cold = any(r.reason in PASSING and not (by_key and r.over) for r in each) or (changes and not by_key)
    if cold or not CALLS.due((route if layer is None else layer, wanted), 1):
        return
    free = layer is not None or by_key
    check = check_of(grad, x, w, free=2 * free)
    if check is None:
        return
    found = CallGuard(
        check,
        (*WATCHED_BACK, *switches(flags, x.dtype, *([] if by_key else each))),
        aligned,
        only_on(routes.data, routes.weight),
    )
    found_by = "find(params, sizes, *same)" if by_key else "known(sizes) or find(grad, x, w, sizes)"
    parts: list[Part] = [
        "sizes = x.shape, x.stride(), grad.shape, grad.stride()",
        f"routes = {found_by}",
        "return None if routes is None else routes.run(grad, x, w)",
    ]
    if by_key:
        params, _, *same = key
        known: dict[str, Any] = {"find": _find_key, "params": params, "same": same}
    elif layer is not None:
        known = {"known": layer.known.get, "find": layer.backward}
    else:
        line, known = routes.bound()
        parts = [line]
    CALLS.keep_in(
        route.gradients,
        wanted,
        written(
            "call(grad, x, w)",
            [found.tests(["grad", "x", "w"]), *parts],
            "return None",
            {**found.known(), **known},
        ),
    )
