"""``python -m bench first-calls``: what a size costs the host the first time it comes, and later, where
kernels take sizes as arguments.

Calls come after other work, whose code and data have driven theirs from the processor's caches:
``first`` of a new size, ``known`` of the same size. ``later`` calls follow at once. The GPU is not waited
for; without one nothing is launched, and the driver's part is missing. Rows are in
``<gpu>_first_calls.csv``; a repeated run adds what is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch

import transconv
from bench import faked_launches
from bench.environment import VERSIONS, at_hand, versions
from bench.issues import short
from bench.size_calls import Call, host_us, switched
from transconv.cli.arguments import ranges
from transconv.torch_ops.arguments import Params
from transconv.torch_ops.calls import select_impl
from transconv.tuning.table import CsvTable

COLUMNS = (
    "layer",
    "direction",
    "first_us",
    "worst_us",
    "known_us",
    "later_us",
    "functions",
    "sizes",
    *VERSIONS,
)
KEY = ("layer", "direction", "device")
# name -> channels in and out, filter, stride, groups, sides of an image
LAYERS = {
    "3x3": (64, 64, 3, 1, 1, 2),
    "1x1": (64, 256, 1, 1, 1, 2),
    "3x3 stride 2": (128, 128, 3, 2, 1, 2),
    "depthwise": (384, 384, 3, 1, 384, 2),
    "1D": (128, 128, 11, 1, 1, 1),
}
DIRECTIONS = ("fwd", "bwd_d", "bwd_w")
MORE_THAN_CACHES = 64 << 20  # bytes that other work reads and writes
LATER = 4  # calls that follow; the last counts


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--sizes", type=ranges.at_least(2), default=40, help="new sizes of each (default: 40)"
    )
    parser.add_argument("--layers", type=ranges.some_of(*LAYERS), default=",".join(LAYERS))


def main(options: argparse.Namespace) -> int:
    """Measure every layer and direction that has no row; 0."""
    about = versions()
    table = CsvTable(Path(options.out) / f"{short(about['device'])}_first_calls.csv", COLUMNS, KEY)
    for name in options.layers.split(","):
        left = [d for d in DIRECTIONS if not table.has({"layer": name, "direction": d, **about})]
        if not left:
            continue
        with calling(), torch.no_grad():
            layer = Layer(name, *LAYERS[name])
            layer.warm()
            for direction in left:
                row = {
                    "layer": name,
                    "direction": direction,
                    **measured(layer, direction, options.sizes),
                    "functions": layer.functions(direction),
                    "sizes": options.sizes,
                    **about,
                }
                table.add(row)
                print(" ".join(f"{k}={row[k]}" for k in COLUMNS[:8]), flush=True)
    print(f"{len(table.rows)} rows are in {table.path}", flush=True)
    return 0


@contextmanager
def calling() -> Iterator[None]:
    """Calls are launched, or faked without a GPU."""
    if at_hand() == "cuda":
        with switched(sizes="any", compile="now", fallback="error"):
            yield
    else:
        with faked_launches.as_on_gpu():
            yield


class Layer:
    """A layer, and its calls at sizes that it has not had."""

    def __init__(self, name: str, ic: int, oc: int, k: int, stride: int, groups: int, sides: int) -> None:
        self.name, self.ic, self.oc, self.stride, self.groups = name, ic, oc, stride, groups
        self.padding, self.sides, self.draw = k // 2, sides, random.Random(1)
        self.seen: set[tuple[int, int, int]] = set()
        self.weight = self.tensor(oc, ic // groups, *(k,) * sides)

    @staticmethod
    def tensor(*shape: int) -> torch.Tensor:
        """Zeros, channels last; with one side as torch has them."""
        made = torch.zeros(shape, dtype=torch.bfloat16, device=at_hand())
        return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made

    def call(self, direction: str, n: int, h: int, w: int) -> Call:
        """A call at a size, its tensors made; of one side, which is h*w long."""
        sides = (h, w) if self.sides == 2 else (h * w,)
        x, weight = self.tensor(n, self.ic, *sides), self.weight
        stride, padding = self.stride, self.padding
        if direction == "fwd":
            convolve = transconv.conv2d if self.sides == 2 else transconv.conv1d
            return lambda: convolve(x, weight, None, stride, padding, 1, self.groups)
        k = weight.shape[-1]
        grad = self.tensor(n, self.oc, *((s + 2 * padding - k) // stride + 1 for s in sides))
        each = len(sides)
        params = Params((stride,) * each, (padding,) * each, (1,) * each, False, (0,) * each, self.groups)
        wanted = [direction == "bwd_d", direction == "bwd_w", False]
        return lambda: select_impl.backward(params, grad, x, weight, wanted, "now")[wanted.index(True)]  # type: ignore

    def new(self, direction: str) -> Call:
        """A call at a new size."""
        while True:
            size = self.draw.randint(1, 8), self.draw.randint(20, 100), self.draw.randint(20, 100)
            if size not in self.seen:
                self.seen.add(size)
                return self.call(direction, *size)

    def warm(self) -> None:
        """Call at the sizes that the plans were made for, and at some new ones."""
        for direction in DIRECTIONS:
            for n, side in ((8, 56), (1, 14), (16, 224)) if at_hand() == "cuda" else ((8, 56), (1, 14)):
                self.call(direction, n, side, side)()
            for _ in range(6):
                self.new(direction)()

    def functions(self, direction: str) -> int:
        """How many functions of Python a call of a new size runs."""
        call, seen = self.new(direction), []

        def profile(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                seen.append(frame.f_code)

        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
        return len(seen)


def measured(layer: Layer, direction: str, sizes: int) -> dict[str, float]:
    """Microseconds of first calls, in the median and at most, and of the calls after them."""
    scratch = torch.zeros(MORE_THAN_CACHES, dtype=torch.uint8)
    first, known, later = list[float](), list[float](), list[float]()
    for _ in range(sizes):
        call = layer.new(direction)
        for found in (first, known):
            other_work(scratch)
            found.append(host_us(call)[0])
        later += [host_us(call)[0] for _ in range(LATER)][-1:]
    return {
        "first_us": round(median(first), 1),
        "worst_us": round(max(first), 1),
        "known_us": round(median(known), 1),
        "later_us": round(median(later), 1),
    }


def other_work(scratch: torch.Tensor) -> None:
    """What a program does between two calls: memory that is read and written, and code of its own."""
    scratch.add_(1)
    json.loads(json.dumps([[at, str(at)] for at in range(5000)]))
