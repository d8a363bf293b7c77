"""Stage 11b for kernels whose sizes are arguments. In: tensors and sizes. Out: the kernel runs.

One compiled kernel serves all sizes: they are passed in 32 bits, and Triton specialises on none of them.
The number of programs is computed from them at each launch.
"""

from __future__ import annotations

from typing import Any

from transconv.backend_triton.interpreter import mend_interpreter
from transconv.backend_triton.launch import INTERPRETER, Launcher
from transconv.backend_triton.launch import _torch as torch_module
from transconv.ir import For, Kernel, Sizes, Values, value_at, walk


def programs(kernel: Kernel, values: Values) -> int:
    """The number of programs that a kernel is launched with for given sizes."""
    for at in walk(kernel.body):
        if isinstance(at, For) and at.kind == "grid":
            return at.stop if at.until is None else value_at(at.until, values)
    return 1


class SizedLauncher(Launcher):
    """Runs one kernel for any sizes that it takes. ``compiled`` counts what Triton was asked to compile:
    at most two kernels a device, for tensors that are aligned and for others."""

    def __init__(self, kernel: Kernel, sizes: Sizes, source: str, path: Any, warps: int, stages: int,
                 early: bool) -> None:
        super().__init__(source, kernel.name, path, 1, warps, stages, early=early)
        self.kernel, self.sizes, self.unspecialised = kernel, sizes, sizes.names
        self.compiled = 0
        self.runs: dict[tuple[int, bool], Any] = {}

    def start(self, tensors: list[Any], values: Values) -> None:
        """Launch for sizes that meet the kernel's requirements, which the caller has seen to."""
        grid, device = programs(self.kernel, values), tensors[0].device
        args = [*tensors, *(values[n] for n in self.sizes.names)]
        if device.type == "cpu":
            with INTERPRETER:
                mend_interpreter()
                self._function()[(grid,)](*args, **self._options())
            return
        torch = torch_module()
        aligned = not any(t.data_ptr() & 15 for t in tensors)
        with torch.cuda.device(device.index):
            made = self.runs.get((device.index, aligned))
            if made is None:
                made = self.runs[device.index, aligned] = self._compiled(args, aligned)
                self.compiled += 1
            stream = torch.cuda.current_stream(device.index).cuda_stream
            made.run(grid, 1, 1, stream, made.function, made.packed_metadata, None, None, None, *args)
