"""Every kind of row of the table, one small graph each: all of it is ours, and is what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.graph.meant import by_meaning, compare, traced
from transconv.graph import KernelRow, TorchRow, backend, report
from transconv.graph.lowerings.table import ROWS, why_no_row
from transconv.graph.lowerings.view_indexing import fitted

Tensor = torch.Tensor
X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
IMAGE = X.view(1, 2, 4, 6)
WHOLE = torch.arange(24).view(4, 6) - 7
PLACES = torch.tensor([[3, 0, 1], [2, 2, 0]])

MAPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "activations": (
        torch.tanh,
        F.softplus,
        F.elu,
        F.relu6,
        F.hardswish,
        F.mish,
        F.hardsigmoid,
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    "functions": (
        torch.exp,
        torch.floor,
        torch.round,
        torch.sign,
        lambda x: x.abs().log2(),
        lambda x: x**3,
        lambda x: (x * x + 1) ** -0.5,
        lambda x: (x * x + 1).rsqrt(),
    ),
    "numbers": (
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: 2 - x,
        lambda x: x / 3,
        lambda x: 1 / (x * x + 1),
        lambda x: torch.add(x, x, alpha=3),
        lambda x: torch.rsub(x, 1, alpha=2),
    ),
    "powers and bounds": (
        lambda x: (x * x + 0.1) ** 0.3,
        lambda x: x**16,
        lambda x: x**11,
        lambda x: x**-3,
        lambda x: 3**x,
        lambda x: x.clamp(max=0.3),
        lambda x: torch.clamp(x, x * 0 - 0.5, x.abs() / 2),
        lambda x: torch.clamp(x, max=x.flip(0)),
    ),
    "truths": (
        lambda x: x > 0.3,
        lambda x: (x > 0) & ~(x < 1),
        lambda x: (x > 0) | (x == x),
        lambda x: (x > 0) * x,
        lambda x: x.masked_fill(x < 0, 7.0),
        torch.isnan,
        lambda x: torch.where(x > 0, 1.0, x),
        lambda x: (x > 0).to(torch.float32),
    ),
}
VIEWS: dict[str, tuple[Callable[..., Any], ...]] = {
    "shapes": (
        lambda x: x.transpose(0, 2) + 0,
        lambda x: x.reshape(8, 6) * 2,
        lambda x: x[:, 1] + 1,
        lambda x: x[:, ::2].exp(),
        lambda x: x.unsqueeze(1).expand(2, 3, 4, 6).contiguous(),
        lambda x: x.flip(0, 2),
        lambda x: x.roll((1, 2), (0, 2)),
        lambda x: x.repeat(2, 1, 3) + 0,
        lambda x: x[:, :1].repeat(3, 2, 4, 1),
        lambda x: x.squeeze(0) + 0,
    ),
    "parts": (
        lambda x: [p + 0 for p in x.split(3, 2)],
        lambda x: [p.exp() for p in x.chunk(2, 1)],
        lambda x: torch.stack([x, x + 1], 1),
        lambda x: torch.cat([x, x[:, :1], x], 1),
        lambda x: torch.cat([x[:, :1].repeat(1, 2, 1), x, x[:, -1:].repeat(1, 3, 1)], 1),
        lambda x: torch.cat([x[:, :1].repeat(1, 0, 1), x * 2, x[:, :0]], 1),
        lambda x: torch.cat([x[:0], x.transpose(0, 2).exp().transpose(0, 2)]),
        lambda x: torch.slice_scatter(x, x[:, :2] * 0, 1, 1, 3),
        lambda x: torch.select_scatter(x, x[:, 0], 1, 2),
        lambda x: torch.as_strided_scatter(x, x[0, :3, :2].t() * 2, (2, 3), (3, 12), 5),
        lambda x: torch.as_strided_scatter(x, x.transpose(0, 1) + 1, (4, 2, 6), (6, 24, 1)),
    ),
    "pads": (
        lambda x: F.pad(x, (1, 2), value=3.0),
        lambda x: F.pad(x, (-1, 2, 1, 0)),
        lambda x: F.pad(x, (2, 1), mode="reflect"),
        lambda x: F.pad(x, (2, 1), mode="replicate"),
    ),
    "numbers made of places": (
        lambda x: x + torch.arange(6),
        lambda x: x * torch.full((6,), 2.0),
        lambda x: torch.zeros_like(x) + x,
        lambda x: x + torch.arange(0, 12, 2),
    ),
}
REDUCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "sums": (
        lambda x: x.sum(),
        lambda x: x.mean((0, 2)),
        lambda x: x.mean((1, 2), True),
        lambda x: x.prod(1),
        lambda x: (x > 0).sum(1),
        lambda x: x.sum(2, keepdim=True),
        lambda x: x[:1].sum(0),
    ),
    "extremes": (
        lambda x: x.amax((0, 1)),
        lambda x: x.amin(2, True),
        lambda x: x.argmax(),
        lambda x: x.argmin(1, True),
        lambda x: x.max(1),
        lambda x: x.min(2, True),
    ),
    "truths": (lambda x: (x > 2).any(), lambda x: (x > -1).all(1), lambda x: (x > 0).any(2, True)),
    "moments": (
        lambda x: x.var(1),
        lambda x: x.std(2, correction=0),
        lambda x: torch.var_mean(x, (0, 2)),
        lambda x: F.layer_norm(x, (4, 6)),
        lambda x: F.group_norm(x, 2),
        lambda x: F.instance_norm(x),
        lambda x: F.rms_norm(x, (6,)),
    ),
    "rows": (
        lambda x: x.softmax(1),
        lambda x: x.log_softmax(2),
        lambda x: x.logsumexp(0),
        lambda x: F.normalize(x, dim=1),
    ),
}
IMAGES: dict[str, tuple[Callable[..., Any], ...]] = {
    "pools": (
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True),
        lambda x: F.adaptive_avg_pool2d(x, 1),
    ),
    "averages": (
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
        lambda x: F.adaptive_avg_pool2d(x, (4, 6)),
        lambda x: F.adaptive_avg_pool3d(x, (1, 5, 7)),
        lambda x: F.adaptive_avg_pool1d(x[0], 4),
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    ),
    "linear": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, (3, 4), mode="bilinear"),
        lambda x: F.interpolate(x, (7, 9), mode="bilinear", align_corners=True),
    ),
    "other ratios": (
        lambda x: F.interpolate(x, (7, 9)),
        lambda x: F.interpolate(x, scale_factor=1.7),
        lambda x: F.interpolate(x, (3, 5), mode="nearest-exact"),
    ),
    "larger": (
        lambda x: F.interpolate(x, scale_factor=3.0),
        lambda x: F.interpolate(x, size=(6, 9)),
        lambda x: F.interpolate(x, size=(2, 3)),
        lambda x: F.pixel_shuffle(torch.cat([x, x], 1), 2),
    ),
    "convolutions": (
        lambda x: F.conv2d(x, x[:, :, :3, :3], padding=1),
        lambda x: F.conv2d(x, x[0, :, None, :2, :3], stride=(2, 1), groups=2),
        lambda x: F.conv2d(x, x[:, :, :2, :2], dilation=2),
        lambda x: F.conv_transpose2d(x, x[0, :, None, :3, :3], stride=2, output_padding=1),
        lambda x: F.conv1d(x[:, :, 0], x[:, :, 0, :3]),
    ),
}
OTHERS: dict[str, tuple[Callable[..., Any], ...]] = {
    "whole numbers": (
        lambda x, i: i + 3,
        lambda x, i: i * i - 2,
        lambda x, i: i.sum(1),
        lambda x, i: i.amax(0),
        lambda x, i: i / 4,
        lambda x, i: i > 2,
        lambda x, i: i.to(torch.float64) + x[0, :, 0:1],
        lambda x, i: i.clamp(min=0),
        lambda x, i: i.to(torch.int32).sum(),
    ),
    "products": (
        lambda x, i: x[0] @ x[1].t(),
        lambda x, i: torch.bmm(x, x.transpose(1, 2)),
        lambda x, i: torch.addmm(x[0, :, :4], x[0], x[1].t(), beta=2, alpha=3),
        lambda x, i: x[0] @ x[0, 0],
        lambda x, i: torch.einsum("bij,bkj->bik", x, x),
    ),
}
TOLD: dict[str, tuple[Callable[..., Any], ...]] = {
    "indices": (
        lambda x, j: x.index_select(1, j[0]),
        lambda x, j: x[0].gather(0, j),
        lambda x, j: F.embedding(j, x[0]),
        lambda x, j: x[:, j - 1],
        lambda x, j: x[0, j, j + 1],
        lambda x, j: x[:, :, j],
    )
}


# Where torch's compiler writes weights that it computed in f32.
NEAR = {"linear": 1e-6, "other ratios": 1e-6}


def cases() -> list[Any]:
    given = {
        "maps": (MAPS, (X,)),
        "views": (VIEWS, (X,)),
        "reductions": (REDUCTIONS, (X,)),
        "images": (IMAGES, (IMAGE,)),
        "others": (OTHERS, (X, WHOLE)),
        "told": (TOLD, (X, PLACES)),
    }
    return [
        pytest.param(fs, inputs, NEAR.get(name, 1e-9), id=f"{kind}-{name}")
        for kind, (table, inputs) in given.items()
        for name, fs in table.items()
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize(("functions", "inputs", "most"), cases())
def test_rows(functions: tuple[Callable[..., Any], ...], inputs: tuple[Tensor, ...], most: float) -> None:
    """All functions of a kind as one graph."""
    made: list[Any] = []

    def noted(gm: Any, given: Any) -> Any:
        run = backend(gm, given, options={"rest": "eager"})
        made.append(run.transconv)  # type: ignore[attr-defined]
        return run

    def whole(*given: Any) -> Any:
        found: list[Any] = []
        for f in functions:
            result = f(*given)
            found += result if isinstance(result, (tuple, list)) else [result]
        return tuple(found)

    with by_meaning(), torch.no_grad():
        compare(whole, torch.compile(whole, backend=noted), inputs, most, gradients=False)
    rows = [r for m in made for g in m.graphs for r in g.rows]
    assert rows and not [r for r in rows if not isinstance(r, KernelRow)]


WITH_A_NUMBER: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda x, n: x + n,
    lambda x, n: n - x,
    lambda x, n: x * n,
    lambda x, n: x / n,
    lambda x, n: x < n,
)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300, -0.0])
def test_numbers_that_a_text_or_a_type_lacks(number: float) -> None:
    """An operation with one is torch's or a kernel's, and the others stay kernels."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * x - x
        return (y, *(g(y, number) for g in WITH_A_NUMBER))

    x = torch.tensor([[0.0, 1.0, -2.0, torch.inf]])
    run = traced(f, [x])
    with by_meaning(), np.errstate(all="ignore"):
        compare(f, run, [x], 0)
    rows = [r for g in run.transconv.graphs for r in g.rows]  # type: ignore[attr-defined]
    assert any(isinstance(r, KernelRow) and r.operations[:2] == ("mul", "sub") for r in rows)


@pytest.mark.every(2)
@pytest.mark.parametrize("whole", [torch.int8, torch.uint8])
def test_quantised_graphs_are_fused(whole: torch.dtype) -> None:
    """What PT2E writes around a convolution: no kernel of its own for what stands behind it. Scales are
    powers of two, with which f32 is exact."""
    ops, least = torch.ops.quantized_decomposed, torch.iinfo(whole).min
    limits = (least, least + 255, whole)

    def f(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, 2**-5, 3, *limits), 2**-5, 3, *limits)
        w = ops.dequantize_per_channel(w, s, z, 0, -127, 127, torch.int8)
        y = F.conv2d(x, w, padding=1).relu()
        return (
            ops.quantize_per_tensor(y, 2**-3, 7, *limits),
            ops.quantize_per_channel(y, 16 * s, z, 1, *limits),
            ops.quantize_per_tensor.tensor(y, s[:1], z[:1], *limits),
        )

    made: list[Any] = []

    def noted(gm: Any, given: Any) -> Any:
        run = backend(gm, given, options={"rest": "eager"})
        made.append(run.transconv)  # type: ignore[attr-defined]
        return run

    given = (
        X[:1].reshape(1, 4, 6, 1).expand(1, 4, 6, 5).float(),
        (torch.arange(216) - 108).char().view(6, 4, 3, 3),
        2.0 ** -torch.arange(6, 12),
        torch.arange(6),
    )
    with by_meaning(), torch.no_grad():
        compare(f, torch.compile(f, backend=noted), given, 1e-6)
    rows = [r for m in made for g in m.graphs for r in g.rows]
    assert not [r for r in rows if not isinstance(r, KernelRow)]
    assert rows[-1].operations[:3] == ("convolution", "relu", "quantize")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "averages", "other ratios", "powers and bounds"])
def test_gradients_of_rows(name: str) -> None:
    """Where elements are taken from places that are known, each sums those that took it."""
    functions, x = (MAPS[name], X) if name in MAPS else (IMAGES[name], IMAGE)
    x = x.clone().requires_grad_()
    run = torch.compile(
        lambda x: tuple(f(x) for f in functions), backend=backend, options={"rest": "eager"}
    )
    with by_meaning():
        compare(lambda x: tuple(f(x) for f in functions), run, [x], NEAR.get(name, 1e-9))
    found = [g for g in report(run).graphs]
    assert [g.phase for g in found] == ["forward", "backward"]
    assert not [r for g in found for r in g.rows if isinstance(r, TorchRow)]


@pytest.mark.slow
def test_launched_by_the_interpreter() -> None:
    """What is computed for places beyond an end is masked in kernels, too."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.interpolate(x, (7, 9), mode="bilinear"),
            F.adaptive_avg_pool2d(x, (3, 4)),
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        )

    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    compare(f, run, [IMAGE.float().requires_grad_()], 1e-5)
    assert not transconv.stats().fallback


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("cumsum.default", "a scan"),
        ("topk.default", "order"),
        ("scatter.src", "are put where values say"),
        ("nonzero.default", "size of its result"),
        ("bernoulli.p", "random"),
        ("digamma.default", "no row"),
        ("_scaled_dot_product_flash_attention.default", "attention"),
    ],
)
def test_why_an_operation_has_no_row(op: str, why: str) -> None:
    packet, _, overload = op.partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload)
    assert target not in ROWS and why in why_no_row(target)


def test_elements_that_are_put_where_no_place_says() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        i = torch.tensor([2, 0, 0])
        return (
            torch.zeros_like(x).index_put((i,), x[:3], accumulate=True),
            torch.zeros_like(x).index_put((i,), x[:3]),
        )

    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning():
        compare(f, run, [X[0]], 1e-9)
    (row,) = [r for r in report(run).graphs[0].rows if isinstance(r, TorchRow)]
    assert any("put" in reason for reason in row.reasons)


def test_dropout_has_torchs_mask(dtype: torch.dtype = torch.float32) -> None:
    """In training and, where it drops nothing, without one."""

    def f(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.4).exp() + F.dropout(x, 0.4, False) + F.dropout(x, 1.0)

    x, found = torch.randn(5, 7, dtype=dtype), []
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    for function in (f, run):
        torch.manual_seed(3)
        own = x.clone().requires_grad_()
        with by_meaning():
            made = function(own)
            made.sum().backward()
        found.append((made, own.grad))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    first, last = report(run).graphs
    assert [r.operations for r in first.rows if isinstance(r, TorchRow)] == [
        "2 x empty.memory_format, 2 x bernoulli.p"
    ]
    assert not [r for r in last.rows if isinstance(r, TorchRow)]


def test_the_table_follows_that_of_the_operations() -> None:
    """A row of the operations' table is enough for torch's function of it."""
    aten = torch.ops.aten
    for op in (
        aten.silu.default,
        aten.gelu.default,
        aten.add.Tensor,
        aten.maximum.default,
        aten.ne.Scalar,
        aten.where.self,
        aten.softplus.default,
        aten.erf.default,
    ):
        assert op in ROWS


def test_options_that_a_row_does_not_mean_are_torchs() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return F.softplus(x, beta=2.0), F.elu(x, alpha=0.5), torch.div(x, 2, rounding_mode="floor")

    with by_meaning():
        compare(f, traced(f, [X]), [X], 1e-9)


def test_axes_have_no_names_of_types() -> None:
    """Of ten dims that cannot be joined, the ninth is not called as a type is."""
    x = torch.randn((2,) * 10, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        turned = x.permute(*reversed(range(10)))
        return x + turned, (x * turned).sum((8, 9)), x @ turned

    with by_meaning():
        compare(f, run := traced(f, [x]), [x], 1e-9)
    (found,) = run.transconv.graphs  # type: ignore[attr-defined]
    assert all(isinstance(r, KernelRow) for r in found.rows)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x.reshape(4, 1) @ y.reshape(1, 5),
        lambda x, y: torch.addmm(y, x.reshape(4, 1), y[None]),
        lambda x, y: F.conv2d(x.reshape(2, 1, 2, 1), y.reshape(5, 1, 1, 1), y),
        lambda x, y: F.conv2d(
            F.conv2d(y.reshape(1, 5, 1, 1), x[:1].expand(5).reshape(1, 5, 1, 1)), x.reshape(4, 1, 1, 1)
        ),
    ],
)
def test_products_of_one_term_are_maps(f: Any) -> None:
    """No schedule of a product has a sum of one term."""
    given = [torch.randn(4, requires_grad=True), torch.randn(5, requires_grad=True)]
    with by_meaning() as texts:
        compare(f, traced(lambda x, y: (f(x, y),), given), given, 1e-5)
    assert not any("=1 ic=1\n" in t or "=1 oc=1\n" in t or "| k=1\n" in t for t in texts), texts


@pytest.mark.every(2)
@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 24])
def test_indices_along_a_line_are_found(n: int) -> None:
    """Every index that is a rounded line, ends held where it is clipped, is one: as torch's tensors of
    places for windows, nearest neighbours and slices."""
    at = np.arange(n)
    for size in (1, 2, 3, 4, 7, n, 2 * n, 2 * n + 1):
        for values in (
            at * size // n,
            (at * size + size // 2) // n,
            at * (size - 1) // max(1, n - 1),
            np.clip(at - 2, 0, n - 1),
            np.clip(at + 1, 0, n - 1),
            (at + 1) * size // n,
            size - 1 - at * size // n,
        ):
            line = fitted(values.astype(np.int64))
            assert line is not None, values
            made = (at * line.up + line.add) // line.down
            low, high = (
                made.min() if line.low is None else line.low,
                made.max() if line.high is None else line.high,
            )
            assert np.array_equal(np.clip(made, low, high), values)
    assert fitted(np.array([0, 9, 1, 8, 2, 7, n])) is None
