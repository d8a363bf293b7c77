"""torch's side of a comparison computes what the definition says, in the layout that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import reference
from bench.sides import baseline_calls
from tests.reference import convolve
from tests.verify.shapes import PROBLEMS, operands
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.verify.case import ProblemCase


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize("name", PROBLEMS)
def test_torch_computes_the_same(name: str, prop: Prop) -> None:
    p = PROBLEMS[name]
    a, b = operands(p, prop)
    got = reference.call(p, prop, a, b)()
    assert got.shape == p.shapes[prop.result]
    np.testing.assert_allclose(got, convolve(p, prop, a.numpy(), b.numpy()), atol=1e-10)


@pytest.mark.parametrize("prop", [Prop.FWD, Prop.BWD_D])
@pytest.mark.parametrize("name", ["groups", "asymmetric", "transposed"])
def test_torch_with_an_epilogue(name: str, prop: Prop) -> None:
    p = PROBLEMS[name]
    a, b = operands(p, prop)
    shape = p.shapes[prop.result]
    bias, residual = torch.randn(shape[1]).double(), torch.randn(shape).double()
    got = reference.call(p, prop, a, b, "bias+res+relu", bias, residual)()
    plain = torch.from_numpy(convolve(p, prop, a.numpy(), b.numpy()))
    want = torch.relu(plain + bias.view(-1, *[1] * p.ndims) + residual)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_torch_keeps_the_layout(layout: str) -> None:
    p = PROBLEMS["groups"].with_layout(layout)
    for prop in Prop:
        a, b = (
            torch.randn(p.shapes[n]).as_strided(p.shapes[n], getattr(p, n).layout.strides())
            for n in prop.operands
        )
        got = reference.call(p, prop, a, b)()
        form = reference.memory_format(p.ndims, layout)
        assert form is not None
        assert got.is_contiguous(memory_format=form), prop


@pytest.mark.every(3)
@pytest.mark.parametrize("prop", list(Prop))
def test_torch_compile_traces_once_for_all_sets_of_tensors(
    prop: Prop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inductor itself, which takes long; the tracing is torch's own, with no graph break."""
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        traced.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, mode, **more: real(run, backend=backend, **more))
    p = PROBLEMS["groups"]
    run = reference.inductor(p, prop, "relu")
    for seed in range(3):
        a, b = operands(p, prop, seed)
        want = torch.relu(torch.from_numpy(convolve(p, prop, a.numpy(), b.numpy())))
        torch.testing.assert_close(run(a, b, None, None), want)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("prop", "rows", "columns", "terms"),
    [
        (Prop.FWD, 2 * 4 * 5, 24, 16 * 9),
        (Prop.BWD_D, 2 * 8 * 10, 16, 24 * 9 // 4),
        (Prop.BWD_W, 24, 16 * 9, 2 * 4 * 5),
    ],
)
def test_the_product_that_a_convolution_amounts_to(
    prop: Prop, rows: int, columns: int, terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "settings", lambda **_: None)  # of the whole process
    p = ConvProblem.parse("mb2ic16ih8iw10oc24oh4ow5kh3kw3sh2sw2ph1pw1 dt=f32 tag=nhwc")
    case = ProblemCase(p, prop)
    counted = FlopCounterMode(display=False)
    with counted:
        made = baseline_calls(case, ["gemm"])["gemm"](0)()
    assert isinstance(made, torch.Tensor) and made.shape == (rows, columns)
    # The call that shows whether torch can do it counts, too.
    assert counted.get_total_flops() == 2 * 2 * rows * columns * terms
    grouped = ProblemCase(ConvProblem.parse("g2mb2ic16ih8oc24oh8kh3ph1 dt=f32"), prop)
    assert not baseline_calls(grouped, ["gemm"])
