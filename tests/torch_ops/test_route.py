"""Routes whose kernel has a start function, as on a GPU; torch stands in for the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transconv
from tests.torch_ops import samples as s
from transconv.torch_ops import execute, route, warm

KWARGS = {"stride": 2, "padding": 1}


class Plan:
    """What the compiler would give: torch computes, and the names tell what is what."""

    def __init__(self, problem: Any, direction: Any, epilogue: str) -> None:
        self.problem, self.direction, self.epilogue = problem, direction, epilogue
        self.bound: tuple[str, ...] = ()

    def launch(self, src: Any, wei: Any, dst: Any, bia: Any = None) -> None:
        p = self.problem
        numbers = (p.stride, p.pad_lo, p.dilation, False, (0,) * p.ndims, p.g)
        if self.direction.value == "fwd":
            dst.copy_(torch.ops.aten.convolution(src, wei, bia, *numbers))
            return
        mask = [self.direction.value == "bwd_d", self.direction.value == "bwd_w", False]
        made = torch.ops.aten.convolution_backward(dst, src, wei, None, *numbers, mask)
        if mask[0]:
            src.copy_(made[0] if bia is None else made[0] + bia.view(-1, *[1] * p.ndims))
        else:
            wei.copy_(made[1])

    def starter(self, device: Any, aligned: bool, names: tuple[str, ...]) -> Any:
        self.bound = names

        def begin(*given: torch.Tensor) -> None:
            started.append(self.direction.value)
            self.launch(**dict(zip(names, given, strict=True)))

        return begin


started: list[str] = []


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "conv1d", "conv_transpose3d"])
@pytest.mark.parametrize("biased", [False, True])
def test_bound_kernels_get_their_tensors(name: str, biased: bool,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that can be started directly, as on a GPU: right tensors in right places."""
    monkeypatch.setattr(execute, "planned", lambda p, d, _, epilogue, *rest: Plan(p, d, epilogue))
    monkeypatch.setattr(execute, "proven", lambda plan, *a, **k: plan)
    monkeypatch.setattr(route, "_empty", lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype).fill_(float("nan")))
    monkeypatch.setattr(route, "_current_device", lambda: None)
    transconv.config.cpu = "interpret"
    ndims = int(name[-2])
    x, w, b = (torch.randn(*shape, requires_grad=True)
               for shape in ((3, 4, *[6] * ndims), (4, 4, *[3] * ndims), (4,)))
    given = (x, w, b if biased else None)
    leaves = [t for t in given if t is not None]

    def run(f: Any) -> Any:
        y = f(*given, **KWARGS)
        return (y.detach(), *torch.autograd.grad(y.sin().sum(), leaves))

    wanted = run(s.theirs(name))
    for _ in range(warm.PATIENCE + 3):
        started.clear()
        torch.testing.assert_close(run(s.ours(name)), wanted)
    assert len(started) == 3  # the last of them all by bound functions
    with torch.no_grad():
        torch.testing.assert_close(s.ours(name)(*given, **KWARGS), wanted[0])
    assert transconv.stats().fallback == {}
    assert sum(transconv.stats().native.values()) == 3 * (warm.PATIENCE + 3) + 1
    negated = torch._neg_view(x.detach())
    torch.testing.assert_close(s.ours(name)(negated, *given[1:], **KWARGS),
                               s.theirs(name)(-x, *given[1:], **KWARGS))
