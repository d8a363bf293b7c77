"""Stage 11b for kernels whose sizes are arguments. In: tensors and sizes. Out: the kernel runs.

One compiled kernel serves all sizes: they are passed in 32 bits, and Triton specialises on none of them.
The number of programs is computed from them. A call of sizes that come back starts the kernel with both
at hand (``starter_at``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transconv.backend_triton.interpreter import explained, mend_interpreter
from transconv.backend_triton.launch import INTERPRETER, Launcher, launch_function, written_out
from transconv.backend_triton.launch import _torch as torch_module
from transconv.ir import LARGEST_SIZE, Expr, For, Kernel, Sizes, Values, as_expr, values_of, walk
from transconv.simplify import facts_of, range_of


def programs(kernel: Kernel) -> Expr:
    """The number of programs that a kernel is launched with, as an expression of its sizes."""
    for at in walk(kernel.body):
        if isinstance(at, For) and at.kind == "grid":
            return as_expr(at.stop) if at.until is None else at.until
    return as_expr(1)


def _countable(programs: Expr, sizes: Sizes) -> Sizes:
    """The requirements, and that there are no more programs than a launch may have."""
    most = range_of(programs, facts_of(sizes)).hi
    if most is not None and most <= LARGEST_SIZE:
        return sizes
    return replace(sizes, where=(*sizes.where, programs <= LARGEST_SIZE))


class SizedLauncher(Launcher):
    """Runs one kernel for any sizes that it takes (``requires``). ``compiled`` counts what Triton was
    asked to compile: at most two kernels a device, for tensors that are aligned and for others."""

    def __init__(self, source: str, function: str, path: Any, programs: Expr, sizes: Sizes, warps: int,
                 stages: int, early: bool, types: tuple[str, ...] = (), key: str = "") -> None:
        super().__init__(source, function, path, 1, warps, stages, early=early, types=types, key=key)
        self.programs, self.sizes, self.unspecialised = programs, sizes, sizes.names
        self.requires = _countable(programs, sizes)
        self.count = values_of((programs,), sizes.names)
        self.compiled = 0
        self.starts: dict[tuple[int, bool], _Start] = {}

    def start(self, tensors: list[Any], values: Values) -> None:
        """Launch for sizes that meet the kernel's requirements, which the caller has seen to."""
        sizes = tuple([values[n] for n in self.sizes.names])
        (grid,), device = self.count(*sizes), tensors[0].device
        if device.type == "cpu":
            with INTERPRETER:
                mend_interpreter()
                with explained():
                    self._function()[(grid,)](*tensors, *sizes, **self._options())
            return
        torch = torch_module()
        aligned = not any(t.data_ptr() & 15 for t in tensors)
        with torch.cuda.device(device.index):
            made = self.starts.get((device.index, aligned))
            if made is None:
                made = _Start(self._compiled(tensors, aligned), self.early)
                self.starts[device.index, aligned] = made
                self.compiled += 1
            made(grid, sizes, tensors, torch._C._cuda_getCurrentRawStream(device.index))

    def starter_at(self, device: int, aligned: bool, order: tuple[int, ...],
                   values: Values) -> Callable[..., None] | None:
        """As ``starter``, for given sizes."""
        start = self.starts.get((device, aligned))
        if start is None:
            return None
        sizes = tuple([values[n] for n in self.sizes.names])
        (grid,) = self.count(*sizes)
        return start.bound(grid, sizes, order, device,
                           torch_module()._C._cuda_getCurrentRawStream)

    def is_ready(self, aligned: bool) -> bool:
        """As Launcher's."""
        return any(a is aligned for _, a in self.starts) or super().is_ready(aligned)

    def is_loaded(self, device: int, aligned: bool) -> bool:
        """As Launcher's."""
        return (device, aligned) in self.starts

    def _arguments(self, tensors: list[Any]) -> list[Any]:
        """Tensors, and the examples of sizes: what is compiled depends on none of them."""
        return [*tensors, *self.sizes.like.values()]


class _Start:
    """Starts a compiled kernel that takes addresses and sizes."""

    def __init__(self, kernel: Any, early: bool) -> None:
        self.kernel, self.early, self.raw = kernel, early, launch_function(kernel)

    def __call__(self, grid: int, sizes: tuple[int, ...], tensors: Sequence[Any], stream: Any) -> None:
        kernel = self.kernel
        if self.raw is None:
            kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
                       *tensors, *sizes)
            return
        self.raw(grid, 1, 1, stream, kernel.function, False, self.early, None, None,
                 kernel.packed_metadata, None, None, None, *[t.data_ptr() for t in tensors], *sizes)

    def bound(self, grid: int, sizes: tuple[int, ...], order: tuple[int, ...], device: int,
              stream: Callable[[int], Any]) -> Callable[..., None]:
        """A function of tensors that starts the kernel for these sizes, with nothing left to decide;
        ``order`` says which of them are its arguments."""
        kernel = self.kernel
        if self.raw is not None:
            packed = kernel.function, kernel.packed_metadata, self.early
            return written_out(self.raw, (grid, *packed), order, sizes, device, stream)
        return lambda *given: self(grid, sizes, [given[at] for at in order], stream(device))
