"""The published interface of vLLM's and sglang's convolution layers, as signatures: stand-ins of their
classes are made
from these, and have nothing of their code. Of vllm/model_executor/custom_op.py and layers/conv.py, and of
sglang/kernels/fused_op.py and srt/layers/conv.py."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

ARGUMENTS = (
    "in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1, groups=1, bias=True, "
    "padding_mode='zeros'"
)
SIGNATURES = {
    "vllm": {
        "layer": f"(self, {ARGUMENTS}, *, params_dtype=None)",
        "register_oot": "(cls, _decorated_op_cls=None, name=None)",
        "forward_cuda": "(self, x)",
        "forward_native": "(self, x)",
    },
    "sglang": {
        "layer": f"(self, {ARGUMENTS}, disable_linear=True)",
        "register_oot_forward": "(cls, op_cls, fn, platform_key)",
        "forward_cuda": "(self, x)",
        "forward_native": "(self, x)",
    },
}


def signature(server: str, name: str) -> inspect.Signature:
    """One of them, read."""
    namespace: dict[str, Any] = {}
    exec(f"def f{SIGNATURES[server][name]}: ...", namespace)
    return inspect.signature(namespace["f"])


def bound(server: str, name: str) -> Callable[..., dict[str, Any]]:
    """What a call that fits the signature gives each argument; TypeError for one that does not."""

    def bind(*given: Any, **named: Any) -> dict[str, Any]:
        made = signature(server, name).bind(*given, **named)
        made.apply_defaults()
        return dict(made.arguments)

    return bind


class ServedLayer(nn.Module):
    """A convolution layer with the published attributes; it dispatches once, when it is made."""

    server, dims = "vllm", 2

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()
        a = bound(self.server, "layer")(self, *given, **named)
        each = {n: (v,) * self.dims if isinstance(v := a[n], int) else v for n in SIZED}
        self.kernel_size, self.stride = each["kernel_size"], each["stride"]
        self.padding, self.dilation = each["padding"], each["dilation"]
        self.groups, self.padding_mode = a["groups"], a["padding_mode"]
        shape = (a["out_channels"], a["in_channels"] // self.groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(shape[0])) if a["bias"] else None
        self._forward_method = self.dispatch_forward()

    def dispatch_forward(self) -> Callable[..., torch.Tensor]:
        return self.forward_cuda

    def forward(self, *given: Any) -> torch.Tensor:
        return self._forward_method(*given)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the server's own forward ran")

    forward_cuda = forward_native


SIZED = ("kernel_size", "stride", "padding", "dilation")


def vllm(patch: pytest.MonkeyPatch) -> Any:
    """Stand-ins of vLLM's modules; returns that of its layers."""
    registry: dict[str, type] = {}

    class CustomOp(ServedLayer):
        def __new__(cls, *given: Any, **named: Any) -> Any:
            return nn.Module.__new__(registry.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, *given: Any, **named: Any) -> Any:
            a = bound("vllm", "register_oot")(cls, *given, **named)
            assert a["name"] not in registry, "vLLM asserts that a name is new"
            registry[a["name"]] = a["_decorated_op_cls"]
            return a["_decorated_op_cls"]

    return modules(patch, "vllm.model_executor", "custom_op", CustomOp, op_registry_oot=registry)


def sglang(patch: pytest.MonkeyPatch) -> Any:
    """Stand-ins of sglang's modules; returns that of its layers."""
    registry: dict[tuple[str, type], Any] = {}

    class BaseFusedOp(ServedLayer):
        server = "sglang"

        @classmethod
        def register_oot_forward(cls, *given: Any, **named: Any) -> None:
            a = bound("sglang", "register_oot_forward")(cls, *given, **named)
            registry[a["platform_key"], a["op_cls"]] = a["fn"]

        def dispatch_forward(self) -> Callable[..., torch.Tensor]:
            found = registry.get(("cuda", type(self)))
            return types.MethodType(found, self) if found else self.forward_cuda

    return modules(patch, "sglang.srt", "", BaseFusedOp)


def modules(patch: pytest.MonkeyPatch, above: str, beside: str, base: type, **names: Any) -> Any:
    """Modules with a base class, and with two layers of it."""
    layers: Any = types.ModuleType(f"{above}.layers.conv")
    for dims in (2, 3):
        setattr(layers, f"Conv{dims}dLayer", type(f"Conv{dims}dLayer", (base,), {"dims": dims}))
    parts = above.split(".")
    for at in range(1, len(parts) + 1):
        name = ".".join(parts[:at])
        patch.setitem(sys.modules, name, types.ModuleType(name))
    patch.setitem(sys.modules, f"{above}.layers", types.ModuleType(f"{above}.layers"))
    patch.setitem(sys.modules, layers.__name__, layers)
    if beside:
        other: Any = types.ModuleType(f"{above}.{beside}")
        setattr(other, base.__name__, base)
        for name, value in names.items():
            setattr(other, name, value)
        patch.setitem(sys.modules, other.__name__, other)
    return layers
