"""The convolution layers of vLLM and sglang, in two ways: stand-ins that are made from their published
signatures and have nothing of their code, and the servers' own files, read from their wheels, with
stand-ins for what those import.

``make integrations`` puts the wheels in the environment's folder ``servers``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import sys
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ARGUMENTS = (
    "in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True, "
    "padding_mode='zeros'"
)
LAYERS = {"vllm": "vllm.model_executor.layers.conv", "sglang": "sglang.srt.layers.conv"}
HOOKS = "sglang.srt.plugins.hook_registry"
# By module, and path in it.
SIGNATURES = {
    LAYERS["vllm"]: {
        "Conv2dLayer.__init__": f"(self, {ARGUMENTS}, *, params_dtype=None)",
        "Conv3dLayer.__init__": f"(self, {ARGUMENTS}, *, params_dtype=None)",
        "Conv2dLayer.register_oot": "(_decorated_op_cls=None, name=None)",
        "Conv2dLayer.forward_cuda": "(self, x)",
        "Conv3dLayer.forward_cuda": "(self, x)",
        "Conv3dLayer._forward_conv": "(self, x)",
    },
    LAYERS["sglang"]: {
        "Conv2dLayer.__init__": f"(self, {ARGUMENTS}, disable_linear=True)",
        "Conv3dLayer.__init__": f"(self, {ARGUMENTS}, disable_linear=False)",
        "Conv2dLayer.forward_cuda": "(self, x)",
        "Conv3dLayer.forward_cuda": "(self, x)",
        "Conv3dLayer._forward_conv": "(self, x)",
    },
    HOOKS: {"HookRegistry.register": "(target, hook, hook_type=AFTER, *, source=None)"},
}
SIZED = ("kernel_size", "stride", "padding", "dilation")


class HookType(Enum):
    """sglang's kinds of hooks that are used here."""

    AFTER = "after"
    REPLACE = "replace"


def signature(module: str, path: str) -> inspect.Signature:
    """One of them, read."""
    namespace: dict[str, Any] = {"AFTER": HookType.AFTER}
    exec(f"def f{SIGNATURES[module][path]}: ...", namespace)
    return inspect.signature(namespace["f"])


def bound(module: str, path: str, *given: Any, **named: Any) -> dict[str, Any]:
    """What a call that fits the signature gives each argument; TypeError for one that does not."""
    made = signature(module, path).bind(*given, **named)
    made.apply_defaults()
    return dict(made.arguments)


class ServedLayer(nn.Module):
    """A convolution layer with the published attributes."""

    server, dims = "vllm", 2

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()
        a = bound(LAYERS[self.server], f"Conv{self.dims}dLayer.__init__", self, *given, **named)
        each = {n: (v,) * self.dims if isinstance(v := a[n], int) else v for n in SIZED}
        self.kernel_size, self.stride = each["kernel_size"], each["stride"]
        self.padding, self.dilation = each["padding"], each["dilation"]
        self.groups, self.padding_mode = a["groups"], a["padding_mode"]
        shape = (a["out_channels"], a["in_channels"] // self.groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if a["bias"] else None

    def forward(self, *given: Any) -> torch.Tensor:
        return self.forward_cuda(*given)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the server's own forward ran")

    forward_cuda = forward_native


def vllm(patch: pytest.MonkeyPatch) -> Any:
    """Stand-ins of vLLM's modules; returns that of its layers."""
    registry: dict[str, type] = {}

    class CustomOp(ServedLayer):
        def __new__(cls, *given: Any, **named: Any) -> Any:
            return nn.Module.__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, *given: Any, **named: Any) -> Any:
            a = bound(LAYERS["vllm"], "Conv2dLayer.register_oot", *given, **named)
            assert a["name"] not in registry, "vLLM asserts that a name is new"
            registry[a["name"]] = a["_decorated_op_cls"]
            return a["_decorated_op_cls"]

    standing(patch, {"vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": registry}})
    return standing(patch, {LAYERS["vllm"]: layers_of(CustomOp)})


def sglang(patch: pytest.MonkeyPatch) -> Any:
    """Stand-ins of sglang's modules; returns that of its layers."""
    hooks: list[dict[str, Any]] = []

    class BaseFusedOp(ServedLayer):
        server = "sglang"

    class HookRegistry:
        @classmethod
        def register(cls, *given: Any, **named: Any) -> None:
            hooks.append(bound(HOOKS, "HookRegistry.register", *given, **named))

        @classmethod
        def apply_hooks(cls) -> None:
            for hook in hooks:
                assert hook["hook_type"] is HookType.REPLACE
                owner, _, name = hook["target"].rpartition(".")
                setattr(pkgutil.resolve_name(owner), name, hook["hook"])

    standing(patch, {HOOKS: {"HookRegistry": HookRegistry, "HookType": HookType}})
    return standing(patch, {LAYERS["sglang"]: layers_of(BaseFusedOp)})


def layers_of(base: type) -> dict[str, type]:
    """A layer for two dims and one for three."""
    return {f"Conv{n}dLayer": type(f"Conv{n}dLayer", (base,), {"dims": n}) for n in (2, 3)}


def standing(patch: pytest.MonkeyPatch, members: dict[str, dict[str, Any]], files: str = "") -> Any:
    """Put modules with these members in ``sys.modules``; returns the last. ``files``: the folder in which
    packages above them find their other modules."""
    made = types.ModuleType("")
    for name, own in members.items():
        parts = name.split(".")
        for at in range(1, len(parts) + 1):
            above = ".".join(parts[:at])
            made = sys.modules.get(above) or types.ModuleType(above)
            made.__path__ = [f"{files}/{above.replace('.', '/')}"]
            patch.setitem(sys.modules, above, made)
        for attribute, value in own.items():
            setattr(made, attribute, value)
    return made


def wheel(server: str) -> str:
    """The server's wheel; skips the test where there is none."""
    found = sorted((Path(sys.prefix) / "servers").glob(f"{server}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of {server} in {Path(sys.prefix) / 'servers'}")
    return str(found[-1])


def no(*_: Any) -> bool:
    return False


def yes(*_: Any) -> bool:
    return True


def own_vllm(patch: pytest.MonkeyPatch) -> Any:
    """vLLM's own layers, on a platform of CUDA with all custom operations on."""
    asked = {f"is_{n}": no for n in ("rocm", "cpu", "tpu", "xpu", "out_of_tree")}
    config = types.SimpleNamespace(
        custom_ops=["all"], enabled_custom_ops=set[str](), disabled_custom_ops=set[str]()
    )
    members: dict[str, dict[str, Any]] = {
        "vllm.config": {"get_cached_compilation_config": lambda: config},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.utils": {"maybe_disable_graph_partition": no},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(**asked)},
        "vllm.utils.torch_utils": {"is_torch_equal_or_newer": yes},
        "vllm.model_executor.layers": {},
    }
    standing(patch, members, wheel("vllm"))
    return importlib.import_module(LAYERS["vllm"])


def own_sglang(patch: pytest.MonkeyPatch) -> Any:
    """sglang's own layers, dispatch and hooks, on a platform of CUDA."""
    forced = types.SimpleNamespace(get=lambda: None)
    asked: dict[str, Any] = {
        f"is_{n}": yes if n == "cuda" else no for n in ("cuda", "hip", "musa", "npu", "xpu", "cpu")
    }
    members: dict[str, dict[str, Any]] = {
        "sglang.kernels": {},
        "sglang.srt.environ": {"envs": types.SimpleNamespace(SGLANG_FORCE_FUSED_OP_BACKEND=forced)},
        "sglang.srt.platforms": {"current_platform": types.SimpleNamespace(is_out_of_tree=no)},
        "sglang.srt.utils": asked | {"cpu_has_amx_support": no, "use_intel_amx_backend": no},
        "sglang.srt.layers.amx_utils": {"PackWeightMethod": None},
        "sglang.srt.plugins": {},
    }
    standing(patch, members, wheel("sglang"))
    return importlib.import_module(LAYERS["sglang"])


def registered(register: Callable[[], Any]) -> None:
    """Register, and what sglang does when it has loaded its plugins."""
    register()
    if (hooks := sys.modules.get(HOOKS)) is not None:
        hooks.HookRegistry.apply_hooks()
