"""Stage 11b. In: a JIT function and tensors. Out: the kernel runs.

The first launch on a device goes through Triton's dispatcher, which compiles; the compiled kernel is
kept and started directly afterwards. Triton specialises on addresses that are multiples of 16, so a
kept kernel is only used for tensors that are aligned like those it was compiled for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from transconv.backend_triton.module import load
from transconv.ir import Tensor

Boxed = tuple[Tensor, tuple[int, ...]]
MAPS_KEPT = 256  # encoded descriptors per kernel and argument; each is bound to one address


class Launcher:
    """Runs one kernel. ``boxes`` says which arguments are passed as descriptors of boxes."""

    def __init__(self, source: str, function: str, path: Any, grid: int, warps: int, stages: int,
                 boxes: tuple[Boxed | None, ...] = ()) -> None:
        self.source, self.function, self.path = source, function, path
        self.grid, self.warps, self.stages = grid, warps, stages
        self.boxes = boxes if any(b is not None for b in boxes) else ()
        self.jit: Any = None
        self.kept: dict[tuple[int, bool], Callable[[list[Any], Any], None]] = {}
        self.lock = threading.Lock()

    def __call__(self, tensors: list[Any]) -> None:
        """Launch on the tensors' device and its current stream; no programs, no launch."""
        if self.grid == 0:
            return
        device = tensors[0].device
        if device.type == "cpu":
            self._dispatch(tensors, True)
            return
        import torch

        aligned = True
        for t in tensors:
            if t.data_ptr() & 15:
                aligned = False
        index = device.index
        start = self.kept.get((index, aligned))
        if start is not None and index == torch._C._cuda_getDevice():
            start(tensors, torch._C._cuda_getCurrentRawStream(index))
            return
        with torch.cuda.device(index):
            if start is None:
                kernel = self._dispatch(tensors, aligned)
                self.kept[index, aligned] = self._starter(kernel)
            else:
                start(tensors, torch._C._cuda_getCurrentRawStream(index))

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

    def _starter(self, kernel: Any) -> Callable[[list[Any], Any], None]:
        """How to start a compiled kernel with the least work per call."""
        entry = _entry(kernel) if self.boxes else None
        grid, function, packed, boxes = self.grid, kernel.function, kernel.packed_metadata, self.boxes
        run = kernel.run
        if not boxes:
            def start(tensors: list[Any], stream: Any) -> None:
                run(grid, 1, 1, stream, function, packed, None, None, None, *tensors)
            return start
        if entry is None:
            def described(tensors: list[Any], stream: Any) -> None:
                args = [t if b is None else describe(t, *b)
                        for t, b in zip(tensors, boxes, strict=True)]
                run(grid, 1, 1, stream, function, packed, None, None, None, *args)
            return described
        raw, encode = entry
        maps: list[dict[int, list[Any]]] = [{} for _ in boxes]

        def encoded(tensors: list[Any], stream: Any) -> None:
            args: list[Any] = []
            place = 0
            for t, box, known in zip(tensors, boxes, maps, strict=True):
                if box is None:
                    args.append(t)
                    continue
                pointer = t.data_ptr()
                found = known.get(pointer)
                if found is None:
                    if len(known) >= MAPS_KEPT:
                        known.clear()
                    found = known[pointer] = encode(place, describe(t, *box))
                place += 1
                args += found
            raw(grid, 1, 1, stream, function, False, False, None, None, packed, None, None, None,
                *args)
        return encoded


def _entry(kernel: Any) -> tuple[Callable[..., None], Callable[[int, Any], list[Any]]] | None:
    """The launch function under Triton's descriptor handling, and the encoder of one descriptor.

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
        raw = inner.__closure__[inner.__code__.co_freevars.index("launcher")].cell_contents
        meta = kernel.metadata.tensordesc_meta
    except (ImportError, AttributeError, ValueError, TypeError):
        return None
    return raw, lambda place, described: make_tensordesc_arg(described, meta[place])


def describe(tensor: Any, box: Tensor, extents: tuple[int, ...]) -> Any:
    """The descriptor of a tensor seen as the box's dimensions; its address is a multiple of 16."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = box.layout.strides()
    assert strides is not None
    return TensorDescriptor(tensor, list(box.shape), list(strides), list(extents))
