"""Sharded convolutions on two GPUs over NCCL: the probe and the drawn cases for two ranks, each in f32, in
which transconv's kernels multiply integers exactly. Several pairs of processes share GPUs and caches.

    TRANSCONV_VERIFY=0 python -m pytest -m gpu -s tests/distributed/test_gpus.py

Without GPUs a few cases run on two pairs of processes with gloo, in f64.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import transconv
from tests.distributed import cases, processes
from transconv.distributed.agreement import EventWatch

SECONDS = 90  # in which the pairs begin cases
LONGEST = 100  # a pair that is silent for so long has an error
GROUP_S = 6.0  # after which a process group gives up


def of_a_pair(todo: list[cases.Case], device: str, until: float) -> dict[str, Any]:
    """What is wrong in which case, on this rank; how many cases were begun, and who computed."""
    transconv.config.fallback = "silent"
    mesh = init_device_mesh(device, (2,))
    dtype = torch.float32 if device == "cuda" else torch.float64
    found: dict[str, Any] = {"wrong": [], "done": 0}
    for case in todo:
        late = torch.tensor([time.time() > until])
        torch.distributed.all_reduce(late, torch.distributed.ReduceOp.MAX)  # both ranks end together
        if late.item():
            break
        try:
            told = cases.wrong(case, mesh, transconv, dtype)
        except Exception as error:
            raise RuntimeError(f"{case}: {error}") from error
        found["wrong"] += [f"{case}: {told}"] if told else []
        found["done"] += 1
    stats = transconv.stats()
    return found | {"ours": sum(stats.native.values()), "torchs": stats.fallback}


def over(pairs: int, todo: list[cases.Case], device: str, seconds: float) -> list[Any]:
    """The answers of the ranks of all pairs, each of which has every so manyth case."""
    until = time.time() + seconds

    def one(at: int, port: int) -> list[Any]:
        began = time.time()
        answers = processes.run(2, of_a_pair, todo[at::pairs], device, until, timeout=LONGEST, port=port)
        for answer in answers:
            print(f"pair {at:2}: {time.time() - began:5.1f} s  {str(answer)[:600]}", flush=True)
        return answers

    with ThreadPoolExecutor(pairs) as threads:
        return [a for answers in threads.map(one, range(pairs), processes.ports(pairs)) for a in answers]


def check(answers: list[Any], wanted: int) -> None:
    """All cases were computed and are right."""
    assert all(isinstance(a, dict) for a in answers), [a for a in answers if not isinstance(a, dict)]
    assert [told for a in answers for told in a["wrong"]] == []
    assert sum(a["done"] for a in answers) == 2 * wanted, "too slow: some cases were not begun"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_cases_for_two_ranks() -> None:
    drawn = [cases.drawn(seed, 1) for seed in range(2100, 2200)]
    todo = [*cases.probed(), *drawn]
    answers = over(max(1, min(14, (os.cpu_count() or 4) // 2 - 2)), todo, "cuda", SECONDS)
    check(answers, len(todo))
    assert sum(a["ours"] for a in answers) > 4 * len(todo), "torch computed what transconv should have"


def dies(recorded: bool) -> None:
    """Rank 1 does, between two steps that send rows."""
    mesh = init_device_mesh("cuda", (2,))
    x = distribute_tensor(torch.randn(1, 4, 64, device="cuda"), mesh, [Shard(2)])
    w = distribute_tensor(torch.randn(4, 4, 3, device="cuda"), mesh, [Replicate()])

    def step() -> torch.Tensor:
        return transconv.conv1d(x, w)

    run = transconv.distributed.captured(step, mesh) if recorded else step
    for _ in range(4):
        run()
    torch.cuda.synchronize()
    # Now all kernels are there, and the ranks close together.
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_S), mesh.get_group())
    torch.distributed.barrier()
    if mesh.get_local_rank() == 1:
        os._exit(1)
    print(f"rank 1 is gone: {time.time():.1f}", flush=True)
    for _ in range(2):
        run()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_a_rank_that_is_gone_is_named(
    recorded: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before NCCL ends the process, which is then to leave no dump behind."""
    for name, text in {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TRANSCONV_VERIFY": "0",
    }.items():
        monkeypatch.setenv(name, text)
    began = time.time()
    answers = processes.run(2, dies, recorded, limit=50)
    took, (out, said) = time.time() - began, capfd.readouterr()
    print(f"{took:.1f} s, ended at {time.time():.1f}: {out[-300:]} {said[-1500:]}")
    assert "rank 0 could not" in said and "rank 1 in a sharded computation" in said, said[-2000:]
    assert ("end a recorded step" in said) is recorded
    assert answers[0] is None or "rank 1" in str(answers[0]), answers[0]
    assert took < 50, "NCCL did not end the process"


class Event:
    """Of a stream, reached at a time."""

    def __init__(self, now: list[float], at: float) -> None:
        self._now, self._at = now, at

    def query(self) -> bool:
        return self._now[0] >= self._at


def test_what_does_not_come_is_named_once() -> None:
    now, said = [0.0], list[str]()
    watch = EventWatch(said.append, lambda: now[0])
    watch.add(Event(now, 5), "rank 0 could not receive 1 rows from rank 1", 10)
    watch.add(Event(now, 100), "rank 0 could not receive 2 rows from rank 1", 10)
    for now[0] in (4.0, 6.0, 7.9):
        watch.look()
    assert said == []
    for now[0] in (8.1, 9.0):
        watch.look()
    assert len(said) == 1 and "receive 2 rows from rank 1 in a sharded computation, after 8 s" in said[0]


def test_a_lost_device_is_forgotten() -> None:
    class Lost:
        def query(self) -> bool:
            raise RuntimeError("CUDA error")

    now, said = [9.0], list[str]()
    watch = EventWatch(said.append, lambda: now[0])
    watch.add(Lost(), "rank 0 could not receive 1 rows from rank 1", 10)
    watch.look()
    watch.add(Event(now, 100), "rank 0 could not receive 2 rows from rank 1", 10)
    now[0] = 18.0
    watch.look()
    assert len(said) == 1 and "receive 2 rows" in said[0]


@pytest.mark.slow
def test_pairs_side_by_side() -> None:
    todo = [*cases.probed()[::40], *(cases.drawn(seed, 1) for seed in range(2))]
    check(over(2, todo, "cpu", 60), len(todo))
