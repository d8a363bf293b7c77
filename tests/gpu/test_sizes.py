"""Kernels whose sizes are arguments, on a GPU: one compiled kernel for drawn sizes, each result exact."""

from __future__ import annotations

import pytest

from transconv.backend_triton import SizedLauncher
from transconv.compute import Compute, parse
from transconv.conv import ConvProblem, Prop, any_size, marked
from transconv.errors import TensorError
from transconv.runtime import build_compute
from transconv.target import detect
from transconv.verify import any_size as sizes
from transconv.verify.computation import Case

SOFTMAX = """compute softmax
    sizes  N=64 in 1..65535, K=777 in 1..65536
    axes   n=N | k=K
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total"""
WIDE = """compute wide
    sizes  M=8 in 1..65536, K=300 in 1..131072
    tensor X f16 [M, K]
    tensor Y f16 [M, K]
    axes   m=M k=K
    read   x = X[m, k]
    store  Y[m, k] = x + 1"""
LAYERS = ("mb2?ic64ih28?oc64oh28kh3ph1 dt=bf16 tag=nhwc",
          "mb2?ic64ih28?oc128oh14kh3sh2ph1 dt=f16 tag=nhwc",
          "mb2?g2ic32ih14?oc32oh14kh3ph1 dt=f32 tag=nchw")


def computes() -> list[Compute]:
    found = [parse(SOFTMAX)]
    for text in LAYERS:
        plain, names = marked(text)
        found += [c for prop in Prop for c in any_size(ConvProblem.parse(plain), prop, names)]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("compute", computes(), ids=lambda c: c.name)
def test_one_compilation_for_drawn_sizes(compute: Compute) -> None:
    plan = build_compute(compute, detect())
    (step,) = plan.steps
    for drawn in sizes.drawn(compute, 20):
        judged = Case(compute.at(**drawn)).launched(plan, "cuda")
        assert not judged.problem, (drawn, judged.problem)
    assert isinstance(step.launcher, SizedLauncher) and step.launcher.compiled == 1


@pytest.mark.gpu
def test_beyond_two_to_the_31() -> None:
    import torch

    plan = build_compute(parse(WIDE), detect())
    x = torch.zeros(33000, 65600, dtype=torch.float16, device="cuda")  # more than 2^31 elements
    x[-1, -1] = 3
    y = torch.empty_like(x)
    plan.launch(X=x, Y=y)
    assert float(y[-1, -1]) == 4 and float(y[0, 0]) == 1 and bool((y[-1, :-1] == 1).all())
    with pytest.raises(TensorError, match="is not in"):
        plan.launch(X=x[:, :0], Y=y[:, :0])
