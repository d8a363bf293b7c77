"""Routes for new sizes of layers that are known.

The general way (calls/select_impl.py) decides a call at one size. Calls of the same layer at other sizes
differ in their shapes alone: the registry that answers them and what starts its plans are kept under a key
without sizes. A new size then costs this look-up, the choice among the plans, and a route. Where something
is open (a plan that has not run yet, a size that none takes, shapes that do not fit), the general way
decides.

A first call mostly waits for memory that other work pushed out of the processor's caches: what it runs is
few functions, most of them written for the layer (``function_of``), and it makes few objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from transconv.calls import dynamic_sizes, route_cache
from transconv.calls.dynamic_sizes import LIMIT
from transconv.conv import CompiledDirection, Epilogue, LayerRegistry, Prop
from transconv.ir import Layout, function_of
from transconv.support import ProblemError
from transconv.torch_ops import shapes
from transconv.torch_ops.arguments import Ints, Params
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.calls.backward_routes import BackwardRoutes
from transconv.torch_ops.calls.call_attributes import CallAttributes
from transconv.torch_ops.calls.route import Begin, ConvCall

if TYPE_CHECKING:
    from transconv.runtime import ChosenPlan, RegisteredPlan

Sizes = tuple[Ints, Ints, Ints, Ints]  # shapes and strides of two tensors


class _Direction:
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
        made = like.resized(shape, strides, best.plan, begin(sizes), self.device.index, len(self.names),
                            self.dtype)
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

    __slots__ = ("channels_last", "counted", "data", "known", "lies", "like", "open", "orders", "params",
                 "rank", "weight")

    def __init__(self, x: torch.Tensor, data: _Direction | None, weight: _Direction | None = None,
                 gradients: BackwardRoutes | None = None) -> None:
        some = data or weight
        assert some is not None and some.like.compiled is not None
        like, required = some.like, some.like.compiled.required
        assert required is not None
        self.data, self.weight, self.params, self.rank = data, weight, like.params, x.dim()
        self.like, self.known = gradients, dict[Hashable, Any]()
        self.counted: dict[Hashable, Any] = {}
        tensors = {t.name: t for t in required.tensors}
        both = tensors[like.near], tensors[like.far]
        self.lies: Callable[..., Sizes] = function_of(
            [e for t in both for e in (*t.bounds, *t.steps)], required.names, self._spelled)
        self.orders = tuple([tuple([b.dim for b in t.layout.blocks]) for t in both])
        self.channels_last = like.channels_last
        # With one channel the same strides may be of both orders: see shapes.suggests_channels_last.
        self.open = self.rank > 3 and x.shape[1] == 1

    def _spelled(self, texts: list[str]) -> tuple[Sequence[tuple[str, str]], str]:
        """The text of shape and strides of two tensors, of those of their numbers."""
        each = [texts[n:n + self.rank] for n in range(0, len(texts), self.rank)]
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
        src = shapes.output_shape(given, w.shape, self.params) if self.params.transposed else given
        n, _, *sides = src
        sizes = n, *sides
        shape, steps, *far = self.lies(*sizes)
        if (strides != steps or self.open) and not self._lie_so(x, w) or given != shape:
            return None
        made = data.route(sizes, *far) or self._own(sizes, strides == steps)
        self.keep((given, strides), made, made is not None and made.over is not None)
        return made

    def _own(self, sizes: Ints, as_stepped: bool) -> ConvCall | None:
        """The route of the sizes' own kernel, if that is settled and runs; ``as_stepped``: for tensors
        that lie as the kernel says."""
        choice = None if self.data is None else self.data.like.choice
        route: ConvCall | None = None if choice is None else choice.among.of(sizes).route
        ready = route is not None and route.start is not None and route.over is None and not (
            route.adds_bias or route.copies)
        return route if ready and as_stepped else None

    def backward(self, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
                 key: Sizes) -> BackwardRoutes | None:
        """The routes of the gradients, found or made. ``key``: how input and gradient lie."""
        given, strides, made, steps = key
        found: BackwardRoutes | None = self.known.get(key)
        if found is not None or self.counted and (found := self.count(key)) is not None:
            return found
        data, weight = self.data, self.weight
        n, _, *sides = made if self.params.transposed else given
        sizes = n, *sides
        near, near_steps, far, far_steps = self.lies(*sizes)
        if ((strides != near_steps or steps != far_steps or self.open) and not self._lie_so(x, w, grad)
                or given != near or made != far):
            return None
        dx = dw = None
        if data is not None and (dx := data.route(sizes, near, near_steps)) is None:
            return None
        if weight is not None:
            like = weight.like
            if (dw := weight.route(sizes, like.shape, like.strides)) is None:
                return None
        assert self.like is not None
        counts = dx is not None and dx.over is not None or dw is not None and dw.over is not None
        return self.keep(key, self.like.resized(dx, dw, self), counts)  # type: ignore[no-any-return]

    def _lie_so(self, x: torch.Tensor, w: torch.Tensor, *grads: torch.Tensor) -> bool:
        """Whether tensors whose strides are not those of the layer's lie as the layer's all the same."""
        last = shapes.channels_last_result(x, w)
        return last is self.channels_last and all(
            order_of(t.shape, t.stride(), last) == order
            for t, order in zip((x, *grads), self.orders, strict=False))


def forward_key(req: CallAttributes, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                flags: lower_call.Flags, aligned: bool) -> Hashable:
    """What calls of a layer share."""
    return (req, x.shape[1], x.stride(1) == 1, x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
            aligned, flags, b is not None and (b.shape, b.stride(), b.dtype, b.device))


def backward_key(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, key: Sizes,
                 mask: Sequence[bool], flags: lower_call.Flags, aligned: bool) -> Hashable:
    """What the gradients of a layer's calls share. ``key`` as for ``LayerEntry.backward``."""
    shape, strides, _, steps = key
    return (params, shape[1], strides[1] == 1, steps[1] == 1, x.dtype, x.device, grad.dtype, grad.device,
            w.shape, w.stride(), w.dtype, w.device, aligned, flags, *mask)


find = route_cache.find_layer


def note_forward(key: Hashable, route: ConvCall, x: torch.Tensor, biased: bool) -> None:
    """Keep the layer of a route that the general way made."""
    if key is not None and _serves(route) and not (route.adds_bias or route.copies):
        data = _Direction(route, x.device, x.dtype, route.near, "wei", *["bia"] * biased, route.far)
        route_cache.keep_layer(key, LayerEntry(x, data))


def note_backward(key: Hashable, routes: BackwardRoutes, x: torch.Tensor) -> None:
    """Keep the layer of routes that the general way made."""
    data, weight = routes.data, routes.weight
    found = [r for r in (data, weight) if r is not None]
    if key is None or not found or routes.aten or not all(map(_serves, found)):
        return
    route_cache.keep_layer(key, LayerEntry(
        x, None if data is None else _Direction(data, x.device, x.dtype, "wei", data.far, data.near),
        None if weight is None else _Direction(weight, x.device, x.dtype, weight.near, weight.far, "wei"),
        routes))


def _serves(route: ConvCall) -> bool:
    """Whether a route's registry answers for other sizes; one that waits for a better kernel does not."""
    if route.registry is None or route.types is not None:
        return False
    return route.over is None or (route.choice is not None and not route.choice.own
                                  and route.registry.is_settled())


# -- the plans of a layer -------------------------------------------------------------------------------

Order = tuple[int, ...] | None


def chosen(
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
    found = dynamic_sizes.registry_of(
        key, lambda: _made(prop, params, dtype, tensors, orders, device, epilogue, bias, aligned, flags))
    src = far[0] if params.transposed else near[0]
    with lower_call.or_unsupported(found.title):
        return found.choose((src[0], *src[2:]), mode), found


def _made(prop: Prop, params: Params, dtype: lower_call.Types, tensors: Sequence[lower_call.Like],
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


def has_gaps(t: torch.Tensor, channels_last: bool) -> bool:
    """Whether a tensor lies so that kernels for any size do not take it: with gaps, expanded, or with its
    dims in another order than torch's."""
    return order_of(t.shape, t.stride(), channels_last) is None


def order_of(shape: Sequence[int], strides: Sequence[int], channels_last: bool) -> Order:
    """The dims of a dense tensor, outermost first, as torch lays tensors out: contiguous or channels last,
    in this order of preference or the other; None for any other tensor."""
    rank = len(shape)
    ways: tuple[tuple[int, ...], ...] = ((*range(rank),), (0, *range(2, rank), 1))
    for order in reversed(ways) if channels_last else ways:
        step = 1
        for dim in reversed(order):
            size = shape[dim]
            if size != 1:
                if strides[dim] != step:
                    break
                step *= size
        else:
            return order
    return None
