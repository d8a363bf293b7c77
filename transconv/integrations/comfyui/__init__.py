"""A folder of custom nodes for ComfyUI: copy or link it into ``custom_nodes``; transconv is installed.

    Transconv VAE      a VAE whose encoder and decoder are compiled graphs; switched off, torch's again
    Transconv Model    a copy of a model, patched: while it is loaded, its calls are compiled graphs

ComfyUI loads the folder by its path and reads the two mappings at the end."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from transconv.integrations.compiled_forward import CompiledForward, compile_forward, restore_forward

Inputs = dict[str, dict[str, tuple[Any, ...]]]
MODEL = "diffusion_model"  # where ComfyUI's models have the network


def halves(model: nn.Module) -> list[nn.Module]:
    """The parts of an autoencoder that hold its time: those with several convolutions."""
    return [part for part in model.children() if len(convolutions(part)) > 1]


def convolutions(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]


class TransconvVAE:
    """A VAE, for images or videos; ``VAE Decode`` and ``VAE Encode``, tiled or not, take it as before."""

    CATEGORY: ClassVar = "transconv"
    FUNCTION: ClassVar = "switch"
    RETURN_TYPES: ClassVar = ("VAE",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        return {"required": {"vae": ("VAE",), "enabled": ("BOOLEAN", {"default": True})}}

    def switch(self, vae: Any, enabled: bool) -> tuple[Any]:
        for part in halves(vae.first_stage_model):
            if enabled:
                compile_forward(part)
            else:
                restore_forward(part)
        return (vae,)


class TransconvModel:
    """A U-Net or transformer. LoRA and other patches of weights may stand before or behind it."""

    CATEGORY: ClassVar = "transconv"
    FUNCTION: ClassVar = "patch"
    RETURN_TYPES: ClassVar = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        patched = model.clone()
        forward = CompiledForward(patched.get_model_object(MODEL))
        patched.add_object_patch(f"{MODEL}.forward", forward)
        return (patched,)


NODE_CLASS_MAPPINGS = {"TransconvVAE": TransconvVAE, "TransconvModel": TransconvModel}
NODE_DISPLAY_NAME_MAPPINGS = {"TransconvVAE": "Transconv VAE", "TransconvModel": "Transconv Model"}
