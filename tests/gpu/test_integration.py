"""Generated kernels under everything that PyTorch programs do around a convolution."""

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
from tests.torch_ops import samples as s
from transconv.torch_ops import fused, library

pytestmark = pytest.mark.gpu
on_gpu = pytest.mark.skipif(not c.HAS_GPU, reason="needs a GPU")

OP = torch.ops.transconv.convolution.default
BACKWARD = torch.ops.transconv.convolution_backward.default


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device=c.DEVICE, dtype=dtype).requires_grad_(grad)


def integers(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Small integers: every sum of products is exact, so results must agree bit for bit."""
    return torch.randint(-2, 3, shape, device=c.DEVICE).to(dtype).requires_grad_(grad)


def operands(make: Callable[..., torch.Tensor] = integers, dtype: torch.dtype = torch.float32,
             grad: bool = True) -> tuple[torch.Tensor, ...]:
    return (make(2, 16, 9, 10, dtype=dtype, grad=grad), make(8, 8, 3, 3, dtype=dtype, grad=grad),
            make(8, dtype=dtype, grad=grad))


def grads(y: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of a loss whose values are small integers if those of y are."""
    weights = torch.arange(y.numel(), device=y.device).view(y.shape) % 3 - 1
    return torch.autograd.grad((y * weights.to(y.dtype)).sum(), leaves)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def native(at_least: int = 1) -> None:
    """Something was computed by generated kernels, and nothing by torch."""
    seen = transconv.stats()
    strange = [r for r in seen.fallback if not c.documented(r)]
    assert not strange, seen
    assert sum(seen.native.values()) >= at_least or c.DEVICE == "cpu", seen


@on_gpu
def test_more_than_2_to_the_31_elements() -> None:
    """2^31 elements in, as many out; both gradients; judged on rows, and the weight gradient by
    sums that torch makes."""
    rows, width = 1024, 1 << 20
    x = torch.randint(-2, 3, (1, 2, rows, width), device="cuda", dtype=torch.int8).half()
    w = integers(2, 2, 3, 3, dtype=torch.float16)
    assert x.numel() == 2**31
    x.requires_grad_(), w.requires_grad_()
    y = transconv.conv2d(x, w, padding=1)
    g = torch.randint(-1, 2, y.shape, device="cuda", dtype=torch.int8).half()
    g[:, :, 4:-4] = 0  # few terms: the sums stay exact in f16
    g[..., 64:-64] = 0
    dx, dw = torch.autograd.grad(y, (x, w), g)
    native(3)
    with torch.no_grad():
        for at in (0, 1, 510, rows - 4):
            lo, hi = max(at - 1, 0), min(at + 4, rows)
            for source, result, turned in ((x, y, False), (g, dx, True)):
                kernel = w.transpose(0, 1).flip(2, 3) if turned else w
                wanted = F.conv2d(source[:, :, lo:hi, -4096:].float(), kernel.float(), padding=1)
                rest = slice(None if lo == 0 else 1, None if hi == rows else -1)
                got = result[:, :, lo:hi, -4095:].float()
                assert torch.equal(got[:, :, rest], wanted[:, :, rest, 1:]), (at, turned)
        total = torch.zeros(w.shape, device="cuda", dtype=torch.float64)
        for lo, side in itertools.product((0, rows - 8), (0, width - 128)):
            part, here = x[:, :, lo:lo + 8, side:side + 128], g[:, :, lo:lo + 8, side:side + 128]
            total += torch.ops.aten.convolution_backward(
                here.double(), part.double(), w.double(), None, (1, 1), (1, 1), (1, 1), False,
                (0, 0), 1, (False, True, False))[1]
        assert torch.equal(dw.double(), total)


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose3d"])
def test_inductor(name: str) -> None:
    n = int(name[-2])
    x, w = randn(2, 8, *[6] * n, grad=True), randn(8, 8, *[3] * n, grad=True)
    f = lambda x, w: s.ours(name)(x, w, stride=2, padding=1).relu() * 2  # noqa: E731
    got = torch.compile(f, fullgraph=True)(x, w)
    close(got, s.theirs(name)(x, w, stride=2, padding=1).relu() * 2)
    close(torch.autograd.grad(got.sum(), (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    native()


@pytest.mark.parametrize("name", s.FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16],
                         ids=str)
def test_integers_are_exact(name: str, dtype: torch.dtype) -> None:
    n = int(name[-2])
    x = integers(2, 32, *(7, 6, 5)[:n], dtype=dtype, grad=True)
    w = integers(32, 8, *(3, 2, 1)[:n], dtype=dtype, grad=True)
    b = integers(32, dtype=dtype, grad=True)
    # Sums must fit the type's integers, and not be zero too often.
    thin = torch.rand(w.shape, device=w.device) < (0.25 if "transpose" not in name else 0.6)
    w.data.mul_(thin)
    kwargs = {"stride": 2, "padding": 1, "groups": 4}
    got = s.ours(name)(x, w, b, **kwargs)
    exact = [t.detach().cpu().double().requires_grad_() for t in (x, w, b)]
    wanted = s.theirs(name)(*exact, **kwargs)
    assert wanted.abs().max() < 256 and (wanted != 0).double().mean() > 0.25
    assert torch.equal(got.cpu().double(), wanted)
    grad = torch.randint(-1, 2, wanted.shape).double()
    for mine, its in zip(torch.autograd.grad(got, (x, w, b), grad.to(got)),
                         torch.autograd.grad(wanted, exact, grad), strict=True):
        assert its.abs().max() < 256
        assert torch.equal(mine.cpu().double(), its)
    native(3)


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
    x, w, b = randn(2, 4, *[5] * n, grad=True), randn(4, 4, *[3] * n, grad=True), randn(4, grad=True)
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

    f = torch.compile(lambda x: transconv.conv2d(x, w, b, padding=1, groups=2), backend=backend,
                      fullgraph=True)
    for batch in (7, 5, 9, 13):
        x = integers(batch, 16, 6, 6)
        assert torch.equal(f(x), F.conv2d(x, w, b, padding=1, groups=2))
    assert len(graphs) <= 2


def test_export() -> None:
    net = torch.nn.Sequential(transconv.nn.Conv2d(4, 6, 3, padding="same"), torch.nn.ReLU(),
                              transconv.nn.ConvTranspose2d(6, 2, 2, stride=2)).to(c.DEVICE)
    x = randn(2, 4, 6, 6)
    program = torch.export.export(net, (x,), dynamic_shapes=(
        {0: torch.export.Dim("batch", min=1, max=64)},))
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
    with torch.autocast(c.DEVICE, dtype=dtype):
        got, wanted = f(x, w, b), F.conv2d(x, w, b, padding=1, groups=2)
        assert got.dtype == wanted.dtype == dtype
        torch.testing.assert_close(got, wanted)
    for mine, its in zip(grads(got, x, w, b), grads(wanted, x, w, b), strict=True):
        assert mine.dtype == its.dtype == torch.float32
        torch.testing.assert_close(mine, its, rtol=0.02, atol=0.5)
    native(3)


def test_transforms() -> None:
    """vmap, grad, jvp, per-sample gradients: aten's, so that nothing is dropped."""
    x, w, _ = operands(randn, torch.float64, grad=False)
    found = []
    for f in (transconv.conv2d, F.conv2d):
        loss = lambda w, x, f=f: f(x[None], w, groups=2).sin().sum()  # noqa: E731
        found.append((torch.vmap(lambda x, f=f: f(x[None], w, groups=2))(x),
                      torch.func.grad(loss)(w, x[0]),
                      torch.vmap(torch.func.grad(loss), (None, 0))(w, x),
                      torch.func.jvp(lambda w, loss=loss: loss(w, x[0]), (w,), (w,)),
                      torch.func.hessian(lambda v, loss=loss: loss(w * v, x[0]))(x.new_ones(()))))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("order", ["aligned first", "misaligned first"])
@pytest.mark.parametrize("form", [s.contiguous, s.channels_last])
def test_alignment_changes_between_calls(dtype: torch.dtype, order: str, form: Any) -> None:
    """The same shapes and strides, at addresses that vector loads can take and that they cannot."""
    x, w, b = (form(t) for t in operands(grad=False, dtype=dtype))

    def moved(t: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros(t.numel() + 1, dtype=dtype, device=t.device)
        return flat[1:].as_strided(t.shape, t.stride(), 1).copy_(t)

    wanted = F.conv2d(x, w, b, padding=1, groups=2)
    sets = [(x, w, b), (moved(x), moved(w), moved(b)), (x, moved(w), b), (moved(x), w, b)]
    for given in (sets if order == "aligned first" else sets[::-1]) * 3:
        leaves = [t.requires_grad_() for t in given]
        got = transconv.conv2d(*leaves, padding=1, groups=2)
        assert torch.equal(got, wanted)
        for mine, its in zip(grads(got, *leaves), grads(F.conv2d(
                *leaves, padding=1, groups=2), *leaves), strict=True):
            torch.testing.assert_close(mine, its)
    native(12)


def test_overlapping_and_expanded_memory() -> None:
    flat = integers(400)
    w = integers(4, 4, 3, 3)
    windows = flat.as_strided((2, 4, 8, 8), (50, 9, 8, 1), 3)
    for x in (windows, integers(1, 4, 1, 8).expand(3, 4, 8, 8), integers(1).expand(2, 4, 8, 8)):
        assert torch.equal(transconv.conv2d(x, w, padding=1), F.conv2d(x, w, padding=1))
        x = x.detach().requires_grad_()
        v = w.detach().requires_grad_()
        got, wanted = (f(x, v, padding=1) for f in (transconv.conv2d, F.conv2d))
        # The gradient of a sum is one number, expanded.
        assert all(map(torch.equal, torch.autograd.grad(got.sum(), (x, v)),
                       torch.autograd.grad(wanted.sum(), (x, v))))
    native(9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64],
                         ids=str)
def test_nan_and_infinity_beside_padding(dtype: torch.dtype) -> None:
    """Padding behaves as literal zeros; a NaN reaches exactly the results that read it."""
    x, w = randn(2, 8, 6, 6, dtype=dtype), randn(8, 8, 3, 3, dtype=dtype)
    w[3, 2, 0, 0] = float("inf")
    x[1, 5, 5, 5] = float("nan")
    x[0, 1, 2, 2] = float("inf")
    w[4] = 0.0
    got = transconv.conv2d(x, w, padding=1)
    columns = F.unfold(F.pad(x.double(), (1, 1, 1, 1)), 3)
    wanted = (w.double().reshape(8, -1) @ columns).view(got.shape)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())
    # Backward: a NaN in the gradient, finite weights.
    v = randn(8, 8, 3, 3, dtype=dtype, grad=True)
    z = randn(2, 8, 7, 7, dtype=dtype, grad=True)
    y = transconv.conv2d(z, v, padding=1, stride=2)
    g = torch.randn_like(y)
    g[1, 0, 0, 0] = float("nan")
    dz, dv = torch.autograd.grad(y, (z, v), g)
    reach = torch.zeros(2, 7, 7, dtype=torch.bool, device=z.device)
    reach[1, :2, :2] = True
    assert torch.equal(dz.isnan(), reach[:, None].expand_as(dz))
    assert torch.equal(dv.isnan().flatten(1).all(1), dv.isnan().flatten(1).any(1))
    assert dv.isnan()[0].all() and not dv.isnan()[1:].any()
    native(3)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic(dtype: torch.dtype) -> None:
    """The same bits every time; and torch fills every fresh tensor with NaN under this switch, so
    nothing may be read that was not written."""
    torch.use_deterministic_algorithms(True)
    x = randn(8, 64, 28, 28, dtype=dtype, grad=True)  # long sums for the weight gradient
    w = randn(64, 64, 3, 3, dtype=dtype, grad=True)
    y = transconv.conv2d(x, w, padding=1)
    g = torch.randn_like(y)
    first = [y.detach(), *torch.autograd.grad(y, (x, w), g)]
    assert not any(t.isnan().any() for t in first)
    for _ in range(20):
        again = transconv.conv2d(x, w, padding=1)
        for mine, its in zip([again.detach(), *torch.autograd.grad(again, (x, w), g)], first,
                             strict=True):
            assert torch.equal(mine, its)
    native(3)


def test_gradient_subsets() -> None:
    """Any subset of the three gradients, and no kernel for one that nobody wants."""
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
    assert isinstance(y.grad_fn, library.ConvolutionFunction._backward_cls)
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
                x = torch.randint(-2, 3, (1, 8, 6, 6 + at % 5), device="cuda",
                                  generator=generator).float().requires_grad_()
                w = torch.randint(-2, 3, (8, 8, 3, 3), device="cuda",
                                  generator=generator).float().requires_grad_()
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


@on_gpu
def test_memory_stays_flat() -> None:
    shapes = [(2, 8, 8, 8), (1, 8, 9, 9), (4, 8, 5, 5)]
    w = randn(8, 8, 3, 3, grad=True)
    inputs = [randn(*shape, grad=True) for shape in shapes]

    def turn() -> None:
        for x in inputs:
            torch.autograd.grad(transconv.conv2d(x, w).sum(), (x, w))

    turn()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        turn()
    assert torch.cuda.memory_allocated() == before


def test_the_same_bits_eager_compiled_and_graphed() -> None:
    x, w, b = operands(randn)
    eager = transconv.conv2d(x, w, b, groups=2)
    compiled = torch.compile(lambda x: transconv.conv2d(x, w, b, groups=2), backend="aot_eager",
                             fullgraph=True)(x)
    assert torch.equal(eager, compiled)
    assert all(map(torch.equal, grads(eager, x, w, b), grads(compiled, x, w, b)))
    if c.HAS_GPU:
        with torch.no_grad():
            graph, kept = graphed(lambda: transconv.conv2d(x, w, b, groups=2))
            graph.replay()
        assert torch.equal(eager, kept)


@on_gpu
def test_float32_obeys_the_precision_switch() -> None:
    shapes = ((4, 64, 14, 14), (64, 64, 3, 3))
    x, w = (randn(*shape, grad=True) for shape in shapes)
    g = randn(4, 64, 14, 14)
    kwargs: dict[str, Any] = {"padding": 1}
    results = {}
    for word in ("ieee", "tf32"):
        c.set_precision(word)
        results[word] = c.run(transconv.conv2d, (x, w), kwargs, g)
        assert not c.violations(results[word], "conv2d", (x, w), kwargs, g, tf32=word == "tf32")
    c.set_precision("tf32")
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    for mine, its in zip(c.run(transconv.conv2d, (x, w), kwargs, g), results["ieee"], strict=True):
        assert torch.equal(mine, its)  # the newer switch means the same
    assert c.violations(results["tf32"], "conv2d", (x, w), kwargs, g), "tf32 was never used"


def test_enable_use_and_convert() -> None:
    x, w, b = operands()
    wanted = F.conv2d(x, w, b, groups=2)
    expected = grads(wanted, x, w, b)
    with transconv.use((c.DEVICE,)):
        got = F.conv2d(x, w, b, groups=2)
        assert torch.equal(got, wanted)
        close(grads(got, x, w, b), expected)
        checkpointed = torch.utils.checkpoint.checkpoint(
            lambda x: F.conv2d(x, w, b, groups=2), x, use_reentrant=False)
        close(grads(checkpointed, x, w, b), expected)
    native(7)
    transconv.enable((c.DEVICE,))
    try:
        assert torch.equal(F.conv2d(x, w, b, groups=2), wanted)
    finally:
        transconv.disable()
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 8, 3), torch.nn.ReLU(),
                                torch.nn.ConvTranspose2d(8, 4, 2, stride=2)).to(c.DEVICE)
    before = model(x)
    state = list(model.state_dict())
    assert len(transconv.convert_(model).converted) == 2
    close(model(x), before)
    assert list(model.state_dict()) == state
    transconv.revert_(model)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("activation", [None, *filter(None, fused.ACTIVATIONS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused(activation: str | None, dtype: torch.dtype) -> None:
    x, w, b = operands(randn, dtype)
    res = randn(2, 8, 9, 10, dtype=dtype, grad=True)
    leaves = (x, w, b, res)
    act = fused.ACTIVATIONS[activation or ""]
    with torch.no_grad():
        plain = transconv.fused_conv2d(x, w, b, padding=1, groups=2, activation=activation,
                                       residual=res)
        native()
    got = transconv.fused_conv2d(x, w, b, padding=1, groups=2, activation=activation, residual=res)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = act(F.conv2d(*exact[:3], padding=1, groups=2) + exact[3])
    g = torch.randn_like(y)
    # Rounding moves a few elements over an activation's kink, where its slope jumps: the mean counts.
    limit = 1e-5 if dtype == torch.float32 else 0.08
    ours = torch.autograd.grad(got, leaves, g.to(dtype))
    for mine, its in zip([plain, got, *ours], [y, y, *torch.autograd.grad(y, exact, g)],
                         strict=True):
        error = (mine.double() - its).square().mean() / its.square().mean()
        assert error.sqrt() < limit


def test_fold() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.BatchNorm2d(8), torch.nn.Hardswish())
    model = model.to(c.DEVICE).eval().requires_grad_(False)
    x = randn(2, 4, 8, 8)
    close(transconv.fold(model)(x), model(x))
    native(2)


@on_gpu
def test_mixed_devices_raise() -> None:
    x, w, _ = operands()
    with pytest.raises(RuntimeError, match="same"):
        transconv.conv2d(x, w.cpu(), groups=2)
    with pytest.raises(RuntimeError, match="same"):
        transconv.conv2d(x.half(), w, groups=2)
