"""The models of ``python -m bench zoo``: convolutional families of torchvision and timm, and models of
other libraries, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.zoo_libraries import MADE

Tensor = torch.Tensor
IMAGES, SCENES, CLIPS = (32, 3, 224, 224), (4, 3, 320, 320), (4, 3, 16, 112, 112)


@dataclass(frozen=True, slots=True)
class ZooModel:
    """``library`` and the ``folder`` of its models in torchvision; the ``shape`` of a batch, and those of
    further inputs."""

    library: str
    folder: str = ""
    shape: tuple[int, ...] = IMAGES
    more: tuple[tuple[int, ...], ...] = ()

    def built(self, name: str) -> nn.Module:
        """For inference, in f32 on the CPU; the same weights at every call. ImportError."""
        torch.manual_seed(0)
        if name in MADE:
            return MADE[name][1]().eval()
        if self.library == "timm":
            import timm

            made: nn.Module = timm.create_model(name, pretrained=False)
            return made.eval()
        from torchvision import models

        own = {"weights": None}
        if self.folder == "segmentation":
            own["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            own |= {"aux_logits": False, "init_weights": True}  # type: ignore[dict-item]
        folder = getattr(models, self.folder) if self.folder else models
        made = getattr(folder, name)(**own)
        return made.eval()

    def batch(self, images: int) -> tuple[Tensor, ...]:
        """Random inputs in f32 on the CPU, of so many images or, for 0, of the shape."""
        seeded = torch.Generator().manual_seed(1)
        return tuple(
            torch.randn((images or shape[0], *shape[1:]), generator=seeded)
            for shape in (self.shape, *self.more)
        )


ZOO: dict[str, ZooModel] = {
    **dict.fromkeys(
        (
            "resnet50",
            "mobilenet_v3_large",
            "convnext_tiny",
            "efficientnet_v2_s",
            "vgg16_bn",
            "mobilenet_v2",
            "squeezenet1_1",
            "alexnet",
            "resnext50_32x4d",
            "wide_resnet50_2",
            "efficientnet_b0",
            "mnasnet1_0",
            "shufflenet_v2_x1_0",
            "regnet_y_1_6gf",
            "regnet_x_3_2gf",
            "googlenet",
            "densenet121",
        ),
        ZooModel("torchvision"),
    ),
    "inception_v3": ZooModel("torchvision", shape=(32, 3, 299, 299)),
    **dict.fromkeys(("r3d_18", "mc3_18", "r2plus1d_18"), ZooModel("torchvision", "video", CLIPS)),
    **dict.fromkeys(
        ("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"),
        ZooModel("torchvision", "segmentation", SCENES),
    ),
    "s3d": ZooModel("torchvision", "video", (4, 3, 16, 224, 224)),
    **dict.fromkeys(
        (
            "convnextv2_tiny",
            "repvgg_b1",
            "vovnet39a",
            "cspresnet50",
            "fbnetc_100",
            "mixnet_m",
            "ghostnet_100",
            "nfnet_l0",
            "tf_efficientnetv2_b2",
            "res2net50_26w_4s",
            "resnest50d",
            "dpn68",
            "edgenext_small",
            "levit_conv_256",
            "coatnet_0_rw_224",
            "maxvit_tiny_rw_224",
            "hrnet_w18",
        ),
        ZooModel("timm"),
    ),
    "swin_t": ZooModel("torchvision"),
    **{name: ZooModel(library, "", s[0], s[1:]) for name, (library, _, s) in MADE.items()},
}


def arranged(thing: Any) -> Any:
    """A module or a tensor with its features last."""
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    if isinstance(thing, Tensor):
        form = forms.get(thing.dim(), torch.contiguous_format)
        return thing.contiguous(memory_format=form)
    for p in thing.parameters():
        p.data = p.data.contiguous(memory_format=forms[p.dim()]) if p.dim() in forms else p.data
    return thing


def without_chance(model: nn.Module) -> nn.Module:
    """The model for training, whose dropout and stochastic depth leave nothing out: results can be
    compared."""
    for m in model.train().modules():
        for name in ("p", "drop_prob", "drop_rate", "dropout", "attention_dropout"):
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 0.0)
    return model


def results(made: Any) -> list[Tensor]:
    """All tensors that a model returns."""
    if isinstance(made, Tensor):
        return [made]
    parts = made.values() if isinstance(made, Mapping) else made
    return [t for part in parts for t in results(part)]
