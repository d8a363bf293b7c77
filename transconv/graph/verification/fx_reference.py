"""torch's own operators on the graph that the backend was handed, node by node: an answer that no row, no
text and no division into regions has written.

A value is computed where it is asked for, from the nearest ones that are known: inputs, results of
kernels that were compared, results of torch's regions. So each kernel is held against torch on the same
operands, and errors of roundings do not add up along a network.

    x -> conv -> relu -> argmax          known: x, and relu, which a kernel stored
                 ^ known                 argmax is asked for: one operation of torch

A known value is let go behind the last node that may ask for it. No random numbers are drawn, and nothing
is written to: where a value would need that, there is none."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, pi, prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from transconv.torch_ops.conversion.aten_replacement import aten as only_aten

Tensor = torch.Tensor
aten = torch.ops.aten
ORIGIN = "transconv_origin"  # in a node's meta: its name in the graph that was handed over
MADE_OF_NOTHING = {
    getattr(aten, name)
    for name in "empty empty_like empty_strided new_empty new_empty_strided empty_permuted".split()
}
PRODUCTS = {
    getattr(aten, name)
    for name in (
        "mm bmm addmm baddbmm mv dot addmv convolution convolution_backward linear matmul".split()
    )
}
COMPARED = {getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
CLOSE = 4  # spacings
PART = 1 << 24  # bytes of a value above which operations of its elements go part by part
FEW = 1 << 16  # elements of what is computed before such operations, as a scale of features is
ADDED = {getattr(aten, name) for name in ("add", "sub", "rsub")}
_broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
Move = Callable[[Tensor, str, float, float], Tensor]
"""What rounding makes of a tensor of floats: one that is ``given``, or was ``stored``, of which the kernel
that stored it may know more digits; an operand of a ``product``; a ``result``. With the relative spacing
of the type that it has in the graph, and the size below which that type has no more digits."""


class Change(NamedTuple):
    """What rounding makes of values. ``meets``: what is compared is equal where rounding may part it."""

    move: Move
    meets: bool = True


class Unknown(Exception):
    """A value that torch's operators cannot make again; why, in words."""


class RecordedNode(NamedTuple):
    """An operation as it was handed over: later rewriting of the graph does not change it."""

    name: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[str, ...]
    node: fx.Node


class Reference:
    """A graph of AOTAutograd. Its nodes are marked, so that those of a rewritten graph that stand for them
    are known. ``results``: the names of what it returns, None for what is no node; ``written``: of each
    input that it writes to at its end, by its place, the name of the value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.nodes: dict[str, RecordedNode] = {}
        for node in gm.graph.nodes:
            node.meta[ORIGIN] = node.name
            self.nodes[node.name] = RecordedNode(
                node.name,
                node.op,
                node.target,
                node.args,
                node.kwargs,
                tuple([x.name for x in node.all_input_nodes]),
                node,
            )
        self.order = {name: i for i, name in enumerate(self.nodes)}
        self.given = [n.name for n in self.nodes.values() if n.op == "placeholder"]
        ends: Any = [*self.nodes.values()][-1].args[0]
        self.results = [x.name if isinstance(x, fx.Node) else None for x in ends]
        self.written = {
            self.given.index(n.inputs[0]): n.inputs[1]
            for n in self.nodes.values()
            if n.target is aten.copy_.default and n.inputs[0] in self.given and len(n.inputs) == 2
        }
        users: dict[str, int] = dict.fromkeys(self.nodes, 0)
        for n in self.nodes.values():
            for x in n.inputs:
                users[x] += 1
        self.users = users

    def values(self, given: Sequence[Any]) -> Values:
        """The values of a call."""
        return Values(self, dict(zip(self.given, given, strict=True)))


class Values:
    """The values of a call, or of a part of one, that are ``known`` by now, by name. ``pending``: how many
    nodes may still ask for one."""

    def __init__(self, of: Reference, known: dict[str, Any]) -> None:
        self.of = of
        self.known = known
        self.pending = dict(of.users)
        self.settled: set[str] = set()
        for n in reversed([*of.nodes.values()]):
            if n.op == "get_attr":
                self.known[n.name] = getattr(of.gm, n.target)
            elif not self.pending[n.name] and n.op == "call_function" and not _writes(n):
                self.settle(n.name)  # nothing needs it
            elif not self.pending[n.name]:
                self.known.pop(n.name, None)

    def state(self) -> tuple[dict[str, Any], dict[str, int], set[str]]:
        """What is known now, for ``restore``: where a region is run once more."""
        return dict(self.known), dict(self.pending), set(self.settled)

    def restore(self, state: tuple[dict[str, Any], dict[str, int], set[str]]) -> None:
        """Know what was known then."""
        self.known, self.pending, self.settled = state

    def enter(self, name: str, value: Any) -> None:
        """That a value is known; what it was made of may go."""
        if name not in self.known and name in self.pending:
            if self.pending[name]:
                self.known[name] = value
            self.settle(name)

    def settle(self, name: str) -> None:
        left = [name]
        while left:
            at = left.pop()
            if at in self.settled:
                continue
            self.settled.add(at)
            for x in self.of.nodes[at].inputs:
                self.pending[x] -= 1
                if not self.pending[x]:
                    self.known.pop(x, None)
                    left.append(x)

    def needed(self, name: str) -> list[RecordedNode]:
        """The operations that make a value of known ones, operands first. Raises Unknown."""
        found: set[str] = set()
        left = [name]
        while left:
            at = left.pop()
            if at in self.known or at in found:
                continue
            node = self.of.nodes[at]
            if why := _why_not(node):
                raise Unknown(why)
            found.add(at)
            left += node.inputs
        return [self.of.nodes[at] for at in sorted(found, key=self.of.order.__getitem__)]

    def evaluated(
        self,
        nodes: Sequence[RecordedNode],
        wanted: Sequence[str],
        wide: bool = False,
        change: Change | None = None,
    ) -> dict[str, Any]:
        """The values of ``wanted`` nodes, by torch, each other value freed behind its last reader.
        ``wide``: in f64; ``change``: what rounding makes of a value, see verification/agreement.py. Raises
        Unknown."""
        values: dict[str, Any] = {}
        left: dict[str, int] = dict.fromkeys(wanted, 1)
        for node in nodes:
            for x in node.inputs:
                left[x] = left.get(x, 0) + 1
        for name in left.keys() & self.known.keys():
            values[name] = _widened(self.known[name]) if wide else self.known[name]
            if change is not None:
                node = self.of.nodes[name]
                what = "stored" if node.op == "call_function" else "given"
                values[name] = _changed(values[name], change, what, node)
        with torch.no_grad(), only_aten(), without_modes():
            _Evaluation(values, left, wide, change).call(nodes)
        return {name: values[name] for name in wanted}


class _Evaluation:
    """Operations in order. ``values``: what is there; ``left``: of each value the readers to come."""

    def __init__(
        self, values: dict[str, Any], left: dict[str, int], wide: bool, change: Change | None
    ) -> None:
        self.values, self.left, self.wide, self.change = values, left, wide, change
        self.waiting: dict[str, RecordedNode] = {}

    def call(self, nodes: Sequence[RecordedNode]) -> None:
        """Compute all of them. What lies between operations of elements of large values is there in parts
        alone, where rounding is not changed: noise is drawn for a whole value."""
        self.waiting = {node.name: node for node in nodes}
        while self.waiting:
            run = self.run() if self.change is None else []
            if len(run) > 1:
                self.values |= self.called_in_parts(run)
                self.end(run)
            else:
                self.call_one(next(iter(self.waiting.values())))

    def call_one(self, node: RecordedNode) -> None:
        self.values[node.name] = _called(node, self.values, self.wide, self.change)
        self.end([node])

    def end(self, nodes: Sequence[RecordedNode]) -> None:
        """Free what these were the last to read, and what of them nobody reads."""
        for node in nodes:
            del self.waiting[node.name]
            for x in (*node.inputs, node.name):
                self.left[x] = self.left.get(x, 0) - (x != node.name)
                if self.left[x] <= 0:
                    self.values.pop(x, None)

    def run(self) -> list[RecordedNode]:
        """The next operation and those behind it that read its large result, or each other's, element by
        element, and otherwise what is there or is of few elements, which is computed first; none where the
        result is not large, or is made otherwise."""
        run: dict[str, RecordedNode] = {}
        shape = torch.Size()
        for node in [*self.waiting.values()]:
            tensors = [self.values[x] for x in node.inputs if x in self.values]
            here = len(tensors) + sum(x in run for x in node.inputs) == len(node.inputs)
            if not here or not all(isinstance(t, Tensor) for t in tensors):
                break
            if run and not any(x in run for x in node.inputs):
                if sum(t.numel() for t in tensors) > FEW:
                    break
                self.call_one(node)
                continue
            if not _is_elementwise(node):
                break
            own = _broadcast(shape, *[t.shape for t in tensors])
            large = prod(own) * max((t.dtype.itemsize for t in tensors), default=1) > PART
            if own != (shape if run else own) or not (run or large):
                break
            run[node.name], shape = node, own
        return [*run.values()]

    def called_in_parts(self, run: Sequence[RecordedNode]) -> dict[str, Tensor]:
        """The results of a run that others read."""
        given = {x: self.values[x] for node in run for x in node.inputs if x in self.values}
        inside = Counter(x for node in run for x in node.inputs)
        kept = {node.name for node in run if self.left.get(node.name, 0) > inside[node.name]}
        shape = _broadcast(*[t.shape for t in given.values()])
        like = next((t for t in given.values() if t.shape == shape), None)
        dim = next(i for i, n in enumerate(shape) if n > 1)
        rows = shape[dim] * PART // (prod(shape) * max(t.dtype.itemsize for t in given.values()))
        made: dict[str, Tensor] = {}
        for first in range(0, shape[dim], max(1, rows)):
            size = min(max(1, rows), shape[dim] - first)
            parts: dict[str, Any] = {}
            for name, t in given.items():
                at = t.dim() - len(shape) + dim
                parts[name] = t.narrow(at, first, size) if at >= 0 and t.shape[at] > 1 else t
            for node in run:
                parts[node.name] = part = _called(node, parts, self.wide, None)
                if node.name in kept:
                    whole = made.get(node.name)
                    if whole is None:
                        whole = (
                            part.new_empty(shape)
                            if like is None
                            else torch.empty_like(like, dtype=part.dtype)
                        )
                    made.setdefault(node.name, whole).narrow(dim, first, size).copy_(part)
        return made


def _is_elementwise(node: RecordedNode) -> bool:
    """Whether an element of the result is made of one of each operand, which may be broadcast."""
    if not isinstance(node.node.meta.get("val"), Tensor):
        return False
    if node.target is aten._to_copy.default:
        return {*node.kwargs} <= {"dtype"}
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and "memory_format" not in node.kwargs


def origin(node: fx.Node) -> str:
    """The name of what a node stands for in the graph that was handed over; empty for none."""
    found: str = node.meta.get(ORIGIN, "")
    return found


def without_modes() -> Any:
    """No mode of the caller sees torch's operators, such as one that counts them."""
    return _disable_current_modes()


def _why_not(node: RecordedNode) -> str:
    """Why a node's value cannot be made again."""
    if node.op != "call_function":
        return f"{node.name} is gone"
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return f"{node.name} draws random numbers"
    if getattr(node.target, "overloadpacket", None) in MADE_OF_NOTHING and not all(
        str(u.target).startswith(("aten.fill", "aten.full")) for u in node.node.users
    ):
        return f"{node.name} has no values"
    return f"{node.name} writes to its operands" if _writes(node) else ""


def _writes(node: RecordedNode) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _called(node: RecordedNode, values: Mapping[str, Any], wide: bool, change: Change | None) -> Any:
    """An operation's result. In f64, where the operation knows it; else of its own types, and widened."""
    target = aten.reshape.default if node.target is aten.view.default else node.target
    exact = EXACT.get(getattr(target, "overloadpacket", None), target)
    product = getattr(target, "overloadpacket", None) in PRODUCTS
    fused = getattr(target, "overloadpacket", None) in ADDED  # with a factor, which is not rounded then

    def value(n: fx.Node) -> Any:
        found = values[n.name]
        if change is not None and product:
            return _changed(found, change, "product", node)
        if change is not None and fused and getattr(n.target, "overloadpacket", None) is aten.mul:
            return _changed(found, change, "result", node)
        return _laid(found, n) if target is aten.as_strided.default else found

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
    if change is not None and change.meets and getattr(target, "overloadpacket", None) in COMPARED:
        args = (_met(args[0], args[1], node), *args[1:])
    try:
        found = exact(*_wide(args), **_wide(kwargs)) if wide else call_operator(target, args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not wide:
            raise Unknown(f"{node.name}: {type(error).__name__}: {error}") from error
        found = _widened(_narrow(target, args, kwargs, node))
    if change is None or target is operator.getitem:
        return found
    return _changed(found, change, "result", node)


def _below(x: Tensor) -> Any:
    """The share of the normal distribution. 1 + erf(x / sqrt(2)), torch's, has one digit of x = -8."""
    return torch.special.erfc(x * -(0.5**0.5)) / 2


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    inner = (x + 0.044715 * x**3) * (8 / pi) ** 0.5  # tanh(u) is 2 sigmoid(2 u) - 1
    return x * (_below(x) if approximate == "none" else torch.sigmoid(inner))


def _gelu_backward(g: Tensor, x: Tensor, *, approximate: str = "none") -> Any:
    far = 40.0 if approximate == "tanh" else inf  # from there on 0 or 1: torch has 0 times infinity
    with torch.enable_grad():
        x = x.detach().clamp(-far, far).requires_grad_()
        y = _gelu(x, approximate=approximate)
    return g * torch.autograd.grad(y, x, torch.ones_like(y))[0]  # of its two terms an infinite g has NaN


def _hardsigmoid(x: Tensor) -> Tensor:
    return (x + 3).clamp(0, 6) / 6


def _hardsigmoid_backward(g: Tensor, x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, g / 6, aten.hardsigmoid_backward(g, x))  # the edges are torch's


def _hardswish(x: Tensor) -> Tensor:
    return x * _hardsigmoid(x)


def _hardswish_backward(g: Tensor, x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, g * (x / 3 + 0.5), aten.hardswish_backward(g, x))


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    if x.is_complex():
        made: tuple[Tensor, Tensor] = aten.var_mean.correction(
            x, dim, correction=correction, keepdim=keepdim
        )
        return made
    dims = [*(dim or range(x.dim()))]
    mean = x.mean(dims, keepdim=True)
    away = x - mean
    less = 1.0 if correction is None else correction
    count = max(x.numel() / max(mean.numel(), 1) - less, 0.0)
    return (away * away).sum(dims, keepdim) / count, x.mean(dims, keepdim)


# Operators of f64 without the difference, the moments of one pass, or the sixth in f32, by which torch's
# own lose digits.
EXACT: dict[Any, Any] = {
    aten.var: lambda *given, **named: _var_mean(*given, **named)[0],
    aten.var_mean: _var_mean,
    aten.gelu: _gelu,
    aten.gelu_backward: _gelu_backward,
    aten.special_ndtr: _below,
    aten.hardsigmoid: _hardsigmoid,
    aten.hardsigmoid_backward: _hardsigmoid_backward,
    aten.hardswish: _hardswish,
    aten.hardswish_backward: _hardswish_backward,
}


def call_operator(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation's result; of dense operands where its kernel takes no others, as that of group norms on
    a GPU does. Values do not depend on it."""
    try:
        return target(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        given = [*args, *kwargs.values()]
        if all(t.is_contiguous() for t in given if isinstance(t, Tensor)):
            raise
        dense = fx.node.map_aggregate(
            (tuple(args), dict(kwargs)), lambda t: t.contiguous() if isinstance(t, Tensor) else t
        )
        return target(*dense[0], **dense[1])


def _met(one: Any, other: Any, node: RecordedNode) -> Any:
    """The first operand of a comparison, with the second one's elements where rounding may part them: a
    value that is computed twice, and not alike."""
    if not isinstance(one, Tensor) or not one.is_floating_point():
        return one
    eps = CLOSE * spacing(node.node.all_input_nodes)
    b = torch.as_tensor(other, dtype=one.dtype, device=one.device)
    size = torch.nan_to_num(one.abs(), 0.0, 0.0, 0.0)
    near = (one - b).abs() <= eps * (size + (size.mean() if size.numel() else 0.0))
    return torch.where(near, b, one)


def _changed(value: Any, change: Change, what: str, node: RecordedNode) -> Any:
    """A value as rounding changes it: its tensors of floats."""
    eps = spacing([node.node])
    least = max(
        (torch.finfo(t.dtype).tiny for t in _tensors(node.node.meta.get("val")) if t.is_floating_point()),
        default=0.0,
    )
    return _pytree.tree_map_only(
        Tensor, lambda t: change.move(t, what, eps, least) if t.is_floating_point() else t, value
    )


def spacing(nodes: Iterable[fx.Node]) -> float:
    """The largest relative spacing of the types of floats that nodes have; 0 for none."""
    return max(
        (
            torch.finfo(t.dtype).eps
            for n in nodes
            for t in _tensors(n.meta.get("val"))
            if t.is_floating_point()
        ),
        default=0.0,
    )


def _narrow(target: Any, args: Any, kwargs: Any, node: RecordedNode) -> Any:
    """The result of an operation that knows no f64."""

    def as_traced(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.dtype is torch.float64 else x

    try:
        return target(
            *fx.node.map_aggregate(args, as_traced), **{k: as_traced(v) for k, v in kwargs.items()}
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Unknown(f"{node.name}: {type(error).__name__}: {error}") from error


def _laid(t: Any, node: fx.Node) -> Any:
    """A tensor with the strides of the trace, of which an operation on memory was told. Raises Unknown."""
    strides = node.meta["val"].stride()
    if not all(isinstance(n, int) for n in strides):
        raise Unknown(f"{node.name} is read by its place in memory")
    if tuple(t.stride()) == tuple(strides):
        return t
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


def _widened(value: Any) -> Any:
    """Tensors of floats in f64, complex ones in complex128."""

    def wide(t: Tensor) -> Tensor:
        if t.is_complex():
            return t.to(torch.complex128)
        return t.to(torch.float64) if t.is_floating_point() else t

    return _pytree.tree_map_only(Tensor, wide, value)


def _wide(given: Any) -> Any:
    """Arguments that name a type of floats, with f64 in its place."""

    def wide(x: Any) -> Any:
        if isinstance(x, torch.dtype):
            return torch.complex128 if x.is_complex else torch.float64 if x.is_floating_point else x
        return x

    return fx.node.map_aggregate(given, wide)


def bytes_of(nodes: Sequence[RecordedNode]) -> int:
    """How many bytes the results of some operations are, at most of those that are held at once: each is
    held from its operation to its last reader. Symbols count as their examples."""
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        last |= dict.fromkeys(node.inputs, i)
    held = most = 0
    sizes: dict[str, int] = {}
    for i, node in enumerate(nodes):
        sizes[node.name] = sum(map(_bytes, _tensors(node.node.meta.get("val"))))
        held += sizes[node.name]
        most = max(most, held)
        held -= sum(sizes.pop(x) for x in (*node.inputs, node.name) if x in sizes and last.get(x, i) <= i)
    return most


def _tensors(val: Any) -> list[Tensor]:
    return [t for t in _pytree.tree_leaves(val) if isinstance(t, Tensor)]


def _bytes(t: Tensor) -> int:
    sizes: Sequence[Any] = t.shape
    return t.dtype.itemsize * prod(
        n if isinstance(n, int) else int(getattr(n.node, "hint", None) or 1) for n in sizes
    )
