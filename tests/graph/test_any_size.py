"""Graphs whose sizes are names: one graph and its kernels for all sizes; what they compute is torch's."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import transconv
from tests.graph import networks
from tests.graph.meant import by_meaning, compare, near
from transconv.graph import backend, report
from transconv.graph.fusion.groups import refined
from transconv.graph.fusion.sized_text import SizedText
from transconv.graph.sizes import Fraction, Known, SymbolicSize, divides, packed, same
from transconv.ir import Expr, Var, eq

Tensor = torch.Tensor
Shapes = list[tuple[int, ...]]


def compiled(f: Any) -> Any:
    counters.clear()
    return torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=True)


def images(count: int, channels: int, times: int = 1) -> list[Shapes]:
    """Batches of images that differ in every size."""
    draw = random.Random(count)
    sizes = [
        (n, channels, h * times, w * times)
        for n in (2, 3)
        for h in range(3, 12)
        for w in range(3, 12)
        if len({n, h, w, h * times, w * times, channels}) >= 4 and h != w
    ]
    return [[shape] for shape in draw.sample(sizes, count)]


def videos() -> list[Shapes]:
    return [
        [(b, 4, t, h, w), (b, 4, 2, h, w)]
        for b, t, h, w in ((3, 5, 6, 7), (5, 4, 7, 6), (3, 7, 5, 9), (6, 3, 8, 5))
    ]


INFERENCE: dict[str, tuple[type[nn.Module], list[Shapes], int]] = {
    "normalized": (networks.Normalized, images(6, 8), 2),
    "unet": (networks.UNet, images(6, 4, 2), 2),
    "causal": (networks.Causal, videos(), 2),
    "convnext": (networks.ConvNext, images(4, 8), 4),
}


def longest(cases: Any, *names: str) -> list[Any]:
    """The cases, of which some are for `make check-all`."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in names else n for n in cases]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", longest(INFERENCE, "convnext", "causal"))
def test_inference(name: str) -> None:
    made, calls, kernels = INFERENCE[name]
    network = made().eval().double()
    run, first = compiled(network), set[str]()
    with by_meaning() as texts, torch.no_grad():
        for i, shapes in enumerate(calls):
            inputs = [torch.randn(s, dtype=torch.float64) for s in shapes]
            compare(network, run, inputs, 1e-9)
            first = {*texts} if i == 0 else first
    assert counters["stats"]["unique_graphs"] == 1
    (graph,) = report(run).graphs
    assert len(graph.kernels) == kernels and len(graph.rows) == kernels
    assert not any(k.numbers for k in graph.kernels) and {*texts} == first
    assert "sizes  S0" in texts[0] and "sizes: S0" in str(report(run))


TRAINING: dict[str, tuple[type[nn.Module], list[Shapes]]] = {
    "normalized": (networks.Normalized, images(3, 8)),
    "residual": (networks.Residual, images(3, 8)),
    "unet": (networks.UNet, images(3, 4, 2)),
    "convnext": (networks.ConvNext, images(2, 8)),
}


@pytest.mark.parametrize("name", longest(TRAINING, "residual", "unet", "convnext"))
def test_training(name: str) -> None:
    made, calls = TRAINING[name]
    network = made().train().double()
    other, run, first = copy.deepcopy(network), compiled(network), set[str]()
    with by_meaning() as texts:
        for i, (shape,) in enumerate(calls):
            x = torch.randn(shape, dtype=torch.float64)
            for f in (other, run):
                f.zero_grad()
                f(x).square().mean().backward()
            for one, two in zip(other.parameters(), network.parameters(), strict=True):
                assert one.grad is not None and two.grad is not None
                near(two.grad, one.grad, 1e-8, "gradient")
            first = {*texts} if i == 0 else first
    assert counters["stats"]["unique_graphs"] == 1 and {*texts} == first
    assert [g.phase for g in report(run).graphs] == ["forward", "backward"]
    assert not any(k.numbers for g in report(run).graphs for k in g.kernels)
    assert all(len(g.rows) == len(g.kernels) for g in report(run).graphs)


LAUNCHED = """
import torch, transconv
from tests.graph.networks import Normalized
from transconv.functional.calls import compiled_launch
from transconv.graph import backend
transconv.config.cpu, transconv.config.fallback = "interpret", "error"
network = Normalized().eval()
run = torch.compile(network, backend=backend, options={"rest": "eager"}, dynamic=True)
with torch.no_grad():
    for shape in ((2, 8, 4, 6), (3, 8, 5, 7), (2, 8, 9, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), network(x), rtol=1e-4, atol=1e-5)
        assert len(compiled_launch._launches) == 2, compiled_launch._launches
    x = torch.randn(1, 8, 4, 6)  # torch makes a graph of its own for a size of 1
    torch.testing.assert_close(run(x), network(x), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_launched_by_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# -- what is not said with names -------------------------------------------------------------------


def test_no_elements_and_one() -> None:
    def f(x: Tensor) -> Tensor:
        return F.silu(x).sum(1)

    run = compiled(f)
    with by_meaning():
        for shape in ((3, 5), (1, 5), (3, 1), (0, 5), (3, 0), (7, 2)):
            compare(f, run, [torch.randn(shape)], 1e-5)


def test_sizes_that_were_not_assumed() -> None:
    """A slice that ends beyond some sizes, which torch's guards do not tell of."""
    known = Known()
    n = known.made(known.name(9, 2, 2**20))
    assert isinstance(n, SymbolicSize) and n > 1 and not known.assumed
    assert min(n, 6) == 6 and len(known.assumed) == 1
    assert not known.why_not({"S0": 7}) and "does not hold" in known.why_not({"S0": 5})
    assert int(n) == 9 and known.why_not({"S0": 10})  # where only a number is possible


@pytest.mark.slow
def test_a_graph_is_made_anew_for_sizes_that_do_not_meet_its_assumptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transconv.graph import symbols, torch_compile

    real = symbols.Symbols.result

    def narrow(self: Any, t: Tensor) -> Any:
        found = real(self, t)
        for size in found.shape:
            _ = size > self.known.like["S0"] - 1  # as if a rule of torch had read the value
        return found

    monkeypatch.setattr(symbols.Symbols, "result", narrow)
    monkeypatch.setattr(torch_compile, "MOST", 3)
    run = compiled(torch.sin)
    with by_meaning() as texts:
        for n in (9, 12, 8, 10, 7, 6, 5, 20):
            compare(torch.sin, run, [torch.randn(n)], 1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    graphs = report(run).graphs
    assert [len(g.kernels) for g in graphs] == [1, 1, 1, 0] and len(texts) == 6
    assert "are not those of 3 ways" in str(graphs[-1])


def test_what_cannot_be_said_with_names_is_a_kernel_for_each_sizes() -> None:
    def f(x: Tensor) -> Tensor:
        return x.reshape(-1).view(-1, 3).flip(0).exp()

    run = compiled(lambda x: f(x[:, ::2]))
    with by_meaning():
        for shape in ((6, 5), (9, 7), (12, 5)):
            x = torch.randn(shape)
            near(run(x), f(x[:, ::2]), 1e-6, "result")
    (kernel,) = report(run).graphs[0].kernels
    assert "a kernel for each sizes" in str(report(run)) and "divides by" in kernel.numbers


def test_sizes_that_data_tell_are_torchs() -> None:
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        run = compiled(lambda x: x[x > 0].exp())
        with by_meaning():
            for n in (9, 12):
                x = torch.randn(n)
                near(run(x), x[x > 0].exp(), 1e-6, "result")
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    assert "a size that data tell" in str(report(run))


@pytest.mark.slow
def test_a_kernel_without_a_schedule_for_any_sizes_is_one_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transconv.errors import Unsupported
    from transconv.graph.regions import region_calls

    run = compiled(torch.sin)
    with by_meaning() as texts, monkeypatch.context() as patched:  # undone before what it is put over
        real = region_calls.launch

        def none(text: str, *rest: Any) -> Any:
            if "sizes" in text:
                raise Unsupported("schedule:refused", "no schedule is legal")
            return real(text, *rest)

        patched.setattr(region_calls, "launch", none)
        for n in (5, 6):
            compare(torch.sin, run, [torch.randn(n)], 1e-6)
    assert len({*texts}) == 2 and not any("sizes" in t for t in texts)


def test_regions_of_torch_take_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def compile_(gm: Any, **options: Any) -> Any:
        asked.append(options)
        return gm

    run = torch.compile(lambda x: torch.logcumsumexp(x, 0).sin(), backend=backend, dynamic=True)
    with by_meaning(), monkeypatch.context() as patched:
        patched.setattr(torch, "compile", compile_)
        for n in (3, 5, 9):
            x = torch.randn(n)
            near(run(x), torch.logcumsumexp(x, 0).sin(), 1e-6, "result")
    assert asked == [{"dynamic": True}]


# -- arithmetic of sizes ---------------------------------------------------------------------------


def test_arithmetic() -> None:
    known = Known()
    h, w = (known.made(known.name(n, 2, 2**20)) for n in (20, 16))
    down = (h - 1) // 2 + 1
    assert isinstance(down, SymbolicSize) and down.like == 10 and 2 * down == ((h - 1) // 2) * 2 + 2
    assert same((h, w, 3), (1 * h, w // 1, 3)) and not same((h,), (w,)) and h != 20
    assert divides(w, h * w * 3) and not divides(h, w) and (h * w * 6) // (w * 2) == h * 3
    assert {h: 1}[h * 1] == 1 and not known.assumed
    assert eq(Var("S0"), 2) is not None and isinstance(down.expr, Expr)


def test_no_arithmetic_gives_a_number_of_the_example() -> None:
    known = Known()
    h = known.made(known.name(20, 2, 2**20))
    assert isinstance(h, SymbolicSize) and h - 1.0 == h - 1 and 2.0 * h == h * 2  # whole numbers
    for made in (h / 2, 40 / h, h * 0.5, h - 0.5, 1 - h / 3, (h + 0.5) * h):
        assert isinstance(made, Fraction) and "S0" in str(made) and "20" not in str(made)
        assert eval(str(made), {"S0": 7}) == eval(str(made).replace("S0", "7"))
    assert eval(str((h + 0.5) * h), {"S0": 7}) == 52.5
    for compared in (lambda: h < 0.5, lambda: h / 2 < h):
        with pytest.raises(TypeError):
            compared()
    assert not known.assumed


def test_the_order_of_dims_is_not_that_of_the_example() -> None:
    """A size of 1 in the example stands beside others of which it is a factor."""
    known = Known()
    a, b = (known.made(known.name(n, 1, 2**20)) for n in (1, 3))
    assert refined((b, a), [(a,)]) == [b, a] and refined((a * b,), [(b, a), (b, a)]) == [b, a]
    assert refined((a * b, 3), [(b, a * 3)]) == [b, a, 3] and not known.assumed
    assert packed((a, b), (b, 1)) == [1, 0] and packed((a, b), (1, a)) == [0, 1]
    assert packed((a, b), (1, b)) is None and packed((b, 1, a), (a, 5, 1)) == [2, 0]


def test_texts_of_names_and_of_numbers() -> None:
    text = (
        "compute f_map\n    tensor X0 f32 [{S7*S9}, {S3*2}]\n    tensor Y0 f32 [{S7*S9}, {S3*2}]\n"
        "    axes   i0={S7*S9} i1={S3*2}\n    read   x = X0[i0, i1]\n    store  Y0[i0, i1] = x"
    )
    dims = [["{S7*S9}", "{S3*2}"]] * 2
    found = SizedText(text, dims, [["{S7*S9}", "{S3*2}"], []], {"S7": 2, "S9": 3, "S3": 5}, {})
    assert not found.refused
    assert found.named.splitlines()[1] == (
        "    sizes  S0=6 in 1..2147418112, S1=5 in 1..1048576, S0*S1*2 <= 2147418112"
    )
    assert found.names({"S7": 4, "S9": 5, "S3": 7}) == {"S0": 20, "S1": 7}
    assert "tensor X0 f32 [20, 14]" in found.at({"S7": 4, "S9": 5, "S3": 7})
    plan = transconv.compile(found.named, target="sm_90")
    assert "do_not_specialize=['S0', 'S1']" in plan.source


@pytest.mark.slow
def test_tensors_full_of_a_size() -> None:
    """A number that is made of sizes is that of each call's."""

    def f(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        made = torch.full_like(x, n) - torch.full_like(x, n / 4) * torch.full((n, 1), n * 3)
        return x * (n * 0.5) + made + torch.full_like(x, n * 1.5) * torch.full_like(x, float(n) + 0.5)

    run = torch.compile(f, backend="transconv", dynamic=True, options={"rest": "eager"})
    for n in (3, 5, 8):
        x = torch.randn(n, 2)
        torch.testing.assert_close(run(x), f(x))
    assert [type(r).__name__ for graph in report(run).graphs for r in graph.rows] == ["KernelRow"]
    assert transconv.stats().native["graph"] and not transconv.stats().fallback


def test_dims_that_guards_leave_one_are_broadcast() -> None:
    """What torch broadcasts has one element by a guard; its size in the trace is a term of names."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        wide = F.avg_pool2d(x, 2)
        one = F.avg_pool2d(wide, 2)
        return (
            wide * 2 * one,
            torch.where(one > 0, wide, one),
            torch.maximum(wide.sum(0), one.amax(0)),
            (wide - one.mean(1, keepdim=True)).std((2, 3)),
            torch.lerp(one, wide, 0.25),
        )

    given = [torch.randn(shape, dtype=torch.double) for shape in ((2, 3, 5, 4), (3, 4, 4, 5))]
    run = compiled(f)
    with by_meaning():
        for x in given:
            compare(f, run, (x,), 1e-12)
    ours = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    alone = torch.compile(f, backend="eager", dynamic=True)  # torch 2.10 guards what a pool leaves over
    for x in given:
        alone(x)
    assert 1 <= ours == counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_dims_that_guards_leave_equal_are_one_dim() -> None:
    """Sizes that torch requires to be equal, or a number, are other terms of names in the trace."""

    def f(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        p, q = F.avg_pool2d(x, 2), F.avg_pool1d(y, 3)
        return p * w, p.sum(2) + q, torch.cat([p.sum(2), q], 1) * w

    run = compiled(f)
    with by_meaning():
        for one, other in (
            ((2, 3, 5, 6), (2, 3, 9)),
            ((4, 2, 7, 7), (4, 2, 10)),
            ((3, 5, 8, 6), (3, 5, 11)),
        ):
            given = (torch.randn(shape, dtype=torch.double) for shape in (one, other, (3,)))
            compare(f, run, (*given,), 1e-12)
