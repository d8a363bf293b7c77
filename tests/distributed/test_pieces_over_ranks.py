"""``transconv.within`` over ranks that are processes with gloo, by Triton's interpreter: every bit of one
process, the bound of each rank, and ranks that disagree or are gone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import init_device_mesh

import transconv
from tests.distributed import processes
from transconv.errors import Unsupported
from transconv.graph.pieces.region_pieces import RegionPieces

Tensor = torch.Tensor
F = nn.functional


class Decoder(nn.Module):
    """With a stride, group norms, an attention over the image, upsampling, a skip connection."""

    def __init__(self, dims: int, blocks: int) -> None:
        super().__init__()
        conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
        self.first, self.query = conv(2, 8, 3, 2, 1), conv(8, 8, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(blocks))
        self.convs = nn.ModuleList(conv(8, 8, 3, padding=1) for _ in range(blocks))
        self.last = conv(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        q = self.query(y)
        z = q.flatten(2).transpose(1, 2)[:, None]
        z = F.scaled_dot_product_attention(z, z, z).squeeze(1).transpose(1, 2).reshape(q.shape)
        y = F.interpolate(y + z, scale_factor=2)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = y + conv(F.silu(norm(y)))
        made: Tensor = self.last(y)
        return made


def create_dot(self: object, a: Any, b: Any, d: Any, *_: object) -> object:
    """Products of a tile whose rows are alike, as matrix units have them."""
    from triton.runtime import interpreter

    return interpreter.TensorHandle(
        np.einsum("...ij,...jk->...ik", a.data, b.data) + d.data, d.dtype.scalar
    )


def free_links(self: RegionPieces, *given: Any) -> None:
    """Plans in which copies to host memory cost next to nothing, so that tensors wait there."""
    self.graph.rates = replace(self.graph.rates, link_gbs=1e6)
    plan(self, *given)


plan = RegionPieces.plan


def run(
    shape: tuple[int, ...], blocks: int, share: float, step: bool, device: str = "cpu", waits: bool = False
) -> dict[str, Any]:
    """What differs on a rank between a model over ranks, or its training ``step``, and one process, and
    the report; its own tensors take this share of those of one process without a bound at most.
    ``waits``: tensors wait in host memory."""
    if device == "cpu":
        transconv.config.cpu = "interpret"
    if waits:
        RegionPieces.plan = free_links  # type: ignore[method-assign]
    from triton.runtime import interpreter

    torch.manual_seed(0)
    model, x = Decoder(len(shape) - 2, blocks).train(step).to(device), torch.randn(shape).to(device)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))

    def called(bound: int | None, ranks: Any = None) -> tuple[list[Tensor], Any]:
        run = transconv.within(model, bound, host=None if waits else 0, ranks=ranks)
        given, found = x.clone().requires_grad_(step), list[Tensor]()
        with torch.set_grad_enabled(step):
            found.append(made := run(given))
            if step:
                found += torch.autograd.grad(made.square().sum(), [given, *model.parameters()])
        return [t.detach() for t in found], run.report()

    with patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        whole, one = called(None)
        bound = int(max(p.beside + (p.peak - p.beside) * share for p in one.plans))
        made, report = called(bound, mesh)
    with torch.no_grad():
        near = torch.allclose(whole[0], model(x), rtol=2e-2, atol=2e-2)  # f32 is multiplied in tf32
    return {
        "differs": [i for i, (a, b) in enumerate(zip(made, whole, strict=True)) if not torch.equal(a, b)],
        "near": near,
        "within": report.peak <= bound,
        "ranks": [p.ranks for p in report.plans],
        "pieces": max(p.pieces for plan in report.plans for p in plan.passes),
        "report": str(report),
        "pinned": report.pinned,
    }


CASES = [
    pytest.param(2, (1, 2, 24, 6), 1, 0.8, False),
    pytest.param(3, (1, 2, 24, 6), 2, 0.8, False, marks=pytest.mark.slow),
    pytest.param(3, (1, 2, 18, 4, 4), 2, 0.8, False, marks=pytest.mark.slow),
    pytest.param(2, (1, 2, 32, 8), 2, 0.9, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "shape", "blocks", "share", "step"), CASES)
def test_a_decoder_over_ranks(
    ranks: int, shape: tuple[int, ...], blocks: int, share: float, step: bool
) -> None:
    answers = processes.run(ranks, run, shape, blocks, share, step, limit=300)
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert answer["differs"] == [] and answer["near"] and answer["within"], answer
        assert ranks in answer["ranks"] and answer["pieces"] >= ranks, answer
        assert answer["report"] == answers[0]["report"]


@pytest.mark.slow
def test_tensors_of_ranks_wait_in_host_memory() -> None:
    """How much of it is free, each rank asks for itself; the least is for all."""
    answers = processes.run(2, run, (1, 2, 32, 6), 3, 0.4, False, "cpu", True, limit=300)
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert answer["differs"] == [] and answer["near"] and answer["within"], answer
        assert answer["pinned"] and answer["report"] == answers[0]["report"], answer["report"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 512, 256), (1, 2, 64, 32, 32)])
def test_a_decoder_over_two_gpus(shape: tuple[int, ...], waits: bool) -> None:
    answers = processes.run(2, run, shape, 2, 0.6, False, "cuda", waits, timeout=100, limit=200)
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert answer["differs"] == [] and answer["near"] and answer["within"], answer
        assert 2 in answer["ranks"] and answer["report"] == answers[0]["report"]


def refused() -> dict[str, str]:
    """What is said where ranks disagree, and at last where one is gone."""
    transconv.config.cpu = "interpret"
    mesh, found = init_device_mesh("cpu", (2,)), dict[str, str]()
    rank, x = mesh.get_local_rank(), torch.randn(1, 2, 32, 8)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 2, 3, padding=1)).eval()

    def said(name: str, memory: Any, model: nn.Module = model, x: Tensor = x) -> None:
        began = time.monotonic()
        try:
            with torch.no_grad():
                transconv.within(model, memory, ranks=mesh)(x)
            found[name] = "no error"
        except (RuntimeError, Unsupported) as error:
            found[name] = f"{type(error).__name__}: {error}"
        found[name] += f" after {time.monotonic() - began:.0f} s" * (time.monotonic() - began > 20)

    try:
        transconv.within(model, "13 KB", ranks=DeviceMesh("cpu", [0]))
    except ValueError as error:
        found["no rank"] = str(error)
    said("bounds", "12 KB" if rank else "13 KB")
    said("drawn", "13 KB", nn.Sequential(*model, nn.Dropout()).train())
    said("too small", 100)
    said("fits", "13 KB")
    with (
        patch("transconv.graph.pieces.piece_plan.LAUNCH_US", 4.0),
        patch("transconv.graph.pieces.piece_passes.PiecePlan.text", f"the plan of {rank}"),
    ):
        said("plans", "13 KB", x=torch.randn(1, 2, 30, 8))
    fails = patch("transconv.graph.pieces.piece_execution.PieceRun.arrange", side_effect=failing)
    with fails if rank else patch("builtins.abs", abs):
        said("kernels", "13 KB", x=torch.randn(1, 2, 34, 8))
    if rank == 0:
        said("gone", "13 KB", x=torch.randn(1, 2, 36, 8))
    return found


def failing() -> None:
    raise Unsupported("within:schedule", "silu in pieces: no registers")


def test_ranks_that_disagree_are_named() -> None:
    answers = processes.run(2, refused, timeout=5, limit=200)
    for rank, found in enumerate(answers):
        assert isinstance(found, dict), found
        disagree = "RuntimeError: the ranks of a mesh disagree about a sharded computation: rank 0 has "
        assert found["bounds"].startswith(f"{disagree}Sequential within 13 KB over ''"), found
        assert "rank 1 has Sequential within 12 KB" in found["bounds"]
        assert found.get("no rank", "").endswith("this process is none of them" * rank)
        assert ("no rank" in found) == bool(rank)
        assert "draws random numbers" in found["drawn"] and "(within:ranks)" in found["drawn"]
        assert "memory='100' is too small: at least" in found["too small"]
        assert found["fits"] == "no error"
        assert found["plans"].startswith(f"{disagree}the plan of 0; rank 1 has the plan of 1")
        assert found["kernels"].startswith(f"{disagree}kernels") and "no registers" in found["kernels"]
        if rank == 0:
            assert found["gone"].startswith("RuntimeError") and "after" not in found["gone"], found
