"""How far results move if each operation rounds: what no algorithm in that arithmetic can promise.

    layer_norm of three equal columns     x - mean is 0, or the rounding of the mean, times 1 / sqrt(eps)

Every number that an operation of f64 returns is moved by up to half a unit in the last place of f32, or of
f64, at random. Views stay views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

Tensor = torch.Tensor
F32, F64 = 2.0**-24, 2.0**-53  # half units in the last place, as a share of a number
TIMES = 3


class Shaken(TorchDispatchMode):
    """Moves what operations return."""

    def __init__(self, seed: int, half: float) -> None:
        super().__init__()
        self.half = half
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):
            return found
        return _pytree.tree_map_only(Tensor, self._moved, found)

    def _moved(self, t: Tensor) -> Tensor:
        if t.dtype is not torch.float64 or not t.numel():
            return t
        by = torch.rand(t.shape, generator=self.random, dtype=t.dtype, device="cpu").mul_(2).sub_(1)
        return t.mul_(by.mul_(self.half).add_(1).to(t.device))


def made(f: Callable[..., Any], given: Sequence[Tensor]) -> list[Tensor]:
    """Results, then the gradients of all inputs that have one, on the CPU."""
    results = [*f(*given)]
    ends = [r for r in results if r.requires_grad]
    leaves = [x for x in given if x.requires_grad]
    random = torch.Generator().manual_seed(1)
    grads = [torch.randn(r.shape, generator=random, dtype=torch.float64, device="cpu").to(r) for r in ends]
    found = torch.autograd.grad(ends, leaves, grads, allow_unused=True) if ends else ()
    return [t.detach().cpu() for t in (*results, *(g for g in found if g is not None))]


def movements(f: Callable[..., Any], given: Sequence[Tensor], half: float = F32) -> list[float]:
    """How far each result, and each gradient, is off at most in some runs."""
    want = made(f, given)
    far = [0.0] * len(want)
    for seed in range(TIMES):
        with Shaken(seed, half):
            found = made(f, given)
        for i, (a, b) in enumerate(zip(found, want, strict=True)):
            if a.is_floating_point() and a.numel():
                far[i] = max(far[i], float((a.double() - b.double()).abs().nan_to_num(torch.inf).max()))
    return far
