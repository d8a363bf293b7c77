"""A step of a sharded model compared with the same step of one process: which tensors differ, where.

Every rank computes the whole step twice, in the model's type and in f64, and its part of the sharded one.
So it is for sizes that fit one device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from transconv.distributed.models import parallelize

Tensor = torch.Tensor
TIMES = 4.0  # what a sharded step may be off, in what one process is off


@dataclass(frozen=True)
class Difference:
    """One tensor: the largest error of each rank's part, and what is allowed, both absolute."""

    tensor: str
    errors: tuple[float, ...]
    allowed: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose part is wrong."""
        return tuple(r for r, error in enumerate(self.errors) if not error <= self.allowed)


@dataclass(frozen=True)
class Certificate:
    """The result and all gradients of a step; the same on every rank."""

    exact: bool
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return not any(d.ranks for d in self.differences)

    def __str__(self) -> str:
        wide = max(len(d.tensor) for d in self.differences)
        lines = [f"{'tensor':{wide}}  largest error  allowed    wrong on"]
        for d in self.differences:
            where = f"rank {', '.join(map(str, d.ranks))}" if d.ranks else "-"
            lines.append(f"{d.tensor:{wide}}  {max(d.errors):13.3g}  {d.allowed:9.3g}  {where}")
        wrong = sum(bool(d.ranks) for d in self.differences)
        how = "bit by bit" if self.exact else "within the error of one process"
        said = f"{wrong} of {len(self.differences)} tensors are wrong" if wrong else (
            f"{len(self.differences)} tensors equal those of one process, {how}")
        return "\n".join([*lines, said])


def verify(model: nn.Module, mesh: Any, plan: Mapping[str, int | str], *inputs: Tensor,
           exact: bool = False, whole: Sequence[str] = (),
           rows: Sequence[str | type[nn.Module]] = ()) -> Certificate:
    """Compare a step of ``model``, sharded as by ``parallelize`` with these words, with one process: its
    result, the gradients of its parameters and of inputs that are floats. All ranks of the mesh call it
    with the same model and inputs, which stay as they are; the result is one tensor. ``exact``: parameters
    and inputs become small integers, whose sums are exact in any order, and every bit counts; modules that
    divide or take roots differ then. Otherwise a part may be off by 4 times what one process is off from
    f64. Raises what ``parallelize`` raises."""
    model = copy.deepcopy(model)
    given = [t.detach().clone() for t in inputs]
    if exact:
        with torch.no_grad():
            for at, t in enumerate((*model.parameters(), *given)):
                t.copy_(_integers(t, at))
    wide = [t.double() if t.is_floating_point() else t for t in given]
    true = _step(copy.deepcopy(model).double(), wide)
    alone = _step(copy.deepcopy(model), given)
    parts = _step(parallelize(copy.deepcopy(model), mesh, plan, whole, rows), [
        DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim) for t in given])
    found = []
    for name, want in true.items():
        one = alone[name]
        allowed = 0.0 if exact else TIMES * max(_off(one, want), _rounding(one) * _largest(want))
        part = parts.get(name)
        error = torch.inf if part is None else _off(part.to_local(), _same_part(
            one if exact else want, part))
        found.append(Difference(name, _of_all_ranks(error, mesh), allowed))
    return Certificate(exact, tuple(found))


def _step(model: nn.Module, inputs: list[Any]) -> dict[str, Any]:
    """The result and the gradients, by name. The gradient of the result is of small integers."""
    given = [t.requires_grad_() if t.is_floating_point() else t for t in (t.detach() for t in inputs)]
    result = model(*given)
    grad = _integers(torch.empty(result.shape, dtype=result.dtype, device=result.device), -1)
    result.backward(distribute_tensor(grad, result.device_mesh, result.placements)
                    if isinstance(result, DTensor) else grad)
    named = [("result", result.detach()),
             *((f"gradient of input {at}", t.grad) for at, t in enumerate(given)),
             *((f"gradient of {name}", p.grad) for name, p in model.named_parameters())]
    return {name: t for name, t in named if t is not None}


def _integers(like: Tensor, seed: int) -> Tensor:
    """Integers from -2 to 2 in the shape, type and place of a tensor, the same on every rank."""
    made = torch.randint(-2, 3, like.shape, generator=torch.Generator().manual_seed(seed + 1))
    return made.to(like)


def _same_part(whole: Tensor, part: DTensor) -> Tensor:
    """What this rank has of a tensor that every rank has whole, without a message."""
    places = [Replicate()] * part.device_mesh.ndim
    spread: Any = DTensor.from_local(whole, part.device_mesh, places)
    local: Tensor = spread.redistribute(part.device_mesh, part.placements).to_local()
    return local


def _off(made: Tensor, want: Tensor) -> float:
    """The largest absolute difference; inf for other shapes, and where one is not a number alone."""
    if made.shape != want.shape:
        return torch.inf
    apart = (made.double() - want.double()).abs()
    apart = torch.where(made.isnan() & want.isnan(), torch.zeros_like(apart), apart)
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0


def _rounding(t: Tensor) -> float:
    return torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _of_all_ranks(error: float, mesh: Any) -> tuple[float, ...]:
    """What each rank of the process group found; 0 for those that the mesh does not have."""
    found = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=mesh.device_type)
    found[dist.get_rank()] = min(error, torch.finfo(torch.float64).max)
    for dim in range(mesh.ndim):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return tuple(found.tolist())
