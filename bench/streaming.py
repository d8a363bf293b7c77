"""``python -m bench streaming``: what a piece of a stream costs.

A model's piece is timed beside torch on the piece with the rows before it that it reads, which is how one
streams without a state, eager and by torch.compile; the models are a codec's decoder and a causal video
decoder with random weights (transformers' EnCodec where it is installed). Steps and packed sequences of a
depthwise convolution are timed beside torch's operations and causal-conv1d, where that is installed; a
result in parts with norms of heads beside the same of one result, by torch and by torch.compile:

    python -m bench streaming                all, 120 seconds at most
    python -m bench streaming --only steps   steps, packed, parts, codec, video

Each side's result is compared with torch's. Rows are in ``<gpu>_streaming.csv``; a repeated run measures
what is missing. ``us`` is the GPU's time of a call, ``host_us`` the host's until it returns, and
``latency_us`` that until the result is there. On a CPU it is shown whether it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import transconv
import transconv.functional as ours
from bench import environment
from bench.issues import short
from transconv.cli.arguments import ranges
from transconv.runtime.timing import Clock
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import device, synchronize

Tensor = torch.Tensor
Calls = dict[str, Callable[[], Any]]
COLUMNS = ("what", "size", "side", "us", "host_us", "latency_us", "off", *environment.VERSIONS)
KEY = ("what", "size", "side", "device")
KINDS = ("steps", "packed", "parts", "codec", "video")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--only", choices=KINDS, help="one kind of case")
    parser.add_argument("--limit", type=ranges.seconds, default=120, help="seconds in all (default: 120)")
    parser.add_argument("--budget-ms", type=ranges.milliseconds, default=60, help="timing of one call")
    parser.add_argument("--quick", action="store_true", help="small sizes")


def main(options: argparse.Namespace) -> int:
    """Measure, and print as it goes; 1 if a side is wrong."""
    about, end = environment.versions(), time.monotonic() + options.limit
    table = CsvTable(Path(options.out) / f"{short(about['device'])}_streaming.csv", COLUMNS, KEY)
    clock, wrong = Clock(device(), options.budget_ms), 0
    for kind in KINDS:
        if options.only not in (None, kind):
            continue
        for what, size, sides, want in CASES[kind](options.quick):
            if time.monotonic() > end:
                print("no time is left; a repeated run goes on", file=sys.stderr)
                return int(wrong > 0)
            for side, call in sides.items():
                row: Row = {**about, "what": what, "size": size, "side": side}
                if table.has(row):
                    continue
                with torch.no_grad():
                    off = (call() - want).abs().max().item() / want.abs().max().item()
                    late = latency(call)
                    found = clock.one(lambda _, call=call: call, 1 << 26)  # type: ignore[misc]
                row |= {"us": f"{found.us:.2f}", "host_us": f"{found.host_us:.2f}"}
                row |= {"latency_us": f"{late:.2f}", "off": f"{off:.2g}"}
                wrong += off > 2e-2
                table.add(row)
                times = f"{found.us:10.1f} us, {late:10.1f} until it is there"
                print(f"{what:<16} {size:<24} {side:<24} {times}, off {off:.1e}", flush=True)
    print(f"{len(table.rows)} rows are in {table.path}", file=sys.stderr)
    return int(wrong > 0)


def latency(call: Callable[[], Any], times: int = 30) -> float:
    """Microseconds from a call until its result is there, the median of several."""
    found = []
    for _ in range(times if device() != "cpu" else 3):
        start = time.perf_counter()
        call()
        synchronize()
        found.append((time.perf_counter() - start) * 1e6)
    return median(found)


def of_steps(quick: bool) -> Iterator[tuple[str, str, Calls, Tensor]]:
    """One position of a batch, with a state in place: Mamba's decode."""
    kind = torch.float32 if device() == "cpu" else torch.bfloat16
    for batch, width in ((2, 64),) if quick else ((1, 4096), (64, 4096), (256, 8192)):
        x, w, b, before = _random(kind, (batch, width), (width, 4), (width,), (batch, width, 3))
        state, theirs = before.clone(), before.clone()

        def by_torch(x: Tensor = x, w: Tensor = w, b: Tensor = b, state: Tensor = theirs) -> Tensor:
            wide = torch.cat([state, x[..., None]], -1)
            state.copy_(wide[..., 1:])
            return F.silu((wide * w).sum(-1) + b)

        def by_ours(x: Tensor = x, w: Tensor = w, b: Tensor = b, state: Tensor = state) -> Tensor:
            return ours.causal_conv1d_update(x, state, w, b, "silu")

        calls: Calls = {"transconv": by_ours, "torch": by_torch}
        if (update := _theirs("causal_conv1d_update")) is not None:
            own = before.clone()
            calls["causal-conv1d"] = lambda x=x, w=w, b=b, own=own: update(x, own, w, b, "silu")  # type: ignore[misc]
        wide = torch.cat([before, x[..., None]], -1)
        yield (
            "step",
            f"{batch}x{width} width 4",
            calls,
            F.silu((wide.float() * w.float()).sum(-1) + b.float()),
        )
        for one in (state, theirs):
            one.copy_(before)


def of_packed(quick: bool) -> Iterator[tuple[str, str, Calls, Tensor]]:
    """Sequences of different lengths: one behind another, and padded to the longest."""
    kind = torch.float32 if device() == "cpu" else torch.bfloat16
    width, lengths = (16, [3, 9, 5]) if quick else (4096, [137, 2048, 511, 64, 1300, 36])
    x, w, b = _random(kind, (1, width, sum(lengths)), (width, 4), (width,))
    ends = torch.tensor([0, *lengths], device=x.device).cumsum(0)
    numbers = (
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().to(x.device)[None]
    )
    padded = x.new_zeros(len(lengths), width, max(lengths))
    for i, part in enumerate(x[0].split(lengths, -1)):
        padded[i, :, : lengths[i]] = part

    def by_torch() -> Tensor:
        return F.silu(F.conv1d(F.pad(padded, (3, 0)), w[:, None], b, groups=width))

    def unpadded(y: Tensor) -> Tensor:
        return torch.cat([y[i, :, :n] for i, n in enumerate(lengths)], -1)[None]

    want = unpadded(by_torch())
    size = f"{sum(lengths)}x{width} of {len(lengths)}"
    packed: Calls = {
        "transconv": lambda: ours.causal_conv1d_fn(x, w, b, activation="silu", cu_seqlens=ends)
    }
    alone: Calls = {
        "transconv padded": lambda: ours.causal_conv1d_fn(padded, w, b, activation="silu"),
        "torch padded": by_torch,
    }
    if (fn := _theirs("causal_conv1d_fn")) is not None:
        last = x.transpose(1, 2).contiguous().transpose(1, 2)
        packed["causal-conv1d"] = lambda: fn(last, w, b, seq_idx=numbers, activation="silu")
    yield "packed", size, packed, want
    yield "packed", size, alone, by_torch()


def of_parts(quick: bool) -> Iterator[tuple[str, str, Calls, Tensor]]:
    """Queries and keys divided by their norms, and values: of a gated delta net."""
    kind = torch.float32 if device() == "cpu" else torch.bfloat16
    head, split, length = (4, [8, 8, 16], 20) if quick else (128, [2048, 2048, 4096], 4096)
    x, w, b = _random(kind, (1, length, sum(split)), (sum(split), 4), (sum(split),))
    last, norms = x.transpose(1, 2), ["l2", "l2", None]

    def apart(y: Tensor) -> Tensor:
        """The parts in torch's operations, as one tensor again."""
        made = [*y.transpose(1, 2).split(split, -1)]
        for i in (0, 1):
            wide = made[i].float().unflatten(-1, (-1, head))
            wide = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
            made[i] = wide.flatten(-2).to(y.dtype)
        return torch.cat(made, -1)

    def by_torch() -> Tensor:
        return apart(F.silu(F.conv1d(F.pad(last, (3, 0)), w[:, None], b, groups=sum(split))))

    def in_parts() -> Tensor:
        made = ours.causal_conv1d_fn(last, w, b, activation="silu", split=split, norm=norms, head=head)
        return torch.cat([t.transpose(1, 2) for t in made], -1)  # each side joins its parts

    sides: Calls = {"transconv": in_parts, "torch": by_torch, "torch.compile": torch.compile(by_torch)}
    compiled = torch.compile(apart)
    sides["transconv, then compiled norms"] = lambda: compiled(
        ours.causal_conv1d_fn(last, w, b, activation="silu")
    )
    yield "parts", f"{length}x{sum(split)} heads of {head}", sides, by_torch()


class Left(nn.Module):
    """A convolution padded on the left in time."""

    def __init__(self, i: int, o: int, k: int, d: int = 1, ndims: int = 1) -> None:
        super().__init__()
        beside = (1,) * (ndims - 1)
        kind: Any = {1: nn.Conv1d, 3: nn.Conv3d}[ndims]
        self.conv = kind(i, o, (k, *(3,) * (ndims - 1)), padding=(0, *beside), dilation=(d, *beside))
        self.left = (k - 1) * d

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(F.pad(x, (*(0, 0) * (x.dim() - 3), self.left, 0)))
        return made


class Added(nn.Module):
    """What modules in a row make is added to their input."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.inner(x)
        return made


class Longer(nn.Module):
    """A transposed convolution without its tail."""

    def __init__(self, i: int, o: int, s: int) -> None:
        super().__init__()
        self.conv, self.tail = nn.ConvTranspose1d(i, o, 2 * s, s), s

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(x)[..., : -self.tail]
        return made


def decoder(width: int) -> nn.Module:
    """A codec's decoder: 320 samples of one row of codes."""
    parts: list[nn.Module] = [Left(128, width, 7)]
    for stride in (8, 5, 4, 2):
        parts += [nn.ELU(), Longer(width, width // 2, stride)]
        width //= 2
        parts.append(
            Added(nn.ELU(), Left(width, width // 2, 3), nn.ELU(), nn.Conv1d(width // 2, width, 1))
        )
    return nn.Sequential(*parts, nn.ELU(), Left(width, 1, 7))


def video(width: int) -> nn.Module:
    """A causal video decoder without norms: twice the height and width."""
    return nn.Sequential(
        Left(16, width, 3, ndims=3),
        Added(nn.SiLU(), Left(width, width, 3, ndims=3), nn.SiLU(), Left(width, width, 3, ndims=3)),
        nn.Upsample(scale_factor=(1, 2, 2), mode="nearest"),
        Left(width, width // 2, 3, ndims=3),
        Added(nn.SiLU(), Left(width // 2, width // 2, 3, ndims=3)),
        Left(width // 2, 3, 3, ndims=3),
    )


def of_codec(quick: bool) -> Iterator[tuple[str, str, Calls, Tensor]]:
    """Pieces of a codec's decoder."""
    made = decoder(32 if quick else 512)
    for rows in (1,) if quick else (1, 4, 16):
        yield from _pieces("codec", made, (1, 128, rows), 24, f"{rows} of 320 samples")
    if (found := _encodec()) is not None and not quick:
        yield from _pieces("EnCodec", found, (1, 128, 4), 24, "4 of 320 samples")


def of_video(quick: bool) -> Iterator[tuple[str, str, Calls, Tensor]]:
    """Pieces of a video decoder."""
    made, (h, w) = (video(8), (4, 6)) if quick else (video(128), (60, 104))
    for rows in (1,) if quick else (1, 4):
        yield from _pieces("video", made, (1, 16, rows, h, w), 12, f"{rows} frames {2 * h}x{2 * w}")


def _pieces(
    what: str, model: nn.Module, shape: tuple[int, ...], past: int, size: str
) -> Iterator[tuple[str, str, Calls, Tensor]]:
    """A model's piece by a stream, and by torch with ``past`` rows before it."""
    kind = torch.float32 if device() == "cpu" else torch.bfloat16
    model = model.eval().to(device(), kind)
    (x,) = _random(kind, (*shape[:2], shape[2] + past, *shape[3:]))
    piece = x[:, :, past:].contiguous()
    s = transconv.streaming(model)
    compiled = torch.compile(model)
    with torch.no_grad():
        s(x[:, :, :past].contiguous())
        want = model(x)
        rows = want.shape[2] * shape[2] // x.shape[2]
        want = want[:, :, -rows:]
        yield what, size, {"transconv, first": lambda: s(piece)}, want
        plain = transconv.streaming(model, record=False)
        plain(x[:, :, :past].contiguous())

        # Later pieces see others before them: their times count, their numbers are the tests' matter.
        def again(stream: nn.Module) -> Tensor:
            stream(piece)
            return want

        calls: Calls = {
            "transconv": lambda: again(s),
            "transconv, not recorded": lambda: again(plain),
            "torch, with the past": lambda: model(x)[:, :, -rows:],
        }
        if device() != "cpu":
            calls["torch.compile, with the past"] = lambda: compiled(x)[:, :, -rows:]
        yield what, size, calls, want


def _random(kind: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(device(), kind) for shape in shapes]


def _theirs(name: str) -> Callable[..., Any] | None:
    """A function of causal-conv1d; None where it is not installed, or without a GPU."""
    try:
        found = getattr(importlib.import_module("causal_conv1d"), name)
    except ImportError:
        return None
    return found if device() != "cpu" else None  # type: ignore[no-any-return]


def _encodec() -> nn.Module | None:
    """transformers' EnCodec decoder with random weights; None where it is not installed."""
    try:
        lib = importlib.import_module("transformers")
        made: nn.Module = lib.EncodecModel(lib.EncodecConfig()).decoder
    except (ImportError, RuntimeError):
        return None
    return made


CASES = {"steps": of_steps, "packed": of_packed, "parts": of_parts, "codec": of_codec, "video": of_video}
