"""Torch border, step 4. The hit path: one dictionary from what a call looks like to what runs it.

A key holds shapes, strides, dtypes, devices, the numbers of the convolution, pointer alignment and
torch's numeric switches. Its value is a Route, made once by the checks, the compiler and the
fallback policy, and run with nothing more to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from transconv.errors import Unsupported
from transconv.problem import Prop
from transconv.torch_ops import arguments, execute, shapes, stats
from transconv.torch_ops.arguments import Ints, Params
from transconv.torch_ops.settings import settings

if TYPE_CHECKING:
    from transconv.compiler import Compiled

LIMIT = 4096  # routes kept; beyond it the oldest quarter goes
ALIGNMENT = 15  # pointers that share these zero bits may be read 16 bytes at a time


class Request:
    """The numbers as a caller gave them, one object for each distinct set: compared by identity.

    ``name`` and ``ndims`` say which public function was called; the registered operators have none.
    """

    __slots__ = (
        "dilation",
        "groups",
        "name",
        "ndims",
        "output_padding",
        "padding",
        "stride",
        "transposed",
    )

    def __init__(self, name: str, ndims: int, stride: Ints, padding: Ints | str, dilation: Ints,
                 transposed: bool, output_padding: Ints, groups: int) -> None:
        self.name = name
        self.ndims = ndims
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.transposed = transposed
        self.output_padding = output_padding
        self.groups = groups

    def resolve(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Params:
        """Check a batched call, in torch's order. RuntimeError as torch's."""
        p = arguments.resolve(
            x.shape, w.shape, None if b is None else b.shape, self.stride, self.padding,
            self.dilation, self.transposed, self.output_padding, self.groups,
            two_sided=not self.name)
        arguments.check_tensors(x, w, b)
        return p


_requests: dict[Hashable, Request] = {}
_routes: dict[Hashable, Any] = {}


def request(name: str, ndims: int, stride: Sequence[int], padding: Sequence[int] | str,
            dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
            groups: int) -> Request:
    """The one Request of these numbers."""
    key = (name, ndims, tuple(stride), padding if isinstance(padding, str) else tuple(padding),
           tuple(dilation), bool(transposed), tuple(output_padding), int(groups))
    found = _requests.get(key)
    if found is None:
        found = _requests.setdefault(key, Request(*key))
    return found


class Route:
    """One tensor that one kernel computes, or the reason why torch does."""

    __slots__ = (
        "adds_bias",
        "aligned",
        "calls",
        "channels_last",
        "compiled",
        "copies_bias",
        "direction",
        "params",
        "reason",
        "shape",
        "start",
        "strides",
    )

    def __init__(self, direction: Prop, params: Params, shape: Ints, channels_last: bool) -> None:
        self.direction = direction
        self.params = params
        self.shape = shape
        self.channels_last = channels_last
        self.strides = shapes.result_strides(shape, channels_last)
        self.compiled: Compiled | None = None
        self.reason = ""
        self.adds_bias = False  # after the kernel, because its epilogue cannot
        self.copies_bias = False
        self.aligned = False
        # What starts the kernel on a device with nothing left to decide, after its first launch.
        self.start: tuple[int, Callable[[Any, Any, Any], None]] | None = None
        # A plain `+= 1` on it holds no call, so threads of one interpreter lose no count.
        self.calls = 0

    def count(self) -> None:
        """Move the calls so far into the totals."""
        calls, self.calls = self.calls, 0
        if calls:
            stats.add(not self.reason, self.reason or self.direction.value, calls)

    def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """Run a forward route: a fresh result."""
        self.calls += 1
        compiled = self.compiled
        if compiled is None:
            y = execute.aten_forward(x, w, b, self.params)
            return shapes.with_result_strides(y, self.channels_last)
        if b is None and self.start is not None and self.start[0] == _current_device() and not (
                x.is_neg() or w.is_neg()):
            y = _empty(self.shape, self.strides, x.dtype)
            if self.params.transposed:
                self.start[1](y, w, x)
            else:
                self.start[1](x, w, y)
            return y
        y = x.new_empty_strided(self.shape, self.strides)
        src, dst = (y, x) if self.params.transposed else (x, y)
        if b is None:
            execute.launch(compiled, src, w, dst)
            if self.start is None and x.is_cuda:
                found = compiled.starter(x.device.index, self.aligned)
                self.start = (x.device.index, found) if found else None
        elif self.adds_bias:
            execute.launch(compiled, src, w, dst)
            y += b.view(-1, *[1] * (x.dim() - 2))
        else:
            execute.launch(compiled, src, w, dst, bia=b.contiguous() if self.copies_bias else b)
        return y


def _allocator() -> Callable[[Ints, Ints, torch.dtype], torch.Tensor]:
    """How to make an empty tensor on the current device: the entry that torch's compiled code uses
    takes a third of the time of the public one."""
    lean = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found = getattr(lean, "_empty_strided_cuda", None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype,
                                                             device="cuda")


_empty = _allocator()
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


class BackwardRoutes:
    """The gradients of one call: a route for each wanted tensor, torch for what is left over."""

    __slots__ = ("aten", "aten_mask", "bias_dims", "channels_last", "data", "params", "weight")

    def __init__(self, params: Params, channels_last: bool, data: Route | None,
                 weight: Route | None, wants_bias: bool, rank: int) -> None:
        self.params = params
        self.channels_last = channels_last
        self.data = data if data and data.compiled else None
        self.weight = weight if weight and weight.compiled else None
        self.aten = [r for r in (data, weight) if r and not r.compiled]
        # torch sums the bias gradient on the way if it computes something anyway.
        bias_with_aten = wants_bias and bool(self.aten)
        self.aten_mask = (data in self.aten, weight in self.aten, bias_with_aten)
        self.bias_dims = [0, *range(2, rank)] if wants_bias and not bias_with_aten else None

    def routes(self) -> list[Route]:
        return [r for r in (self.data, self.weight, *self.aten) if r]

    def run(self, grad: torch.Tensor, x: torch.Tensor,
            w: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx: torch.Tensor | None = None
        dw: torch.Tensor | None = None
        db: torch.Tensor | None = None
        if self.aten:
            dx, dw, db = self._run_aten(grad, x, w)
        if self.data:
            dx = self._launch(self.data, x, (None, w, grad))
        if self.weight:
            dw = self._launch(self.weight, w, (x, None, grad))
        if self.bias_dims:
            db = grad.sum(self.bias_dims)
        return dx, dw, db

    def _run_aten(self, grad: torch.Tensor, x: torch.Tensor,
                  w: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for route in self.aten:
            route.calls += 1
        found = execute.aten_backward(grad, x, w, self.params, self.aten_mask)
        dx, dw = (None if t is None else shapes.with_result_strides(t, self.channels_last)
                  for t in found[:2])
        return dx, dw, found[2]

    def _launch(self, route: Route, like: torch.Tensor,
                tensors: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        route.calls += 1
        result = like.new_empty_strided(route.shape, route.strides)
        near, w, far = (result if t is None else t for t in tensors)
        src, dst = (far, near) if self.params.transposed else (near, far)
        assert route.compiled is not None
        execute.launch(route.compiled, src, w, dst)
        return result


# -- making routes ---------------------------------------------------------------------------------


def compile_route(route: Route, near: torch.Tensor | None, weight: torch.Tensor | None,
                  far: torch.Tensor | None, epilogue: str, aligned: bool, flags: execute.Flags,
                  **extra: torch.Tensor) -> None:
    """Give the route a kernel whose first result was checked; Unsupported if there is none. Of the
    tensors, the one that the route makes is None; ``extra`` is what the epilogue reads."""
    some = near if near is not None else weight
    assert some is not None
    device, own = some.device, (route.shape, route.strides)
    if execute.capturing(device):
        raise Unsupported("capture:cold", "a kernel cannot be built while a CUDA graph is captured;"
                                          " call once before capturing")
    shapes_of = [own if t is None else like(t) for t in (near, weight, far)]
    problem = execute.describe(some.dtype, shapes_of[0], shapes_of[1], shapes_of[2], route.params,
                               flags.math)
    compiled = execute.planned(problem, route.direction, device, epilogue, aligned,
                               flags.deterministic)
    src, dst = (far, near) if route.params.transposed else (near, far)
    operands = {name: t for name, t in (("src", src), ("wei", weight), ("dst", dst))
                if t is not None}
    route.aligned = aligned
    route.compiled = execute.proven(compiled, aligned, lambda: some.new_empty_strided(*own),
                                    **operands, **extra)


def settle(route: Route, why: list[str], message: str = "") -> None:
    """Send the route to torch, as far as the policy allows."""
    route.reason = why[0]
    for reason in why:
        stats.announce(reason, message)


def like(tensor: torch.Tensor) -> execute.Like:
    return tuple(tensor.shape), tensor.stride()


def make_forward(params: Params, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None,
                 flags: execute.Flags, aligned: bool) -> Route:
    """Decide who computes a checked forward call."""
    route = Route(Prop.BWD_D if params.transposed else Prop.FWD, params,
                  shapes.output_shape(x.shape, w.shape, params), shapes.channels_last_result(x, w))
    why = execute.reasons(x, w)
    if why:
        settle(route, why)
        return route
    route.copies_bias = b is not None and not b.is_contiguous()
    try:
        if b is not None:
            try:
                compile_route(route, x, w, None, "bias", aligned, flags, bia=b.contiguous())
                return route
            except Unsupported:
                route.adds_bias = True
        compile_route(route, x, w, None, "", aligned, flags)
    except Unsupported as error:
        settle(route, [error.reason], error.message)
    return route


def make_backward(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
                  mask: Sequence[bool], flags: execute.Flags, aligned: bool) -> BackwardRoutes:
    """Decide who computes which gradient."""
    channels_last = shapes.channels_last_result(x, w)
    made: list[Route | None] = [None, None]
    why = execute.reasons(x, w)
    data_direction = Prop.FWD if params.transposed else Prop.BWD_D
    for at, (direction, wanted) in enumerate(((data_direction, x), (Prop.BWD_W, w))):
        if not mask[at]:
            continue
        route = made[at] = Route(direction, params, tuple(wanted.shape), channels_last)
        if why:
            settle(route, why)
            continue
        near, weight = (None, w) if at == 0 else (x, None)
        try:
            compile_route(route, near, weight, grad, "", aligned, flags)
        except Unsupported as error:
            settle(route, [error.reason], error.message)
    return BackwardRoutes(params, channels_last, made[0], made[1], mask[2], grad.dim())


# -- looking routes up -----------------------------------------------------------------------------


def forward_key(req: Request, x: torch.Tensor, w: torch.Tensor,
                b: torch.Tensor | None) -> tuple[Hashable, execute.Flags, bool]:
    """The key of a forward call, and the two parts of it that are not seen in the tensors."""
    flags = execute.flags(x.dtype)
    if b is None:
        aligned = not (x.data_ptr() | w.data_ptr()) & ALIGNMENT
        return (req, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype,
                w.device, aligned, flags), flags, aligned
    aligned = not (x.data_ptr() | w.data_ptr() | b.data_ptr()) & ALIGNMENT
    return (req, x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
            aligned, flags, b.shape, b.stride(), b.dtype, b.device), flags, aligned


def find(key: Hashable) -> Any:
    """The route under a key, or None."""
    return _routes.get(key)


def add_forward(key: Hashable, req: Request, x: torch.Tensor, w: torch.Tensor,
                b: torch.Tensor | None, flags: execute.Flags, aligned: bool) -> Any:
    """Make the route of a batched forward call; RuntimeError as torch's if the call is wrong."""
    route = make_forward(req.resolve(x, w, b), x, w, b, flags, aligned)
    return _keep(key, route, [route])


def forward_route(req: Request, x: torch.Tensor, w: torch.Tensor,
                  b: torch.Tensor | None) -> Any:
    """The route of a batched forward call, found or made."""
    key, flags, aligned = forward_key(req, x, w, b)
    return find(key) or add_forward(key, req, x, w, b, flags, aligned)


def backward(params: Params, grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor,
             mask: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of input, weight and bias of a checked call; None where ``mask`` is False."""
    flags = execute.flags(x.dtype)
    aligned = not (grad.data_ptr() | x.data_ptr() | w.data_ptr()) & ALIGNMENT
    key = (params, grad.shape, grad.stride(), grad.dtype, x.shape, x.stride(), x.dtype, x.device,
           w.shape, w.stride(), aligned, flags, *mask)
    routes = _routes.get(key)
    if routes is None:
        routes = make_backward(params, grad, x, w, mask, flags, aligned)
        routes = _keep(key, routes, routes.routes())
    found: tuple[torch.Tensor | None, ...] = routes.run(grad, x, w)
    return found


def kept(key: Hashable, make: Callable[[], Route]) -> Any:
    """The route under ``key``, made if there is none yet."""
    route = _routes.get(key)
    if route is None:
        route = make()
        route = _keep(key, route, [route])
    return route


def _keep(key: Hashable, value: Any, routes: list[Route]) -> Any:
    if any(r.reason == "capture:cold" for r in routes):
        for r in routes:
            stats.add(False, r.reason, 1)
        return value  # outside the capture a kernel may be built
    with stats.lock:
        value = _routes.setdefault(key, value)
        old = list(_routes)[: LIMIT // 4] if len(_routes) > LIMIT else []
        dropped = [_routes.pop(k) for k in old]
    for item in dropped:
        _count(item)
    return value


def _count(item: Route | BackwardRoutes) -> None:
    for route in [item] if isinstance(item, Route) else item.routes():
        route.count()


def forget() -> None:
    """Drop every route; counts stay. Compiled kernels stay with the compiler."""
    with stats.lock:
        dropped = list(_routes.values())
        _routes.clear()
    for item in dropped:
        _count(item)


def counted(reset: bool = False) -> stats.Stats:
    """Who computed how many results: see Stats."""
    with stats.lock:
        items = list(_routes.values())
    for item in items:
        _count(item)
    return stats.totals(reset)


settings.on_change(forget)
