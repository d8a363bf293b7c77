"""The models of ``python -m bench quantized``: made, quantised, timed, compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

import transconv
import transconv.graph
from bench import layers, models
from bench.environment import VERSIONS, versions
from bench.graph_measures import timed
from transconv.torch_ops.quantized.input_quantization import KINDS as ROWS
from transconv.torch_ops.quantized.input_quantization import quantised

Tensor = torch.Tensor

# The kinds, and for those that are quantised the words of quantize_.
KINDS: dict[str, dict[str, Any] | None] = {
    "torch": None,
    "bf16": None,
    "int8": {"kind": "int8"},
    "fp8": {"kind": "fp8"},
    "fp8 fast": {"kind": "fp8", "use_fast_accum": True},
    "int8 weights": {"kind": "int8_weight_only"},
    "int4 weights": {"kind": "int4_weight_only"},
}
SETTINGS = ("eager", "folded", "compiled")
COLUMNS = (
    "model",
    "kind",
    "setting",
    "ms",
    "host_ms",
    "convolutions",
    "left",
    "kernels",
    "regions",
    "other",
    "elements",
    "off",
    "prepare_s",
    *VERSIONS,
)
FUSED = 1e-3  # of elements that one rounding less may change: a bias is added in the same instruction
LEAST_CHANNELS = 16  # of convolutions that train in 8 bits


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
    model.requires_grad_(False)
    if part == "sdxl":
        return model, ()
    image = models.inputs(part, small)[0].to(device, torch.bfloat16)
    return model, (image.contiguous(memory_format=torch.channels_last),)


def inference(
    part: str, small: bool, kinds: Sequence[str], settings: Sequence[str]
) -> Iterator[dict[str, object]]:
    """A row for each kind in each setting."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    model, given = subject(part, small, device)
    with torch.no_grad():
        want = _flat(model(*given))
        for kind in kinds:
            made, counts = copy.deepcopy(model), {"convolutions": 0, "left": 0}
            if (words := KINDS[kind]) is not None:
                report = transconv.quantize_(made, calibration=[given], **words)
                counts = {"convolutions": len(report.quantized), "left": len(report.left)}
            for setting in settings:
                if setting == "folded" and (kind == "torch" or part == "sdxl"):
                    continue
                begun = time.perf_counter()
                run, about = _in_setting(setting, kind, made, given)
                off = float((_flat(run(*given)) - want).norm() / want.norm())
                seconds = time.perf_counter() - begun
                other, elements = compared(made, given) if (kind, setting) == ("int8", "eager") else (0, 0)
                took, host = _in_a_row(lambda run=run: run(*given), device)  # type: ignore[misc]
                yield {
                    "model": part,
                    "kind": kind,
                    "setting": setting,
                    "ms": f"{took:.4g}",
                    "host_ms": f"{host:.3g}",
                    **counts,
                    **about,
                    "other": other,
                    "elements": elements,
                    "off": f"{off:.2e}",
                    "prepare_s": f"{seconds:.1f}",
                    **versions(),
                }
                torch._dynamo.reset()


def _in_a_row(call: Callable[[], object], device: str) -> tuple[float, float]:
    """Milliseconds of a call among many, as in a server, and of the host for it: the median of five
    rounds."""
    times = 10 if device == "cuda" else 1  # fewer launches than a queue holds: the host does not wait
    for _ in range(3):
        call()
    rounds = [timed(lambda: [call() for _ in range(times)], torch.device(device)) for _ in range(5)]
    whole, host = zip(*rounds, strict=True)
    return median(whole) / times, median(host) / times


def _in_setting(
    setting: str, kind: str, model: nn.Module, given: tuple[Tensor, ...]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What is called, its kernels compiled, and what is known of it."""
    ours, prepared = kind != "torch", torch.cuda.is_available()
    if kind == "bf16" and setting == "eager":
        model = copy.deepcopy(model)
        transconv.convert_(model)
    if setting == "folded":
        model = transconv.fold(model)
        if kind == "bf16":
            transconv.convert_(model)
    about = {"kernels": "", "regions": ""}
    if setting != "compiled":
        if ours and prepared:
            print(transconv.prepare(model, *given, backward=False, progress=False), flush=True)
        return model, about
    if not ours:
        return torch.compile(model), about
    compiled = torch.compile(model, backend=transconv.graph.backend)
    if prepared:
        print(transconv.prepare(compiled, *given, backward=False, progress=False), flush=True)
    compiled(*given)
    rows = [r for g in transconv.graph.report(compiled).graphs for r in g.rows]
    regions = sum(isinstance(r, transconv.graph.TorchRow) for r in rows)
    return compiled, {"kernels": len(rows) - regions, "regions": regions}


def _flat(made: Any) -> Tensor:
    found = made if isinstance(made, (list, tuple)) else [made]
    return torch.cat([t.double().flatten() for t in found])


def compared(model: nn.Module, given: tuple[Tensor, ...]) -> tuple[int, int]:
    """How many elements of the first image, behind every int8 convolution, are other ones than exact sums
    of integers give with the same operations in the epilogue, and how many there are."""
    counts = [0, 0]

    def seen(module: Any, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        want = reference(module, inputs[0][:1])
        counts[0] += int((want != result[:1]).sum())
        counts[1] += want.numel()

    hooks = [
        m.register_forward_hook(seen) for m in model.modules() if isinstance(m, transconv.nn.QuantConv2d)
    ]
    model(*given)
    for hook in hooks:
        hook.remove()
    return counts[0], counts[1]


def reference(module: Any, x: Tensor) -> Tensor:
    """An int8 convolution in f64, where its sums are exact."""
    zero = module.input_zero_point
    whole = quantised(x, module.input_scale, zero, ROWS["int8"].input).double() - zero.double()
    sums = nn.functional.conv2d(
        whole, module.weight.double(), None, module.stride, module.padding, module.dilation, module.groups
    )
    real = sums.float() * (module.input_scale * module.weight_scale).view(-1, 1, 1)
    if module.bias is not None:
        real = real + module.bias.float().view(-1, 1, 1)
    return (real.relu() if module.activation else real).to(x.dtype)


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
