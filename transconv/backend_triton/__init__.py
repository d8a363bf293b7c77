"""Triton and Gluon texts of kernels; their modules, launches and offline compilation.

In: a kernel. Out: text, a kernel of Triton, machine code. Knows: passes and below; emitters the IR alone.
"""

from transconv.backend_triton import torch_internals as torch_internals
from transconv.backend_triton.emitters.kernel_text import (
    emit,
    function_name,
    grid_size,
    is_explicit,
    unspecialised,
)
from transconv.backend_triton.emitters.triton import parameters, spelled_lines
from transconv.backend_triton.launch.bound_start import KernelStart, torch_module
from transconv.backend_triton.launch.compile_records import expect, pretend
from transconv.backend_triton.launch.jit_module import write
from transconv.backend_triton.launch.triton_kernel import TritonKernel, numbers_of, programs
from transconv.backend_triton.miscompiles import Miscompiled
from transconv.backend_triton.offline_compilation import (
    BACKENDS,
    Answer,
    Child,
    CompileFailure,
    CompileJob,
    Compilers,
    Resources,
    backends_of,
    compile_offline,
    compiles_for,
    reason_of,
    serve,
    triton_version,
)

__all__ = [
    "BACKENDS",
    "Answer",
    "Child",
    "CompileFailure",
    "CompileJob",
    "Compilers",
    "KernelStart",
    "Miscompiled",
    "Resources",
    "TritonKernel",
    "backends_of",
    "compile_offline",
    "compiles_for",
    "emit",
    "expect",
    "function_name",
    "grid_size",
    "is_explicit",
    "numbers_of",
    "parameters",
    "pretend",
    "programs",
    "reason_of",
    "serve",
    "spelled_lines",
    "torch_module",
    "triton_version",
    "unspecialised",
    "write",
]
