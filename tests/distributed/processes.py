"""Runs a function on several processes of gloo, or of NCCL too, and collects what each returns."""

from __future__ import annotations

import datetime
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def ports(count: int) -> list[int]:
    """So many free ports of this machine, each another one."""
    with ExitStack() as open_:
        probes = [open_.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def run(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 60,
    port: int = 0,
    limit: float = float("inf"),
) -> list[Any]:
    """``function(*arguments)`` on each rank of a process group; what each returned, or the text of its
    error. A rank that is gone has None, and so has one that is not ready in ``limit`` seconds."""
    until = time.monotonic() + limit
    port = port or ports(1)[0]
    on_gpus = torch.cuda.device_count() >= ranks
    context = mp.get_context("spawn" if on_gpus else "forkserver")
    if not on_gpus:  # its processes have imported torch, and transconv not yet
        context.set_forkserver_preload(["torch"])
    queue = context.Queue()
    started = [
        context.Process(
            target=_one, args=(dict(os.environ), rank, ranks, port, timeout, queue, function, arguments)
        )
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    found: dict[int, Any] = {}
    while (
        len(found) < ranks
        and time.monotonic() < until
        and (any(p.is_alive() for p in started) or not queue.empty())
    ):
        try:
            rank, answer = queue.get(timeout=1)
            found[rank] = answer
        except Exception:  # nothing yet
            continue
    for process in started:
        process.join(max(0.0, min(20.0, until - time.monotonic())))
        if process.is_alive():
            process.kill()
    return [found.get(rank) for rank in range(ranks)]


def _one(
    environment: dict[str, str],
    rank: int,
    ranks: int,
    port: int,
    timeout: float,
    queue: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.device_count() >= ranks:
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=timeout)
    )
    try:
        queue.put((rank, function(*arguments)))
    except Exception as error:  # it is the answer
        queue.put((rank, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()
