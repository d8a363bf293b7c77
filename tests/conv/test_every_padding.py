"""Layers of every stride, dilation and padding of each side, and transposed ones of every output padding,
beside torch: the computation, its kernel after every pass, and the public functions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv.compute import execute
from transconv.conv import ConvProblem, Prop, computes
from transconv.runtime import build_compute
from transconv.target import Target
from transconv.verify.computation import ComputationCase

SM90 = Target.parse("sm_90")
Shape = tuple[int, int, int, int, int, int]  # size, kernel, stride, dilation, padding before and behind


def shapes() -> list[Shape]:
    found = []
    for k, s, d in [
        (1, 1, 1),
        (1, 2, 1),
        (2, 1, 1),
        (3, 1, 1),
        (3, 2, 1),
        (2, 1, 2),
        (3, 1, 2),
        (2, 2, 3),
        (3, 2, 2),
        (3, 1, 3),
    ]:
        for before in (0, 1, 2):
            for behind in (0, 1, 2, 3):
                size = d * (k - 1) + 4
                found.append((size, k, s, d, before, behind))
    return found


def problem_of(shape: Shape, ic: int = 3, oc: int = 4) -> tuple[ConvProblem, int]:
    size, k, s, d, before, behind = shape
    out = (size + before + behind - d * (k - 1) - 1) // s + 1
    return ConvProblem.parse(f"mb2ic{ic}iw{size}oc{oc}ow{out}kw{k}sw{s}dw{d - 1}pw{before}"), out


def torchs(shape: Shape, x: torch.Tensor, w: torch.Tensor, out: int) -> torch.Tensor:
    _, _, s, d, before, behind = shape
    padded = F.pad(x, (before, behind + s))  # what a stride leaves over is cut off
    return F.conv1d(padded, w, stride=s, dilation=d)[:, :, :out]


@pytest.mark.every(5)
@pytest.mark.parametrize(("ic", "oc"), [(3, 4), (8, 2)], ids=["many", "few"])
@pytest.mark.parametrize("prop", list(Prop), ids=str)
def test_computations_are_torchs(prop: Prop, ic: int, oc: int) -> None:
    """Of every padding of each side: what is read outside is 0. With few channels of the result the weight
    gradient has another form."""
    for shape in shapes():
        problem, out = problem_of(shape, ic, oc)
        random = np.random.default_rng(3)
        x, w, g = (
            torch.from_numpy(random.integers(-4, 5, n).astype(np.float64)).requires_grad_()
            for n in ((2, ic, shape[0]), (oc, ic, shape[1]), (2, oc, out))
        )
        y = torchs(shape, x, w, out)
        dx, dw = torch.autograd.grad(y, (x, w), g.detach())
        given = {"src": x, "wei": w, "dst": g, "diff_dst": g, "src_diff": x}
        stored = {"fwd": y, "bwd_d": dx, "bwd_w": dw}[prop.value]
        found: dict[str, np.ndarray[Any, Any]] = {}
        for made in computes(problem, prop):
            tensors = {
                t.name: given[t.name].detach().numpy()
                for t in made.tensors
                if t.name not in {v.view.tensor.name for v in made.writes}
            }
            for name, answer in execute(made, tensors).items():
                before = found.get(name, np.full(answer.value.shape, np.nan))
                found[name] = np.where(np.isnan(answer.value), before, answer.value)
        (value,) = found.values()
        np.testing.assert_array_equal(np.nan_to_num(value), stored.detach().numpy(), err_msg=str(shape))


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", list(Prop), ids=str)
def test_kernels_keep_their_masks(prop: Prop) -> None:
    """After all passes, of some of these, among them padding only behind of dilated layers."""
    drawn = random.Random(2).sample(shapes(), 3)
    for shape in [(8, 3, 1, 2, 0, 2), (9, 3, 2, 2, 0, 3), (7, 2, 1, 2, 0, 1), *drawn]:
        problem, _ = problem_of(shape)
        for made in computes(problem, prop):
            plan = build_compute(made, SM90)
            assert not ComputationCase(made).interpreted(*[s.kernel for s in plan.steps]).problem, shape


@pytest.mark.every(2)
@pytest.mark.parametrize("n", [1, 2])
def test_output_padding_of_every_stride_and_dilation(n: int) -> None:
    """torch allows as much as the larger of both, so at a stride of 1 as well. In two dimensions each has
    its own."""
    transconv.config.cpu = "interpret"
    name = f"conv_transpose{n}d"
    drawn = random.Random(4)
    cases = [(s, d, o) for s in (1, 2, 3) for d in (1, 2, 3) for o in range(max(s, d))]
    x, w = torch.randn(1, 2, *[4] * n), torch.randn(2, 3, *[2] * n)
    transconv.stats(reset=True)
    few = drawn.sample(cases, 4) if n == 1 else drawn.sample(cases, 1)
    for case in [(1, 2, 1), (1, 3, 2), *few]:
        other = drawn.choice(cases) if n == 2 else case
        stride, dilation, over = (tuple(p)[:n] for p in zip(case, other, strict=True))
        words = {"stride": stride, "padding": 1, "output_padding": over, "dilation": dilation}
        got, want = (f(x, w, **words) for f in (getattr(transconv, name), getattr(F, name)))
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, msg=str(words))
    assert transconv.stats().native and not transconv.stats().fallback


def test_output_padding_of_quantised_layers_and_gradients() -> None:
    transconv.config.cpu = "interpret"
    words = {"stride": 1, "padding": 0, "output_padding": 1, "dilation": 2}
    x, w = (torch.randint(-5, 5, (1, 4, n), dtype=torch.int8) for n in (6, 3))
    w = w.expand(4, 4, 3).contiguous()
    want = F.conv_transpose1d(x.double(), w.double(), **words)
    assert torch.equal(transconv.quantized.conv_transpose1d(x, w, **words).double(), want)
    a, b = torch.randn(1, 4, 6, requires_grad=True), torch.randn(4, 4, 3, requires_grad=True)
    for f in (transconv.conv_transpose1d, F.conv_transpose1d):
        g = torch.autograd.grad(f(a, b, **words).sin().sum(), (a, b))
        if f is transconv.conv_transpose1d:
            ours = g
    torch.testing.assert_close(ours, g)
    assert not transconv.stats().fallback
