"""The capture of a model's operations on a tensor without values: what a stream executes piece by piece.

    Capture.of(model, ...)    the operations in order, each of aten, with references to earlier results
    ResultReference(at, output)       the result of an operation, in the arguments of another one

Only operations on what depends on the input are recorded; those on parameters alone run while the
model is recorded, and their results are constants. Operations in place are recorded as those that make a
new tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from transconv.support import Unsupported

Tensor = torch.Tensor
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class ResultReference(NamedTuple):
    """A result: the number of its operation (-1: the input), and which of its results it is."""

    at: int
    output: int = 0


@dataclass(eq=False, slots=True)
class CapturedOperation:
    """An operation of aten. Tensors among its arguments are references, or constants."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    module: str  # the module that called it, by its name in the model

    @property
    def references(self) -> list[ResultReference]:
        """What it reads that depends on the input."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, ResultReference)]

    def leaves(self) -> list[Any]:
        """The arguments, those inside of lists, too."""
        return tree_leaves([self.args, self.kwargs], is_leaf=lambda a: isinstance(a, ResultReference))

    def with_arguments(self, replace: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, each replaced."""
        made = tree_map(
            replace, [self.args, self.kwargs], is_leaf=lambda a: isinstance(a, ResultReference)
        )
        return tuple(made[0]), made[1]

    @property
    def name(self) -> str:
        """The operation as it is called in aten."""
        return str(self.op).removeprefix("aten.").partition(".")[0]

    def __str__(self) -> str:
        return f"{self.name} of '{self.module}'" if self.module else self.name


@dataclass(eq=False, slots=True)
class Capture:
    """The operations of a call of a model, the shape and type of its input, and its result."""

    shape: tuple[int, ...]
    operations: list[CapturedOperation] = field(default_factory=list)
    result: ResultReference = ResultReference(-1)
    modules: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Capture:
        """What the model does with an input of this shape. Raises Unsupported for what no recording says,
        and the model's own errors."""
        made = Capture(shape, dtype=dtype)
        meta = torch.empty(shape, dtype=dtype, device="meta")
        # In inference mode operations come here undivided, such as aten.pad.
        names = _named_modules(model, made.modules)
        with torch.inference_mode(False), torch.no_grad(), names, UnwrittenTensors(model):
            given = RecordedTensor(meta, device, ResultReference(-1), made)
            out = model(given)
        leaves = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if len(leaves) != 1 or not isinstance(leaves[0], RecordedTensor):
            found = f"{len(leaves)} tensors" if len(leaves) != 1 else "a tensor that no input reaches"
            raise Unsupported(
                "stream:result",
                f"the model returns {found}; expected one tensor that depends on its input: stream the "
                "part of the model that makes it, such as model.decoder",
            )
        made.result = leaves[0].reference
        return made

    def shape_of(self, value: ResultReference) -> tuple[int, ...]:
        """The shape of a result."""
        return self.shape if value.at < 0 else self.operations[value.at].shapes[value.output]

    def no_rows(self, value: ResultReference, dim: int, device: torch.device) -> Tensor:
        """A tensor like a result, with none of its rows."""
        dtype = self.dtype if value.at < 0 else self.operations[value.at].dtypes[value.output]
        return torch.empty(with_rows(self.shape_of(value), dim, 0), dtype=dtype, device=device)

    def compare(self, long: Capture, far: Capture) -> None:
        """Raise Unsupported where the operations at two other lengths are others, or numbers of theirs do
        not grow evenly with the length, as the end of the last whole group of rows."""
        for other in (long, far):
            if [o.op for o in self.operations] != [o.op for o in other.operations]:
                a, b = len(self.operations), len(other.operations)
                why = f"the model runs other operations for other lengths ({a} and {b} of them, for "
                why += (
                    f"{self.shape} and {other.shape}): a loop over pieces, or a branch on it; stream the "
                )
                raise Unsupported("stream:length", f"{why}part of the model inside of the loop")
        near, wide = (sum(other.shape) - sum(self.shape) for other in (long, far))
        for op, *others in zip(self.operations, long.operations, far.operations, strict=True):
            for a, b, c in zip(op.leaves(), *(o.leaves() for o in others), strict=True):
                whole = type(a) is type(b) is type(c) is int
                if whole and (c - a) * near != (b - a) * wide:
                    why = f"{op} cannot be streamed: its numbers do not grow evenly with the length "
                    why += f"({a}, {b}, {c}); stream the part of the model before or behind it"
                    raise Unsupported(f"stream:{op.name}", why)

    def add(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an operation on recorded tensors; its results."""
        leaves = tree_leaves([args, kwargs])
        device = next(t.device for t in leaves if isinstance(t, RecordedTensor))
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise Unsupported(
                "stream:random", f"{op}{self._where()} draws random numbers; call model.eval() first"
            )
        writes = op._schema.is_mutable
        target: Any = args[0] if writes else None
        if writes:
            op = _without_writes(op, self.modules[-1] if self.modules else "")
            if not isinstance(target, RecordedTensor) or target.is_viewed:
                raise Unsupported(
                    "stream:write", f"{op} writes to a tensor of which there are views{self._where()}"
                )
        if not all("Tensor" in str(result.type) for result in op._schema.returns):
            raise Unsupported(
                "stream:values",
                f"{op}{self._where()} reads values of the stream, which are not known before it runs; "
                "stream the part of the model before or behind it",
            )
        metas = tree_map(_as_meta, [args, kwargs])
        try:
            out = op(*metas[0], **{**metas[1], **({"device": "meta"} if "device" in kwargs else {})})
        except NotImplementedError as error:
            raise Unsupported(
                "stream:operation", f"{op}{self._where()} has no form without values"
            ) from error
        results = out if isinstance(out, (tuple, list)) else (out,)
        made = self.note(op, args, kwargs, results, device)
        if op.is_view:
            for t in (*leaves, *made):
                if isinstance(t, RecordedTensor):
                    t.is_viewed = True
        if writes:
            if made[0].shape != target.shape:
                raise Unsupported("stream:write", f"{op} changes a tensor's shape in place{self._where()}")
            if made[0].dtype is not target.dtype:  # a tensor keeps its type, whatever is written to it
                to, kept = torch.ops.aten._to_copy.default, {"dtype": target.dtype}
                made = self.note(to, (made[0],), kept, (target.meta,), device)
            target.reference = made[0].reference
            return target
        return type(out)(made) if isinstance(out, (tuple, list)) else made[0]

    def note(self, op: Any, args: Any, kwargs: Any, results: Any, device: torch.device) -> list[Any]:
        """Add an operation with its results, which have no values."""
        at = len(self.operations)
        shapes = tuple(() if t is None else tuple(t.shape) for t in results)
        dtypes = tuple(self.dtype if t is None else t.dtype for t in results)
        kept = tree_map(lambda t: t.reference if isinstance(t, RecordedTensor) else t, [args, kwargs])
        module = self.modules[-1] if self.modules else ""
        self.operations.append(CapturedOperation(op, tuple(kept[0]), kept[1], shapes, dtypes, module))
        return [
            None if t is None else RecordedTensor(t, device, ResultReference(at, i), self)
            for i, t in enumerate(results)
        ]

    def _where(self) -> str:
        return f" in '{self.modules[-1]}'" if self.modules and self.modules[-1] else ""


class RecordedTensor(Tensor):
    """A tensor of a recording: shape, type and device, but no values."""

    reference: ResultReference
    capture: Capture
    meta: Tensor
    is_viewed: bool

    @staticmethod
    def __new__(
        cls, meta: Tensor, device: torch.device, reference: ResultReference, capture: Capture
    ) -> RecordedTensor:
        wrap: Any = torch.Tensor._make_wrapper_subclass
        made: RecordedTensor = wrap(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device, requires_grad=False
        )
        made.reference, made.capture, made.meta, made.is_viewed = reference, capture, meta, False
        return made

    def __init__(self, *given: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says a function without a class
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(t for t in tree_leaves([args, kwargs]) if isinstance(t, RecordedTensor))
        return first.capture.add(op, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in CELLS and isinstance(args[0], RecordedTensor):
            return args[0].recurrent(getattr(torch.ops.aten, name).input, args, kwargs or {})
        onward: Any = super().__torch_function__
        return onward(function, types, args, kwargs or {})

    def recurrent(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a recurrence as one operation: below it every step would be one."""
        states = [_as_meta(t) for t in tree_leaves(args[1])]
        y = self.meta.new_empty((*self.shape[:-1], states[0].shape[-1] * (2 if args[-2] else 1)))
        return tuple(self.capture.note(op, args, kwargs, (y, *states), self.device))


class UnwrittenTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is open, what writes to a tensor that a model holds is refused: such a model is no function
    of its input, and the recording would change it."""

    def __init__(self, model: nn.Module) -> None:
        begin: Any = super().__init__
        begin()
        held = ((n, t) for module in model.modules() for n, t in [*vars(module).items(), *_own(module)])
        self.names = {t.untyped_storage().data_ptr(): n for n, t in held if _is_plain(t)}
        self.names.pop(0, None)  # of tensors without values

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in args[:1] if op._schema.is_mutable else ():
            if _is_plain(t) and (name := self.names.get(t.untyped_storage().data_ptr())):
                raise Unsupported(
                    "stream:write",
                    f"the model writes to its tensor '{name}', so that a call depends on those before; "
                    "call model.eval() first, or stream the part that does not write",
                )
        return op(*args, **(kwargs or {}))


def _is_plain(t: Any) -> bool:
    return isinstance(t, Tensor) and not isinstance(t, RecordedTensor)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def with_rows(shape: tuple[int, ...], dim: int, rows: int) -> tuple[int, ...]:
    return (*shape[:dim], rows, *shape[dim + 1 :])


def _as_meta(t: Any) -> Any:
    if isinstance(t, RecordedTensor):
        return t.meta
    if isinstance(t, Tensor):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return t


def _without_writes(op: Any, module: str) -> Any:
    """The operation that makes a new tensor of what this one writes."""
    name = op._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found = getattr(packet, op._overloadname, None)
    if found is None:
        raise Unsupported("stream:write", f"{op} of '{module}' writes to a tensor of the stream")
    return found


@contextmanager
def _named_modules(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """While it is open, the names of the modules that are running are on the stack, the innermost last."""
    names = {id(module): name for name, module in model.named_modules()}
    thread = get_ident()  # the hooks are of all threads

    def enter(module: nn.Module, args: Any) -> None:
        if get_ident() == thread:
            stack.append(names.get(id(module), stack[-1] if stack else ""))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if get_ident() == thread:
            stack.pop()

    before = nn.modules.module.register_module_forward_pre_hook(enter)
    after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        stack.clear()
