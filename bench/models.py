"""Five whole models without pretrained weights, by name: ``classifiers.py`` and ``unets.py`` have them.

``build`` makes each in its paper's size or, with ``small``, in a size for a CPU; ``inputs`` makes a
batch and its targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from bench.classifiers import MOBILE_LARGE, ConvNeXt, MobileNetV3, ResNet50
from bench.unets import UNet, UNet3d

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Size:
    """A batch: ``image`` has the channels first; ``classes`` per image, or per point if dense."""

    batch: int
    image: tuple[int, ...]
    classes: int
    dense: bool = False


SIZES: dict[str, Size] = {
    "resnet50": Size(32, (3, 224, 224), 1000),
    "mobilenetv3": Size(64, (3, 224, 224), 1000),
    "convnext_t": Size(32, (3, 224, 224), 1000),
    "unet2d": Size(4, (3, 256, 256), 2, dense=True),
    "unet3d": Size(2, (1, 96, 96, 96), 3, dense=True),
}
SMALL: dict[str, Size] = {
    "resnet50": Size(2, (3, 64, 64), 10),
    "mobilenetv3": Size(4, (3, 64, 64), 10),
    "convnext_t": Size(2, (3, 64, 64), 10),
    "unet2d": Size(1, (3, 32, 32), 2, dense=True),
    "unet3d": Size(1, (1, 16, 16, 16), 3, dense=True),
}
NAMES = tuple(SIZES)


def size_of(name: str, small: bool) -> Size:
    """Raises ValueError for a model that is not in the list."""
    if name not in SIZES:
        raise ValueError(f"model '{name}' is unknown; expected one of: {', '.join(NAMES)}")
    return (SMALL if small else SIZES)[name]


def build(name: str, small: bool = False) -> nn.Module:
    """The model, with random weights from torch's generator, on the CPU in float32."""
    classes = size_of(name, small).classes
    if name == "resnet50":
        return ResNet50(8, (1, 1, 2, 1), classes) if small else ResNet50(classes=classes)
    if name == "mobilenetv3":
        return MobileNetV3(MOBILE_LARGE[:5] if small else MOBILE_LARGE, classes)
    if name == "convnext_t":
        return ConvNeXt((8, 16, 24, 32), (1, 1, 2, 1), classes) if small else ConvNeXt(classes=classes)
    if name == "unet2d":
        return UNet((8, 16, 24), classes) if small else UNet(classes=classes)
    return UNet3d((4, 8, 12), classes) if small else UNet3d(classes=classes)


def inputs(name: str, small: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A batch of images (float32) and its targets, on the CPU; the same for the same seed."""
    size = size_of(name, small)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((size.batch, *size.image), generator=generator)
    shape = (size.batch, *size.image[1:]) if size.dense else (size.batch,)
    return x, torch.randint(0, size.classes, shape, generator=generator)
