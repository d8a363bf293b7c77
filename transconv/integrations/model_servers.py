"""vLLM and sglang: their convolution layers, which are patch embeddings, and the autoencoders that
they serve.

    from transconv.integrations import model_servers
    model_servers.register_vllm()                    before models are made, as from a plugin's entry point
    model_servers.register_sglang()                  the same, before sglang applies the hooks of plugins
    model_servers.accelerate_autoencoder(vae)        of a pipeline: its encoder and decoder become graphs

Layers stay what they are: weights, names and loaders. vLLM instantiates a registered class in place of
its own (``CustomOp.register_oot``), sglang replaces a method by a hook (``HookRegistry``). Where they
run ``forward_native``, as vLLM with custom operations off and sglang under torch.compile, layers are
theirs. Nothing is imported unasked."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from transconv.integrations.compiled_forward import compile_forward
from transconv.torch_ops.functional import conv2d, conv3d

LAYERS = ("Conv2dLayer", "Conv3dLayer")
PARTS = ("encoder", "decoder")


def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The result of a convolution layer of either server: x [n, c, h, w] or [n, c, t, h, w]. What has
    no kernel torch computes, and so do layers that pad with other than zeros."""
    if self.padding_mode != "zeros":
        made: torch.Tensor = self._forward_conv(x)
        return made
    convolution = conv2d if self.weight.dim() == 4 else conv3d
    return convolution(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def layer_class(layer: type) -> type:
    """A subclass of a convolution layer of vLLM whose CUDA and ROCm forwards are ours; TypeError for a
    class without such a forward."""
    if not callable(getattr(layer, "forward_cuda", None)):
        raise TypeError(f"{layer.__name__} has no forward_cuda; expected a convolution layer of vLLM")
    members = {"forward_cuda": forward, "forward_hip": forward, "__module__": __name__}
    return type(f"Transconv{layer.__name__}", (layer,), members)


def register_vllm() -> list[type]:
    """Let vLLM make layers of ours in place of Conv2dLayer and Conv3dLayer. Returns the classes that
    were registered: none of a name that has one already. ImportError without vLLM."""
    layers: Any = importlib.import_module("vllm.model_executor.layers.conv")
    operators: Any = importlib.import_module("vllm.model_executor.custom_op")
    known = getattr(operators, "op_registry_oot", None)
    if known is None:
        known = operators.CustomOp.op_registry_oot
    made = []
    for name in LAYERS:
        if name not in known:
            own = layer_class(getattr(layers, name))
            operators.CustomOp.register_oot(_decorated_op_cls=own, name=name)
            made.append(own)
    return made


def register_sglang() -> None:
    """Let sglang's Conv2dLayer and Conv3dLayer call ours on CUDA and ROCm, from when sglang applies the
    hooks of its plugins. ImportError without sglang, and with one older than its hooks."""
    # Not by register_oot_forward, which sglang reads on platforms alone that are not its own.
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    for name in LAYERS:
        target = f"sglang.srt.layers.conv.{name}.forward_cuda"
        hooks.HookRegistry.register(target, forward, hooks.HookType.REPLACE)


def accelerate_autoencoder(model: nn.Module) -> list[str]:
    """Compile the encoder and decoder of an autoencoder, in place; of one without such parts the model.
    Returns the names of what was compiled, "" for the model itself; ``compiled_forward.restore_forward``
    undoes each."""
    parts = {name: part for name in PARTS if isinstance(part := getattr(model, name, None), nn.Module)}
    return [name for name, part in (parts or {"": model}).items() if compile_forward(part)]
