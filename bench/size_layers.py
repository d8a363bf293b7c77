"""The layers of ``python -m bench sizes``, and the image sizes that are drawn for them.

Sides are drawn from 20 to 400 and batches from 1 to 16; of a 1D layer the length is the product of two
such sides. What needs more than ``MOST_BYTES`` is drawn again, which bounds 3D sizes above all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from bench import layers
from transconv.conv import ConvProblem, ListedLayer
from transconv.tuning.table import Row

NAMES = (
    "rn50_l1_3x3_64",
    "rn50_l1_1x1_64_256",
    "rn50_l2_3x3_128_s2",
    "rn50_stem7x7s2",
    "mbv2_dw3_384",
    "convnext_t_dw7_96",
    "resnext50_g32_256",
    "whisper_l3_conv1",
    "hifigan_128_k11_d5",
    "nnunet_enc2_128",
    "x3d_m_dw3_54",
    "dcgan_up_512_256",
)
MIRRORED = ("dcgan_up_512_256",)  # stands in the list as the convolution that it mirrors
QUICK = (
    'mb1ic8ih9oc8oh9kh3ph1n"quick_dense"',
    'mb1ic8ih8oc4oh4kh4sh2ph1n"quick_up"',
    'mb1ic8iw9oc8ow9kw3pw1n"quick_line"',
)
MOST_BYTES = 1 << 30  # of a layer's input and result
LARGEST = 16  # images
LAYOUTS = ("nhwc", "nchw")  # channels last, and torch's own order

# Images [batch, 3, 48, width] and six layers, after the measurement of
# https://github.com/PaddlePaddle/PaddleX/pull/5057; the channels are ours, the thread gives none.
OCR_LAYERS = ((3, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1), (128, 128, 2), (128, 256, 1))
OCR_SIZES = (
    (1, 90),
    (1, 160),
    (2, 120),
    (4, 320),
    (8, 480),
    (3, 200),
    (6, 280),
    (5, 355),
    (2, 440),
    (7, 135),
    (1, 411),
    (4, 233),
    (8, 178),
    (3, 307),
    (6, 96),
    (5, 262),
)


@dataclass(frozen=True, slots=True)
class Size:
    """Images and the sides of src."""

    images: int
    sides: tuple[int, ...]

    def __str__(self) -> str:
        return f"mb{self.images}i{'x'.join(map(str, self.sides))}"

    @staticmethod
    def parse(text: str) -> Size:
        images, _, sides = text.removeprefix("mb").partition("i")
        return Size(int(images), tuple(int(n) for n in sides.split("x")))


def chosen(quick: bool, only: str = "", layout: str = "nhwc") -> list[ListedLayer]:
    """The layers; with ``quick`` small ones for an interpreter. Those of one side have the order nchw in
    either layout, and are among the ones of nhwc. Raises ValueError if none is left."""
    if quick:
        listed = [ListedLayer(p.name, p, p.name.endswith("up")) for p in map(ConvProblem.parse, QUICK)]
    else:
        known = {layer.name: layer for layer in layers.read("layers")}
        listed = [ListedLayer(n, known[n].shape, n in MIRRORED) for n in NAMES]
    listed = [x for x in listed if layout == "nhwc" or order(x, "nhwc") == "nhwc"]
    words = [w for w in only.split(",") if w] or [""]
    found = [x for x in listed if any(w in x.name for w in words)]
    if not found:
        raise ValueError(
            f"--only={only}: no layer of --layout={layout} has this in its name; expected "
            f"some of {' '.join(x.name for x in listed)}"
        )
    return found


def order(layer: ListedLayer, layout: str) -> str:
    """The order of a layer's tensors in a layout: torch has no channels last for one side."""
    return "nchw" if layer.shape.ndims == 1 else layout


def problem_at(layer: ListedLayer, size: Size, dtype: str, layout: str = "nhwc") -> ConvProblem:
    """The problem of a layer at a size, in a layout."""
    p = layer.problem(dtype, order(layer, layout))
    o = tuple(
        (n + 2 * lo - (k - 1) * d - 1) // s + 1
        for n, lo, k, d, s in zip(size.sides, p.pad_lo, p.k, p.dilation, p.stride, strict=True)
    )
    return p.at(size.images, size.sides, o)


def drawn(layer: ListedLayer, count: int, seed: int, quick: bool = False) -> list[Size]:
    """Different sizes, the same for the same seed."""
    found = dict.fromkeys(())
    for size in _draws(layer, random.Random(f"{seed} {layer.name}"), quick):
        if len(found) == count:
            break
        found[size] = None
    return list(found)


def _draws(layer: ListedLayer, rng: random.Random, quick: bool) -> Iterator[Size]:
    p, low, high = layer.shape, *((3, 9) if quick else (20, 400))
    item = layer.problem("bf16").src.dtype.bytes
    while True:
        sides = [rng.randint(low, high) for _ in p.i]
        if p.ndims == 1:
            sides = [sides[0] * rng.randint(low, high)]
        if layer.transposed:  # what such a layer takes is drawn; it gives as many times the stride
            sides = [side * s for side, s in zip(sides, p.stride, strict=True)]
        size = Size(rng.randint(1, 2 if quick else LARGEST), tuple(sides))
        at = problem_at(layer, size, "bf16")
        if item * sum(prod(at.shapes[n]) for n in ("src", "dst")) <= MOST_BYTES:
            yield size


def chunks(sizes: Sequence[Size], length: int) -> Iterator[Sequence[Size]]:
    """Pieces of a list, in its order."""
    for start in range(0, len(sizes), length):
        yield sizes[start : start + length]


def allowed(row: Row) -> float:
    """The error of a model, as a share of its largest element, beyond which a row of it is wrong: for a
    model in tf32 each layer rounds both factors to 11 binary digits."""
    return len(OCR_LAYERS) * 2.0**-10 if row["plans"] else 1e-3
