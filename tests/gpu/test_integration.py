"""Generated kernels under what PyTorch programs do around a convolution: streams, graphs, transforms,
threads, checkpointing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import transconv
from tests.gpu import cases as c
from tests.gpu.operands import close, grads, integers, native, on_gpu, operands, randn
from tests.torch_ops import samples as s
from transconv.torch_ops import operators

pytestmark = pytest.mark.gpu

OP = operators.convolution
BACKWARD = operators.convolution_backward


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose3d"])
def test_inductor(name: str) -> None:
    n = int(name[-2])
    x, w = randn(2, 8, *[6] * n, grad=True), randn(8, 8, *[3] * n, grad=True)
    f = lambda x, w: s.ours(name)(x, w, stride=2, padding=1).relu() * 2  # noqa: E731
    got = torch.compile(f, fullgraph=True)(x, w)
    close(got, s.theirs(name)(x, w, stride=2, padding=1).relu() * 2)
    close(torch.autograd.grad(got.sum(), (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    native()


@pytest.mark.parametrize("form", [s.contiguous, s.channels_last, s.reversed_dims])
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(form: Any, transposed: bool) -> None:
    x, w = (s.vary(t, form) for t in (randn(2, 8, 5, 5, grad=True), randn(8, 4, 3, 3, grad=True)))
    b = randn(8, grad=True)
    numbers = ([2, 1], [1, 1], [1, 2], transposed, [0, 0], 2)
    assert set(opcheck(OP, (x, w, b, *numbers)).values()) == {"SUCCESS"}
    grad = torch.randn_like(OP(x, w, b, *numbers)).detach().requires_grad_()
    found = opcheck(BACKWARD, (grad, x, w, *numbers, [True, True, True]))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", s.FUNCTIONS)
def test_compiles_without_a_graph_break(name: str) -> None:
    n = int(name[-2])
    x, w = randn(2, 4, *[5] * n, grad=True), randn(4, 4, *[3] * n, grad=True)
    b = randn(4, grad=True)
    call = lambda f: lambda x, w, b: f(x, w, b, stride=2, padding=1).relu()  # noqa: E731
    compiled = torch.compile(call(s.ours(name)), fullgraph=True, backend="aot_eager")
    got, wanted = compiled(x, w, b), call(s.theirs(name))(x, w, b)
    close(got, wanted)
    assert got.stride() == wanted.stride()
    close(grads(got, x, w, b), grads(wanted, x, w, b))
    native(3)


def test_one_recompilation_over_batch_sizes() -> None:
    _, w, b = operands()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    f = torch.compile(
        lambda x: transconv.conv2d(x, w, b, padding=1, groups=2), backend=backend, fullgraph=True
    )
    for batch in (7, 5, 9, 13):
        x = integers(batch, 16, 6, 6)
        assert torch.equal(f(x), F.conv2d(x, w, b, padding=1, groups=2))
    assert len(graphs) <= 2


def test_export() -> None:
    net = torch.nn.Sequential(
        transconv.nn.Conv2d(4, 6, 3, padding="same"),
        torch.nn.ReLU(),
        transconv.nn.ConvTranspose2d(6, 2, 2, stride=2),
    ).to(c.DEVICE)
    x = randn(2, 4, 6, 6)
    program = torch.export.export(
        net, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},)
    )
    assert [n.target for n in program.graph.nodes].count(OP) == 2
    for given in (x, randn(5, 4, 6, 6)):
        close(program.module()(given), net(given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(dtype: torch.dtype, compiled: bool) -> None:
    x, w, b = operands()
    f = lambda x, w, b: transconv.conv2d(x, w, b, padding=1, groups=2)  # noqa: E731
    if compiled:
        f = torch.compile(f, backend="aot_eager", fullgraph=True)
    calls = 6  # the last ones take the short way
    for _ in range(calls):
        with torch.autocast(c.DEVICE, dtype=dtype):
            got, wanted = f(x, w, b), F.conv2d(x, w, b, padding=1, groups=2)
            assert got.dtype == wanted.dtype == dtype
            torch.testing.assert_close(got, wanted)
        for mine, its in zip(grads(got, x, w, b), grads(wanted, x, w, b), strict=True):
            assert mine.dtype == its.dtype == torch.float32
            torch.testing.assert_close(mine, its, rtol=0.02, atol=0.5)
    native(3 * calls)


def test_transforms() -> None:
    """vmap, grad, jvp and per-sample gradients are computed by aten, so that no derivative is lost."""
    x, w, _ = operands(randn, torch.float64, grad=False)
    found = []
    for f in (transconv.conv2d, F.conv2d):
        loss = lambda w, x, f=f: f(x[None], w, groups=2).sin().sum()  # noqa: E731
        found.append(
            (
                torch.vmap(lambda x, f=f: f(x[None], w, groups=2))(x),
                torch.func.grad(loss)(w, x[0]),
                torch.vmap(torch.func.grad(loss), (None, 0))(w, x),
                torch.func.jvp(lambda w, loss=loss: loss(w, x[0]), (w,), (w,)),
                torch.func.hessian(lambda v, loss=loss: loss(w * v, x[0]))(x.new_ones(())),
            )
        )
    torch.testing.assert_close(*found)
    assert "transform:functorch" in transconv.stats().fallback


def test_transforms_reach_kernels_under_use() -> None:
    x, w, _ = operands(grad=False)
    with transconv.use((c.DEVICE,)):
        got = torch.vmap(lambda x: F.conv2d(x[None], w, groups=2))(x)
    assert torch.equal(got[:, 0], F.conv2d(x, w, groups=2))
    native()


def graphed(run: Callable[[], Any]) -> tuple[Any, Any]:
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return graph, kept


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_graph_of_forward_and_backward(dtype: torch.dtype) -> None:
    x, w, b = operands(randn, dtype)

    def run() -> Any:
        y = transconv.conv2d(x, w, b, padding=1, groups=2)
        return [y, *grads(y, x, w, b)]

    graph, kept = graphed(run)
    for turn in range(1000):
        if turn % 100 == 0:
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                w.copy_(torch.randn_like(w))
        graph.replay()
        if turn % 100 == 0:
            for mine, its in zip(kept, run(), strict=True):
                assert torch.equal(mine, its), turn
    native(3)


@on_gpu
def test_a_first_call_inside_a_capture() -> None:
    """No kernel can be built there: torch computes it, for a reason, and the next call is ours."""
    x, w = integers(2, 4, 7, 11), integers(4, 4, 3, 3)
    wanted = F.conv2d(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = transconv.conv2d(x, w)
    graph.replay()
    assert torch.equal(y, wanted)
    assert transconv.stats(reset=True).fallback == {"capture:cold": 1}
    assert torch.equal(transconv.conv2d(x, w), wanted)
    assert transconv.stats().native == {"fwd": 1}


@on_gpu
def test_streams() -> None:
    """Interleaved on two streams, each behind work of its own."""
    streams: list[Any] = [torch.cuda.Stream(), torch.cuda.Stream()]
    _, w, _ = operands(grad=False)
    results: list[list[torch.Tensor]] = [[], []]
    inputs = [integers(2, 16, 9, 10) for _ in range(40)]
    torch.cuda.synchronize()
    for at, x in enumerate(inputs):
        with torch.cuda.stream(streams[at % 2]):
            big = torch.randn(1 << 20, device="cuda").sort().values  # delays this stream
            y = (x + (big[0] > 100).float()).contiguous()
            results[at % 2].append(transconv.conv2d(y, w, groups=2))
    torch.cuda.synchronize()
    for at, x in enumerate(inputs):
        assert torch.equal(results[at % 2][at // 2], F.conv2d(x, w, groups=2)), at
    native(40)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    x, w, b = operands()
    f = lambda x: transconv.conv2d(x, w, b, groups=2).relu()  # noqa: E731
    y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)
    wanted = F.conv2d(x, w, b, groups=2).relu()
    assert torch.equal(y, wanted)
    if reentrant:
        y.backward(torch.ones_like(y))
        got: Any = (x.grad, w.grad, b.grad)
    else:
        got = torch.autograd.grad(y, (x, w, b), torch.ones_like(y))
    close(got, torch.autograd.grad(wanted, (x, w, b), torch.ones_like(wanted)))
    native(4)  # the forward ran twice


def test_gradient_subsets() -> None:
    """Any subset of the three gradients, and no kernel for one that is not asked for."""
    for wanted in itertools.product((False, True), repeat=3):
        leaves = [t.detach().requires_grad_(on) for t, on in zip(operands(), wanted, strict=True)]
        live = [t for t in leaves if t.requires_grad]
        transconv.stats(reset=True)
        got = transconv.conv2d(*leaves, padding=1, groups=2)
        assert got.requires_grad == bool(live)
        if live:
            theirs = F.conv2d(*leaves, padding=1, groups=2)
            for mine, its in zip(grads(got, *live), grads(theirs, *live), strict=True):
                torch.testing.assert_close(mine, its)
        if c.HAS_GPU:
            assert sum(transconv.stats().native.values()) == 1 + wanted[0] + wanted[1]


def test_autograd_habits() -> None:
    x, w, b = operands()
    y = transconv.conv2d(x, w, b, groups=2)
    assert y.grad_fn is not None and y.grad_fn.name() == "ConvolutionFunctionBackward"
    first = torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), w, create_graph=True)[0].detach())
    v = w.detach().clone().requires_grad_()
    z = transconv.conv2d(x, v * 1.0, b, groups=2)
    kept = v * 1.0
    z = transconv.conv2d(x, kept, b, groups=2)
    kept.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@on_gpu
def test_threads() -> None:
    """Eight threads, cold, with shapes they share and shapes they do not."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator("cuda").manual_seed(seed)
            for at in range(50):
                x = (
                    torch.randint(-2, 3, (1, 8, 6, 6 + at % 5), device="cuda", generator=generator)
                    .float()
                    .requires_grad_()
                )
                w = (
                    torch.randint(-2, 3, (8, 8, 3, 3), device="cuda", generator=generator)
                    .float()
                    .requires_grad_()
                )
                got, wanted = transconv.conv2d(x, w), F.conv2d(x, w)
                assert torch.equal(got, wanted)
                assert all(map(torch.equal, grads(got, x, w), grads(wanted, x, w)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[:3]
    assert transconv.stats().total == 8 * 50 * 3


def test_the_same_bits_eager_compiled_and_graphed() -> None:
    x, w, b = operands(randn)
    eager = transconv.conv2d(x, w, b, groups=2)
    compiled = torch.compile(
        lambda x: transconv.conv2d(x, w, b, groups=2), backend="aot_eager", fullgraph=True
    )(x)
    assert torch.equal(eager, compiled)
    assert all(map(torch.equal, grads(eager, x, w, b), grads(compiled, x, w, b)))
    if c.HAS_GPU:
        with torch.no_grad():
            graph, kept = graphed(lambda: transconv.conv2d(x, w, b, groups=2))
            graph.replay()
        assert torch.equal(eager, kept)


def test_enable_use_and_convert() -> None:
    x, w, b = operands()
    wanted = F.conv2d(x, w, b, groups=2)
    expected = grads(wanted, x, w, b)
    with transconv.use((c.DEVICE,)):
        got = F.conv2d(x, w, b, groups=2)
        assert torch.equal(got, wanted)
        close(grads(got, x, w, b), expected)
        # Without an early stop the recomputed forward pass runs to its end, and is counted.
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            checkpointed = torch.utils.checkpoint.checkpoint(
                lambda x: F.conv2d(x, w, b, groups=2), x, use_reentrant=False
            )
            close(grads(checkpointed, x, w, b), expected)
    native(7)
    transconv.enable((c.DEVICE,))
    try:
        assert torch.equal(F.conv2d(x, w, b, groups=2), wanted)
    finally:
        transconv.disable()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(16, 8, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(8, 4, 2, stride=2)
    ).to(c.DEVICE)
    before = model(x)
    state = list(model.state_dict())
    assert len(transconv.convert_(model).converted) == 2
    close(model(x), before)
    assert list(model.state_dict()) == state
    transconv.revert_(model)
    assert torch.equal(model(x), before)


@on_gpu
def test_mixed_devices_raise() -> None:
    x, w, _ = operands()
    with pytest.raises(RuntimeError, match="same"):
        transconv.conv2d(x, w.cpu(), groups=2)
    with pytest.raises(RuntimeError, match="same"):
        transconv.conv2d(x.half(), w, groups=2)
