"""Stage 11b for kernels whose sizes are arguments. In: tensors and sizes. Out: the kernel runs.

One compiled kernel serves all sizes: they are passed in 32 bits, and Triton specialises on none of them.
The number of programs is computed from them, and so is how the tensors of boxes lie (``At``), by one
function for all kernels of a plan (``numbers_of``). Descriptors are kept by addresses and sizes.
``binding`` returns what makes a function that starts the kernel for given sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from transconv.backend_triton import torch_internals
from transconv.backend_triton.launch.bound_start import (
    At,
    Bind,
    BoundStart,
    Boxed,
    Encoder,
    Places,
    addresses,
    arguments,
    encoded,
    encodings,
    entry,
    torch_module,
    written_out,
)
from transconv.backend_triton.launch.descriptors import NotEncoded, lying
from transconv.backend_triton.launch.interpreter import explained, prepare_interpreter
from transconv.backend_triton.launch.launcher import INTERPRETER, Launcher
from transconv.backend_triton.miscompiles.signs import Miscompiled
from transconv.errors import Unsupported
from transconv.ir import (
    LARGEST_SIZE,
    Expr,
    For,
    Kernel,
    Sizes,
    Values,
    as_expr,
    function_of,
    minimum,
    walk,
)
from transconv.simplify import facts_of, range_of


def programs(kernel: Kernel) -> Expr:
    """The number of programs that a kernel is launched with, as an expression of its sizes."""
    for at in walk(kernel.body):
        if isinstance(at, For) and at.kind == "grid":
            tiles = as_expr(at.stop) if at.until is None else at.until
            return minimum(tiles, at.programs) if at.programs else tiles
    return as_expr(1)


FARTHEST = 2**40 - 1  # bytes: the largest stride of a descriptor
CALLS_KEPT = 1024  # sizes and addresses for which a kernel keeps descriptors


def _countable(programs: Expr, sizes: Sizes, boxes: tuple[Boxed | None, ...]) -> Sizes:
    """The requirements of a launch: not more programs than a grid may have, and no stride of a box longer
    than a descriptor allows."""
    most = [(programs, LARGEST_SIZE), *((b[0].far * b[0].dtype.bytes, FARTHEST) for b in boxes
                                        if b is not None and b[0].extents)]
    facts = facts_of(sizes)
    more = []
    for value, limit in most:
        known = range_of(value, facts).hi
        if known is None or known > limit:
            more.append(value <= limit)
    return replace(sizes, where=(*sizes.where, *more)) if more else sizes


def numbers_of(launchers: Sequence[Launcher], rooms: Sequence[Expr],
               names: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """A function of sizes, in the order of their names: ``At`` for each launcher, then the shapes of
    workspaces with so many elements (``rooms``)."""
    sized = [(run.programs, run.boxes) if isinstance(run, SizedLauncher) else (as_expr(run.grid), ())
             for run in launchers]
    each = [e for programs, boxes in sized for e in (programs, *(
        e for b in boxes if b is not None and b[0].extents for e in (*b[0].extents, *b[0].steps)))]

    def said(texts: list[str]) -> tuple[list[tuple[str, str]], str]:
        left = iter(texts)
        found = [_tuple([next(left), _tuple([_place(b, left) for b in boxes])]) for _, boxes in sized]
        return [], _tuple([*found, _tuple([_tuple([next(left)]) for _ in rooms])])

    return function_of([*each, *rooms], names, said)


def _place(box: Boxed | None, left: Iterator[str]) -> str:
    """The text of how a box's tensor lies, of those of what it depends on."""
    if box is None or not box[0].extents:
        return repr(box and lying(box[0]))
    return _tuple([_tuple([next(left) for _ in box[0].shape]) for _ in range(2)])


def _tuple(texts: Sequence[str]) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"


class SizedLauncher(Launcher):
    """Runs one kernel for any sizes that it takes (``requires``). ``compiled`` counts
    Triton's compiles: at most two kernels a device, for tensors that are aligned and for others."""

    def __init__(self, source: str, function: str, path: Any, programs: Expr, sizes: Sizes, warps: int,
                 stages: int, early: bool, types: tuple[str, ...] = (), key: str = "",
                 boxes: tuple[Boxed | None, ...] = (), explicit: bool = False, fuse: bool = True,
                 requires: Sizes | None = None) -> None:
        super().__init__(source, function, path, 1, warps, stages, boxes, explicit, early, types, key,
                         fuse)
        self.programs, self.sizes, self.unspecialised = programs, sizes, sizes.names
        # Another process may have found them already.
        self.requires = requires or _countable(programs, sizes, self.boxes)
        self.compiled = 0
        self.starts: dict[tuple[int, bool], _Start] = {}

    @cached_property  # most kernels that are read from disk are never launched
    def numbers(self) -> Callable[..., tuple[At, tuple[()]]]:
        """What is computed from sizes, in the order of their names."""
        return numbers_of([self], (), self.sizes.names)

    def in_order(self, values: Values) -> tuple[int, ...]:
        """Sizes as the kernel takes them."""
        return tuple([values[n] for n in self.sizes.names])

    def start(self, tensors: list[Any], values: Values) -> None:
        """Launch for sizes that meet the kernel's requirements; the caller has checked that."""
        sizes = self.in_order(values)
        at, device = self.numbers(*sizes)[0], tensors[0].device
        if device.type == "cpu":
            self.refuse_steps("Triton's interpreter")
            with INTERPRETER:
                prepare_interpreter()
                with explained():
                    given = arguments(tensors, self.boxes_at(at[1]), self.describe)
                    self._function()[(at[0],)](*given, *sizes, **self._options())
            return
        torch = torch_module()
        _, aligned = addresses(tensors)
        with torch.cuda.device(device.index):
            made = self.starts.get((device.index, aligned))
            if made is None:
                made = _Start(self, self._compiled(tensors, aligned))
                self.starts[device.index, aligned] = made
                self.compiled += 1
            made(sizes, at, tensors, torch_internals.raw_stream(device.index))

    def refuse_steps(self, what: str) -> None:
        """Raise Unsupported where descriptors are made by what cannot take every so many-th position."""
        if stepped := next((b[0] for b in self.boxes if b is not None and b[0].every), None):
            raise Unsupported("boxes:every", f"{self.function}: its boxes take every "
                              f"{list(stepped.every)} position of {stepped.name}, which {what} cannot; "
                              "expected a=gather")

    def boxes_at(self, places: Places) -> tuple[Boxed | None, ...]:
        """Which arguments are descriptors, each with its tensor and how it lies."""
        return tuple([b and (*b, at) for b, at in zip(self.boxes, places, strict=True)])

    def begun(self, device: int, aligned: bool) -> BoundStart | None:
        """As Launcher's."""
        start = self.starts.get((device, aligned))
        if start is None or start.raw is None:
            return None
        kernel = start.kernel
        return BoundStart(
            start.raw,
            kernel.function,
            kernel.packed_metadata,
            start.early,
            start.encoder,
            None,
            True,
            torch_internals.raw_stream,
        )

    def binding(self, device: int, aligned: bool, order: tuple[int, ...]) -> Bind | None:
        """From sizes to what ``starter`` returns for them."""
        start = self.starts.get((device, aligned))
        if start is None:
            return None
        return start.binding(order, device, torch_internals.raw_stream)

    def is_ready(self, aligned: bool) -> bool:
        """As Launcher's."""
        return any(a is aligned for _, a in self.starts) or super().is_ready(aligned)

    def is_loaded(self, device: int, aligned: bool) -> bool:
        """As Launcher's."""
        return (device, aligned) in self.starts

    def _arguments(self, tensors: list[Any]) -> Sequence[Any]:
        """Tensors or descriptors, and example sizes: the compiled kernel depends on none of these."""
        return [*arguments(tensors, self.boxes, self.describe), *self.sizes.like.values()]


class _Start:
    """Starts a compiled kernel that takes addresses or descriptors, and sizes."""

    def __init__(self, launcher: SizedLauncher, kernel: Any) -> None:
        self.launcher, self.kernel, self.early = launcher, kernel, launcher.early
        self.boxed = bool(launcher.boxes)
        direct = entry(kernel, self.boxed)
        self.raw: Any = direct and direct[0]
        if direct is None:
            launcher.refuse_steps("Triton's own launch")
        self.encoder: Encoder | None = None
        if direct and self.boxed:
            self.encoder = Encoder(encodings(launcher.boxes, direct[1]), CALLS_KEPT)

    def __call__(self, sizes: tuple[int, ...], at: At, tensors: Sequence[Any], stream: Any) -> None:
        kernel, (grid, places) = self.kernel, at
        if self.raw is None:
            given = arguments(tensors, self.launcher.boxes_at(places), self.launcher.describe)
            kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
                       *given, *sizes)
            return
        given = *addresses(tensors)[0], *sizes
        if self.encoder:
            try:
                given = self.encoder(given, places)
            except NotEncoded as error:  # the next best schedule takes this one's place
                raise Miscompiled(self.launcher.function, str(error)) from error
        self.raw(grid, 1, 1, stream, kernel.function, False, self.early, None, None,
                 kernel.packed_metadata, None, None, None, *given)

    def binding(self, order: tuple[int, ...], device: int, stream: Callable[[int], Any]) -> Bind:
        """From sizes to a function of tensors that starts the kernel for them without further checks;
        ``order``: the indices of its arguments among the tensors."""
        kernel = self.kernel
        if self.raw is None:
            return lambda sizes, grid, places: lambda *given: self(
                sizes, (grid, places), [given[n] for n in order], stream(device))
        raw, encoder = self.raw, self.encoder
        function, packed, early = kernel.function, kernel.packed_metadata, self.early
        count = len(self.launcher.sizes.names)
        if encoder is None:
            plain = written_out(order, count)
            return lambda sizes, grid, places: plain(
                raw, grid, function, packed, early, device, stream, *sizes)
        made, calls = encoded(order, count), encoder.calls.get
        return lambda sizes, grid, places: made(
            raw, grid, function, packed, early, device, stream, calls, encoder, places, *sizes)
