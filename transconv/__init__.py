"""transconv: computations described once and transpiled into Triton kernels; convolutions for PyTorch.

The public names. Each is loaded at its first use, so that ``import transconv`` imports neither torch
nor triton nor sympy."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transconv.support import __version__

if TYPE_CHECKING:
    from transconv import distributed as distributed
    from transconv import functional as functional
    from transconv import graph as graph
    from transconv import kernel as kernel
    from transconv import nn as nn
    from transconv import quantized as quantized
    from transconv.calls import route_cache
    from transconv.calls.settings import Settings
    from transconv.calls.stats import FallbackWarning as FallbackWarning
    from transconv.conv import ConvProblem as ConvProblem
    from transconv.conv import Prop as Prop
    from transconv.distributed.streams.stream import streaming as streaming
    from transconv.functional.computation import computation as computation
    from transconv.graph.certification import certify as certify
    from transconv.graph.optimization import optimize as optimize
    from transconv.graph.pieces.bounded_model import within as within
    from transconv.runtime.api import Compute as Compute
    from transconv.runtime.api import Kernel as Kernel
    from transconv.runtime.api import Schedule as Schedule
    from transconv.runtime.api import Target as Target
    from transconv.runtime.api import compile as compile
    from transconv.runtime.api import lower as lower
    from transconv.torch_ops.conversion.aten_replacement import disable as disable
    from transconv.torch_ops.conversion.aten_replacement import enable as enable
    from transconv.torch_ops.conversion.aten_replacement import use as use
    from transconv.torch_ops.conversion.export import export as export
    from transconv.torch_ops.conversion.fold import fold as fold
    from transconv.torch_ops.conversion.inference import inference as inference
    from transconv.torch_ops.conversion.prepare import prepare as prepare
    from transconv.torch_ops.explain import explain as explain
    from transconv.torch_ops.functional import conv1d as conv1d
    from transconv.torch_ops.functional import conv2d as conv2d
    from transconv.torch_ops.functional import conv3d as conv3d
    from transconv.torch_ops.functional import conv_transpose1d as conv_transpose1d
    from transconv.torch_ops.functional import conv_transpose2d as conv_transpose2d
    from transconv.torch_ops.functional import conv_transpose3d as conv_transpose3d
    from transconv.torch_ops.fused.fused_functional import fused_conv1d as fused_conv1d
    from transconv.torch_ops.fused.fused_functional import fused_conv2d as fused_conv2d
    from transconv.torch_ops.fused.fused_functional import fused_conv3d as fused_conv3d
    from transconv.torch_ops.fused.tracing import epilogue as epilogue
    from transconv.torch_ops.modules import convert_ as convert_
    from transconv.torch_ops.modules import off as off
    from transconv.torch_ops.modules import revert_ as revert_
    from transconv.torch_ops.quantized.quantize import quantize_ as quantize_

    config: Settings
    stats = route_cache.counted


_HOMES = {
    "conv1d": "torch_ops.functional",
    "conv2d": "torch_ops.functional",
    "conv3d": "torch_ops.functional",
    "conv_transpose1d": "torch_ops.functional",
    "conv_transpose2d": "torch_ops.functional",
    "conv_transpose3d": "torch_ops.functional",
    "fused_conv1d": "torch_ops.fused.fused_functional",
    "fused_conv2d": "torch_ops.fused.fused_functional",
    "fused_conv3d": "torch_ops.fused.fused_functional",
    "epilogue": "torch_ops.fused.tracing",
    "fold": "torch_ops.conversion.fold",
    "convert_": "torch_ops.modules",
    "revert_": "torch_ops.modules",
    "enable": "torch_ops.conversion.aten_replacement",
    "disable": "torch_ops.conversion.aten_replacement",
    "use": "torch_ops.conversion.aten_replacement",
    "explain": "torch_ops.explain",
    "inference": "torch_ops.conversion.inference",
    "off": "torch_ops.modules",
    "optimize": "graph.optimization",
    "streaming": "distributed.streams.stream",
    "certify": "graph.certification",
    "within": "graph.pieces.bounded_model",
    "prepare": "torch_ops.conversion.prepare",
    "stats": "calls.route_cache",
    "FallbackWarning": "calls.stats",
    "quantize_": "torch_ops.quantized.quantize",
    "ConvProblem": "conv.conv_problem",
    "Prop": "conv.conv_problem",
    "Compute": "runtime.api",
    "Kernel": "runtime.api",
    "Schedule": "runtime.api",
    "Target": "runtime.api",
    "compile": "runtime.api",
    "lower": "runtime.api",
    "computation": "functional.computation",
    "export": "torch_ops.conversion.export",
}
# Modules of higher rooms to import with a name: they register kernels of derivatives.
_ALSO = dict.fromkeys(
    ("epilogue", "fused_conv1d", "fused_conv2d", "fused_conv3d"), "functional.epilogue_derivatives"
)
_INNER_NAMES = {"stats": "counted"}

__all__ = [
    "__version__",
    "config",
    "distributed",
    "functional",
    "graph",
    "kernel",
    "nn",
    "quantized",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    if name in ("distributed", "errors", "functional", "graph", "kernel", "nn", "quantized"):
        return importlib.import_module(f"transconv.{name}")
    if name not in _HOMES:
        near = importlib.import_module("transconv.support").nearest(name, __all__)
        # A folder of the package is asked for here before it is imported.
        if not name.startswith("_") and importlib.util.find_spec(f"transconv.{name}") is None:
            for door in ("functional", "nn"):
                if name in importlib.import_module(f"transconv.{door}").__all__:
                    near = f"; did you mean transconv.{door}.{name}?"
        raise AttributeError(f"module 'transconv' has no attribute '{name}'{near}")
    home = importlib.import_module(f"transconv.{_HOMES[name]}")
    if name in _ALSO:
        importlib.import_module(f"transconv.{_ALSO[name]}")
    value = getattr(home, _INNER_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """The module ``transconv``. ``transconv.config`` are the switches of a running program, and stay that
    object."""

    @property
    def config(self) -> Settings:
        found: Settings = importlib.import_module("transconv.calls.settings").settings
        return found

    @config.setter
    def config(self, other: object) -> None:
        raise TypeError("transconv.config cannot be replaced; set its switches instead")


sys.modules[__name__].__class__ = _Package


def _enter_backend(folder: str) -> None:
    """Make ``backend="transconv"`` known to torch's compiler, which reads the entries of packages when it
    looks for a name. The folder has the entry of a checkout; an installed package has its own, and no
    folder. A compiler that has read them before gets the entry itself: it loads the backend at its use."""
    if folder not in sys.path and os.path.isdir(folder):
        sys.path.append(folder)
    if "_dynamo" in getattr(sys.modules.get("torch"), "__dict__", ()):
        from transconv.backend_triton import torch_internals

        entry = sys.modules["importlib.metadata"].EntryPoint
        torch_internals.backends().setdefault(
            "transconv", entry("transconv", "transconv.graph:backend", "torch_dynamo_backends")
        )


_enter_backend(os.path.join(os.path.dirname(__file__), "data", "dynamo"))
