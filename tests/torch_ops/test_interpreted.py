"""Generated kernels in the place of torch's, end to end, in Triton's interpreter.

Triton decides when it is imported whether it interprets, so these run in a process of their own:
``TRITON_INTERPRET=1 pytest tests/torch_ops/test_interpreted.py``; `test_in_a_process_of_its_own`
does that wherever the variable is not set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.torch_ops import samples as s
from transconv import runtime
from transconv.errors import Unsupported
from transconv.support import knobs
from transconv.torch_ops import operators

interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def native() -> None:
    transconv.config.cpu = "interpret"
    transconv.config.fallback = "error"


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers: every sum of products is exact, so results must agree bit for bit."""
    return torch.randint(-2, 3, shape).to(dtype)


@pytest.mark.skipif(knobs.interpret(), reason="this is that process")
@pytest.mark.slow
def test_in_a_process_of_its_own() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        __file__,
        str(Path(__file__).with_name("test_inference.py")),
        f"{Path(__file__).with_name('test_traced.py')}::test_kernels",
    ]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert found.returncode == 0, found.stdout[-4000:]
    assert "passed" in found.stdout


@pytest.mark.every(33)
@interpreted
@pytest.mark.parametrize("name", s.FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_results_and_gradients(name: str, dtype: torch.dtype) -> None:
    ndims = int(name[-2])
    x = integers(2, 4, *(5, 6, 4)[:ndims], dtype=dtype).requires_grad_()
    w = integers(4, 2, *(3, 2, 2)[:ndims], dtype=dtype).requires_grad_()
    b = integers(4, dtype=dtype).requires_grad_()
    kwargs = {"stride": 2, "padding": 1, "groups": 2}
    got, wanted = s.ours(name)(x, w, b, **kwargs), s.theirs(name)(x, w, b, **kwargs)
    assert torch.equal(got, wanted)
    grad = integers(*got.shape, dtype=dtype)
    for ours, theirs in zip(
        torch.autograd.grad(got, (x, w, b), grad),
        torch.autograd.grad(wanted, (x, w, b), grad),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert transconv.stats().fallback == {}
    assert sorted(transconv.stats().native.values()) == [1, 1, 1]


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("variant", s.VARIANTS.values())
def test_memory_variants(variant: Any) -> None:
    x, w = (s.vary(t, variant) for t in (integers(2, 4, 5, 6), integers(4, 4, 3, 3)))
    for got, wanted in (
        (transconv.conv2d(x, w), F.conv2d(x, w)),
        (transconv.conv_transpose2d(x, w), F.conv_transpose2d(x, w)),
    ):
        assert torch.equal(got, wanted)


@pytest.mark.every(4)
@interpreted
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d"])
def test_opinfo_samples(name: str) -> None:
    for sample in list(s.samples(name, torch.float32))[::3]:
        if sample.input.numel() == 0:
            continue
        given = [
            torch.round(t) if isinstance(t, torch.Tensor) else t for t in (sample.input, *sample.args)
        ]
        torch.testing.assert_close(
            s.ours(name)(*given, **sample.kwargs), s.theirs(name)(*given, **sample.kwargs)
        )
    assert transconv.stats().native


@pytest.mark.slow
@interpreted
def test_imaginary_parts_of_conjugates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negated views with gaps between their elements, which a copy does not have: right kernels are
    not taken for wrong."""

    def imaginary(*shape: int) -> torch.Tensor:
        made = torch.complex(integers(*shape), integers(*shape)).conj().imag
        assert made.is_neg() and not made.is_contiguous()
        return made

    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    x, w, b = imaginary(2, 4, 5, 6), imaginary(4, 4, 3, 3), imaginary(4)
    for given in ((x, w.clone(), None), (x.clone(), w, b.clone()), (x, w, b)):
        assert torch.equal(transconv.conv2d(*given), F.conv2d(*given))
        assert torch.equal(transconv.fused_conv2d(*given, activation="relu"), F.conv2d(*given).relu())
        numbers = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        assert torch.equal(torch.ops.transconv.convolution(*given, *numbers), F.conv2d(*given))
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    grad = imaginary(2, 4, 3, 4)
    for got, wanted in zip(
        torch.autograd.grad(transconv.conv2d(x, w), (x, w), grad),
        torch.autograd.grad(F.conv2d(x, w), (x, w), grad),
        strict=True,
    ):
        assert torch.equal(got, wanted)


@interpreted
def test_same_padding_without_a_copy() -> None:
    x, w = integers(1, 2, 6, 7), integers(3, 2, 2, 4)
    for dilation in (1, 2, (1, 3)):
        assert torch.equal(
            transconv.conv2d(x, w, padding="same", dilation=dilation),
            F.conv2d(x, w, padding="same", dilation=dilation),
        )
    x.requires_grad_()
    got, wanted = (f(x, w, padding="same") for f in (transconv.conv2d, F.conv2d))
    grad = integers(*got.shape)
    assert torch.equal(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(wanted, x, grad)[0])


@interpreted
def test_nan_and_infinity_beside_padding() -> None:
    x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)
    w[0, 0, 0, 0] = float("inf")
    x[0, 0, 3, 3] = float("nan")
    got, wanted = transconv.conv2d(x, w, padding=1), F.conv2d(x, w, padding=1)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", None])
def test_fused(activation: str | None) -> None:
    x, w, b, res = integers(2, 4, 5, 5), integers(4, 4, 3, 3), integers(4), integers(2, 4, 5, 5)
    got = transconv.fused_conv2d(x, w, b, padding=1, activation=activation, residual=res)
    from transconv.torch_ops.fused.fused_functional import ACTIVATIONS

    wanted = ACTIVATIONS[activation or ""](F.conv2d(x, w, b, padding=1) + res)
    torch.testing.assert_close(got, wanted)
    assert transconv.stats().native == {"fwd": 1}
    transposed_res = res.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    transposed = transconv.fused_conv2d(x, w, b.repeat(2)[::2], padding=1, residual=transposed_res)
    torch.testing.assert_close(transposed, F.conv2d(x, w, b.repeat(2)[::2], padding=1) + res)


@interpreted
def test_under_use_compile_and_modules() -> None:
    x, w = integers(2, 4, 5, 5).requires_grad_(), integers(4, 4, 3, 3).requires_grad_()
    wanted = torch.autograd.grad(F.conv2d(x, w).square().sum(), (x, w))
    with transconv.use():
        got = torch.autograd.grad(F.conv2d(x, w).square().sum(), (x, w))
        mapped = torch.func.vmap(lambda x: F.conv2d(x, w.detach()))(x.detach()[None])
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert torch.equal(mapped[0], F.conv2d(x, w))
    transconv.config.cpu = "interpret"
    f = torch.compile(
        lambda x, w: transconv.conv2d(x, w).square().sum(), backend="aot_eager", fullgraph=True
    )
    got = torch.autograd.grad(f(x, w), (x, w))
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert transconv.stats().native["bwd_w"] == 2
    assert transconv.stats().fallback == {}


@interpreted
def test_atomic_sums_are_not_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's switch for determinism is obeyed, whatever schedule is asked for."""
    monkeypatch.setenv("TRANSCONV_CONFIG", "ic:16 oc:16 oh.ow:32 split_k=2 reduce=atomic")
    monkeypatch.setattr(runtime.compiler, "_plans", {})  # made before the config was asked for
    x, w = integers(1, 4, 8, 8), integers(4, 4, 3, 3)
    grad, numbers = integers(1, 4, 6, 6), "stride=1x1"
    with torch.backends.cudnn.flags(deterministic=True):
        with pytest.raises(Unsupported, match="atomic sums differ from run to run"):
            operators.bwd_w(grad, x, w, numbers)
        transconv.config.fallback = "silent"
        made = operators.bwd_w(grad, x, w, numbers)
    assert transconv.stats().fallback == {"schedule:refused": 1}
    with torch.backends.cudnn.flags(deterministic=False):
        assert torch.equal(operators.bwd_w(grad, x, w, numbers), made)
    assert transconv.stats().native == {"bwd_w": 1}


@pytest.mark.slow
@interpreted
def test_threads_get_their_own_results() -> None:
    """Triton's interpreter has one place in the grid for all of them."""
    cases = [
        (integers(1, 4 + 4 * (n % 3), 6, 6), integers(4 + n, 4 + 4 * (n % 3), 3, 3)) for n in range(6)
    ]
    wanted = [F.conv2d(*case) for case in cases]

    def run(first: int) -> list[bool]:
        order = [(first + n) % len(cases) for n in range(12)]
        return [torch.equal(transconv.conv2d(*cases[n]), wanted[n]) for n in order]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(cases)) as pool:
            assert all(right for each in pool.map(run, range(len(cases))) for right in each)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.slow
@interpreted
def test_gradcheck() -> None:
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    for check, stride in ((torch.autograd.gradcheck, 2), (torch.autograd.gradgradcheck, 1)):
        assert check(
            lambda x, w, stride=stride: transconv.conv2d(x, w, None, stride, 1), (x, w), fast_mode=True
        )
