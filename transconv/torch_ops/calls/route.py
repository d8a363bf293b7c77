"""The route of one result: a kernel, or torch and the reason why.

It is made once (calls/select_impl.py) and run many times. After the first launch the kernel's start
function is bound to it, so that a call makes the result and starts the kernel, and nothing else.

Gradients have a route for each wanted tensor. Layers that are known have routes for new sizes: the general
way (calls/select_impl.py) decides a call at one size. Calls of the same layer at other sizes differ in
their shapes alone: the registry that answers them and what starts its plans are kept under a key without
sizes. A new size then costs this look-up, the choice among the plans, and a route. Where something is open
(a plan that has not run yet, a size that none takes, shapes that do not fit), the slow path decides.

A first call mostly waits for memory that other work pushed out of the processor's caches: what it runs is
few functions, most of them written for the layer (``function_of``), and it makes few objects."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from transconv.calls.guard import current_device as current_device
from transconv.calls.guard import start_of
from transconv.calls.route_cache import Route
from transconv.calls.settings import settings
from transconv.calls.size_policy import LIMIT
from transconv.conv import CompiledDirection, Prop
from transconv.ir import function_of
from transconv.runtime import torch_internals
from transconv.torch_ops import arguments
from transconv.torch_ops.arguments import Ints, Params, order_of
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.conversion import aten_convolutions, inference

if TYPE_CHECKING:
    from transconv.calls.size_policy import SizeChoice, SizeTrial
    from transconv.conv import LayerRegistry
    from transconv.runtime import RegisteredPlan, WeightPrepack

Run = Callable[..., torch.Tensor]  # from the given tensors to the computed one
Begin = Callable[[Ints], Callable[..., None]]  # from sizes to what starts a plan for them
# Of the result's gradient, input and weight; None where they are of another kind.
Gradients = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], "tuple[torch.Tensor | None, ...] | None"]


def laid_out(made: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """torch's result with the strides of the rule; the common case, that it has them, is tested first."""
    if not channels_last and made.is_contiguous():
        return made
    return arguments.with_result_strides(made, channels_last)


_new = object.__new__
_empty = torch_internals.quickest()


class RouteEpilogue(NamedTuple):
    """What follows the sums of a route, behind a bias or with it.

    ``words``: as a kernel's epilogue is written; ``names``: those of its operands in the plan; ``reads``,
    of a call's weight and what follows it: these operands, as the kernel reads them; ``computed``: what
    torch computes, of the whole call; ``shapes``: in which a launch by names sees the operands;
    ``biased``: whether there is a bias among the tensors; ``picks``: for entries, the argument or else the
    number of each operand, None where operands are copied in every call."""

    words: str
    names: tuple[str, ...]
    reads: Callable[..., Sequence[torch.Tensor]]
    computed: Callable[..., torch.Tensor]
    shapes: Sequence[Ints] = ()
    activation: str = ""
    biased: bool = True
    picks: tuple[tuple[str, torch.Tensor | None], ...] | None = None

    def named(self, read: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The operands by the kernel's names, in its shapes."""
        if self.shapes:
            read = [t.view(shape) for t, shape in zip(read, self.shapes, strict=True)]
        return dict(zip(self.names, read, strict=True))


class ConvCall(Route):
    """The route of one tensor, which one kernel of a direction computes, or torch."""

    __slots__ = (
        "adds_bias",
        "channels_last",
        "choice",
        "compiled",
        "copies",
        "direction",
        "epilogue",
        "far",
        "gradients",
        "halves",
        "near",
        "params",
        "plain",
        "registry",
        "rival",
        "shape",
        "start",
        "strides",
        "trains",
        "trial",
        "types",
        "whole",
    )

    def __init__(
        self,
        direction: Prop,
        params: Params,
        shape: Ints,
        channels_last: bool,
        epilogue: RouteEpilogue | None = None,
    ) -> None:
        super().__init__()
        self.epilogue = epilogue  # None: a bias, if one is given
        # The route of the sums alone, where torch computes what follows them.
        self.plain: ConvCall | None = None
        self.direction = direction
        self.params = params
        self.shape = shape
        self.channels_last = channels_last
        self.strides = arguments.result_strides(shape, channels_last)
        # The problem's names of the layer's input and of its result.
        self.near, self.far = ("dst", "src") if params.transposed else ("src", "dst")
        # Those of the layer's input, weight and result; None where they are one.
        self.types: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None
        self.compiled: CompiledDirection | None = None
        self.halves: WeightPrepack[Any] | None = None  # where it copies the weight first
        self.registry: LayerRegistry | None = None  # where sizes are arguments of its kernel
        # Where earlier sizes decide which kernel answers: what is known of this one, and while its own
        # kernel is timed against one for any size, the trial and the route of that one.
        self.choice: SizeChoice | None = None
        self.trial: SizeTrial | None = None
        self.rival: ConvCall | None = None
        self.whole = False  # of integers, for which another route is found
        self.trains = False  # a call asked for gradients, which were then compiled ahead
        self.adds_bias = False  # after the kernel, because its epilogue cannot
        self.copies = False  # operands of the epilogue, which the kernel reads in another order
        # From the given tensors to the result with nothing left to decide, on `device` as the
        # current one. Bound after the first launch.
        self.start: Run | None = None
        # `functions` are those of autograd, by the type they cast to and whether they are for `start`.
        # Entries of the gradients that were seen, by the wanted ones: see calls/call_entries.py.
        self.gradients: dict[tuple[bool, ...], Gradients] = {}

    @property
    def name(self) -> str:
        return self.direction.value

    @property
    def any_size(self) -> bool:
        return self.registry is not None

    @property
    def asks_own(self) -> bool:
        """Whether the kernel that it has, or waits for, is to be one of its own size."""
        return settings.reach != "any" if self.choice is None else self.choice.own

    def count(self) -> None:
        super().count()
        for other in (self.plain, self.rival):
            if other is not None:
                other.count()

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *more: Any
    ) -> torch.Tensor:
        """A fresh result of a forward route; ``more``: what else its epilogue reads."""
        behind, start = self.epilogue, self.start
        made = None if self.types is None else self.types[2]  # None: of the input's type
        if behind is not None and self.plain is not None:
            return behind.computed(x, w, b, *more)
        if behind is not None:
            read, names = behind.reads(w, b, *more), behind.names
        elif b is None or self.adds_bias:
            read, names = (), ()
        else:
            read, names = (b.contiguous() if self.copies else b,), ("bia",)
        if start is None and self.any_size:  # the kernel may have run for other sizes
            self.bind(x, made or x.dtype, self.near, "wei", *names, self.far)
            start = self.start
        if start is not None and current_device() == self.device:
            y = start(x, w, *read)
        elif self.whole:
            return aten_convolutions.whole_forward(x, w, b, self.params)
        else:
            self.calls += 1
            if self.compiled is None:
                if behind is not None:
                    return behind.computed(x, w, b, *more)
                return laid_out(aten_convolutions.aten_forward(x, w, b, self.params), self.channels_last)
            y = x.new_empty_strided(self.shape, self.strides, dtype=made)
            extra = dict(zip(names, read, strict=True)) if behind is None else behind.named(read)
            self.launch({self.near: x, "wei": w, self.far: y, **extra})
            self.bind(x, y.dtype, self.near, "wei", *names, self.far)
        if self.adds_bias and b is not None:
            y += b.view(-1, *[1] * (x.dim() - 2))
        return y

    def launch(self, tensors: dict[str, torch.Tensor]) -> None:
        """Run the plan on tensors by name; copies of the weight that exist are not made again."""
        halves, compiled = self.halves, self.compiled
        assert compiled is not None
        made = None if halves is None else inference.find(halves, tensors["wei"])
        if halves is None or made is None:
            lower_call.launch(compiled, **tensors)
        else:
            names = (c.name for c in halves.copies)
            lower_call.launch(halves.rest, **tensors, **dict(zip(names, made, strict=True)))

    def lay_out(self, w: torch.Tensor) -> None:
        """Make the copies of a frozen weight, where the plan begins with such copies."""
        halves = (self if self.plain is None else self.plain).halves
        if halves is not None:
            inference.lay_out(halves, w)

    def of_given(self) -> Run:
        """``forward`` as a function of the given tensors alone."""
        return self.forward if self.epilogue is None or self.epilogue.biased else self._unbiased

    def _unbiased(self, x: torch.Tensor, w: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self.forward(x, w, None, *more)

    def bound(self) -> Run:
        """The same without further checks, where the kernel has its start function and reads the tensors
        as they are: for the device of `start`."""
        start = None if self.copies or self.adds_bias else self.start
        return start or self.of_given()

    def gradient(
        self, like: torch.Tensor, near: torch.Tensor | None, w: torch.Tensor | None, far: torch.Tensor
    ) -> torch.Tensor:
        """Run a gradient's route; of ``near`` and ``w`` the one that it makes is None, and ``like``
        has its dtype and device."""
        start = self.start
        given = near if w is None else w
        assert given is not None
        first, last = ("wei", self.near) if near is None else (self.near, "wei")
        if start is None and self.any_size:
            self.bind(given, like.dtype, first, self.far, last)
            start = self.start
        if start is not None and current_device() == self.device:
            return start(given, far)
        self.calls += 1
        assert self.compiled is not None
        made = like.new_empty_strided(self.shape, self.strides)
        lower_call.launch(self.compiled, **{first: given, self.far: far, last: made})
        self.bind(given, made.dtype, first, self.far, last)
        return made

    def bind(self, given: torch.Tensor, dtype: torch.dtype, *names: str) -> None:
        """Keep the kernel's start function. ``names``: the plan's names of a call's tensors in
        order, then of the result; ``given`` is any of the former."""
        if self.start is not None or self.compiled is None:
            return
        device = given.device.index
        begin = self.compiled.starter(device, self.aligned, names)
        if begin is None:  # no kernel of a device is kept, as on the CPU
            return
        if self.rival is not None:
            self.rival.bind(given, dtype, *names)
        if self.halves is not None:
            begin = inference.starter(self.halves, device, self.aligned, names, begin)
        self._starts(begin, device, len(names), dtype)

    def _starts(self, begin: Callable[..., None], device: int, count: int, dtype: torch.dtype) -> None:
        self.device = device
        self.functions.clear()
        start = start_of(count - 1)(self, self.shape, self.strides, begin, dtype, _empty)
        if self.trial is not None and self.rival is not None:
            start = self.trial.alternating(start, self.rival.start)
        self.start = start

    def resized(
        self,
        shape: Ints,
        strides: Ints,
        compiled: CompiledDirection,
        begin: Callable[..., None],
        device: int,
        count: int,
        dtype: torch.dtype,
    ) -> ConvCall:
        """The route of a call that differs in its sizes alone, of which ``count`` tensors ``begin`` starts
        the plan. This one counts its calls."""
        made: ConvCall = _new(ConvCall)
        made.direction, made.params, made.channels_last = self.direction, self.params, self.channels_last
        made.shape, made.strides, made.near, made.far = shape, strides, self.near, self.far
        made.types, made.aligned, made.registry = self.types, self.aligned, self.registry
        made.compiled, made.device, made.halves, made.reason = compiled, device, None, ""
        made.whole = made.trains = made.adds_bias = made.copies = False
        made.over = made.epilogue = made.plain = made.choice = made.trial = made.rival = None
        made.functions, made.gradients, made.calls = {}, self.gradients, 0
        made.start = start_of(count - 1)(self, shape, strides, begin, dtype, _empty)
        return made


class RouteMatch(NamedTuple):
    """The route of a call, whether it was known before, and what of its key is not in the tensors."""

    route: ConvCall
    known: bool
    flags: lower_call.Flags
    aligned: bool


class BackwardRoutes:
    """The gradients of one call: a route for each wanted tensor, torch for what is left over."""

    __slots__ = ("aten", "aten_mask", "bias_dims", "channels_last", "data", "layer", "params", "weight")

    def __init__(
        self,
        params: Params,
        channels_last: bool,
        data: ConvCall | None,
        weight: ConvCall | None,
        wants_bias: bool,
        rank: int,
    ) -> None:
        self.params = params
        self.channels_last = channels_last
        self.layer: LayerEntry | None = None  # whose calls of other sizes have routes made from these
        self.data = data if data and data.compiled else None
        self.weight = weight if weight and weight.compiled else None
        self.aten = [r for r in (data, weight) if r and not r.compiled]
        # torch sums the bias gradient too if it computes another gradient anyway.
        bias_with_aten = wants_bias and bool(self.aten)
        self.aten_mask = (data in self.aten, weight in self.aten, bias_with_aten)
        self.bias_dims = [0, *range(2, rank)] if wants_bias and not bias_with_aten else None

    def resized(self, data: ConvCall | None, weight: ConvCall | None, layer: LayerEntry) -> BackwardRoutes:
        """The gradients of a call of the layer that differs in its sizes alone; kernels compute them."""
        made: BackwardRoutes = _new(BackwardRoutes)
        made.params, made.channels_last, made.data, made.weight = (
            self.params,
            self.channels_last,
            data,
            weight,
        )
        made.aten, made.aten_mask, made.bias_dims = self.aten, self.aten_mask, self.bias_dims
        made.layer = layer
        return made

    def routes(self) -> list[ConvCall]:
        return [r for r in (self.data, self.weight, *self.aten) if r]

    def run(self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx: torch.Tensor | None = None
        dw: torch.Tensor | None = None
        db: torch.Tensor | None = None
        if self.aten:
            dx, dw, db = self._run_aten(grad, x, w)
        if self.data:
            dx = self.data.gradient(x, None, w, grad)
        if self.weight:
            dw = self.weight.gradient(w, x, None, grad)
        if self.bias_dims:
            db = lower_call.bias_gradient(grad, w, self.params)
        return dx, dw, db

    def _run_aten(
        self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        for route in self.aten:
            route.calls += 1
        found = aten_convolutions.aten_backward(grad, x, w, self.params, self.aten_mask)
        dx, dw = (None if t is None else laid_out(t, self.channels_last) for t in found[:2])
        return dx, dw, found[2]

    def bound(self) -> tuple[str, dict[str, Any]]:
        """The line of an entry that runs them, and what it mentions: on the device of these as the current
        one, without ``run`` where every kernel has its start function."""
        there = [r for r in (self.data, self.weight) if r is not None]
        summed = settings.invariant and self.bias_dims  # by a kernel
        if self.aten or not there or summed or any(r.start is None for r in there):
            return "return run(grad, x, w)", {"run": self.run}
        made = (
            "data(w, grad)" if self.data else "None",
            "weight(x, grad)" if self.weight else "None",
            f"grad.sum({self.bias_dims})" if self.bias_dims is not None else "None",
        )
        return f"return {', '.join(made)}", {
            "data": self.data and self.data.start,
            "weight": self.weight and self.weight.start,
        }


class LayerDirection:
    """A route of one size, from which those of other sizes are made. ``names``: the plans' names of a
    call's tensors, the result last; ``dtype``: that of the result."""

    __slots__ = ("begins", "device", "dtype", "like", "names")

    def __init__(self, like: ConvCall, device: torch.device, dtype: torch.dtype, *names: str) -> None:
        self.like, self.device, self.dtype, self.names = like, device, dtype, names
        self.begins: dict[RegisteredPlan[CompiledDirection], Begin] = {}

    def route(self, sizes: Ints, shape: Ints, strides: Ints) -> ConvCall | None:
        """The route for sizes, whose result has this shape and these strides; None if a plan is missing or
        has not run yet, or if they are to have a kernel of their own."""
        like = self.like
        choice = None if like.choice is None else like.choice.among.of(sizes)
        if choice is not None and choice.own:
            return None
        best = like.registry.fastest(sizes)  # type: ignore[union-attr]
        if best is None:
            return None
        begin = self.begins.get(best) or self._begin(best)
        if begin is None:
            return None
        made = like.resized(
            shape, strides, best.plan, begin(sizes), self.device.index, len(self.names), self.dtype
        )
        if choice is not None and choice.is_counting:
            made.choice, made.over = choice, choice.over
        return made

    def _begin(self, best: RegisteredPlan[CompiledDirection]) -> Begin | None:
        aligned = self.like.aligned
        if not lower_call.is_loaded(best.plan, self.device, aligned):
            return None
        begin = best.plan.starter_at(self.device.index, aligned, self.names)
        if begin is not None:
            self.begins[best] = begin
        return begin


class LayerEntry:
    """What the calls of a layer share: of its forward pass (``data``), or of its gradients; ``like`` has
    these for one size. ``known``: what its calls run, by shapes and strides; ``counted``: the same while
    calls of the size are counted. ``lies``, of sizes: shape and
    strides of the layer's input, then those of its result."""

    __slots__ = (
        "channels_last",
        "counted",
        "data",
        "known",
        "lies",
        "like",
        "open",
        "orders",
        "params",
        "rank",
        "weight",
    )

    def __init__(
        self,
        x: torch.Tensor,
        data: LayerDirection | None,
        weight: LayerDirection | None = None,
        gradients: BackwardRoutes | None = None,
    ) -> None:
        some = data or weight
        assert some is not None and some.like.compiled is not None
        like, required = some.like, some.like.compiled.required
        assert required is not None
        self.data, self.weight, self.params, self.rank = data, weight, like.params, x.dim()
        self.like, self.known = gradients, dict[Hashable, Any]()
        self.counted: dict[Hashable, Any] = {}
        tensors = {t.name: t for t in required.tensors}
        both = tensors[like.near], tensors[like.far]
        self.lies: Callable[..., lower_call.Sizes] = function_of(
            [e for t in both for e in (*t.bounds, *t.steps)], required.names, self._spelled
        )
        self.orders = tuple([tuple([b.dim for b in t.layout.blocks]) for t in both])
        self.channels_last = like.channels_last
        # With one channel the same strides may be of both orders: see shapes.suggests_channels_last.
        self.open = self.rank > 3 and x.shape[1] == 1

    def _spelled(self, texts: list[str]) -> tuple[Sequence[tuple[str, str]], str]:
        """The text of shape and strides of two tensors, of those of their numbers."""
        each = [texts[n : n + self.rank] for n in range(0, len(texts), self.rank)]
        return [], ", ".join(f"({', '.join(one)},)" for one in each)

    def routes(self) -> list[ConvCall]:
        """Those that count its calls."""
        return [one.like for one in (self.data, self.weight) if one is not None]

    def keep(self, key: Hashable, found: Any, counts: bool) -> Any:
        """Keep what calls of these shapes and strides run, if there is something; ``counts``: while they
        are counted."""
        if found is not None:
            kept = self.counted if counts else self.known
            if len(kept) >= LIMIT:
                kept.clear()
            kept[key] = found
        return found

    def count(self, key: Hashable) -> Any:
        """What calls of these shapes and strides run while they are counted, this one, too; None where
        they are not, or no longer."""
        found = self.counted.get(key)
        if found is not None and any([r.over is not None and r.over() for r in found.routes()]):
            self.counted.pop(key, None)
            return None
        return found

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> ConvCall | None:
        """The route of a forward call, made for its sizes."""
        data, given, strides = self.data, x.shape, x.stride()
        assert data is not None
        made: ConvCall | None = self.count((given, strides)) if self.counted else None
        if made is not None:
            return made
        src = arguments.output_shape(given, w.shape, self.params) if self.params.transposed else given
        n, _, *sides = src
        sizes = n, *sides
        shape, steps, *far = self.lies(*sizes)
        if ((strides != steps or self.open) and not self._lie_so(x, w)) or given != shape:
            return None
        made = data.route(sizes, *far) or self._own(sizes, strides == steps)
        self.keep((given, strides), made, made is not None and made.over is not None)
        return made

    def _own(self, sizes: Ints, as_stepped: bool) -> ConvCall | None:
        """The route of the sizes' own kernel, if that is settled and runs; ``as_stepped``: for tensors
        that lie as the kernel says."""
        choice = None if self.data is None else self.data.like.choice
        route: ConvCall | None = None if choice is None else choice.among.of(sizes).route
        ready = (
            route is not None
            and route.start is not None
            and route.over is None
            and not (route.adds_bias or route.copies)
        )
        return route if ready and as_stepped else None

    def backward(
        self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, key: lower_call.Sizes
    ) -> BackwardRoutes | None:
        """The routes of the gradients, found or made. ``key``: how input and gradient lie."""
        given, strides, made, steps = key
        found: BackwardRoutes | None = self.known.get(key)
        if found is not None or (self.counted and (found := self.count(key)) is not None):
            return found
        data, weight = self.data, self.weight
        n, _, *sides = made if self.params.transposed else given
        sizes = n, *sides
        near, near_steps, far, far_steps = self.lies(*sizes)
        if (
            ((strides != near_steps or steps != far_steps or self.open) and not self._lie_so(x, w, grad))
            or given != near
            or made != far
        ):
            return None
        dx = dw = None
        if data is not None and (dx := data.route(sizes, near, near_steps)) is None:
            return None
        if weight is not None:
            like = weight.like
            if (dw := weight.route(sizes, like.shape, like.strides)) is None:
                return None
        assert self.like is not None
        counts = (dx is not None and dx.over is not None) or (dw is not None and dw.over is not None)
        kept: BackwardRoutes | None = self.keep(key, self.like.resized(dx, dw, self), counts)
        return kept

    def _lie_so(self, x: torch.Tensor, w: torch.Tensor, *grads: torch.Tensor) -> bool:
        """Whether tensors whose strides are not those of the layer's lie as the layer's all the same."""
        last = arguments.channels_last_result(x, w)
        return last is self.channels_last and all(
            order_of(t.shape, t.stride(), last) == order
            for t, order in zip((x, *grads), self.orders, strict=False)
        )


# -- the plans of a layer -------------------------------------------------------------------------------
