"""The selection of an implementation: a kernel or torch computes a call, by the checks, the compiler and
the fallback policy.

In: a checked call. Out: a ConvCall whose kernel gave one checked result, or that goes to torch for a
reason, also while another process compiles its kernel. Runs once for each kind of call: ``forward_route``
and ``backward_routes`` find what was made. A kernel is made for the sizes of a call or for any;
calls/size_policy.py decides which of the two answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from transconv.calls import route_cache, size_policy
from transconv.calls.guard import ALIGNMENT
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.calls.size_policy import SizeChoice, SizeTrial, policy
from transconv.conv import CompiledDirection, Prop
from transconv.runtime import Waiting, apart, is_capturing, is_collecting, ready
from transconv.support import Unsupported
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import layer_keys, lower_call, precompile
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.precompile import gradients
from transconv.torch_ops.calls.route import BackwardRoutes, ConvCall, LayerDirection, LayerEntry
from transconv.torch_ops.conversion import aten_convolutions

if TYPE_CHECKING:
    from transconv.conv import ConvProblem
    from transconv.runtime import PlanRequest


def compile_route(
    route: ConvCall,
    near: torch.Tensor | None,
    weight: torch.Tensor | None,
    far: torch.Tensor | None,
    epilogue: str,
    aligned: bool,
    flags: lower_call.Flags,
    mode: str,
    **extra: torch.Tensor,
) -> None:
    """Give the route a kernel whose first result was checked; Unsupported if there is none, or none yet.
    Of the tensors, the one that the route computes is None; ``extra``: operands of the epilogue.

    With ``config.sizes = "any"`` the kernel takes sizes as arguments, if one for the layer does; otherwise
    it is made for these sizes, and one for any size, if there is one, answers until it is compiled. With
    "auto" the sizes that came before decide (calls/size_policy.py)."""
    call = _SelectedCall(route, near, weight, far, epilogue, aligned, flags, extra)
    if is_capturing(call.some.device):
        call.captured()
        return
    choice = route.choice = call.choice(mode)
    if choice is not None and not choice.own:
        if call.of_any_or_known(choice, mode):
            return
    elif settings.reach == "any":
        if is_collecting():
            call.elsewhere(mode)
        try:
            call.of_any_size(mode)
            return
        except Unsupported as error:
            if not size_policy.leaves_exact(error):
                raise
    try:
        with lower_call.or_unsupported(call):
            q = call.question()
            made = ready(q.workload, q.target, None, q.deterministic, CompiledDirection, aligned, mode)
        call.take(made)
    except Unsupported as error:
        settled = size_policy.leaves_exact(error) and (choice is None or choice.settled)
        if settled or is_collecting() or settings.invariant:
            raise
        try:
            call.of_any_size("never")
        except Unsupported:
            if isinstance(error, Waiting) and choice is not None:
                error.over = choice.or_general(error.over)
            raise error from None
        route.over = error.over if isinstance(error, Waiting) else None
        if choice is not None and size_policy.leaves_exact(error):
            choice.settle(own=False)  # the size has no kernel of its own
        return
    if choice is not None and choice.own:
        call.held_against(choice)


class _SelectedCall:
    """The tensors and numbers of a call, for which its route gets a kernel."""

    def __init__(
        self,
        route: ConvCall,
        near: torch.Tensor | None,
        weight: torch.Tensor | None,
        far: torch.Tensor | None,
        epilogue: str,
        aligned: bool,
        flags: lower_call.Flags,
        extra: dict[str, torch.Tensor],
    ) -> None:
        some = near if near is not None else weight
        assert some is not None
        self.route, self.some, self.own = route, some, (route.shape, route.strides)
        self.types: lower_call.Types = route.types or some.dtype
        self.tensors = [self.own if t is None else layer_keys.like(t) for t in (near, weight, far)]
        src, dst = (far, near) if route.params.transposed else (near, far)
        given = {"src": src, "wei": weight, "dst": dst}
        self.operands = {name: t for name, t in given.items() if t is not None} | extra
        self.epilogue, self.flags = epilogue, flags
        self.bias = extra["bia"].dtype if "bia" in extra else None
        self.copies_weight = route.direction is not Prop.BWD_W and far is None
        route.aligned = aligned

    def choice(self, mode: str) -> SizeChoice | None:
        """What is known of the call's size, where that decides which kernel answers; None also where
        tensors lie so that only kernels of their own take them."""
        route, device, prepares = self.route, self.some.device, is_collecting()
        on = device.type != "cpu" or settings.compile != "auto"
        if (
            settings.reach != "auto"
            or self.flags.deterministic
            or not on
            or not (prepares or mode == "background")
        ):
            return None
        near, weight, far = self.tensors
        orders = tuple([arguments.order_of(*t, route.channels_last) for t in self.tensors])
        if None in orders:
            return None
        src = far[0] if route.params.transposed else near[0]
        layer = layer_keys.layer_of(route.params, self.types, weight[0], device)
        kind = route.direction, orders, self.epilogue, self.bias, route.aligned, self.flags
        found = policy.choices(layer, kind).of((src[0], *src[2:]))
        if prepares:  # kernels of these sizes are compiled: none is needed for any size
            found.settle(own=True)
        return None if prepares else found

    def of_any_or_known(self, choice: SizeChoice, mode: str) -> bool:
        """A kernel for any size, or the size's own one if it is compiled already; False where only its own
        one may compute the call."""
        route = self.route
        if choice.among.prepared and not choice.settled:
            with suppress(Unsupported):
                with lower_call.or_unsupported(self):
                    q = self.question()
                    made = ready(
                        q.workload,
                        q.target,
                        None,
                        q.deterministic,
                        CompiledDirection,
                        route.aligned,
                        "never",
                    )
                self.take(made)
                choice.settle(own=True)
                choice.route = route
                return True
            choice.among.prepared = False
        try:
            self.of_any_size(mode)
        except Unsupported as error:
            if not size_policy.leaves_exact(error):
                raise
            choice.settle(own=True)
            return False
        choice.among.general = True
        if choice.is_counting:
            route.over = choice.counted_with(route.over)
        return True

    def held_against(self, choice: SizeChoice) -> None:
        """Have the size's own kernel timed against one for any size that runs on the device already;
        without one its own is the choice."""
        route = self.route
        if not choice.settled:
            rival = ConvCall(
                route.direction, route.params, route.shape, route.channels_last, route.epilogue
            )
            rival.types, rival.copies, rival.aligned = route.types, route.copies, route.aligned
            with suppress(Unsupported):
                other = copy(self)
                other.route = rival
                other.of_any_size("never", loaded=True)
                route.rival, route.trial = rival, SizeTrial(choice)
                route.over = route.trial.over
                return
        choice.settle(own=True)
        choice.route = route

    def of_any_size(self, mode: str, loaded: bool = False) -> None:
        """A kernel whose sizes are arguments; if ``loaded``, one that runs on the device already."""
        route, some = self.route, self.some
        chosen, registry = layer_keys.choose_plan(
            route.direction,
            route.params,
            self.types,
            self.tensors,
            route.channels_last,
            some.device,
            self.epilogue,
            self.bias,
            route.aligned,
            self.flags,
            mode,
        )
        if loaded and not lower_call.is_loaded(chosen.plan, some.device, route.aligned):
            raise Unsupported("capture:cold", "the kernel for any size has not run yet")
        compiled = self.proven(chosen.plan)
        route.compiled, route.registry, route.over = compiled, registry, chosen.waits
        if compiled.steps is not chosen.plan.steps:
            registry.forget()

    def elsewhere(self, mode: str) -> None:
        """Ask also for the kernels of tensors that begin anywhere, if one of these begins within its
        memory: at other sizes, a part of a concatenation begins at no multiple of 16 bytes."""
        route = self.route
        if route.aligned and any(t.storage_offset() for t in self.operands.values()):
            route.aligned = False
            with suppress(Unsupported):
                self.of_any_size(mode)
            route.aligned = True

    def problem(self) -> ConvProblem:
        """The problem of these sizes."""
        near, weight, far = self.tensors
        return lower_call.describe(self.types, near, weight, far, self.route.params, self.flags.math)

    def __str__(self) -> str:
        return f"{self.problem()} {self.route.direction}"

    def question(self) -> PlanRequest:
        """What a kernel for these sizes alone is asked for by."""
        route, flags = self.route, self.flags
        return lower_call.question(
            self.problem(),
            route.direction,
            self.some.device,
            self.epilogue,
            route.aligned,
            flags.deterministic,
            self.bias,
        )

    def take(self, made: CompiledDirection) -> None:
        """Have the route launch a kernel for these sizes alone, or images of these sizes, once its first
        result was checked."""
        route = self.route
        route.compiled = self.proven(lower_call.of_batch(made, self.problem()))
        if self.copies_weight:
            route.halves = apart(route.compiled, "wei")

    def captured(self) -> None:
        """A kernel for a call that a CUDA graph captures, where nothing can be compiled or checked."""
        if settings.reach != "exact":
            with suppress(Unsupported):
                self.of_any_size("never", loaded=True)
                return
        raise Unsupported(
            "capture:cold",
            "a kernel cannot be built while a CUDA graph is captured; call once before capturing",
        )

    def proven(self, plan: CompiledDirection) -> CompiledDirection:
        """The plan or its replacement, after the check of its first result."""
        made = self.some.dtype
        if (types := self.route.types) is not None:
            made = types[1] if self.route.direction is Prop.BWD_W else types[2]
        return lower_call.proven(
            plan,
            self.route.aligned,
            lambda: self.some.new_empty_strided(*self.own, dtype=made),
            **self.operands,
        )


def refused(route: ConvCall, error: Unsupported, x: torch.Tensor) -> None:
    """Send the route of a call with the input ``x`` to torch, because it has no kernel, or none yet."""
    route.refuse(error)
    if route.over is not None:
        lower_call.expect_checks(x.device, x.dtype)


def make_forward(
    params: Params,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    flags: lower_call.Flags,
    aligned: bool,
    mode: str,
) -> ConvCall:
    """Decide who computes a checked forward call, and have its gradients compiled meanwhile."""
    route = ConvCall(
        Prop.BWD_D if params.transposed else Prop.FWD,
        params,
        arguments.output_shape(x.shape, w.shape, params),
        arguments.channels_last_result(x, w),
    )
    trained(route, x, w, flags, aligned, mode)
    if all(route.shape) and aten_convolutions.takes_whole(x, w):
        route.whole = True
        return route
    why = lower_call.reasons(x, w) or ([] if all(route.shape) else ["shape:empty"])
    if why:
        route.settle(why)
        return route
    route.copies = b is not None and not b.is_contiguous()
    try:
        if b is not None:
            try:
                compile_route(route, x, w, None, "bias", aligned, flags, mode, bia=b.contiguous())
                return route
            except Unsupported as error:
                if error.reason in PASSING:
                    raise
                route.adds_bias = True
        compile_route(route, x, w, None, "", aligned, flags, mode)
    except Unsupported as error:
        refused(route, error, x)
        if route.over is not None and route.asks_own:
            precompile.meanwhile(params, x, w, flags, aligned)
    return route


def make_backward(
    params: Params,
    grad: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    mask: Sequence[bool],
    flags: lower_call.Flags,
    aligned: bool,
    mode: str,
) -> BackwardRoutes:
    """Decide who computes which gradient. RuntimeError where the tensors do not fit."""
    arguments.check_tensors(x, w, None)
    arguments.check_shapes(x.shape, w.shape, None, params)
    arguments.check_grad(grad, x, w, params)
    channels_last = arguments.channels_last_result(x, w)
    made: list[ConvCall | None] = [None, None]
    why = lower_call.reasons(x, w) or ([] if grad.numel() else ["shape:empty"])
    data_direction = Prop.FWD if params.transposed else Prop.BWD_D
    for at, (direction, wanted) in enumerate(((data_direction, x), (Prop.BWD_W, w))):
        if not mask[at]:
            continue
        route = made[at] = ConvCall(direction, params, tuple(wanted.shape), channels_last)
        if why:
            route.settle(why)
            continue
        near, weight = (None, w) if at == 0 else (x, None)
        try:
            compile_route(route, near, weight, grad, "", aligned, flags, mode)
        except Unsupported as error:
            refused(route, error, x)
    return BackwardRoutes(params, channels_last, made[0], made[1], mask[2], grad.dim())


def add_forward(
    key: Hashable,
    req: CallAttributes,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    flags: lower_call.Flags,
    aligned: bool,
    mode: str,
) -> Any:
    """Make the route of a batched forward call; RuntimeError as torch's if the call is wrong."""
    return add_sized(key, req, x, w, b, flags, aligned, mode)[0]


def add_sized(
    key: Hashable,
    req: CallAttributes,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    flags: lower_call.Flags,
    aligned: bool,
    mode: str,
) -> tuple[Any, Hashable]:
    """``add_forward``, and the key of the layer if the route was made from that of another size."""
    layer = layer_keys.layer_key(req, x, w, b, flags, aligned) if settings.reach != "exact" else None
    known = route_cache.find_layer(layer)
    route = None if known is None else known.forward(x, w)
    if route is not None:
        return route_cache.keep(key, route), layer
    route = make_forward(req.resolve(x, w, b), x, w, b, flags, aligned, mode)
    note_layer(layer, route, x, b is not None)
    return route_cache.keep(key, route), None


def forward_route(
    req: CallAttributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, mode: str
) -> Any:
    """The route of a batched forward call, found or made."""
    key, flags, aligned = layer_keys.forward_key(req, x, w, b)
    return route_cache.find(key) or add_forward(key, req, x, w, b, flags, aligned, mode)


def backward(
    params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: Sequence[bool], mode: str
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of input, weight and bias of a checked call; None where ``mask`` is False."""
    x = arguments.in_any_batch(x, w)
    grad = arguments.in_any_batch(grad, x)
    found, *_ = backward_routes(params, grad, x, w, mask, mode)
    return found.run(grad, x, w)


def backward_routes(
    params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: Sequence[bool], mode: str
) -> tuple[BackwardRoutes, lower_call.Flags, bool, Hashable]:
    """The routes of the gradients, found or made, what of their key is not in the tensors, and the key;
    those of a layer have none."""
    flags = lower_call.flags(x.dtype)
    aligned = not (grad.data_ptr() | x.data_ptr() | w.data_ptr()) & ALIGNMENT
    layer, sizes = None, (x.shape, x.stride(), grad.shape, grad.stride())
    if settings.reach != "exact":
        layer = layer_keys.gradients_key(params, grad, x, w, sizes, mask, flags, aligned)
        known = route_cache.find_layer(layer)
        if known is not None and (found := known.backward(grad, x, w, sizes)) is not None:
            return found, flags, aligned, None
    key = (
        params,
        sizes,
        grad.dtype,
        grad.device,
        x.dtype,
        x.device,
        w.shape,
        w.stride(),
        w.dtype,
        w.device,
        aligned,
        flags,
        *mask,
    )
    routes = route_cache.routes.get(key) or route_cache.find(key)
    if routes is None:
        routes = make_backward(params, grad, x, w, mask, flags, aligned, mode)
        note_gradients(layer, routes, x)
        routes = route_cache.keep(key, routes)
    return routes, flags, aligned, key


def trained(
    route: ConvCall, x: torch.Tensor, w: torch.Tensor, flags: lower_call.Flags, aligned: bool, mode: str
) -> None:
    """``gradients`` of a forward route's first call in training, which may be a later one."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        route.trains = True
        gradients(route.params, x, w, flags, aligned, mode)


def note_layer(key: Hashable, route: ConvCall, x: torch.Tensor, biased: bool) -> None:
    """Keep the layer of a route that the slow path made."""
    if key is not None and _serves(route) and not (route.adds_bias or route.copies):
        data = LayerDirection(route, x.device, x.dtype, route.near, "wei", *["bia"] * biased, route.far)
        route_cache.keep_layer(key, LayerEntry(x, data))


def note_gradients(key: Hashable, routes: BackwardRoutes, x: torch.Tensor) -> None:
    """Keep the layer of routes that the slow path made."""
    data, weight = routes.data, routes.weight
    found = [r for r in (data, weight) if r is not None]
    if key is None or not found or routes.aten or not all(map(_serves, found)):
        return
    route_cache.keep_layer(
        key,
        LayerEntry(
            x,
            None if data is None else LayerDirection(data, x.device, x.dtype, "wei", data.far, data.near),
            None
            if weight is None
            else LayerDirection(weight, x.device, x.dtype, weight.near, weight.far, "wei"),
            routes,
        ),
    )


def _serves(route: ConvCall) -> bool:
    """Whether a route's registry answers for other sizes; one that waits for a better kernel does not."""
    if route.registry is None or route.types is not None:
        return False
    return route.over is None or (
        route.choice is not None and not route.choice.own and route.registry.is_settled()
    )
