"""``python -m bench within``: models within a bound of memory (``transconv.within``), beside the whole.

    python -m bench within                                   all rows
    python -m bench within --models sdxl_1024,wan_17 --memory "4 GB"
    python -m bench within --models sdxl_2048 --memory "3 GB" --ranks 2

A row has the time of a call, or of a training step (``unet3d_step_128``), and the most memory that was
allocated during it, weights and input included: of the whole by torch.compile's backend, of one piece
without a bound, and within the bound; in how much pinned host memory tensors wait there (``--host``: at
most), and the rate of copies to and from it, where some do; whether these have the same bits; and what
diffusers' tiled decode of its own class takes, where it is installed, with its largest difference from
diffusers' whole decode. With ``--ranks`` processes of torchrun, each with a GPU, share the pieces of a
call: the time is that of the slowest, the memory that of the one with most (and ``each_mb``), and bits are
those of all. A side that does not fit the device has the reason. Rows are in
``<gpu>_within.csv``; a repeated run measures what is missing. On a CPU
(``--quick``) kernels are interpreted: only whether it runs is worth something there.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import transconv
from bench import environment, unets, vaes, video_vaes
from bench.environment import ROOT
from bench.issues import short
from transconv.graph.pieces.bounded_model import BoundedModel
from transconv.tuning.table import CsvTable, Row
from transconv.verify.machine import device

Tensor = torch.Tensor
COLUMNS = (
    "model",
    "memory",
    "dtype",
    "ranks",
    "whole_ms",
    "whole_mb",
    "piece_ms",
    "piece_mb",
    "within_ms",
    "within_mb",
    "each_mb",
    "estimated_mb",
    "host_mb",
    "link_gbs",
    "passes",
    "pieces",
    "first_s",
    "bits_of_piece",
    "bits_of_whole",
    "off_whole",
    "tiled_ms",
    "tiled_mb",
    "tiled_off",
    "refused",
    "device",
    "torch",
    "triton",
    "commit",
)
KEY = ("model", "memory", "dtype", "ranks", "device")
MEMORY = "8 GB"
REPEATS = 3
CALLS = {"within": 3}  # until the bound holds for what calls were measured to take


@dataclass(frozen=True)
class BoundCase:
    """A model and its input; ``library``: diffusers' class of its kind and how it is made, if there is
    one; ``trains``: a call is a training step, and its result are all gradients."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    library: tuple[str, dict[str, Any]] | None = None
    trains: bool = False


SDXL = (
    "AutoencoderKL",
    {
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": 4,
        "sample_size": 1024,  # of SDXL's own configuration: the size of a tile
    },
)
WAN: tuple[str, dict[str, Any]] = ("AutoencoderKLWan", {})
CASES = {
    **{
        f"sdxl_{n}": BoundCase(lambda: vaes.Decoder(4, True), (1, 4, n // 8, n // 8), SDXL)
        for n in (1024, 2048, 4096)
    },
    **{
        f"wan_{n}": BoundCase(video_vaes.WanDecoder, (1, 16, (n + 3) // 4, 60, 104), WAN) for n in (17, 81)
    },
    **{f"unet3d_step_{n}": BoundCase(unets.UNet3d, (1, 1, n, n, n), trains=True) for n in (96, 128, 192)},
    "segresnet_384": BoundCase(lambda: segresnet(), (1, 1, 384, 384, 384)),
}
QUICK = {
    "sdxl_quick": BoundCase(lambda: vaes.Decoder(4, True, (4, 4), 2, 1), (1, 4, 4, 4)),
    "conv_quick": BoundCase(lambda: nn.Conv2d(3, 8, 3, padding=1), (1, 3, 32, 16)),
    "conv_step_quick": BoundCase(lambda: nn.Conv2d(3, 8, 3, padding=1), (1, 3, 32, 16), trains=True),
}


def segresnet() -> nn.Module:
    """MONAI's network of that name; a residual encoder of the same kind where MONAI is not installed."""
    try:
        return importlib.import_module("monai.networks.nets").SegResNet(  # type: ignore[no-any-return]
            spatial_dims=3, init_filters=16, in_channels=1, out_channels=3
        )
    except ImportError:
        return unets.UNet3d()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=[], help=f"of {', '.join((*CASES, *QUICK))}"
    )
    parser.add_argument("--memory", default=MEMORY, help=f"the bound (default: {MEMORY})")
    parser.add_argument(
        "--host", help="pinned host memory at most, 0 for none (default: half of what is free)"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes that share the pieces (default: 1)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="torch's name (default: bfloat16)")
    parser.add_argument("--limit", type=float, default=540, help="seconds; then no new row begins")
    parser.add_argument("--report", action="store_true", help="print the passes of each row")
    parser.add_argument(
        "--pictures", type=Path, help="a folder for what decodes in tiles and in pieces differ by"
    )
    parser.add_argument("--quick", action="store_true", help="small models, for Triton's interpreter")


def main(options: argparse.Namespace) -> int:
    """Measure, and print as it goes; 1 if something was refused, or bits differ."""
    if options.ranks > 1 and "LOCAL_RANK" not in os.environ:
        words = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(options.ranks),
            "-m",
            "bench",
        ]
        return subprocess.run(
            [sys.executable, "-m", *words, *sys.argv[1:]], cwd=ROOT, check=False
        ).returncode
    if options.quick:
        transconv.config.cpu = "interpret"
    mesh = mesh_of(options.ranks)
    about, end = environment.versions(), time.monotonic() + options.limit
    table = CsvTable(Path(options.out) / f"{short(about['device'])}_within.csv", COLUMNS, KEY)
    wrong = False
    for name in options.models or (QUICK if options.quick else CASES):
        row: Row = {**about, "model": name, "memory": options.memory, "dtype": options.dtype}
        row["ranks"] = options.ranks if mesh is not None else ""
        if table.has(row):
            continue
        if any(of_all(mesh, time.monotonic() > end)):
            print("no time is left; a repeated run goes on", file=sys.stderr)
            break
        case = {**CASES, **QUICK}[name]
        with torch.set_grad_enabled(case.trains):
            row |= measured(case, options, name, mesh)
        if mesh is not None and mesh.get_local_rank():
            continue
        table.add(row)
        wrong |= bool(row.get("refused")) or row.get("bits_of_piece") is False
        print({k: v for k, v in row.items() if k not in about and v != ""}, flush=True)
    if mesh is not None:
        torch.distributed.destroy_process_group()
    return int(wrong)


def mesh_of(ranks: int) -> Any:
    """The mesh of the processes that torchrun began; None for one."""
    if ranks == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    if device() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh(device(), (ranks,))


def of_all(mesh: Any, what: Any) -> list[Any]:
    """What each rank has."""
    if mesh is None:
        return [what]
    found: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(found, what)
    return found


def measured(case: BoundCase, options: argparse.Namespace, name: str, mesh: Any = None) -> Row:
    """What is measured of a case; ``name``: of its picture; ``mesh``: of the ranks that share it."""
    place, dtype = torch.device(device()), getattr(torch, options.dtype)
    torch.manual_seed(0)
    model = features_last(case.make().train(case.trains).to(place, dtype))
    x = torch.randn(case.shape, device=place, dtype=dtype)
    x = x.contiguous(memory_format=FORMATS[x.dim()])
    row: Row = {}

    def called(run: Callable[..., Any]) -> Callable[..., Any]:
        return partial(stepped, model, run) if case.trains else run

    whole = side(row, "whole", lambda: called(torch.compile(model, backend=transconv.graph.backend)), x)
    piece = side(row, "piece", lambda: called(transconv.within(model, None)), x)
    bounded: list[BoundedModel] = []

    def within() -> Callable[..., Any]:
        bounded.append(transconv.within(model, options.memory, host=options.host, ranks=mesh))
        return called(bounded[0])

    began = time.monotonic()
    made = side(row, "within", within, x)
    if made is not None:
        report = bounded[0].report()
        passes = [p for plan in report.plans for p in plan.passes]
        row |= {
            "estimated_mb": round(report.peak / 1e6, 1),
            "host_mb": round(report.pinned / 1e6, 1),
            "passes": len(passes),
            "pieces": sum(p.pieces for p in passes),
            "first_s": round(time.monotonic() - began, 1),
        }
        if report.pinned and x.is_cuda:
            row["link_gbs"] = f"{link_gbs(x.device):.3g}"
        if options.report:
            print(report, flush=True)
        if piece is not None:
            row["bits_of_piece"] = torch.equal(made, piece)
        if whole is not None:
            row["bits_of_whole"] = torch.equal(made, whole)
            row["off_whole"] = f"{float((made.float() - whole.float()).abs().max()):.3g}"
    bounded.clear()
    torch.compiler.reset()
    model.to("meta")
    if mesh is not None:
        each = of_all(mesh, row)
        row |= {
            k: max(r[k] for r in each) for k in ("within_ms", "within_mb") if all(k in r for r in each)
        }
        row |= {k: all(r[k] for r in each) for k in ("bits_of_piece", "bits_of_whole") if k in row}
        row["each_mb"] = " ".join(str(r.get("within_mb", "")) for r in each)
    elif case.library is not None:
        apart = tiled(row, case.library, x)
        if options.pictures and apart is not None and made is not None and whole is not None:
            draw(apart, difference(made, whole), options.pictures / f"{name}_tiled.png")
    return row


TITLES = ("diffusers, tiled", "transconv.within")  # of a picture's two sides
FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


def features_last(model: nn.Module) -> nn.Module:
    """The model with the weights of its convolutions in the order that kernels like."""
    for p in model.parameters():
        if p.dim() in (4, 5):
            p.data = p.data.contiguous(memory_format=FORMATS[p.dim()])
    return model


def stepped(model: nn.Module, run: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """The gradients of a training step, of the input first."""
    model.zero_grad()
    given = x.detach().requires_grad_()
    run(given).float().square().mean().backward()
    return [g for t in (given, *model.parameters()) if (g := t.grad) is not None]


def side(row: Row, name: str, make: Callable[[], Callable[..., Any]], x: Tensor) -> Tensor | None:
    """A side's result on the host, and its time and peak in the row; None, with the reason, where it does
    not run."""
    try:
        run = make()
        for _ in range(CALLS.get(name, 1)):  # kernels are built, and looked at
            if x.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            run(x)
        made, ms, mb = timed(run, x)
    except (torch.OutOfMemoryError, transconv.errors.TransconvError) as error:
        row["refused"] = f"{row.get('refused', '')} {name}: {str(error).splitlines()[0][:200]}".strip()
        return None
    finally:
        gc.collect()
        if x.is_cuda:
            torch.cuda.empty_cache()
    row |= {f"{name}_ms": round(ms, 2), f"{name}_mb": round(mb, 1)}
    return torch.cat([t.cpu().flatten() for t in made]) if isinstance(made, list) else made.cpu()


def timed(run: Callable[..., Any], x: Tensor) -> tuple[Any, float, float]:
    """A result, the milliseconds of the quickest call, and the megabytes that are allocated at most."""
    best, made = float("inf"), None
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATS if x.is_cuda else 1):
        made = None
        began = waited(x)
        made = run(x)
        best = min(best, waited(x) - began)
    peak = torch.cuda.max_memory_allocated() / 1e6 if x.is_cuda else 0.0
    return made, best * 1e3, peak


def link_gbs(device: torch.device) -> float:
    """The rate of copies of 1 GiB between the device and pinned host memory, of the slower direction, in
    GB/s."""
    here = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    there, best = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), [float("inf")] * 2
    for _ in range(REPEATS):
        for way, (into, given) in enumerate(((here, there), (there, here))):
            began = waited(here)
            into.copy_(given, non_blocking=True)
            best[way] = min(best[way], waited(here) - began)
    return here.nbytes / max(best) / 1e9


def waited(x: Tensor) -> float:
    """The time, when all that was started is done."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def tiled(row: Row, library: tuple[str, dict[str, Any]], x: Tensor) -> Tensor | None:
    """Where diffusers' tiled decode differs from its whole decode, both by eager torch, and what it takes
    in the row; None where diffusers is missing or something does not fit."""
    try:
        kind = getattr(importlib.import_module("diffusers"), library[0])
    except (ImportError, AttributeError):
        return None
    model = kind(**library[1]).eval().to(x.device, x.dtype)

    def run(z: Tensor) -> Tensor:
        return model.decode(z, return_dict=False)[0]  # type: ignore[no-any-return]

    whole = None
    try:
        whole = run(x).cpu()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    model.enable_tiling()
    try:
        made, ms, mb = timed(run, x)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    row |= {"tiled_ms": round(ms, 2), "tiled_mb": round(mb, 1)}
    if whole is None:
        return None
    row["tiled_off"] = f"{float((made.cpu().float() - whole.float()).abs().max()):.3g}"
    return difference(made.cpu(), whole)


def difference(made: Tensor, whole: Tensor) -> Tensor:
    """The largest difference of two images or videos over features and frames, in shares of the largest
    value of ``whole``: ``(height, width)``."""
    apart = (made.float() - whole.float()).abs()
    return apart.reshape(-1, *apart.shape[-2:]).amax(0) / whole.float().abs().max()


def draw(of_tiles: Tensor, of_pieces: Tensor, path: Path) -> None:
    """A picture of both differences (``difference``), the largest of each block of positions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    most = float(of_tiles.max())
    for axes, apart, title in zip(sides, (of_tiles, of_pieces), TITLES, strict=True):
        side = max(1, apart.shape[-1] // 512)
        shown = torch.nn.functional.max_pool2d(apart[None], side)[0]
        drawn = axes.imshow(
            shown, cmap="magma", vmin=0, vmax=most, extent=(0, apart.shape[1], apart.shape[0], 0)
        )
        axes.set_title(f"{title}: at most {float(apart.max()):.2g}")
    figure.colorbar(drawn, ax=sides, label="difference from the whole, of the largest value")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
