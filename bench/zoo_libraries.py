"""Models of transformers, diffusers, MONAI and segmentation-models that ``python -m bench zoo`` takes
besides torchvision's and timm's, with random weights: decoders of sound, images and films, networks that
segment, and encoders of images and speech."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

Shapes = tuple[tuple[int, ...], ...]


def _made(path: str, *given: Any, **named: Any) -> Any:
    """What a class of a library makes of arguments, and of the default configuration ``config``."""
    module, _, name = path.rpartition(".")
    config = named.pop("config", None)
    library = importlib.import_module(module)
    if config is not None:
        given = (getattr(library, config)(**named), *given)
        named = {}
    return getattr(library, name)(*given, **named)


class Decoded(nn.Module):
    """The decoder of a model that also encodes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, z: Any) -> Any:
        """The sample that a latent stands for."""
        return self.model.decode(z, return_dict=False)[0]  # type: ignore[operator]


class Denoised(nn.Module):
    """A U-Net of a diffusion model at one step of time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, context: Any) -> Any:
        """The noise in a latent."""
        return self.model(x, 500, context, return_dict=False)[0]


class Encoded(nn.Module):
    """The last hidden state of an encoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        """Features of images or of speech."""
        return self.model(x, return_dict=False)[0]


def _transformer(name: str, **named: Any) -> nn.Module:
    made: nn.Module = _made(f"transformers.{name}Model", config=f"{name}Config", **named)
    return made


def _sdxl() -> nn.Module:
    wide = (128, 256, 512, 512)
    return Decoded(
        _made(
            "diffusers.AutoencoderKL",
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=wide,
            layers_per_block=2,
            latent_channels=4,
        )
    )


MADE: dict[str, tuple[str, Callable[[], nn.Module], Shapes]] = {
    "dac_decoder": ("transformers", lambda: _transformer("Dac").decoder, ((4, 1024, 200),)),
    "encodec_decoder": ("transformers", lambda: _transformer("Encodec").decoder, ((4, 128, 750),)),
    "whisper_encoder": (
        "transformers",
        lambda: Encoded(_transformer("Whisper").encoder),
        ((8, 80, 3000),),
    ),
    "segformer": ("transformers", lambda: Encoded(_transformer("Segformer")), ((8, 3, 512, 512),)),
    "vit": ("transformers", lambda: Encoded(_transformer("ViT")), ((32, 3, 224, 224),)),
    "sd15_unet": (
        "diffusers",
        lambda: Denoised(_made("diffusers.UNet2DConditionModel", cross_attention_dim=768)),
        ((2, 4, 64, 64), (2, 77, 768)),
    ),
    "sdxl_decoder": ("diffusers", _sdxl, ((1, 4, 64, 64),)),
    "ltx_decoder": (
        "diffusers",
        lambda: Decoded(_made("diffusers.AutoencoderKLLTXVideo")),
        ((1, 128, 3, 16, 16),),
    ),
    "unet_resnet34": (
        "segmentation-models",
        lambda: _made("segmentation_models_pytorch.Unet", "resnet34", encoder_weights=None),
        ((8, 3, 512, 512),),
    ),
    "deeplab_resnet50": (
        "segmentation-models",
        lambda: _made("segmentation_models_pytorch.DeepLabV3Plus", "resnet50", encoder_weights=None),
        ((8, 3, 512, 512),),
    ),
    "segresnet": (
        "monai",
        lambda: _made("monai.networks.nets.SegResNet", init_filters=16, in_channels=1, out_channels=3),
        ((1, 1, 96, 96, 96),),
    ),
    "monai_unet": (
        "monai",
        lambda: _made(
            "monai.networks.nets.UNet",
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            channels=(16, 32, 64, 128, 256),
            strides=(2, 2, 2, 2),
            num_res_units=2,
        ),
        ((2, 1, 96, 96, 96),),
    ),
    "dynunet": (
        "monai",
        lambda: _made(
            "monai.networks.nets.DynUNet",
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            kernel_size=[3] * 5,
            strides=[1, 2, 2, 2, 2],
            upsample_kernel_size=[2] * 4,
        ),
        ((2, 1, 96, 96, 96),),
    ),
}
"""By name: the library, the model in f32 on the CPU, and the shapes of its inputs."""
