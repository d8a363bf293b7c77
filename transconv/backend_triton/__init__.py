"""Triton and Gluon texts of kernels; their modules, launches and offline compilation.

In: a kernel. Out: text, a kernel of Triton, machine code. Knows: passes and below; emitters the IR alone.
"""

from transconv.backend_triton import torch_internals as torch_internals
from transconv.backend_triton.emitters.kernel_text import emit as emit
from transconv.backend_triton.emitters.kernel_text import function_name as function_name
from transconv.backend_triton.emitters.kernel_text import grid_size as grid_size
from transconv.backend_triton.emitters.kernel_text import is_explicit as is_explicit
from transconv.backend_triton.emitters.kernel_text import unspecialised as unspecialised
from transconv.backend_triton.emitters.triton import parameters as parameters
from transconv.backend_triton.emitters.triton import spelled_lines as spelled_lines
from transconv.backend_triton.launch.bound_start import KernelStart as KernelStart
from transconv.backend_triton.launch.bound_start import torch_module as torch_module
from transconv.backend_triton.launch.compile_records import expect as expect
from transconv.backend_triton.launch.compile_records import pretend as pretend
from transconv.backend_triton.launch.jit_module import write as write
from transconv.backend_triton.launch.triton_kernel import TritonKernel as TritonKernel
from transconv.backend_triton.launch.triton_kernel import numbers_of as numbers_of
from transconv.backend_triton.launch.triton_kernel import programs as programs
from transconv.backend_triton.miscompiles import Miscompiled as Miscompiled
from transconv.backend_triton.offline_compilation import BACKENDS as BACKENDS
from transconv.backend_triton.offline_compilation import Answer as Answer
from transconv.backend_triton.offline_compilation import CompileFailure as CompileFailure
from transconv.backend_triton.offline_compilation import CompileJob as CompileJob
from transconv.backend_triton.offline_compilation import Compilers as Compilers
from transconv.backend_triton.offline_compilation import Resources as Resources
from transconv.backend_triton.offline_compilation import compile_offline as compile_offline
from transconv.backend_triton.offline_compilation import compiles_for as compiles_for
from transconv.backend_triton.offline_compilation import reason_of as reason_of
from transconv.backend_triton.offline_compilation import serve as serve
from transconv.backend_triton.offline_compilation import triton_version as triton_version
