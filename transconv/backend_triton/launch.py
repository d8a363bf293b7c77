"""Stage 11b. In: a JIT function and tensors. Out: the kernel runs.

The first launch on a device goes through Triton's dispatcher, which compiles; the compiled kernel is
kept and started directly afterwards. Triton specialises on addresses that are multiples of 16, so a
kept kernel is only used for tensors that are aligned like those it was compiled for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from transconv.backend_triton.module import load
from transconv.ir import Tensor

Boxed = tuple[Tensor, tuple[int, ...]]
Start = Callable[[Sequence[int], Sequence[Any], Any], None]
MAPS_KEPT = 256  # encoded descriptors per kernel and argument; each is bound to one address


class Launcher:
    """Runs one kernel. ``boxes`` says which arguments are passed as descriptors of boxes."""

    def __init__(self, source: str, function: str, path: Any, grid: int, warps: int, stages: int,
                 boxes: tuple[Boxed | None, ...] = ()) -> None:
        self.source, self.function, self.path = source, function, path
        self.grid, self.warps, self.stages = grid, warps, stages
        self.boxes = boxes if any(b is not None for b in boxes) else ()
        self.jit: Any = None
        self.kept: dict[tuple[int, bool], Start] = {}
        self.lock = threading.Lock()

    def __call__(self, tensors: list[Any]) -> None:
        """Launch on the tensors' device and its current stream; no programs, no launch."""
        if self.grid == 0:
            return
        device = tensors[0].device
        if device.type == "cpu":
            self._dispatch(tensors, True)
            return
        pointers = [t.data_ptr() for t in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        aligned = not bits & 15
        index = device.index
        start = self.kept.get((index, aligned))
        c = _torch()._C
        if start is not None and index == c._cuda_getDevice():
            start(pointers, tensors, c._cuda_getCurrentRawStream(index))
            return
        with _torch().cuda.device(index):
            if start is None:
                kernel = self._dispatch(tensors, aligned)
                self.kept[index, aligned] = self._starter(kernel)
            else:
                start(pointers, tensors, c._cuda_getCurrentRawStream(index))

    def _dispatch(self, tensors: list[Any], aligned: bool) -> Any:
        """Launch through Triton, which compiles what it has not compiled before."""
        with self.lock:
            if self.jit is None:
                self.jit = load(self.source, self.function, self.path)
        function = self.jit
        if not aligned:
            import triton

            names = [p.name for p in function.params]
            function = triton.jit(function.fn, do_not_specialize_on_alignment=names)
        args = tensors
        if self.boxes:
            args = [t if b is None else describe(t, *b)
                    for t, b in zip(tensors, self.boxes, strict=True)]
        return function[(self.grid,)](*args, num_warps=self.warps, num_stages=self.stages)

    def _starter(self, kernel: Any) -> Start:
        """How to start a compiled kernel with the least work per call."""
        entry = _entry(kernel, bool(self.boxes))
        grid, function, packed, boxes = self.grid, kernel.function, kernel.packed_metadata, self.boxes
        run = kernel.run

        def through_triton(pointers: Sequence[int], tensors: Sequence[Any], stream: Any) -> None:
            args = tensors if not boxes else [t if b is None else describe(t, *b)
                                              for t, b in zip(tensors, boxes, strict=True)]
            run(grid, 1, 1, stream, function, packed, None, None, None, *args)

        if entry is None:
            return through_triton
        raw, encode = entry
        if not boxes:
            def direct(pointers: Sequence[int], tensors: Sequence[Any], stream: Any) -> None:
                raw(grid, 1, 1, stream, function, False, False, None, None, packed, None, None, None,
                    *pointers)
            return direct
        maps: list[dict[int, list[Any]]] = [{} for _ in boxes]

        def encoded(pointers: Sequence[int], tensors: Sequence[Any], stream: Any) -> None:
            args: list[Any] = []
            place = 0
            for i, box in enumerate(boxes):
                pointer = pointers[i]
                if box is None:
                    args.append(pointer)
                    continue
                known = maps[i]
                found = known.get(pointer)
                if found is None:
                    if len(known) >= MAPS_KEPT:
                        known.clear()
                    found = known[pointer] = encode(place, describe(tensors[i], *box))
                place += 1
                args += found
            raw(grid, 1, 1, stream, function, False, False, None, None, packed, None, None, None,
                *args)
        return encoded


def _entry(kernel: Any, boxed: bool) -> tuple[Callable[..., None],
                                              Callable[[int, Any], list[Any]]] | None:
    """The launch function that Triton's own Python wraps, and the encoder of one descriptor.

    Encoding a descriptor takes as long as a launch, and depends only on the address; Triton does it
    at every launch. None where this version of Triton keeps them elsewhere, or the kernel needs
    scratch memory: then its own entry is used.
    """
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launcher = kernel.run
        if launcher.global_scratch_size or launcher.profile_scratch_size or (
                launcher.launch_cooperative_grid or launcher.launch_pdl):
            return None
        inner = launcher.launch
        if not boxed:
            return inner, make_tensordesc_arg
        raw = inner.__closure__[inner.__code__.co_freevars.index("launcher")].cell_contents
        meta = kernel.metadata.tensordesc_meta
    except (ImportError, AttributeError, ValueError, TypeError):
        return None
    return raw, lambda place, described: make_tensordesc_arg(described, meta[place])


@lru_cache(maxsize=1)
def _torch() -> Any:
    """torch, imported when the first kernel starts; cheaper per call than an import statement."""
    import torch

    return torch


def describe(tensor: Any, box: Tensor, extents: tuple[int, ...]) -> Any:
    """The descriptor of a tensor seen as the box's dimensions; its address is a multiple of 16."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = box.layout.strides()
    assert strides is not None
    return TensorDescriptor(tensor, list(box.shape), list(strides), list(extents))
