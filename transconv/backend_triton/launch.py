"""Stage 11b. In: a JIT function and tensors. Out: the kernel runs.

The first launch on a device goes through Triton's dispatcher, which compiles; the compiled kernel is
kept and run directly afterwards. Triton specialises on addresses that are multiples of 16, so a kept
kernel is only used for tensors that are aligned like those it was compiled for.
"""

from __future__ import annotations

import threading
from typing import Any

from transconv.backend_triton.module import load
from transconv.ir import Tensor


class Launcher:
    """Runs one kernel: the compiled form per (device, alignment) is kept."""

    def __init__(self, source: str, function: str, path: Any, grid: int, warps: int,
                 stages: int, boxes: tuple[tuple[Tensor, tuple[int, ...]] | None, ...] = ()) -> None:
        self.boxes = boxes
        self.source, self.function, self.path = source, function, path
        self.grid, self.warps, self.stages = grid, warps, stages
        self.jit: Any = None
        self.kept: dict[tuple[int, bool], Any] = {}
        self.lock = threading.Lock()

    def __call__(self, tensors: list[Any]) -> None:
        """Launch on the tensors' device and its current stream; no programs, no launch."""
        if self.grid == 0:
            return
        first = tensors[0]
        if any(b is not None for b in self.boxes):
            self._boxed(tensors, first)
            return
        if not first.is_cuda:
            self._first(tensors)
            return
        import torch

        device = first.device.index
        aligned = True
        for t in tensors:
            if t.data_ptr() & 15:
                aligned = False
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(tensors, device, aligned)
        else:
            self._run(tensors, device, aligned)

    def _boxed(self, tensors: list[Any], first: Any) -> None:
        """Launch with descriptors, made here from the tensors, in place of pointers."""
        args = [t if box is None else describe(t, *box)
                for t, box in zip(tensors, self.boxes, strict=True)]
        if not first.is_cuda:
            self._first(args)
            return
        import torch

        with torch.cuda.device(first.device.index):
            self._run(args, first.device.index, True)

    def _run(self, tensors: list[Any], device: int, aligned: bool) -> None:
        import torch

        kernel = self.kept.get((device, aligned))
        if kernel is None:
            kernel = self._first(tensors, aligned)
            self.kept[device, aligned] = kernel
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        kernel.run(self.grid, 1, 1, stream, kernel.function, kernel.packed_metadata,
                   None, None, None, *tensors)

    def _first(self, tensors: list[Any], aligned: bool = True) -> Any:
        with self.lock:
            if self.jit is None:
                self.jit = load(self.source, self.function, self.path)
        function = self.jit
        if not aligned:
            import triton

            names = [p.name for p in function.params]
            function = triton.jit(function.fn, do_not_specialize_on_alignment=names)
        return function[(self.grid,)](*tensors, num_warps=self.warps, num_stages=self.stages)


def describe(tensor: Any, box: Tensor, extents: tuple[int, ...]) -> Any:
    """The descriptor of a tensor seen as the box's dimensions; its address is a multiple of 16."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = box.layout.strides()
    assert strides is not None
    return TensorDescriptor(tensor, list(box.shape), list(strides), list(extents))
