"""Data-parallel training with two gloo processes gives the gradients of one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import transconv


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(4, 2, 2, stride=2)
    )
    transconv.convert_(net)
    return net


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    transconv.config.fallback = "silent"
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    net = torch.nn.parallel.DistributedDataParallel(model())
    net(batch()[2 * rank : 2 * rank + 2]).square().mean().backward()
    torch.save([p.grad for p in net.parameters()], Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, str(tmp_path)), nprocs=2)
    net = model()
    net(batch()).square().mean().backward()
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for parameter, first, second in zip(net.parameters(), *found, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, parameter.grad)
