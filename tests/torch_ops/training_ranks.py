"""Training of a small network by torch, by converted modules and by the compiled graph, on one or
several ranks, with checkpoints after each step.

    TRITON_INTERPRET=1 python -m tests.torch_ops.training_ranks --ranks 2    gloo, on the CPU
    python -m tests.torch_ops.training_ranks --device cuda --ranks 2         NCCL, a GPU each

A line for each way. It ends with 1 if ranks differ, if losses are not torch's, within what the order of
sums changes, or if a rank of ours launched no kernel or left a result to torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import transconv
from tests.distributed.processes import ports

WAYS = ("torch", "convert", "compile")
Tensor = torch.Tensor


class Network(nn.Sequential):
    """A class that is not torch's own, of which torch.compile compiles nothing within
    DistributedDataParallel."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        return made


def network(width: int = 4) -> Network:
    torch.manual_seed(0)
    return Network(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.ConvTranspose2d(2 * width, 2, 2, stride=2),
    )


def called(model: nn.Module, way: str) -> Any:
    """The model as a way computes it; its state dict stays torch's."""
    if way == "convert":
        transconv.convert_(model)
    return torch.compile(model, backend="transconv") if way == "compile" else model


def batch(step: int, rank: int, ranks: int, size: int = 6) -> Tensor:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(4 * ranks, 3, size, size, generator=drawn)[4 * rank : 4 * rank + 4]


def train(
    way: str,
    steps: range,
    checkpoint: Path | None = None,
    device: str = "cpu",
    rank: int = 0,
    ranks: int = 1,
    size: int = 6,
    width: int = 4,
    killed_after: int = -1,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of these steps, and the state afterwards. ``checkpoint``: loaded if it is there, and
    written after each step; ``killed_after``: the step behind which the process kills itself."""
    model = network(width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    net: Any = model
    if way == "convert":
        net = called(model, way)
    if ranks > 1:
        where = [device] if device != "cpu" else None
        net = nn.parallel.DistributedDataParallel(net, device_ids=where)
    if way == "compile":
        net = called(net, way)
    losses = []
    for step in steps:
        optimizer.zero_grad(set_to_none=True)
        loss = net(batch(step, rank, ranks, size).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if checkpoint is not None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
        if step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
    return losses, {k: v.detach().cpu() for k, v in model.state_dict().items()}


def _one_rank(rank: int, port: int, folder: str, options: dict[str, Any]) -> None:
    """All ways on one rank; what each made is left in the folder."""
    device, ranks = options["device"], options["ranks"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
    else:
        transconv.config.cpu = "interpret"
    transconv.config.fallback = "error"
    dist.init_process_group("gloo" if device == "cpu" else "nccl", rank=rank, world_size=ranks)
    for way in WAYS:
        began = time.perf_counter()
        transconv.stats(reset=True)
        made = train(
            way,
            range(options["steps"]),
            device=device,
            rank=rank,
            ranks=ranks,
            size=options["size"],
            width=options["width"],
        )
        seen = transconv.stats()
        counts = sum(seen.native.values()), sum(seen.fallback.values()) + seen.waiting
        torch.save((*made, time.perf_counter() - began, counts), Path(folder) / f"{way}{rank}.pt")
        torch._dynamo.reset()
        dist.barrier()
    dist.destroy_process_group()


def compare(folder: Path, **options: Any) -> list[str]:
    """Train by all ways on ranks of their own. Returns what is wrong, a line each."""
    mp.spawn(_one_rank, (ports(1)[0], str(folder), options), nprocs=options["ranks"])
    wrong = []
    want: Any = None
    for way in WAYS:
        found = [torch.load(folder / f"{way}{rank}.pt") for rank in range(options["ranks"])]
        losses, state, seconds, (launches, _) = found[0]
        want = want or losses
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, want, strict=True))
        if off > 1e-3:
            wrong.append(f"{way}: losses {losses}, torch's {want}")
        for rank, (*_, (launched, by_torch)) in enumerate(found):
            if bool(launched) != (way != "torch") or by_torch:
                wrong.append(f"{way}: rank {rank} launched {launched} kernels, torch computed {by_torch}")
        for _, other, _, _ in found[1:]:
            # Running statistics of batch norm are each rank's own.
            parameters = [k for k in state if "running" not in k]
            if any(not torch.equal(state[k], other[k]) for k in parameters):
                wrong.append(f"{way}: ranks have different parameters")
        print(
            f"{way:8} {seconds:6.1f} s  {launches} launches a rank  last loss {losses[-1]:.6f}  "
            f"off torch's by {off:.1e}"
        )
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    given = vars(parser.parse_args())
    sizes = {"size": 64, "width": 64} if given["device"] == "cuda" else {"size": 6, "width": 4}
    with tempfile.TemporaryDirectory() as made_in:
        said = compare(Path(made_in), **given, **sizes)
    print("\n".join(said) or "all ways agree")
    sys.exit(bool(said))
