"""Convolutions reported in public issues as slow, failing or wrong, each with its issue.

Each is written from the sizes, the type and the direction that its thread gives; where a thread leaves one
out, the matter says that the size is ours. ``small`` has the same form at a size for the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from transconv.conv import ConvProblem, Prop

TRACKERS = {
    "pytorch": "pytorch/pytorch",
    "transformers": "huggingface/transformers",
    "diffusers": "huggingface/diffusers",
    "MIOpen": "ROCm/MIOpen",
    "rocm-pytorch": "ROCm/pytorch",
    "rocm": "ROCm/legacy-rocm-build",
}
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "c64": torch.complex64}
WANTED = {"fwd": (), "bwd_d": (0,), "bwd_w": (1,), "bwd": (0, 1)}  # operands with gradients

Shape = tuple[int, ...]
Options = dict[str, Any]


@dataclass(frozen=True)
class IssueCase:
    """One call: ``function`` of torch.nn.functional on an input ``x`` and a weight ``w``, and what of it
    is computed: the result, or gradients."""

    issue: str
    matter: str
    function: str
    x: Shape
    w: Shape
    options: Options
    small: tuple[Shape, Shape, Options] = field(repr=False)
    dtype: str = "f32"
    direction: str = "fwd"
    layout: str = "nchw"
    bias: bool = False
    tf32: bool = True
    deterministic: bool = False

    @property
    def name(self) -> str:
        return f"{self.issue} {self.direction}"

    @property
    def url(self) -> str:
        tracker, number = self.issue.split("#")
        return f"https://github.com/{TRACKERS[tracker]}/issues/{number}"

    @property
    def ndims(self) -> int:
        return len(self.w) - 2

    @property
    def transposed(self) -> bool:
        return "transpose" in self.function

    @property
    def layouts(self) -> tuple[str, ...]:
        """The memory orders that a user may choose from; torch has one for 1D."""
        return ("nchw",) if self.ndims == 1 else ("nchw", "nhwc")

    def shrunk(self) -> IssueCase:
        """The same at a size for an interpreter."""
        x, w, options = self.small
        changed = {**self.__dict__, "x": x, "w": w, "options": {**self.options, **options}}
        return IssueCase(**changed)

    def call(self) -> str:
        """As a user would write it, with shapes in the place of tensors."""
        words = [
            f"x{list(self.x)}",
            f"w{list(self.w)}",
            *(["bias"] if self.bias else []),
            *(f"{k}={v}" for k, v in self.options.items()),
        ]
        return f"{self.function}({', '.join(words)})".replace("'", "")

    def on(self, home: Any) -> Callable[..., torch.Tensor]:
        """The function of this name in a module, with the options."""
        function = getattr(home, self.function)
        return lambda x, w, b=None: function(x, w, b, **self.options)  # type: ignore[no-any-return]

    def shape(self) -> Shape:
        """Of the result."""
        with torch.device("meta"):
            made = self.on(torch.nn.functional)(torch.empty(self.x), torch.empty(self.w))
        return tuple(made.shape)

    def bytes(self) -> int:
        """Of input, weight and result."""
        size = TYPES[self.dtype].itemsize
        return size * (prod(self.x) + prod(self.w) + prod(self.shape()))

    def problem(self, layout: str) -> ConvProblem | None:
        """The convolution that is computed; None where there is no such problem (complex, or empty)."""
        y = self.shape()
        if self.dtype == "c64" or not prod(self.x) * prod(y):
            return None
        src, dst = (y, self.x) if self.transposed else (self.x, y)
        o = self.options
        math = "tf32" if self.tf32 and self.dtype == "f32" else "ieee"
        return ConvProblem.make(
            src[0],
            src[1],
            dst[1],
            src[2:],
            self.w[2:],
            o.get("stride", 1),
            o.get("dilation", 1),
            o.get("padding", 0),
            dst[2:],
            o.get("groups", 1),
            self.dtype,
            layout,
            math,
        )

    def numbers(self) -> tuple[Any, ...]:
        """The options as the operators of gradients take them: stride, padding, dilation, transposed,
        output padding, groups."""

        def spread(name: str, default: int) -> list[int]:
            found = self.options.get(name, default)
            return list(found) if isinstance(found, tuple) else [found] * self.ndims

        return (
            spread("stride", 1),
            spread("padding", 0),
            spread("dilation", 1),
            self.transposed,
            spread("output_padding", 0),
            self.options.get("groups", 1),
        )

    def props(self) -> tuple[Prop, ...]:
        """The directions of the problem that are computed."""
        back = Prop.FWD if self.transposed else Prop.BWD_D
        forward = Prop.BWD_D if self.transposed else Prop.FWD
        return {"fwd": (forward,), "bwd_d": (back,), "bwd_w": (Prop.BWD_W,), "bwd": (back, Prop.BWD_W)}[
            self.direction
        ]


def _case(
    issue: str, matter: str, function: str, x: Shape, w: Shape, small: tuple[Any, ...], **more: Any
) -> IssueCase:
    """``small``: input, weight and, if they differ, options; what is no field is an option of the call."""
    fields = {k: more.pop(k) for k in list(more) if k in IssueCase.__dataclass_fields__}
    sx, sw, *rest = small
    return IssueCase(issue, matter, function, x, w, more, (sx, sw, rest[0] if rest else {}), **fields)


CASES: tuple[IssueCase, ...] = (
    _case(
        "pytorch#75747",
        "A depthwise 1D convolution whose filter is as long as the sequence is ten times slower "
        "than a plain kernel.",
        "conv1d",
        (32, 768, 1535),
        (768, 1, 768),
        ((2, 8, 31), (8, 1, 16), {"groups": 8}),
        groups=768,
        tf32=False,
    ),
    _case(
        "pytorch#75747",
        "The same, both gradients.",
        "conv1d",
        (32, 768, 1535),
        (768, 1, 768),
        ((2, 8, 31), (8, 1, 16), {"groups": 8}),
        groups=768,
        tf32=False,
        direction="bwd",
    ),
    _case(
        "pytorch#74363",
        "Depthwise filters of 31x31 are far from what the chip can do.",
        "conv2d",
        (64, 384, 32, 32),
        (384, 1, 31, 31),
        ((1, 8, 9, 9), (8, 1, 7, 7), {"padding": 3, "groups": 8}),
        padding=15,
        groups=384,
        dtype="f16",
    ),
    _case(
        "pytorch#18631",
        "A depthwise layer takes longer than a dense one of as many channels.",
        "conv2d",
        (2, 32, 512, 512),
        (32, 1, 3, 3),
        ((1, 8, 9, 9), (8, 1, 3, 3), {"groups": 8}),
        padding=1,
        groups=32,
    ),
    _case(
        "pytorch#37406",
        "Gradients of depthwise 3D layers take ten times a dense forward pass; the size is that "
        "of pytorch#40801.",
        "conv3d",
        (8, 64, 32, 56, 56),
        (64, 1, 3, 3, 3),
        ((1, 4, 4, 5, 6), (4, 1, 3, 3, 3), {"groups": 4}),
        padding=1,
        groups=64,
        direction="bwd",
    ),
    _case(
        "pytorch#132300",
        "Memory explodes from a certain size of a video on: the result has more than 2^31 elements.",
        "conv3d",
        (1, 3, 24, 1008, 1792),
        (128, 3, 3, 3, 3),
        ((1, 3, 3, 6, 7), (8, 3, 3, 3, 3)),
        padding=1,
        dtype="bf16",
    ),
    _case(
        "transformers#45750",
        "A patch embedding whose stride is its filter is thousands of times slower than the "
        "matrix product that it is; 4,096 patches, a number of ours.",
        "conv3d",
        (4096, 3, 2, 16, 16),
        (1152, 3, 2, 16, 16),
        ((4, 3, 2, 4, 4), (16, 3, 2, 4, 4), {"stride": (2, 4, 4)}),
        stride=(2, 16, 16),
        bias=True,
        dtype="bf16",
    ),
    _case(
        "pytorch#70954",
        "Training with eight groups is no faster than with one.",
        "conv2d",
        (16, 128, 224, 224),
        (128, 16, 3, 3),
        ((1, 16, 6, 6), (16, 8, 3, 3), {"groups": 2}),
        padding=1,
        groups=8,
        direction="bwd",
    ),
    _case(
        "pytorch#73764",
        "A grouped call is slower than one call for each group; images of 8x8, a size of ours.",
        "conv2d",
        (512, 2560, 8, 8),
        (1280, 512, 3, 3),
        ((1, 16, 6, 6), (16, 8, 3, 3), {"groups": 2}),
        padding=1,
        groups=5,
        dtype="f16",
        layout="nhwc",
    ),
    _case(
        "pytorch#34977",
        "Grouped layers are 40 times slower in channels last.",
        "conv2d",
        (100, 2048, 14, 14),
        (2048, 64, 3, 3),
        ((1, 16, 6, 6), (16, 8, 3, 3), {"groups": 2}),
        stride=2,
        padding=1,
        groups=32,
        dtype="f16",
        layout="nhwc",
        direction="bwd",
    ),
    _case(
        "pytorch#192902",
        "Short depthwise 1D filters on many channels reach a part of the memory's bandwidth.",
        "conv1d",
        (1, 12288, 16384),
        (12288, 1, 4),
        ((1, 8, 20), (8, 1, 4), {"groups": 8}),
        groups=12288,
        dtype="bf16",
    ),
    _case(
        "pytorch#192902",
        "The same, both gradients.",
        "conv1d",
        (1, 12288, 16384),
        (12288, 1, 4),
        ((1, 8, 20), (8, 1, 4), {"groups": 8}),
        groups=12288,
        dtype="bf16",
        direction="bwd",
    ),
    _case(
        "pytorch#170138",
        "Depthwise 1D layers became slow in half precision; 8 sequences of 1,024, sizes of ours.",
        "conv1d",
        (8, 768, 1024),
        (768, 1, 31),
        ((1, 8, 20), (8, 1, 5), {"padding": 2, "groups": 8}),
        padding=15,
        groups=768,
        bias=True,
        dtype="f16",
    ),
    _case(
        "pytorch#128936",
        "One pixel more makes a layer 60 times slower: its input has more than 2^31 elements.",
        "conv2d",
        (64, 128, 513, 513),
        (128, 128, 3, 3),
        ((1, 8, 7, 7), (8, 8, 3, 3)),
        stride=2,
        bias=True,
        dtype="bf16",
    ),
    _case(
        "pytorch#163539",
        "Results of a large video are wrong without a word.",
        "conv3d",
        (1, 16, 124, 1282, 722),
        (16, 16, 1, 3, 3),
        ((1, 8, 3, 6, 5), (8, 8, 1, 3, 3)),
        dtype="bf16",
    ),
    _case(
        "pytorch#44109",
        "A 1x1 layer on an input of 2^31 elements fails.",
        "conv2d",
        (1, 128, 4096, 4096),
        (3, 128, 1, 1),
        ((1, 8, 7, 7), (3, 8, 1, 1)),
        bias=True,
        dtype="f16",
    ),
    _case(
        "pytorch#117736",
        "An input of more than 2^31 elements ends in an illegal memory access.",
        "conv2d",
        (1, 514, 2048, 2048),
        (1, 514, 3, 3),
        ((1, 10, 6, 6), (1, 10, 3, 3)),
        padding=1,
        bias=True,
        dtype="f16",
    ),
    _case(
        "pytorch#87354",
        "An input of 2^31 elements gives zeros.",
        "conv3d",
        (1, 32, 512, 512, 256),
        (1, 32, 1, 1, 1),
        ((1, 8, 4, 4, 5), (1, 8, 1, 1, 1)),
    ),
    _case(
        "pytorch#128947",
        "Twice the frames ask for 161 GiB of workspace.",
        "conv3d",
        (1, 256, 5, 1090, 1922),
        (64, 256, 3, 3, 3),
        ((1, 8, 4, 5, 6), (8, 8, 3, 3, 3)),
        bias=True,
    ),
    _case(
        "pytorch#167420",
        "A 3D layer with a bias is many times slower in 16 bits than in 32.",
        "conv3d",
        (8, 384, 3, 34, 34),
        (384, 384, 3, 3, 3),
        ((1, 8, 3, 5, 5), (8, 8, 3, 3, 3)),
        bias=True,
        dtype="bf16",
    ),
    _case(
        "pytorch#24082",
        "A 3D layer takes longer in half precision than in single.",
        "conv3d",
        (8, 64, 64, 64, 64),
        (64, 64, 3, 3, 3),
        ((1, 8, 4, 5, 5), (8, 8, 3, 3, 3)),
        bias=True,
        dtype="f16",
    ),
    _case(
        "pytorch#41382",
        "A transposed 1D layer is slower on a GPU than on its host.",
        "conv_transpose1d",
        (1, 64, 40000),
        (64, 32, 4),
        ((1, 8, 12), (8, 4, 4)),
        stride=2,
        padding=1,
        bias=True,
    ),
    _case(
        "pytorch#47341",
        "A depthwise transposed 1D layer takes 25 times a dense one.",
        "conv_transpose1d",
        (16, 512, 32),
        (512, 1, 6),
        ((1, 8, 9), (8, 1, 6), {"groups": 8}),
        stride=3,
        padding=2,
        output_padding=1,
        groups=512,
        bias=True,
    ),
    _case(
        "rocm-pytorch#587",
        "A depthwise transposed layer with a filter of 8x8 faults.",
        "conv_transpose2d",
        (16, 64, 32, 32),
        (64, 1, 8, 8),
        ((1, 4, 4, 4), (4, 1, 4, 4), {"stride": 2, "padding": 1, "groups": 4}),
        stride=4,
        padding=2,
        groups=64,
    ),
    _case(
        "pytorch#32370",
        "The weight's gradient of many small 3D filters takes ten forward passes.",
        "conv3d",
        (1, 2, 33, 33, 33),
        (729, 2, 2, 2, 2),
        ((1, 2, 5, 5, 5), (16, 2, 2, 2, 2)),
        direction="bwd_w",
    ),
    _case(
        "pytorch#22741",
        "The weight's gradient takes more than 8 GB of workspace.",
        "conv2d",
        (1, 128, 168, 64),
        (128, 128, 3, 3),
        ((1, 8, 7, 6), (8, 8, 3, 3)),
        padding=1,
        dtype="f16",
        direction="bwd_w",
    ),
    _case(
        "pytorch#54404",
        "The weight's gradient of a first layer is much slower in half precision.",
        "conv2d",
        (512, 3, 32, 32),
        (64, 3, 3, 3),
        ((2, 3, 6, 6), (8, 3, 3, 3)),
        padding=1,
        dtype="f16",
        direction="bwd_w",
    ),
    _case(
        "pytorch#33044",
        "A 3D layer of three channels takes a quarter of a second.",
        "conv3d",
        (16, 3, 40, 320, 320),
        (3, 3, 2, 3, 3),
        ((1, 3, 4, 6, 6), (3, 3, 2, 3, 3)),
        bias=True,
    ),
    _case(
        "pytorch#146096",
        "One channel and a filter of 51x51: eight times slower after an update.",
        "conv2d",
        (75, 1, 572, 572),
        (1, 1, 51, 51),
        ((1, 1, 12, 12), (1, 1, 7, 7)),
    ),
    _case(
        "pytorch#21462",
        "1D filters of 1,024 elements are slow.",
        "conv1d",
        (1, 64, 64000),
        (64, 64, 1024),
        ((1, 4, 40), (4, 4, 16)),
    ),
    _case(
        "pytorch#28777",
        "Dilated layers are ten times slower where the same bits are asked for.",
        "conv2d",
        (32, 64, 32, 32),
        (64, 64, 3, 3),
        ((1, 8, 6, 6), (8, 8, 3, 3)),
        padding=2,
        dilation=2,
        bias=True,
        deterministic=True,
    ),
    _case(
        "pytorch#40275",
        "3D layers of 8 channels are wrong in half precision.",
        "conv3d",
        (1, 8, 5, 7, 13),
        (8, 8, 3, 1, 1),
        ((1, 8, 5, 7, 13), (8, 8, 3, 1, 1)),
        padding=(1, 0, 0),
        dtype="f16",
    ),
    _case(
        "MIOpen#97",
        "The weight's gradient of a 7x7 layer is wrong.",
        "conv2d",
        (2, 2, 100, 99),
        (3, 2, 7, 7),
        ((1, 2, 9, 8), (3, 2, 7, 7)),
        padding=3,
        direction="bwd_w",
    ),
    _case(
        "rocm#5191",
        "The decoder of an image is slow in bf16.",
        "conv2d",
        (1, 512, 512, 512),
        (512, 512, 3, 3),
        ((1, 8, 6, 6), (8, 8, 3, 3)),
        padding=1,
        dtype="bf16",
    ),
    _case(
        "diffusers#10350",
        "The decoder of an image takes 15 GB; its widest layer, of four images.",
        "conv2d",
        (4, 256, 768, 768),
        (128, 256, 3, 3),
        ((1, 8, 6, 6), (8, 8, 3, 3)),
        padding=1,
        bias=True,
        dtype="f16",
    ),
    _case(
        "pytorch#19599",
        "A batch without an image fails on a GPU.",
        "conv2d",
        (0, 3, 3, 3),
        (3, 3, 3, 3),
        ((0, 3, 3, 3), (3, 3, 3, 3)),
        bias=True,
    ),
    _case(
        "pytorch#52983",
        "Complex convolutions are made of real ones; (8, 32, 64, 64), a size of ours.",
        "conv2d",
        (8, 32, 64, 64),
        (32, 32, 3, 3),
        ((1, 4, 6, 6), (4, 4, 3, 3)),
        padding=1,
        dtype="c64",
    ),
)
