"""torch's internals: what torch calls private, and what this package needs of it, name by name.

No other file names ``torch._C`` or another module with an underscore. All names are in torch 2.10, the
least version that the package takes, and in those since; two are in builds with CUDA alone. A name is
looked up, and its module imported, when it is asked for; what runs at every call is bound at the import of
its caller:

    _modes: Callable[[], int] = torch_internals.dispatch_modes
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

Empty = Callable[[Sequence[int], Sequence[int], Any], Any]
F = TypeVar("F", bound=Callable[..., Any])

INTERNALS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # The state of a thread, asked for at every call: functions in C; the public ones are in Python.
        "any_autocast": ("torch._C", "_is_any_autocast_enabled"),  # one question for all devices
        "transforms": ("torch._C", "_are_functorch_transforms_active"),  # vmap, grad and jvp have rules
        "dispatch_modes": ("torch._C", "_len_torch_dispatch_stack"),  # a mode sees operators, not kernels
        "function_modes": ("torch._C", "_is_torch_function_mode_enabled"),  # it sees functions of torch
        "tracing_state": ("torch._C", "_get_tracing_state"),  # torch.jit.trace records operators
        "deterministic": ("torch._C", "_get_deterministic_algorithms"),  # no kernels with atomics then
        "cudnn_deterministic": ("torch._C", "_get_cudnn_deterministic"),  # the same, by cuDNN's own switch
        "backward_task": ("torch._C", "_current_graph_task_id"),  # -1 outside of a backward pass
        "precision": ("torch._C", "_get_fp32_precision_getter"),  # the documented attribute takes 0.7 us
        "raw_stream": ("torch._C", "_cuda_getCurrentRawStream"),  # with CUDA; what a launch is given
        "device_number": ("torch._C", "_cuda_getDevice"),  # with CUDA; the device of bound launches
        # Tensors.
        "TensorGuards": ("torch._C._dynamo.guards", "TensorGuards"),  # compares all tensors of a call in C
        "functorch": ("torch._C", "_functorch"),  # levels of torch.func, and of is_grads_batched
        "copy_each": ("torch", "_foreach_copy_"),  # tensors to tensors, in one launch
        "add_batch_dim": ("torch", "_add_batch_dim"),  # is_grads_batched: vmap of an older kind
        "remove_batch_dim": ("torch", "_remove_batch_dim"),
        "foreach_copy": ("torch", "_foreach_copy_"),  # many tensors by one launch
        "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),  # has sizes and no memory
        "FunctionalTensor": ("torch._subclasses.functional_tensor", "FunctionalTensor"),  # AOTAutograd's
        "detect_fake_mode": ("torch._guards", "detect_fake_mode"),  # the mode of a graph's examples
        # Operators.
        "below_autograd": (
            "torch._C",
            "_AutoDispatchBelowAutograd",
        ),  # within an operator's own derivative
        "OpOverload": ("torch._ops", "OpOverload"),  # which nodes of a graph are operators
        "transform_level": ("torch._functorch.pyfunctorch", "retrieve_current_functorch_interpreter"),
        "single_level_autograd": ("torch._functorch.utils", "enable_single_level_autograd_function"),
        # Inductor's max pool with places of 8 bits within windows, and what these are in the image.
        "max_pool_with_places": ("torch._inductor.inductor_prims", "_low_memory_max_pool_with_offsets"),
        "max_pool_index": ("torch._inductor.inductor_prims", "_low_memory_max_pool_offsets_to_indices"),
        # Graphs: what AOTAutograd takes, and what a backend learns of the compilation around it.
        "aot_autograd": ("torch._dynamo.backends.common", "aot_autograd"),
        "aot_settings": ("torch._functorch", "config"),
        "core_aten_decompositions": ("torch._decomp", "core_aten_decompositions"),
        "get_decompositions": ("torch._decomp", "get_decompositions"),
        "partitioners": ("torch._functorch", "partitioners"),  # its module, which says what is arithmetic
        "min_cut_partition": ("torch._functorch.partitioners", "min_cut_rematerialization_partition"),
        "TracingContext": ("torch._guards", "TracingContext"),  # says how saved tensors lie
        "InstructionTranslator": ("torch._dynamo.symbolic_convert", "InstructionTranslator"),  # its module
        "mark_dynamic": ("torch._dynamo", "mark_dynamic"),  # whose dims are names of graphs
        "GraphBreak": ("torch._dynamo.exc", "Unsupported"),  # what a whole graph cannot have
        "cache_entries": (
            "torch._dynamo.eval_frame",
            "_debug_get_cache_entry_list",
        ),  # compiled code of code
        # Inductor, for regions without a kernel, and its CUDA graphs.
        "compile_fx": ("torch._inductor.compile_fx", "compile_fx"),
        "inductor_compile": ("torch._inductor", "compile"),
        "cpp_compiler": ("torch._inductor.cpp_builder", "get_cpp_compiler"),
        "static_inputs": ("torch._inductor.compile_fx", "get_static_input_idxs"),
        "cudagraphify": ("torch._inductor.cudagraph_trees", "cudagraphify_impl"),
        "cudagraph_manager": ("torch._inductor.cudagraph_trees", "get_manager"),
        "placeholder_info": ("torch._inductor.cudagraph_utils", "get_placeholder_info"),
        "count_tangents": ("torch._inductor.utils", "count_tangents"),
        "fixed_arguments": ("torch._inductor.utils", "num_fw_fixed_arguments"),
        "why_no_cudagraph": ("torch._dynamo.backends.cudagraphs", "check_for_skip"),
        "input_mutations": ("torch._dynamo.backends.cudagraphs", "find_input_mutations"),
    }
)


def __getattr__(name: str) -> Any:
    """One of ``INTERNALS``; AttributeError where this torch does not have it, ImportError where it does
    not have its module."""
    found = INTERNALS.get(name)
    if found is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    module, attribute = found
    return getattr(sys.modules.get(module) or import_module(module), attribute)


def constant_in_graphs(function: F) -> F:
    """The function, whose result torch's compiler takes as a constant of the graph that it traces:
    ``torch.compiler.assume_constant_result`` without an import of the compiler."""
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def outside_graphs(function: F) -> F:
    """The function, which torch's compiler does not trace: ``torch.compiler.disable`` without an import of
    the compiler, which may be on its way."""
    made: F = import_module("torch")._disable_dynamo(function)
    return made


def behind_operations(act: Callable[[], object]) -> Any:
    """A context within which ``act`` is called behind each operation of torch in this thread."""
    mode: Any = import_module("torch.utils._python_dispatch").TorchDispatchMode

    class ActMode(mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, operation: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            made = operation(*given, **(named or {}))
            act()
            return made

    return ActMode()


def take_one_as_any(on: bool) -> bool:
    """Set whether torch's compiler takes sizes of 1 as any others where sizes are symbols; what it was."""
    switches: Any = import_module("torch.fx.experimental._config")
    before, switches.backed_size_oblivious = bool(switches.backed_size_oblivious), on
    return before


def compiled_code() -> Any:
    """The code objects that torch's compiler made, none before its import."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", ())


def backends() -> dict[str, Any]:
    """The backends of torch's compiler by their names; empty while its registry is not imported."""
    found: dict[str, Any] = getattr(sys.modules.get("torch._dynamo.backends.registry"), "_BACKENDS", {})
    return found


def keys_of(device: str) -> Any:
    """The set of one dispatch key, "CPU" or "CUDA", for a call of a kernel of aten that was replaced."""
    c = import_module("torch._C")
    return c.DispatchKeySet(getattr(c.DispatchKey, device))


# -- the current GPU ---------------------------------------------------------------------------------


@cache
def quickest() -> Empty:
    """A function of shape, strides and dtype that makes an uninitialised tensor on the current CUDA
    device, in a third of the time of the public one, which it is where torch does not have the fast one:
    that of torch's compiled code."""
    torch: Any = import_module("torch")
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found = getattr(guards, "_empty_strided_cuda", None)
    if found is None:
        empty = torch.empty_strided
        found = lambda shape, strides, dtype: empty(shape, strides, dtype=dtype, device="cuda")  # noqa: E731
    made: Empty = found
    return made


@cache
def current_device() -> Callable[[], int]:
    """A function that gives the number of the current CUDA device; -1 where torch has no CUDA."""
    found: Callable[[], int] = getattr(import_module("torch._C"), "_cuda_getDevice", lambda: -1)
    return found
