"""The models of ``python -m bench graphs``: what is decoded, encoded and trained, and small ones of each
for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bench import models
from bench.unets import ResEnc3d, UNet
from bench.vaes import Decoder, Encoder, Residual
from bench.video_vaes import CogDecoder, CogResidual, WanDecoder, WanEncoder, WanResidual

Tensor = torch.Tensor
Make = Callable[[], nn.Module]
NARROW = (8, 8, 16, 16)


@dataclass(frozen=True, slots=True)
class GraphModel:
    """``make`` builds the model in its public size, ``small`` in one for a CPU; ``shapes`` are those of
    its inputs, in both sizes. ``classes``: of the targets that it is trained on, one for each image or, if
    ``dense``, each point; 0: it is used for inference alone."""

    make: Make
    shapes: tuple[tuple[int, ...], ...]
    small: Make
    small_shapes: tuple[tuple[int, ...], ...]
    classes: int = 0
    small_classes: int = 0
    dense: bool = False

    def built(self, quick: bool) -> nn.Module:
        """With random weights, the same at every call."""
        torch.manual_seed(1)
        return (self.small if quick else self.make)()

    def inputs(self, quick: bool, seed: int = 0) -> list[Tensor]:
        """A batch, on the CPU in f32; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(s, generator=generator) for s in (self.small_shapes if quick else self.shapes)]

    def targets(self, quick: bool, seed: int = 0) -> Tensor:
        """The classes of a batch."""
        shape = (self.small_shapes if quick else self.shapes)[0]
        generator = torch.Generator().manual_seed(seed)
        size = (shape[0], *shape[2:]) if self.dense else shape[:1]
        return torch.randint(0, self.small_classes if quick else self.classes, size, generator=generator)


def _known(name: str) -> GraphModel:
    """One of bench/models.py, to be trained."""
    sizes = [models.size_of(name, small) for small in (False, True)]
    shapes = [((s.batch, *s.image),) for s in sizes]
    return GraphModel(
        lambda: models.build(name),
        shapes[0],
        lambda: models.build(name, True),
        shapes[1],
        sizes[0].classes,
        sizes[1].classes,
        sizes[0].dense,
    )


def _efficientnet() -> nn.Module:
    from torchvision.models import efficientnet_v2_s

    made: nn.Module = efficientnet_v2_s(stochastic_depth_prob=0.0, dropout=0.0)
    return made


def grouped(model: nn.Module, groups: int) -> nn.Module:
    """The model with group norms in the place of its batch norms."""
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(groups, child.num_features))
    return model


# -- inference, then training ----------------------------------------------------------------------

LATENT, FLUX, IMAGE, VIDEO = (1, 4, 128, 128), (1, 16, 128, 128), (1, 3, 1024, 1024), (1, 16, 5, 60, 104)
MODELS: dict[str, GraphModel] = {
    "vae_block": GraphModel(
        lambda: Residual(512, 512, 32), ((1, 512, 128, 128),), lambda: Residual(8, 8, 4), ((1, 8, 6, 6),)
    ),
    "sdxl_decode": GraphModel(
        lambda: Decoder(4, True), (LATENT,), lambda: Decoder(4, True, NARROW, 4, 1), ((1, 4, 4, 4),)
    ),
    "sdxl_encode": GraphModel(
        lambda: Encoder(4, True), (IMAGE,), lambda: Encoder(4, True, NARROW, 4, 1), ((1, 3, 16, 16),)
    ),
    "flux_decode": GraphModel(
        lambda: Decoder(16, False), (FLUX,), lambda: Decoder(16, False, NARROW, 4, 1), ((1, 16, 4, 4),)
    ),
    "flux_encode": GraphModel(
        lambda: Encoder(16, False), (IMAGE,), lambda: Encoder(16, False, NARROW, 4, 1), ((1, 3, 16, 16),)
    ),
    "wan_block": GraphModel(
        lambda: WanResidual(96, 96),
        ((1, 96, 4, 480, 832), (1, 96, 2, 480, 832), (1, 96, 2, 480, 832)),
        lambda: WanResidual(8, 8),
        ((1, 8, 3, 4, 4), (1, 8, 2, 4, 4), (1, 8, 2, 4, 4)),
    ),
    "wan_decode": GraphModel(WanDecoder, (VIDEO,), lambda: WanDecoder(4, 4, 1), ((1, 4, 3, 2, 2),)),
    "wan_encode": GraphModel(
        WanEncoder, ((1, 3, 17, 480, 832),), lambda: WanEncoder(4, 4, 1), ((1, 3, 9, 16, 16),)
    ),
    "cogvideox_block": GraphModel(
        lambda: CogResidual(256, 256, 16, 32),
        ((1, 256, 4, 240, 360), (1, 16, 2, 60, 90)),
        lambda: CogResidual(8, 8, 4, 4),
        ((1, 8, 2, 4, 4), (1, 4, 1, 2, 2)),
    ),
    "cogvideox_decode": GraphModel(
        CogDecoder, ((1, 16, 2, 60, 90),), lambda: CogDecoder((8, 8, 8, 8), 4, 1, 4), ((1, 4, 2, 2, 2),)
    ),
    "resnet50": _known("resnet50"),
    "convnext_t": _known("convnext_t"),
    "mobilenetv3": _known("mobilenetv3"),
    "efficientnet_v2_s": GraphModel(
        _efficientnet, ((32, 3, 224, 224),), _efficientnet, ((2, 3, 64, 64),), 1000, 1000
    ),
    "unet2d_groups": GraphModel(
        lambda: grouped(UNet(), 32),
        ((4, 3, 256, 256),),
        lambda: grouped(UNet((8, 16)), 4),
        ((1, 3, 16, 16),),
        2,
        2,
        True,
    ),
    "resenc3d": GraphModel(
        ResEnc3d,
        ((2, 1, 128, 128, 128),),
        lambda: ResEnc3d((4, 8), (1, 1), 3),
        ((1, 1, 8, 8, 8),),
        3,
        3,
        True,
    ),
}
