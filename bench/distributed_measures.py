"""What the processes of a row of ``python -m bench distributed`` measure: a network on some ranks.

    python -m torch.distributed.run --nproc-per-node 2 -m bench.distributed_measures '{"model": ...}'

Rank 0 writes the row as JSON. Times are medians of single steps, of the slowest rank each. ``exchange_ms``
is the time of a step less that of one that sends no rows of convolutions: what of it is not hidden. The
peak of a recorded step is that of its recording.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import transconv
from bench.distributed_models import MODELS
from bench.distributed_watching import no_rows, nothing_computed, rows_counted
from transconv.distributed import Captured
from transconv.distributed.halo import shards

Tensor = torch.Tensor
Row = dict[str, Any]
FEWEST, MOST = 3, 30
SAMPLES = 1 << 16


class Run:
    """A network on this rank. ``side``: plain (one process, converted), sharded, or captured: sharded with
    steps that are recorded as CUDA graphs."""

    def __init__(self, model: str, side: str, device: str, small: bool) -> None:
        self.what, self.sharded = MODELS[model], side != "plain"
        build, shape = self.what.small if small else (self.what.build, self.what.shape)
        self.device = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
        self.mesh = init_device_mesh(device, (dist.get_world_size(),))
        self.narrow = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        with self.device:
            self.model = self.arranged(build())
        self.model = (
            self.model.train()
            if self.what.trains
            else self.model.to(self.narrow).eval().requires_grad_(False)
        )
        if self.sharded:
            transconv.distributed.parallelize(
                self.model, self.mesh, {self.what.plan: 0}, self.what.whole, self.what.rows
            )
        else:
            transconv.convert_(self.model)
        self.x = self.input(shape)
        self.step: Callable[[], Any] = self.eager
        if side == "captured":
            self.step = transconv.distributed.captured(self.eager, self.mesh)

    def arranged(self, thing: Any) -> Any:
        """A module's weights, or an input, with features last."""
        if isinstance(thing, nn.Module):
            for p in thing.parameters():
                p.data = self.arranged(p.data)
            return thing
        form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(thing.dim())
        # torch 2.13's instance norm has wrong gradients with features last on a CPU.
        return thing if form is None or self.device.type == "cpu" else thing.contiguous(memory_format=form)

    def input(self, shape: tuple[int, ...]) -> Any:
        """Of all ranks together the same, whatever their number; each makes its rows alone."""
        dim = {"d": -3, "h": -2, "w": -1}[self.what.plan] % len(shape)
        rows = shards(shape[dim], dist.get_world_size())[dist.get_rank()]
        own = [*shape[:dim], rows.size, *shape[dim + 1 :]]
        at = [torch.arange(n, device=self.device, dtype=torch.float32) for n in own]
        at[dim] += rows.start
        local = torch.zeros(own, device=self.device)
        for axis, steps in enumerate(at):
            spread = [1] * len(own)
            spread[axis] = -1
            local += torch.sin(steps * (0.7 + 0.31 * axis) + axis).view(spread)
        local = self.arranged(local.to(torch.float32 if self.what.trains else self.narrow))
        if not self.sharded:
            return local
        whole = torch.Size(shape)
        stride = self.arranged(torch.empty(shape, device="meta")).stride()
        return DTensor.from_local(local, self.mesh, [Shard(dim)], shape=whole, stride=stride)

    def eager(self) -> Any:
        """The result of inference, or of a step, whose gradients are left in the weights."""
        if not self.what.trains:
            with torch.no_grad():
                return self.model(self.x)
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            y = self.model(self.x)
        loss = y.float().square().sum() / y.numel()
        loss.backward()
        return y.detach()

    def autocast(self) -> Any:
        narrows = self.what.trains and self.narrow is torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=narrows)

    def record(self) -> float | str:
        """Call the step until it is recorded; the peak of the memory meanwhile, as ``peak``. RuntimeError
        if it is not."""
        peak, run = self.peak(), self.step
        assert isinstance(run, Captured)
        for _ in range(10):
            if run.is_recorded or run.why_not:
                break
            peak = self.peak()
        told(f"recorded: {run.is_recorded}")
        if not run.is_recorded and self.device.type == "cuda":
            raise RuntimeError(f"the step is not recorded: {run.why_not or 'kernels are missing'}")
        return peak

    def close(self) -> None:
        if isinstance(self.step, Captured):
            self.step.close()

    # -- measures --------------------------------------------------------------------------------

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, seconds: float) -> float:
        """The median of steps one by one, each as long as on the slowest rank."""
        taken: list[float] = []
        until = time.perf_counter() + seconds
        on = torch.ones((), device=self.device)
        while len(taken) < FEWEST or (len(taken) < MOST and bool(on.item())):
            self.wait()
            dist.barrier()
            began = time.perf_counter()
            self.step()
            self.wait()
            took = torch.tensor(time.perf_counter() - began, device=self.device, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            taken.append(took.item() * 1e3)
            on.fill_(time.perf_counter() < until)
            dist.all_reduce(on, dist.ReduceOp.MIN)
        return median(taken)

    def host(self) -> float:
        """Milliseconds until a step has been launched: as long as a step where the host is too slow."""
        self.wait()
        dist.barrier()
        began = time.perf_counter()
        self.step()
        took = (time.perf_counter() - began) * 1e3
        self.wait()
        return took

    def peak(self) -> float | str:
        """Megabytes that a step takes in all at most, of the rank that takes most."""
        if self.device.type != "cuda":
            return ""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        self.wait()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.wait()
        most = torch.tensor(torch.cuda.max_memory_allocated() / 2**20, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()

    def received(self) -> float:
        """Megabytes of rows of other ranks that come in a step, to the rank with the most."""
        with rows_counted() as counted:
            self.step()
        most = torch.tensor(sum(counted) / 1e6, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()

    def numbers(self) -> dict[str, Tensor]:
        """Samples of a step's result and gradients, on rank 0."""
        found = {"result": self.step()}
        found |= {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: _sampled(t) for name, t in found.items()}


def _sampled(t: Any) -> Tensor:
    """Some elements, evenly spread; the same of every number of ranks."""
    whole = t.full_tensor() if isinstance(t, DTensor) else t
    flat = whole.contiguous().view(-1)
    return flat[:: max(1, flat.numel() // SAMPLES)].double().cpu()


def measure(
    model: str, side: str, ranks: int, device: str, small: bool, seconds: float, folder: str
) -> Row:
    """The row of a network. ``folder``: where one process leaves its numbers, with which the others are
    compared."""
    warnings.filterwarnings("ignore")
    transconv.config.fallback = "silent"
    run = Run(model, side, device, small)
    began = time.perf_counter()
    if device == "cuda":
        workers = max(1, (os.cpu_count() or 2) // dist.get_world_size())
        with run.autocast(), nothing_computed():
            prepared = transconv.prepare(run.model, run.x, workers=workers, progress=False)
        told(str(prepared).replace("\n", "; ")[:300])
        told(f"prepared in {time.perf_counter() - began:.0f} s")
    row: Row = {"says": run.what.says}
    numbers = run.numbers()
    row["start_s"] = time.perf_counter() - began
    told(f"first step after {row['start_s']:.0f} s")
    if side == "captured":
        row["peak_mb"] = run.record()
        numbers = run.numbers()
    row["ms"] = run.milliseconds(seconds)
    row["host_ms"] = run.host()
    if side != "captured":
        row["peak_mb"] = run.peak()
    if ranks > 1 and side == "sharded":
        row["received_mb"] = run.received()
        with no_rows():
            run.step()
            row["exchange_ms"] = row["ms"] - run.milliseconds(seconds / 2)
    counts = transconv.stats()
    row["ours"] = f"{counts.native_share:.3f}"
    told(str(counts).replace("\n", "; "))
    if dist.get_rank() == 0:
        path = Path(folder) / f"{model}{'_small' * small}.pt"
        if side == "plain":
            torch.save(numbers, path)
        else:
            row |= apart(path, numbers)
    run.close()
    return row


def apart(path: Path, numbers: dict[str, Tensor]) -> Row:
    """The error against one process relative to the root mean square: of the result, and of all gradients
    together."""
    if not path.exists():  # one process had no memory for it
        return {}
    want = torch.load(path, weights_only=True)
    result, wanted = numbers.pop("result"), want.pop("result")
    row = {"rmse": ((result - wanted).norm() / wanted.norm()).item()}
    if numbers:
        gradients, wanted = (torch.cat([t[name] for name in numbers]) for t in (numbers, want))
        row["gradient_rmse"] = ((gradients - wanted).norm() / wanted.norm()).item()
    return row


def told(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"    {text}", flush=True)


def main() -> None:
    payload = json.loads(sys.argv[1])
    target = payload.pop("target")
    rank = int(os.environ["LOCAL_RANK"])
    device = payload["device"]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        timeout=timedelta(seconds=payload.pop("limit")),
    )
    try:
        row = measure(**payload)
    except torch.OutOfMemoryError as error:
        row = {"error": f"out of memory: {str(error).splitlines()[0][:120]}"}
        Path(target).write_text(json.dumps(row))  # of any rank
        os._exit(3)  # torchrun then ends the others, which may wait for this rank
    if rank == 0:
        Path(target).write_text(json.dumps(row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
