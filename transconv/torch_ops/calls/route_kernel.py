"""The kernel of a route: made for the sizes of a call or for any, compiled, and its first result checked.

In: the tensors of a call, of which its route computes one. Out: the plan that the route starts from now
on, or Unsupported with the reason, also while another process compiles it. Which of the two kinds answers
is decided by calls/size_policy.py; a layer's registry has the plans for any size."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING

import torch

from transconv.calls import size_policy
from transconv.calls.settings import settings
from transconv.calls.size_policy import SizeChoice, SizeTrial, policy
from transconv.conv import CompiledDirection, Epilogue, LayerRegistry, Prop
from transconv.ir import Layout
from transconv.runtime import Waiting, apart, is_collecting, ready
from transconv.support import ProblemError, Unsupported
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Order, Params, order_of
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.route import ConvCall

if TYPE_CHECKING:
    from transconv.conv import ConvProblem
    from transconv.runtime import ChosenPlan, PlanRequest


def compile_route(route: ConvCall, near: torch.Tensor | None, weight: torch.Tensor | None,
                  far: torch.Tensor | None, epilogue: str, aligned: bool, flags: lower_call.Flags,
                  mode: str, **extra: torch.Tensor) -> None:
    """Give the route a kernel whose first result was checked; Unsupported if there is none, or none yet.
    Of the tensors, the one that the route computes is None; ``extra``: operands of the epilogue.

    With ``config.sizes = "any"`` the kernel takes sizes as arguments, if one for the layer does; otherwise
    it is made for these sizes, and one for any size, if there is one, answers until it is compiled. With
    "auto" the sizes that came before decide (calls/size_policy.py)."""
    call = _SelectedCall(route, near, weight, far, epilogue, aligned, flags, extra)
    if lower_call.capturing(call.some.device):
        call.captured()
        return
    choice = route.choice = call.choice(mode)
    if choice is not None and not choice.own:
        if call.of_any_or_known(choice, mode):
            return
    elif settings.sizes == "any":
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
        if ((size_policy.leaves_exact(error) and (choice is None or choice.settled))
                or is_collecting()):
            raise
        try:
            call.of_any_size("never")
        except Unsupported:
            raise error from None
        route.over = error.over if isinstance(error, Waiting) else None
        if choice is not None and size_policy.leaves_exact(error):
            choice.settle(own=False)  # the size has no kernel of its own
        return
    if choice is not None and choice.own:
        call.held_against(choice)


class _SelectedCall:
    """The tensors and numbers of a call, for which its route gets a kernel."""

    def __init__(self, route: ConvCall, near: torch.Tensor | None, weight: torch.Tensor | None,
                 far: torch.Tensor | None, epilogue: str, aligned: bool, flags: lower_call.Flags,
                 extra: dict[str, torch.Tensor]) -> None:
        some = near if near is not None else weight
        assert some is not None
        self.route, self.some, self.own = route, some, (route.shape, route.strides)
        self.types: lower_call.Types = route.types or some.dtype
        self.tensors = [self.own if t is None else like(t) for t in (near, weight, far)]
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
        if settings.sizes != "auto" or self.flags.deterministic or not on or not (
                prepares or mode == "background"):
            return None
        near, weight, far = self.tensors
        orders = tuple([arguments.order_of(*t, route.channels_last) for t in self.tensors])
        if None in orders:
            return None
        src = far[0] if route.params.transposed else near[0]
        layer = layer_of(route.params, self.types, weight[0], device)
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
                    made = ready(q.workload, q.target, None, q.deterministic, CompiledDirection,
                                 route.aligned, "never")
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
        if choice.is_counting:
            route.over = choice.counted_with(route.over)
        return True

    def held_against(self, choice: SizeChoice) -> None:
        """Have the size's own kernel timed against one for any size that runs on the device already;
        without one its own is the choice."""
        route = self.route
        if not choice.settled:
            rival = ConvCall(route.direction, route.params, route.shape, route.channels_last,
                             route.epilogue)
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
        chosen, registry = choose_plan(
            route.direction, route.params, self.types, self.tensors, route.channels_last, some.device,
            self.epilogue, self.bias, route.aligned, self.flags, mode)
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
        return lower_call.question(self.problem(), route.direction, self.some.device, self.epilogue,
                                   route.aligned, flags.deterministic, self.bias)

    def take(self, made: CompiledDirection) -> None:
        """Have the route launch a kernel for these sizes alone, once its first result was checked."""
        route = self.route
        route.compiled = self.proven(made)
        if self.copies_weight:
            route.halves = apart(route.compiled, "wei")

    def captured(self) -> None:
        """A kernel for a call that a CUDA graph captures, where nothing can be compiled or checked."""
        if settings.sizes != "exact":
            with suppress(Unsupported):
                self.of_any_size("never", loaded=True)
                return
        raise Unsupported("capture:cold", "a kernel cannot be built while a CUDA graph is captured;"
                                          " call once before capturing")

    def proven(self, plan: CompiledDirection) -> CompiledDirection:
        """The plan or its replacement, after the check of its first result."""
        made = self.some.dtype
        if (types := self.route.types) is not None:
            made = types[1] if self.route.direction is Prop.BWD_W else types[2]
        return lower_call.proven(plan, self.route.aligned,
                              lambda: self.some.new_empty_strided(*self.own, dtype=made), **self.operands)


def layer_of(params: Params, types: lower_call.Types, weight: Sequence[int],
             device: torch.device) -> Hashable:
    """What the calls of a layer of any size share, whatever they compute."""
    return params, types, tuple(weight), device


def refused(route: ConvCall, error: Unsupported, x: torch.Tensor) -> None:
    """Send the route of a call with the input ``x`` to torch, because it has no kernel, or none yet."""
    route.refuse(error)
    if route.over is not None:
        lower_call.expect_checks(x.device, x.dtype)


def like(tensor: torch.Tensor) -> lower_call.Like:
    return tuple(tensor.shape), tensor.stride()


def choose_plan(
    prop: Prop,
    params: Params,
    dtype: lower_call.Types,
    tensors: Sequence[lower_call.Like],
    channels_last: bool,
    device: torch.device,
    epilogue: str,
    bias: torch.dtype | None,
    aligned: bool,
    flags: lower_call.Flags,
    mode: str,
) -> tuple[ChosenPlan[CompiledDirection], LayerRegistry]:
    """The plan for the sizes of a call, and its registry. ``tensors``: input, weight and result of the
    layer, each as shape and strides; ``dtype``: of all three, or of each. Unsupported, with a reason,
    where there is no plan, or none yet."""
    near, weight, far = tensors
    orders = tuple([order_of(*t, channels_last) for t in tensors])
    key = (prop, params, dtype, near[0][1], far[0][1], weight[0], orders, device, epilogue, bias, aligned,
           flags)
    found = size_policy.registry_of(
        key, lambda: _registry(prop, params, dtype, tensors, orders, device, epilogue, bias, aligned,
                               flags))
    src = far[0] if params.transposed else near[0]
    with lower_call.or_unsupported(found.title):
        return found.choose((src[0], *src[2:]), mode), found


def _registry(prop: Prop, params: Params, dtype: lower_call.Types, tensors: Sequence[lower_call.Like],
              orders: tuple[Order, ...], device: torch.device, epilogue: str, bias: torch.dtype | None,
              aligned: bool, flags: lower_call.Flags) -> LayerRegistry:
    """The registry of a layer. Raises ProblemError where it has none."""
    if not params.symmetric and any(s > 1 for s in params.stride):
        raise ProblemError("two paddings of a dimension differ, and it has a stride")
    if None in orders:
        raise ProblemError("a tensor has gaps, or lies in another order than torch's")
    kinds = [lower_call.RESULTS[t] for t in lower_call.each(dtype)]
    dense = [(shape, Layout.dense(kind, shape, order).strides() or ())
             for kind, (shape, _), order in zip(kinds, tensors, orders, strict=True)]
    bia = None if bias is None else lower_call.DTYPES[bias]
    problem = lower_call.describe(dtype, dense[0], dense[1], dense[2], params, flags.math)
    return LayerRegistry(problem, prop, lower_call.target_of(device),
                         Epilogue.parse(epilogue, None if bia is kinds[-1] else bia), aligned,
                         flags.deterministic)
