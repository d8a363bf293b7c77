"""Launches a Triton JIT function on tensors.

Before the first launch on a device Triton's dispatcher compiles; the compiled kernel is kept and
started directly. Triton specialises on addresses that are multiples of 16, so a kept kernel is only
used for tensors that are aligned like those it was compiled for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from transconv.backend_triton import torch_internals
from transconv.backend_triton.launch import compile_records, fingerprint
from transconv.backend_triton.launch.bound_start import (
    MAPS_KEPT,
    Bind,
    BoundStart,
    Boxed,
    Direct,
    Encoded,
    Encoder,
    Start,
    addresses,
    arguments,
    encodings,
    entry,
    torch_module,
)
from transconv.backend_triton.launch.descriptors import describe, describe_explicit, lying
from transconv.backend_triton.launch.interpreter import explained, prepare_interpreter
from transconv.backend_triton.launch.jit_module import load
from transconv.backend_triton.miscompiles.signs import refuse
from transconv.backend_triton.offline import fake_tensors
from transconv.target import DIRECT

# Triton's interpreter keeps the grid position and the patched language in globals: kernels
# that are interpreted at the same time would compute each other's programs.
INTERPRETER = threading.Lock()


class Launcher:
    """Runs one kernel. ``boxes`` says which arguments are descriptors of boxes, ``types`` torch's element
    type of each; ``key`` is the kernel's name in the record of compiled kernels. ``fuse``: whether the
    compiler may make one instruction, with one rounding, of a product and a sum."""

    def __init__(self, source: str, function: str, path: Any, grid: int, warps: int, stages: int,
                 boxes: tuple[Boxed | None, ...] = (), explicit: bool = False,
                 early: bool = False, types: tuple[str, ...] = (), key: str = "",
                 fuse: bool = True) -> None:
        self.source, self.function, self.path = source, function, path
        self.grid, self.warps, self.stages = grid, warps, stages
        self.boxes = boxes if any(b is not None for b in boxes) else ()
        self.describe = describe_explicit if explicit else describe
        self.explicit, self.early = explicit, early
        self.types, self.key, self.fuse = types, key, fuse
        self.unspecialised: tuple[str, ...] = ()  # arguments on whose values Triton does not specialise
        self.jit: Any = None
        self.kept: dict[tuple[int, bool], Start] = {}
        self.lock = threading.Lock()

    def __call__(self, tensors: list[Any]) -> None:
        """Launch on the tensors' device and its current stream; no programs, no launch."""
        if self.grid == 0:
            return
        device = tensors[0].device
        if device.type == "cpu":
            self._interpret(tensors)
            return
        pointers, aligned = addresses(tensors)
        index = device.index
        start = self.kept.get((index, aligned))
        c = torch_module()._C
        if start is not None and index == c._cuda_getDevice():
            start(pointers, tensors, c._cuda_getCurrentRawStream(index))
            return
        with torch_module().cuda.device(index):
            if start is None:
                start = self.kept[index, aligned] = self._starter(self._compiled(tensors, aligned))
            start(pointers, tensors, c._cuda_getCurrentRawStream(index))

    def _interpret(self, tensors: list[Any]) -> None:
        with INTERPRETER:
            prepare_interpreter()
            with explained():
                self._function()[(self.grid,)](*self._arguments(tensors), **self._options())

    def _compiled(self, tensors: list[Any], aligned: bool) -> Any:
        """The compiled kernel for such tensors, from Triton's cache where it is there. Raises Miscompiled
        for a known miscompile."""
        kernel = compile_records.again(self.key, self.function, aligned, self.types)
        if kernel is not None:
            return kernel
        function, args = self._function(), self._arguments(tensors)
        fingerprint.remember()
        if not aligned:
            import triton

            names = [p.name for p in function.params]
            function = triton.jit(function.fn, do_not_specialize=[*self.unspecialised],
                                  do_not_specialize_on_alignment=names)
        kernel = function.warmup(*args, grid=(self.grid,), **self._options())
        refuse(kernel, self.function)
        compile_records.note(self.key, aligned, kernel, self.types)
        return kernel

    def warm(self, tensors: list[Any]) -> None:
        """Compile into Triton's cache the kernel for a launch with such tensors; those of torch's ``meta``
        device count as aligned to 16 bytes."""
        if self.grid:
            args = self._arguments(tensors)
            self._function().warmup(*args, grid=(self.grid,), **self._options())

    def compile(self, aligned: bool, patient: bool = True) -> None:
        """Compile into Triton's cache, with what starts it, and record it. Needs neither a GPU, after
        ``compiled.pretend``, nor torch. ``patient``: see ``compiled.build_start``. Raises Miscompiled, and
        Triton's errors."""
        if self.grid:
            compile_records.build_start(self._compiled(self._nowhere(), aligned), patient)

    def _nowhere(self) -> list[Any]:
        """What stands for the tensors of a launch; without torch for the release that is known."""
        import triton

        if triton.__version__.startswith(DIRECT):
            return [fake_tensors.tensor(t) for t in self.types]
        torch = torch_module()
        return [torch.empty(1, dtype=getattr(torch, t), device="meta") for t in self.types]

    def is_ready(self, aligned: bool) -> bool:
        """Whether a launch with such tensors compiles nothing: the kernel is loaded in this process or
        is in Triton's cache."""
        return (not self.grid or any(a is aligned for _, a in self.kept)
                or compile_records.is_there(self.key, aligned))

    def is_loaded(self, device: int, aligned: bool) -> bool:
        """Whether the kernel is loaded on a device, for aligned tensors or for others."""
        return not self.grid or (device, aligned) in self.kept

    def _function(self) -> Any:
        with self.lock:
            if self.jit is None:
                self.jit = load(self.source, self.function, self.path)
        return self.jit

    def _arguments(self, tensors: list[Any]) -> Sequence[Any]:
        """Tensors, or descriptors of boxes in their place."""
        return arguments(tensors, self.boxes, self.describe)

    def _options(self) -> dict[str, Any]:
        """Triton's compile options; other options give another compiled kernel."""
        # Fused multiply-adds are set explicitly: the default differs between Triton's releases.
        options = {"num_warps": self.warps, "num_stages": self.stages,
                   "enable_fp_fusion": self.fuse}
        return options | {"launch_pdl": True} if self.early else options

    def _starter(self, kernel: Any) -> Start:
        """The function that starts a compiled kernel with the least work per call."""
        found = entry(kernel, bool(self.boxes))
        grid, function, packed, boxes = self.grid, kernel.function, kernel.packed_metadata, self.boxes
        run, describe, early = kernel.run, self.describe, self.early

        def through_triton(pointers: tuple[int, ...], tensors: Sequence[Any], stream: Any) -> None:
            args = arguments(tensors, boxes, describe)
            # Newer releases of Triton unload a kernel with its last reference, so it is kept here.
            run(grid, 1, 1, stream, kernel.function, packed, None, None, None, *args)

        if found is None:
            return through_triton
        raw, meta = found
        if not boxes:
            return Direct(raw, grid, function, packed, early)
        return Encoded(raw, grid, function, packed, early, Encoder(encodings(boxes, meta), MAPS_KEPT),
                       tuple([b and lying(b[0]) for b in boxes]))

    def starter(self, device: int, aligned: bool,
                order: tuple[int, ...]) -> Callable[..., None] | None:
        """A function of tensors that starts the kernel without further checks; ``order``: the indices
        of the kernel's arguments among them.

        None before the first launch on the device for this ``aligned``. The caller makes the device
        the current one.
        """
        start = self.kept.get((device, aligned))
        if start is None:
            return None
        stream = torch_internals.raw_stream
        if isinstance(start, (Direct, Encoded)):
            return start.bound(order, device, stream)
        address, pick = torch_module().Tensor.data_ptr, itemgetter(*order)

        def run(*given: Any) -> None:
            tensors = pick(given)
            start(tuple(map(address, tensors)), tensors, stream(device))

        return run


    def begun(self, device: int, aligned: bool) -> BoundStart | None:
        """What starts the kernel; None before the first launch on the device for this ``aligned``, and
        where only Triton's own launch does."""
        start = self.kept.get((device, aligned))
        if not isinstance(start, (Direct, Encoded)):
            return None
        stream = torch_internals.raw_stream
        if isinstance(start, Direct):
            return BoundStart(
                start.raw, start.function, start.packed, start.early, None, None, False, stream
            )
        _, function, packed, early = start.kernel
        return BoundStart(start.raw, function, packed, early, start.encoder, start.places, False, stream)

    def binding(self, device: int, aligned: bool, order: tuple[int, ...]) -> Bind | None:
        """``starter`` as a function of sizes and what is ``At`` them, on which it does not depend."""
        start = self.starter(device, aligned, order)
        return start and (lambda sizes, grid, places: start)
