"""What ``python -m bench integrations`` runs: models of other packages by their own classes, in their
public sizes and with random weights. ``small``: a few features, for a CPU.

Inference is in bf16; nnU-Net's training is under autocast to f16 with scaled gradients, as its trainer
has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
# nnU-Net's plan for 3D images that have no anisotropy, on a GPU of 10 GB.
PATCH, FEATURES = 128, (32, 64, 128, 256, 320, 320)


@dataclass(frozen=True)
class Subject:
    """``build(small)``: a model on the default device; ``given(small)``: the tensors of a call; ``call``:
    the result; ``parts``: the modules whose forwards are compiled; ``trains``: steps of training."""

    package: str
    build: Callable[[bool], nn.Module]
    given: Callable[[bool], tuple[Tensor, ...]]
    call: Callable[..., Any]
    parts: Callable[[nn.Module], Iterator[nn.Module]]
    trains: bool = False


def whole(model: nn.Module) -> Iterator[nn.Module]:
    yield model


def halves(model: nn.Module) -> Iterator[nn.Module]:
    yield from (getattr(model, name) for name in ("encoder", "decoder"))


def decoded(model: Any, z: Tensor) -> Tensor:
    made: Tensor = model.decode(z).sample
    return made


def encoded(model: Any, x: Tensor) -> Tensor:
    made: Tensor = model.encode(x).latent_dist.mean
    return made


def called(model: Any, *given: Tensor) -> Any:
    made = model(*given)
    return getattr(made, "sample", getattr(made, "logits", made))


def autoencoder(kind: str, **sizes: Any) -> Callable[[bool], nn.Module]:
    """A class of diffusers; ``small``, which is among the sizes, replaces those of its models."""
    small = sizes.pop("small")

    def build(tiny: bool) -> nn.Module:
        import diffusers

        made: nn.Module = getattr(diffusers, kind)(**(sizes | small if tiny else sizes))
        return made

    return build


def image_autoencoder(latent: int, quant: bool) -> Callable[[bool], nn.Module]:
    return autoencoder(
        "AutoencoderKL",
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=latent,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
        small={"block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 4},
    )


def unet(small: bool) -> nn.Module:
    """Stable Diffusion 1.5's; its classes' own defaults."""
    from diffusers import UNet2DConditionModel

    tiny = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 4, "attention_head_dim": 2}
    return UNet2DConditionModel(cross_attention_dim=768, **(tiny if small else {}))


def segmentation_unet(small: bool) -> nn.Module:
    """As nnU-Net's plans make it, with deep supervision."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    features = FEATURES[:2] if small else FEATURES
    n = len(features)
    return PlainConvUNet(
        1,
        n,
        [4, 8] if small else list(features),
        nn.Conv3d,
        3,
        [1, *[2] * (n - 1)],
        [2] * n,
        3,
        [2] * (n - 1),
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )


def windows(small: bool) -> nn.Module:
    """MONAI's sliding windows around its U-Net."""
    from monai.inferers import SlidingWindowInferer
    from monai.networks.nets import BasicUNet

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            features = (4,) * 6 if small else (32, 32, 64, 128, 256, 32)
            self.net = BasicUNet(3, 1, 2, features=features)
            self.inferer = SlidingWindowInferer((32 if small else 96,) * 3, sw_batch_size=2, overlap=0.25)

        def forward(self, volume: Tensor) -> Any:
            return self.inferer(volume, self.net)

    return Windows()


def detector(small: bool) -> nn.Module:
    """YOLOv8, as ``predict`` has it: fused, one result."""
    from ultralytics.nn.tasks import DetectionModel

    made = DetectionModel("yolov8n.yaml" if small else "yolov8m.yaml", verbose=False).eval()
    return made.fuse(verbose=False)


def found(model: Any, images: Tensor) -> Tensor:
    made: Tensor = model(images)[0]
    return made


def classifier(package: str, name: str) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        if package == "timm":
            import timm

            return timm.create_model("test_convnext" if small else name)
        import torchvision

        return getattr(torchvision.models, "squeezenet1_1" if small else name)()

    return build


def masks(small: bool) -> nn.Module:
    import segmentation_models_pytorch

    tiny = {"encoder_name": "tu-test_resnet", "decoder_channels": (8, 8, 8, 8, 4)}
    made: nn.Module = segmentation_models_pytorch.Unet(encoder_weights=None, **(tiny if small else {}))
    return made


def labels(small: bool) -> nn.Module:
    """ResNet-50; its class's own defaults."""
    from transformers import ResNetConfig, ResNetForImageClassification

    tiny = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**(tiny if small else {})))


def noise(*shape: int, small: tuple[int, ...]) -> Callable[[bool], tuple[Tensor, ...]]:
    return lambda tiny: (torch.randn(small if tiny else shape),)


def denoised(small: bool) -> tuple[Tensor, ...]:
    size = 8 if small else 64
    return torch.randn(2, 4, size, size), torch.tensor(500), torch.randn(2, 77, 768)


def decodes(
    kind: Callable[[bool], nn.Module], *latents: int, small: tuple[int, ...], call: Any = decoded
) -> Subject:
    return Subject("diffusers", kind, noise(*latents, small=small), call, halves)


WAN = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
NUMBERS = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
LTX = {"block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4, "latent_channels": 4}
LAYERS = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5}
COG = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4}
SDXL, FLUX = image_autoencoder(4, True), image_autoencoder(16, False)
SUBJECTS = {
    "sdxl_decode": decodes(SDXL, 1, 4, 128, 128, small=(1, 4, 2, 2)),
    "sdxl_encode": decodes(SDXL, 1, 3, 1024, 1024, small=(1, 3, 16, 16), call=encoded),
    "flux_decode": decodes(FLUX, 1, 16, 128, 128, small=(1, 16, 2, 2)),
    "qwen_decode": decodes(
        autoencoder("AutoencoderKLQwenImage", small=WAN | NUMBERS),
        1,
        16,
        1,
        128,
        128,
        small=(1, 4, 1, 2, 2),
    ),
    "wan_decode": decodes(
        autoencoder("AutoencoderKLWan", small=WAN | NUMBERS), 1, 16, 5, 60, 104, small=(1, 4, 2, 2, 2)
    ),
    "ltx_decode": decodes(
        autoencoder("AutoencoderKLLTXVideo", small=LTX | LAYERS), 1, 128, 4, 16, 24, small=(1, 4, 2, 2, 2)
    ),
    "cogvideox_decode": decodes(
        autoencoder(
            "AutoencoderKLCogVideoX",
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(128, 256, 256, 512),
            small=COG,
        ),
        *(1, 16, 3, 60, 90),
        small=(1, 4, 2, 2, 2),
    ),
    "hunyuan_decode": decodes(
        autoencoder("AutoencoderKLHunyuanVideo", small=COG), 1, 16, 3, 60, 104, small=(1, 4, 2, 2, 2)
    ),
    "sd_unet": Subject("diffusers", unet, denoised, called, whole),
    "nnunet_train": Subject(
        "nnunetv2",
        segmentation_unet,
        noise(2, 1, *(PATCH,) * 3, small=(2, 1, 8, 8, 8)),
        called,
        whole,
        trains=True,
    ),
    "monai_windows": Subject(
        "monai",
        windows,
        noise(1, 1, 192, 192, 160, small=(1, 1, 36, 32, 32)),
        called,
        lambda model: whole(model.net),
    ),
    "yolo_predict": Subject(
        "ultralytics", detector, noise(8, 3, 640, 640, small=(1, 3, 32, 32)), found, whole
    ),
    "timm_convnext": Subject(
        "timm",
        classifier("timm", "convnext_small"),
        noise(32, 3, 224, 224, small=(1, 3, 32, 32)),
        called,
        whole,
    ),
    "smp_unet": Subject(
        "segmentation_models_pytorch", masks, noise(8, 3, 512, 512, small=(1, 3, 32, 32)), called, whole
    ),
    "transformers_resnet50": Subject(
        "transformers", labels, noise(32, 3, 224, 224, small=(1, 3, 32, 32)), called, whole
    ),
    "torchvision_resnet50": Subject(
        "torchvision",
        classifier("torchvision", "resnet50"),
        noise(32, 3, 224, 224, small=(1, 3, 32, 32)),
        called,
        whole,
    ),
}
