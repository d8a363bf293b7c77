"""Regions that torch computes: by its operators, or compiled by Inductor.

Values of a graph may be aliases, in the same memory, as torch says of its operations:

    split_with_sizes(x, ...), getitem    views of x                  by the operation's schema
    _unsafe_view(x, ...)                 x's memory by another name  by the traced values, which share it

The schema alone tells of a view whose base was replaced by another call of the same value, such as
``add(x, 0.5)`` by ``add(x, tensor)`` where numbers are symbols: the traced values share nothing any more.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch
from torch import fx

from transconv.calls import stats
from transconv.functional import attention
from transconv.graph.verification.fx_reference import PRODUCTS, call_operator
from transconv.runtime import COMPILING, torch_internals
from transconv.support import knobs
from transconv.target import Target
from transconv.torch_ops.conversion.aten_replacement import aten


def base_of(node: fx.Node) -> fx.Node | None:
    """The node that another one may be a view of: its first operand, or that of the call of which it is
    one of several results."""
    made = call_of(node)
    first = made.args[0] if made.args else None
    return first if isinstance(first, fx.Node) else None


def call_of(node: fx.Node) -> fx.Node:
    """The call that makes a value, of which it may be one of several results."""
    made = node.args[0] if node.target is operator.getitem else node
    return made if isinstance(made, fx.Node) else node


def is_view(node: fx.Node) -> bool:
    """Whether a value is in the memory of its base. Of operations that are written as others, such as
    ``reshape``, the traced values tell whether it is a copy."""
    base, op = base_of(node), call_of(node).target
    own, whole = _storage(node), None if base is None else _storage(base)
    if own is None or whole is None:
        return False
    return own == whole or (
        isinstance(op, torch_internals.OpOverload) and bool(op.is_view and not op._can_decompose())
    )


def may_view(node: fx.Node) -> bool:
    """Whether a value may be in memory of something else: a schema says so, or there is none."""
    schema = getattr(call_of(node).target, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def memory(node: fx.Node) -> int | None:
    """What the memory of a tensor is known by, which its views have too; None for other values."""
    while is_view(node) and (base := base_of(node)) is not None:
        node = base
    return _storage(node)


def readers(x: fx.Node) -> Iterator[fx.Node]:
    """What reads a value or a view of it."""
    left = [*x.users]
    while left:
        at = left.pop()
        yield at
        if at.op == "call_function" and may_view(at):
            left += [*at.users]


def _storage(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and val.layout is torch.strided:
        return int(val.untyped_storage()._cdata)
    return None


Tensor = torch.Tensor
aten_ops: Any = torch.ops.aten
log = logging.getLogger("transconv.graph")


class TorchRegion:
    """A region of torch's: compiled when it is first called, as its inputs then are."""

    def __init__(self, gm: fx.GraphModule, rest: str, sized: bool) -> None:
        self.gm, self.sized = gm, sized  # whether its sizes differ between calls
        self.compiles = rest != "eager"
        self.run: Callable[..., Any] | None = gm.forward if rest == "eager" else None

    def __call__(self, *given: Any) -> Sequence[Any]:
        if self.run is None:
            return self.first(given)
        found: Sequence[Any] = self.run(*given)
        return found

    def first(self, given: Sequence[Any]) -> Sequence[Any]:
        """The first call, by torch's operators where Inductor's results have other types than theirs."""
        self.run = self.dynamic() if self.sized else self.compiled(given)
        found: Sequence[Any] = self.run(*given)
        ends: Any = self.gm.graph.output_node().args[0]
        wanted = [getattr(n.meta["val"], "dtype", None) if isinstance(n, fx.Node) else None for n in ends]
        wrong = [
            f"{t.dtype}, expected {dtype}"
            for t, dtype in zip(found, wanted, strict=True)
            if dtype is not None and t.dtype != dtype
        ]
        if wrong:
            log.warning("Inductor's result is of type %s: torch's operators compute it", wrong[0])
            self.run, self.compiles = self.gm.forward, False
            found = self.run(*given)
        return found

    def compiled(self, given: Sequence[Any]) -> Callable[..., Any]:
        """By Inductor. In a thread of its own: the call that asks for it stands in the middle of autograd,
        whose state is the thread's."""
        like = [t.detach() if isinstance(t, Tensor) else t for t in given]

        def compile_() -> Callable[..., Any]:
            found: Callable[..., Any] = torch_internals.inductor_compile(self.gm, like)
            return found

        with ThreadPoolExecutor(1) as fresh:
            return fresh.submit(compile_).result()

    def dynamic(self) -> Callable[..., Any]:
        """By Inductor, for all sizes: through torch.compile, which asks for symbols of its own."""
        made: Callable[..., Any] = torch.compile(self.gm, dynamic=True)
        return made


@cache
def why_not_inductor(device: str) -> str:
    """Why Inductor compiles nothing for a kind of device on this machine, which is told once; empty if it
    does: torch's operators compute in its place."""
    why = "" if device == "cpu" or find_spec("triton") else "Triton is not installed"
    if device == "cpu":
        try:
            torch_internals.cpp_compiler()
        except Exception as error:  # of several types, by the system
            why = f"there is no C++ compiler ({str(error).strip().splitlines()[0]})"
    if why:
        log.warning("Inductor compiles nothing for %s, torch's operators compute instead: %s", device, why)
    return why


def whole_graph(gm: fx.GraphModule, inputs: Sequence[Any], rest: str) -> Callable[..., Any]:
    """A graph that torch computes whole."""
    if rest == "eager":
        return gm.forward
    return cast(Callable[..., Any], torch_internals.compile_fx(gm, list(inputs)))


def left_nodes(gm: fx.GraphModule) -> dict[str, str]:
    """The operations, by their names, of modules that ``transconv.off`` leaves to torch, and why."""
    return {n.name: why for n in gm.graph.nodes if (why := (n.meta.get("custom") or {}).get("by"))}


def announce_torch(reason: str, message: str, what: str) -> None:
    """Tell the caller that torch computes something, and count it."""
    stats.announce(reason, message, what)
    stats.add(False, reason, 1)


class LaidRegion(Protocol):
    """The launches of a region, as far as torch answers for them."""

    kernels: list[Any]

    def laid(self, sizes: Mapping[str, int], made: Sequence[Any], /) -> Sequence[Any]:
        """Results with the strides that its kernels' have."""


class TorchAnswers(Protocol):
    """What has torch answer for regions whose kernels are not there yet."""

    def answered(
        self, launches: Any, gm: fx.GraphModule, sizes: Mapping[str, int], given: Sequence[Any], /
    ) -> Sequence[Any] | None:
        """The results of a region; None where calls wait."""


def by_torch(
    launches: LaidRegion, gm: fx.GraphModule, sizes: Mapping[str, int], given: Sequence[Any]
) -> Sequence[Any]:
    """The results of a region by torch's operators, lying as those of its kernels."""
    stats.add(False, COMPILING, len(launches.kernels))
    with aten():
        try:
            made: Sequence[Any] = gm.forward(*given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operator that takes dense operands alone
            made = OperatorRun(gm).run(*given)
    return launches.laid(sizes, made)


class OperatorRun(fx.Interpreter):
    """A graph operation by operation, each on operands that it takes."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An operation's result."""
        return call_operator(target, args, kwargs)


# -- what they take ------------------------------------------------------------------------------------


WIDE = 128  # elements of a head above which memory-efficient attention adds up in memory


def storage_bytes(values: Iterable[Any]) -> dict[int, int]:
    """Bytes of the memory of tensors, by address (``address``)."""
    found = [v.untyped_storage() for v in values if isinstance(v, Tensor)]
    return {address(s): s.nbytes() for s in found}


def address(storage: torch.UntypedStorage) -> int:
    """Where memory is; of tensors without memory, that stand in for others, a number of its own."""
    key: int = storage.data_ptr() or storage._cdata
    return key


def left_bytes(outputs: Iterable[fx.Node]) -> int:
    """Bytes of the results of a region that are in no memory of its inputs."""
    vals = [n.meta.get("val") for n in outputs if not is_view(n)]
    return sum(v.numel() * v.itemsize for v in vals if isinstance(v, Tensor))


def sums_bytes(nodes: Iterable[fx.Node], target: Target) -> int:
    """Bytes that an attention of these nodes has in memory while it runs: the sums in f32 of torch's
    memory-efficient one, of 16 bits and heads wider than ``WIDE`` (torch 2.13, kernel_forward.h); the
    scores of a block of ours."""
    found = 0
    for node in nodes:
        if node.target is attention.attention:
            query, key = (x.meta["val"] for x in node.args[:2] if isinstance(x, fx.Node))
            found = max(found, attention.scratch_bytes(query, key))
        if target.backend == "cuda" and _packet(node) is aten_ops._scaled_dot_product_efficient_attention:
            q, k, v = (x.meta["val"] for x in node.args[:3] if isinstance(x, fx.Node))
            if q.itemsize == 2 and max(k.shape[-1], v.shape[-1]) > WIDE:
                found = max(found, 4 * q.shape[0] * q.shape[1] * q.shape[2] * v.shape[-1])
    return found


def library_bytes(nodes: Iterable[fx.Node], target: Target) -> int:
    """Bytes of the workspace that torch's library of products takes at its first call on a stream, and
    keeps; 0 where none of these nodes is computed by it."""
    by_library = PRODUCTS - {aten_ops.convolution, aten_ops.convolution_backward}
    if not target.products_bytes or not any(_packet(n) in by_library for n in nodes):
        return 0
    asked = knobs.products()
    return target.products_bytes if asked is None else asked


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
