"""``python -m bench quantized``: whole models with 8-bit convolutions beside bf16.

    resnet50   inference: int8, fp8 and int8 weights, quantised in one line
    sdxl       the convolutions of SDXL's U-Net, each once, the same
    train      ResNet-50 trained on one batch in fp8 and in bf16: its losses in quantized_train.csv
"""

from __future__ import annotations

import argparse
import copy
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import transconv
from bench import layers, models
from bench.environment import versions
from transconv.cli.ranges import some_of
from transconv.torch_ops.quantized_kinds import KINDS, quantised
from transconv.tuning.timing import Clock

Tensor = torch.Tensor

PARTS = ("resnet50", "sdxl", "train")
# The kind, the words of quantize_, and whether calibration gives inputs one scale.
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("int8", {"kind": "int8"}), ("fp8", {"kind": "fp8"}),
    ("fp8 fast", {"kind": "fp8", "use_fast_accum": True}), ("int8 weights", {"kind": "int8_weight_only"}),
    ("int4 weights", {"kind": "int4_weight_only"}))
COLUMNS = ("model", "kind", "ms", "bf16_ms", "convolutions", "left", "other", "elements", "off",
           "prepare_s", "device", "torch", "triton", "commit")
TRAIN = ("step", "fp8", "bf16", "device", "torch", "triton", "commit")
STEPS = 50
FUSED = 1e-3  # of elements that one rounding less may change: a bias is added in the same instruction
LEAST_CHANNELS = 16  # of convolutions that train in 8 bits


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", type=some_of(*PARTS), default=",".join(PARTS),
                        help=f"of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, where torch computes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--time-budget", type=float, default=float("inf"), metavar="S",
                        help="seconds; then no way and no step starts, and what was measured is kept")


def main(options: argparse.Namespace) -> int:
    """Measure; 1 if results of int8 are not the integer reference's, or a loss goes another way."""
    end = time.monotonic() + options.time_budget
    out, parts = Path(options.out), options.only.split(",")
    out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    if parts != ["train"]:
        with (out / "quantized.csv").open("w", newline="", encoding="utf-8") as file:
            lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            lines.writeheader()
            for part in (p for p in parts if p != "train"):
                for row in until(end, inference(part, options.small)):
                    print(" ".join(f"{k}={v}" for k, v in row.items() if k not in versions()), flush=True)
                    lines.writerow(row)
                    file.flush()
                    wrong += row["kind"] == "int8" and row["other"] > FUSED * row["elements"]
    if "train" in parts:
        with (out / "quantized_train.csv").open("w", newline="", encoding="utf-8") as file:
            lines = csv.DictWriter(file, TRAIN, lineterminator="\n")
            lines.writeheader()
            losses = []
            for step, (small, plain) in enumerate(until(end, trained(options.small, options.steps))):
                losses.append((small, plain))
                lines.writerow({"step": step, "fp8": f"{small:.4f}", "bf16": f"{plain:.4f}", **versions()})
                file.flush()
            print("losses, fp8 and bf16: " + "; ".join(f"{a:.3f} {b:.3f}" for a, b in losses), flush=True)
            wrong += bool(losses) and max(abs(a - b) for a, b in losses) > 0.15 * losses[0][1]
    return 1 if wrong else 0


Row = TypeVar("Row")


def until(end: float, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows as long as there is time; the one that is being made is finished."""
    while time.monotonic() < end and (row := next(rows, None)) is not None:
        yield row


class Layers(nn.Module):
    """Convolutions side by side, each with an input of its own."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        found = [x.reduced(1 if small else 0).shape for x in layers.read("sdxl") if ":unet." in x.name]
        shrink = 16 if small else 1
        self.layers = nn.ModuleList()
        for i, p in enumerate(found):
            into, out = (max(4, n // shrink) for n in (p.ic, p.oc))
            self.layers.append(nn.Conv2d(into, out, p.k, p.stride, p.pad_lo))
            self.register_buffer(f"x{i}", torch.randn(p.mb, into, *(n // shrink for n in p.i)))

    def forward(self) -> list[Tensor]:
        return [layer(getattr(self, f"x{i}")) for i, layer in enumerate(self.layers)]


def subject(part: str, small: bool, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and its inputs, bf16, channels last."""
    torch.manual_seed(0)
    made = Layers(small) if part == "sdxl" else models.build(part, small)
    model = made.to(device, torch.bfloat16, memory_format=torch.channels_last).eval()
    if part == "sdxl":
        return model, ()
    image = models.inputs(part, small)[0].to(device, torch.bfloat16)
    return model, (image.contiguous(memory_format=torch.channels_last),)


def inference(part: str, small: bool) -> Iterator[dict[str, object]]:
    """A row for each way."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    model, given = subject(part, small, device)
    clock = Clock(device, 200.0)
    with torch.no_grad():
        want = _flat(model(*given))
        base = clock.one(lambda i: lambda: model(*given), 1 << 30).us / 1e3
        for name, words in WAYS:
            made = copy.deepcopy(model)
            report = transconv.quantize_(made, calibration=[given], **words)
            begun = time.perf_counter()
            if device == "cuda":
                print(transconv.prepare(made, *given, backward=False, progress=False), flush=True)
            seconds = time.perf_counter() - begun
            other, elements = compared(made, given) if name == "int8" else (0, 0)
            off = float((_flat(made(*given)) - want).norm() / want.norm())
            us = clock.one(lambda i, made=made: lambda: made(*given), 1 << 30).us  # type: ignore[misc]
            yield {"model": part, "kind": name, "ms": f"{us / 1e3:.4g}", "bf16_ms": f"{base:.4g}",
                   "convolutions": len(report.quantized), "left": len(report.left), "other": other,
                   "elements": elements, "off": f"{off:.2e}", "prepare_s": f"{seconds:.1f}", **versions()}


def _flat(made: Any) -> Tensor:
    found = made if isinstance(made, list) else [made]
    return torch.cat([t.double().flatten() for t in found])


def compared(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[int, int]:
    """How many elements of the first image, behind every int8 convolution, are other ones than exact sums
    of integers give with the same operations behind them, and how many there are."""
    counts = [0, 0]

    def seen(module: Any, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        want = reference(module, inputs[0][:1])
        counts[0] += int((want != result[:1]).sum())
        counts[1] += want.numel()

    hooks = [m.register_forward_hook(seen) for m in model.modules()
             if isinstance(m, transconv.nn.QuantConv2d)]
    model(*given)
    for hook in hooks:
        hook.remove()
    return counts[0], counts[1]


def reference(module: Any, x: Tensor) -> Tensor:
    """An int8 convolution in f64, where its sums are exact."""
    zero = module.input_zero_point
    whole = quantised(x, module.input_scale, zero, KINDS["int8"].input).double() - zero.double()
    sums = nn.functional.conv2d(whole, module.weight.double(), None, module.stride, module.padding,
                                module.dilation, module.groups)
    real = sums.float() * (module.input_scale * module.weight_scale).view(-1, 1, 1)
    if module.bias is not None:
        real = real + module.bias.float().view(-1, 1, 1)
    return real.to(x.dtype)


# -- training --------------------------------------------------------------------------------------


def trained(small: bool, steps: int) -> Iterator[tuple[float, float]]:
    """The loss of every step in fp8 and in bf16, from the same weights on the same batch, step by step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain = models.build("resnet50", small).to(device, memory_format=torch.channels_last)
    in_fp8 = copy.deepcopy(plain)
    for module in in_fp8.modules():
        if type(module) is nn.Conv2d and module.in_channels >= LEAST_CHANNELS:
            transconv.nn.Float8Conv2d.from_float(module)
    x, y = (t.to(device) for t in models.inputs("resnet50", small))
    x = x.contiguous(memory_format=torch.channels_last)
    if device == "cuda":
        with torch.autocast(device, torch.bfloat16):
            print(transconv.prepare(in_fp8, x, progress=False), flush=True)
    yield from zip(_losses(in_fp8, x, y, steps), _losses(plain, x, y, steps), strict=True)


def _losses(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Iterator[float]:
    optimizer, device = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), x.device.type
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())
