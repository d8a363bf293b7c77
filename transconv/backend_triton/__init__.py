"""Triton and Gluon texts of kernels; their modules, launches and offline compilation.

In: a kernel. Out: text, a launcher, machine code. Knows: passes and below; emitters the IR alone.
"""

from transconv.backend_triton.child import Child, reason_of, serve
from transconv.backend_triton.compiled import pretend
from transconv.backend_triton.compilers import Compilers
from transconv.backend_triton.distinct import function_name
from transconv.backend_triton.emit_tl import spelled_lines
from transconv.backend_triton.expected import expect
from transconv.backend_triton.flaws import Miscompiled
from transconv.backend_triton.kernel_text import emit, grid_size, is_explicit, unspecialised
from transconv.backend_triton.launch import Launcher
from transconv.backend_triton.module import write
from transconv.backend_triton.offline import (
    BACKENDS,
    Answer,
    CompileFailure,
    Job,
    Resources,
    compile_offline,
    triton_version,
)
from transconv.backend_triton.parameter import parameters
from transconv.backend_triton.sized_launch import SizedLauncher, numbers_of, programs
from transconv.backend_triton.starts import Begun, Bind

__all__ = [
    "Answer", "BACKENDS", "Begun", "Bind", "Child", "CompileFailure", "Compilers", "Job", "Launcher",
    "Miscompiled", "Resources", "SizedLauncher", "compile_offline", "emit", "expect", "function_name",
    "grid_size", "is_explicit", "numbers_of", "parameters", "pretend", "programs", "reason_of", "serve",
    "spelled_lines", "triton_version", "unspecialised", "write",
]
