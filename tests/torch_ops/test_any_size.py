"""Calls whose kernels take batch and image sizes as arguments, in Triton's interpreter: one set of kernels
for all sizes of a layer, and what they exclude goes to a kernel of its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import transconv
from transconv.backend_triton import TritonKernel
from transconv.backend_triton.launch.triton_kernel import EXACT
from transconv.calls import size_policy
from transconv.conv import compiler
from transconv.runtime import check_records, first_run_check
from transconv.torch_ops.calls import select_impl


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One example for each layer: plans take a while to make."""
    monkeypatch.setattr(compiler, "EXAMPLES", {n: e[:1] for n, e in compiler.EXAMPLES.items()})
    transconv.config.cpu, transconv.config.sizes, transconv.config.fallback = "interpret", "any", "error"


@pytest.fixture
def nothing_new(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which no plan may be made any more."""

    def stop() -> None:
        from transconv.runtime import compiler

        monkeypatch.setattr(compiler, "build", lambda *_: pytest.fail("a plan was made"))

    return stop


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float()


def counts() -> tuple[dict[str, int], dict[str, int]]:
    found = transconv.stats(reset=True)
    return found.native, found.fallback


def same(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, **numbers: Any) -> None:
    """Result and gradients are torch's, element by element."""
    given = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    ours = transconv.conv2d(*given, **numbers)
    torchs = torch.conv2d(*given, **numbers)
    grad = whole(*torchs.shape)
    assert torch.equal(ours, torchs) and ours.stride() == torchs.stride()
    for a, b in zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(torchs, given, grad), strict=True
    ):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_three_directions_of_any_size(nothing_new: Any) -> None:
    """Edges first: one pixel, one row, one column; both orders of memory; bias in the kernel."""
    w, b = whole(16, 8, 3, 3), whole(16)
    same(whole(1, 8, 9, 9), w, b, padding=1)
    assert counts() == ({"fwd any size": 1, "bwd_d any size": 1, "bwd_w any size": 1}, {})
    nothing_new()
    for n, h, width in ((1, 1, 1), (3, 1, 17), (2, 18, 1), (4, 7, 5)):
        same(whole(n, 8, h, width), w, b, padding=1)
    assert counts() == ({"fwd any size": 4, "bwd_d any size": 4, "bwd_w any size": 4}, {})


@pytest.mark.slow
def test_what_is_excluded_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    w = whole(16, 8, 3, 3)
    transconv.conv2d(whole(1, 8, 9, 9), w, padding=1)
    launched = []
    start = TritonKernel.run
    monkeypatch.setattr(
        TritonKernel, "run", lambda self, t, v=EXACT: (launched.append(v), start(self, t, v))
    )
    gaps = whole(1, 8, 9, 18)[..., ::2]
    for x, w_, numbers in ((whole(1, 8, 1, 16385), w, {"padding": 1}), (gaps, w, {"padding": 1})):
        assert torch.equal(transconv.conv2d(x, w_, **numbers), torch.conv2d(x, w_, **numbers))
    assert counts() == ({"fwd any size": 1, "fwd": 2}, {}) and launched and not any(launched)


def test_fused_calls_modules_and_operators(nothing_new: Any) -> None:
    """One layer by every name: the same kernels serve them all."""
    w, b = whole(16, 8, 3, 3), whole(16)
    layer = torch.nn.Conv2d(8, 16, 3, padding=1)
    layer.weight.data.copy_(w)
    layer.bias.data.copy_(b)
    ours = torch.nn.Sequential(layer)
    transconv.convert_(ours)

    def compare(n: int, h: int, width: int) -> None:
        x, residual = whole(n, 8, h, width), whole(n, 16, h, width)
        want = torch.conv2d(x, w, b, padding=1)
        assert torch.equal(ours(x), want)
        with transconv.use("cpu"):
            assert torch.equal(torch.conv2d(x, w, b, padding=1), want)
        numbers = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        assert torch.equal(torch.ops.transconv.convolution(x, w, b, *numbers), want)
        fused = transconv.fused_conv2d(x, w, b, padding=1, activation="relu", residual=residual)
        assert torch.equal(fused, (want + residual).relu())

    compare(1, 5, 6)
    nothing_new()
    compare(3, 2, 11)
    assert counts() == ({"fwd any size": 8}, {})


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("rank", "transposed", "numbers"),
    [
        (1, False, {"stride": 2, "padding": 1}),
        (1, True, {"stride": 2, "padding": 1, "output_padding": 1}),
        (2, False, {"padding": "same", "dilation": 2}),
        (3, False, {"padding": 1}),
    ],
)
def test_layers_of_other_kinds(
    rank: int, transposed: bool, numbers: dict[str, Any], nothing_new: Any
) -> None:
    """Edges of what is required: the smallest image that has a result first."""
    name = f"conv{'_transpose' * transposed}{rank}d"
    w = whole(8, 4 if transposed else 8, *((1, 1, 2) if rank == 3 else (3,) * rank))
    ours, torchs = getattr(transconv, name), getattr(torch.nn.functional, name)
    for size in (4, 3, 5):
        x = whole(2 if size == 4 else 1, 8, *[size] * (rank - 1), size + size % 2)
        assert torch.equal(ours(x, w, **numbers), torchs(x, w, **numbers)), size
        nothing_new()
    assert counts() == ({("bwd_d" if transposed else "fwd") + " any size": 3}, {})


@pytest.mark.slow
def test_stride_phases_without_a_tap() -> None:
    """Their gradients are zeros, which a kernel for any size stores as well."""
    w = whole(8, 4, 1, 1)
    for size in (5, 2):
        x = whole(1, 4, size, size).requires_grad_()
        made, want = transconv.conv2d(x, w, stride=2), torch.conv2d(x, w, stride=2)
        grad = whole(*want.shape)
        assert torch.equal(torch.autograd.grad(made, x, grad)[0], torch.autograd.grad(want, x, grad)[0])
    assert counts() == ({"fwd any size": 2, "bwd_d any size": 2}, {})


def test_an_unequal_padding_under_a_stride_is_refused() -> None:
    """How long dst is does not follow from a problem's text there: a kernel of its own computes it."""
    x, w = whole(1, 4, 6, 6), whole(4, 4, 3, 3)
    numbers = ([2, 2], [1, 1, 0, 0], [1, 1], False, [0, 0], 1)
    found = torch.ops.transconv.convolution(x, w, None, *numbers)
    assert torch.equal(found, torch.conv2d(torch.nn.functional.pad(x, (1, 0, 1, 0)), w, stride=2))
    assert counts() == ({"fwd": 1}, {})


@pytest.mark.slow
def test_one_graph_for_twenty_sizes(nothing_new: Any) -> None:
    """Symbolic sizes reach operators and kernels: no graph, no guard and no plan for a size."""
    model = torch.nn.Conv2d(8, 16, 3, padding=1)
    model.weight.data.copy_(whole(16, 8, 3, 3))
    model.bias.data.copy_(whole(16))
    plain = copy.deepcopy(model.requires_grad_(False))
    transconv.convert_(model)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, dynamic=True, fullgraph=True)
    for at in range(20):
        x = whole(2 + at % 3, 8, 3 + at % 10, 7 - at % 4).requires_grad_()
        if at == 2:  # the batch too, by then
            nothing_new()
        made, want = compiled(x), plain(x)
        assert torch.equal(made, want)
        grad = whole(*want.shape)
        assert torch.equal(torch.autograd.grad(made, x, grad)[0], torch.autograd.grad(want, x, grad)[0])
    assert graphs.frame_count == 1
    assert counts() == ({"fwd any size": 20, "bwd_d any size": 20}, {})
    kernels = [len(r.kernels) for r in size_policy._registries.values() if not isinstance(r, str)]
    assert len(kernels) == 2 and max(kernels) <= compiler.MOST_KERNELS


def test_marked_dims_are_not_specialised(nothing_new: Any) -> None:
    """Without ``dynamic=True``: the batch and one side are marked."""
    model = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False).requires_grad_(False)
    model.weight.data.copy_(whole(16, 8, 3, 3))
    plain = copy.deepcopy(model)
    transconv.convert_(model)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for n, side in ((2, 5), (3, 4), (5, 9), (2, 17)):
        x = whole(n, 8, 6, side)
        for dim in (0, 3):
            torch._dynamo.mark_dynamic(x, dim)
        assert torch.equal(compiled(x), plain(x))
        nothing_new()
    assert graphs.frame_count == 1 and counts() == ({"fwd any size": 4}, {})


@pytest.mark.slow
def test_export_with_dynamic_sizes(nothing_new: Any) -> None:
    model = torch.nn.ConvTranspose1d(8, 8, 3, stride=2).eval()
    plain = copy.deepcopy(model)
    transconv.convert_(model)
    x = torch.randn(2, 8, 11)
    given = torch.export.export(
        model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
    ).module()
    for n, width in ((2, 11), (5, 4), (3, 33)):
        x = torch.randn(n, 8, width)
        torch.testing.assert_close(given(x), plain(x))
        nothing_new()
    assert counts()[0] == {"bwd_d any size": 3}


def test_a_capture_takes_a_kernel_that_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that was not warmed up is captured with the layer's kernel, if it is loaded; else torch's."""
    transconv.config.fallback = "silent"
    w = whole(16, 8, 3, 3)
    transconv.conv2d(whole(1, 8, 5, 5), w)
    monkeypatch.setattr(select_impl, "is_capturing", lambda device: True)
    for loaded in (False, True):
        monkeypatch.setattr(TritonKernel, "is_loaded", lambda *_, loaded=loaded: loaded)
        x = whole(1, 8, 6, 9)
        assert torch.equal(transconv.conv2d(x, w), torch.conv2d(x, w))
    assert counts() == ({"fwd any size": 2}, {"capture:cold": 1})


def test_a_wrong_kernel_for_any_size_gives_way_to_an_exact_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planted: kernels that store nothing. The first result of each is checked, whatever its size."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setattr(first_run_check, "MOST_REJECTED", 1)
    check_records.forget()
    x, w = whole(1, 8, 5, 5), whole(16, 8, 1, 1)
    transconv.conv2d(x, w)
    assert counts() == ({"fwd any size": 1}, {})
    start = TritonKernel.run
    monkeypatch.setattr(TritonKernel, "run", lambda self, t, v=EXACT: None if v else start(self, t))
    y, v = whole(1, 4, 5, 5), whole(16, 4, 1, 1)
    assert torch.equal(transconv.conv2d(y, v), torch.conv2d(y, v))
    assert counts() == ({"fwd": 1}, {})
    check_records.forget()
