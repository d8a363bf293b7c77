"""Results of generated kernels in cases where errors are likely: huge tensors, odd addresses, NaN,
rounding."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.gpu import cases as c
from tests.gpu.operands import close, grads, integers, native, on_gpu, operands, randn
from tests.torch_ops import samples as s
from transconv.conv import compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.target.records import detect
from transconv.torch_ops.fused.fused_route import ACTIVATIONS

pytestmark = pytest.mark.gpu


@on_gpu
def test_more_than_2_to_the_31_elements() -> None:
    """2^31 elements in, as many out; both gradients; judged on rows, and the weight gradient by
    sums that torch makes."""
    rows, width = 1024, 1 << 20
    x = torch.randint(-2, 3, (1, 2, rows, width), device="cuda", dtype=torch.int8).half()
    w = integers(2, 2, 3, 3, dtype=torch.float16)
    assert x.numel() == 2**31
    x.requires_grad_()
    w.requires_grad_()
    y = transconv.conv2d(x, w, padding=1)
    g = torch.randint(-1, 2, y.shape, device="cuda", dtype=torch.int8).half()
    g[:, :, 4:-4] = 0  # few terms: the sums stay exact in f16
    g[..., 64:-64] = 0
    dx, dw = torch.autograd.grad(y, (x, w), g)
    native(3)
    with torch.no_grad():
        for at in (0, 1, 510, rows - 4):
            lo, hi = max(at - 1, 0), min(at + 4, rows)
            for source, result, transposed in ((x, y, False), (g, dx, True)):
                kernel = w.transpose(0, 1).flip(2, 3) if transposed else w
                wanted = F.conv2d(source[:, :, lo:hi, -4096:].float(), kernel.float(), padding=1)
                rest = slice(None if lo == 0 else 1, None if hi == rows else -1)
                got = result[:, :, lo:hi, -4095:].float()
                assert torch.equal(got[:, :, rest], wanted[:, :, rest, 1:]), (at, transposed)
        total = torch.zeros(w.shape, device="cuda", dtype=torch.float64)
        for lo, side in itertools.product((0, rows - 8), (0, width - 128)):
            part, here = x[:, :, lo : lo + 8, side : side + 128], g[:, :, lo : lo + 8, side : side + 128]
            total += torch.ops.aten.convolution_backward(
                here.double(),
                part.double(),
                w.double(),
                None,
                (1, 1),
                (1, 1),
                (1, 1),
                False,
                (0, 0),
                1,
                (False, True, False),
            )[1]
        assert torch.equal(dw.double(), total)


@pytest.mark.parametrize("name", s.FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
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
    for mine, its in zip(
        torch.autograd.grad(got, (x, w, b), grad.to(got)),
        torch.autograd.grad(wanted, exact, grad),
        strict=True,
    ):
        assert its.abs().max() < 256
        assert torch.equal(mine.cpu().double(), its)
    native(3)


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
        for mine, its in zip(
            grads(got, *leaves), grads(F.conv2d(*leaves, padding=1, groups=2), *leaves), strict=True
        ):
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
        assert all(
            map(
                torch.equal,
                torch.autograd.grad(got.sum(), (x, v)),
                torch.autograd.grad(wanted.sum(), (x, v)),
            )
        )
    native(9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
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
        for mine, its in zip([again.detach(), *torch.autograd.grad(again, (x, w), g)], first, strict=True):
            assert torch.equal(mine, its)
    native(3)


@on_gpu
def test_memory_stays_flat() -> None:
    shapes = [(2, 8, 8, 8), (1, 8, 9, 9), (4, 8, 5, 5)]
    w = randn(8, 8, 3, 3, grad=True)
    inputs = [randn(*shape, grad=True) for shape in shapes]

    def turn() -> None:
        for x in inputs:
            torch.autograd.grad(transconv.conv2d(x, w).sum(), (x, w))

    turn()
    grown = []
    for _ in range(3):  # what a thread or a further kernel keeps comes once
        gc.collect()  # what other tests left
        before = torch.cuda.memory_allocated()
        for _ in range(500):
            turn()
        grown.append(torch.cuda.memory_allocated() - before)
    assert min(grown) <= 0, grown


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


@on_gpu
@pytest.mark.parametrize(
    "words",
    [
        "a=box b=box | c=box swap=1 stages=3 warps=4",  # rounded by the copy engine
        "a=gather b=gather | stages=3 warps=4",  # in registers
        "a=gather b=gather | stages=3 warps=2",  # for the older matrix unit
        "a=gather b=gather | pack=a.b stages=3 warps=4",  # in copies
    ],
)
def test_the_nearest_numbers_of_tf32_are_multiplied(words: str) -> None:
    """Bits below tf32 are rounded away, and every NaN stays a NaN. Schedules are given, because this
    test is not about the choice."""
    x = randn(32, 64, 32, 32).to(memory_format=torch.channels_last)
    odd = torch.tensor(
        [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, 0x7F800000], dtype=torch.int32, device=x.device
    ).view(torch.float32)
    x[0, 0, 0, :5] = odd
    one = torch.eye(64, device=x.device).view(64, 64, 1, 1).to(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    problem = ConvProblem.parse("mb32ic64ih32oc64oh32kh1 tag=axb math=tf32")
    plan = compiler.plan(problem, Prop.FWD, detect(x.device), f"mb.oh.ow:128 oc:64 ic:16 | mma | {words}")
    plan.launch(x, one, y)
    # Of a pixel with a NaN or an infinity no sum is a number: 0 times either is a NaN.
    strange = (~x.isfinite()).any(1, keepdim=True).expand_as(x)
    assert torch.equal(~y.isfinite(), strange) and y.isnan().any()
    got, given = y[~strange], x[~strange]
    assert not (got.view(torch.int32) & 0x1FFF).any()
    assert ((got - given).abs() <= given.abs() * 2.0**-11).all()


@pytest.mark.parametrize("activation", [None, *filter(None, ACTIVATIONS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused(activation: str | None, dtype: torch.dtype) -> None:
    x, w, b = operands(randn, dtype)
    res = randn(2, 8, 9, 10, dtype=dtype, grad=True)
    leaves = (x, w, b, res)
    act = ACTIVATIONS[activation or ""]
    with torch.no_grad():
        plain = transconv.fused_conv2d(x, w, b, padding=1, groups=2, activation=activation, residual=res)
        native()
    got = transconv.fused_conv2d(x, w, b, padding=1, groups=2, activation=activation, residual=res)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = act(F.conv2d(*exact[:3], padding=1, groups=2) + exact[3])
    g = torch.randn_like(y)
    # Rounding moves a few elements over a kink, where the slope jumps: the mean counts.
    limit = 1e-5 if dtype == torch.float32 else 0.08
    ours = torch.autograd.grad(got, leaves, g.to(dtype))
    for mine, its in zip([plain, got, *ours], [y, y, *torch.autograd.grad(y, exact, g)], strict=True):
        error = (mine.double() - its).square().mean() / its.square().mean()
        assert error.sqrt() < limit


def test_fold() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, groups=8),
        torch.nn.BatchNorm2d(8),
        torch.nn.Hardswish(),
    )
    model = model.to(c.DEVICE).eval().requires_grad_(False)
    x = randn(2, 4, 8, 8)
    close(transconv.fold(model)(x), model(x))
    native(2)
