"""Executes a plan on guarded tensors in the IR's own interpreter.

The final kernels run in NumPy, for any chip: explicit kernels too, which Triton's interpreter cannot
read. Every access is checked, so that a write outside is an error where it happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from transconv.conv import CompiledDirection
from transconv.ir import DType, Memory, offsets_of, run, verify
from transconv.verify.data import poison

if TYPE_CHECKING:
    import torch

    from transconv.verify.data import Guarded


def interpret(compiled: CompiledDirection, tensors: Mapping[str, Guarded]) -> None:
    """Run a plan in place on tensors of the CPU. The rules of the IR are checked first. Raises
    InterpError for accesses that are errors on any target, VerifyError for a kernel that breaks a rule
    of the IR."""
    memory = Memory({name: _numpy(_place(t)) for name, t in tensors.items()})
    for step in compiled.steps:
        if not step.launcher.grid:
            continue
        for tensor in step.kernel.params:
            space = compiled.workspaces.get(tensor.name)
            if space is not None:  # several kernels use it, some as planes of a copy
                span = (space if tensor.copy_of else tensor).layout.span
                room = memory.buffers.get(tensor.name)
                if room is None or len(room) != span:  # each kernel has its own layout of the partial sums
                    fresh = np.full(span, unset(tensor.dtype), tensor.dtype.numpy)
                    memory = Memory({**memory.buffers, tensor.name: fresh})
        verify(step.kernel, "explicit")
        if step.zero is not None:
            memory.buffers[step.zero.name][offsets_of(step.zero)] = 0
        memory.new_launch()
        run(step.kernel, memory)
    for name, guarded in tensors.items():
        _keep(_place(guarded), memory.buffers[name])


def unset(dtype: DType) -> float | int:
    """The value of unwritten elements: NaN, or the least integer."""
    return dtype.limits[0] if dtype.kind == "int" else float("nan")


def _place(tensor: Guarded) -> torch.Tensor:
    return tensor.memory[tensor.start:tensor.start + tensor.layout.span]


def _numpy(memory: torch.Tensor) -> Any:
    """A copy as the interpreter holds it: bf16 and 8-bit floats live in f32."""
    import torch

    held = memory.dtype is torch.bfloat16 or memory.is_floating_point() and memory.itemsize == 1
    return (memory.float() if held else memory).numpy().copy()


def _keep(place: torch.Tensor, made: Any) -> None:
    """Take over what is no NaN: the poison keeps its pattern where nothing was written."""
    import torch

    values = torch.from_numpy(np.ascontiguousarray(made))
    if not place.is_floating_point():
        place.copy_(values)
        return
    written = ~values.isnan()
    bits = poison(place.dtype)[0]  # torch does not select among 8-bit floats
    place.view(bits)[written] = values.to(place.dtype).view(bits)[written]
