"""Edges of values and gradients, against torch: NaN, infinities, zeros, ties, no degree of freedom, rows
that are ignored, norms of zero, saturated functions, empty inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.functional.dependent import TORCH
from transconv import functional
from transconv.compute import OPS, Op

Tensor = torch.Tensor
ROWS: dict[str, list[float]] = {
    "nan": [1, nan, 2, -1],
    "inf": [1, inf, 2, -1],
    "-inf": [1, -inf, 2, -1],
    "infs": [inf, inf, 1, 2],
    "-infs": [-inf] * 4,
    "both": [inf, -inf, 1, 0],
    "nan and inf": [nan, inf, 0, -inf],
    "zeros": [0] * 4,
    "signs of zero": [0.0, -0.0, 0.0, -0.0],
    "ties": [2, 2, 1, 2],
    "ties below": [-3, -3, 1, 1],
    "a zero": [2, 0, 3, 4],
    "two zeros": [2, 0, 0, 4],
    "zero and inf": [0, inf, 2, 1],
    "zero and nan": [0, nan, 2, 1],
    "zeros and inf": [0, 0, inf, 1],
    "saturated": [100, -100, 50, -88],
    "equal": [5] * 4,
    "nans": [nan] * 4,
    "near": [10000, 10000, 9999, 9998],
    "huge": [3e38, 3e38, 1, -3e38],
}
W = torch.tensor([1.0, 2, -1, 0.5])
AT = torch.tensor([[0, 3, 1, 0]])
RUNNING = torch.zeros(4), torch.tensor([1.0, 0, -1, inf])
NORMS = ("huge", "near")
"""Rows whose squares overflow in f32, where torch's sums are wider, and whose digits torch's loses."""

Called = Callable[[Any, Tensor], Any]
CALLS: dict[str, tuple[Called, tuple[str, ...]]] = {
    **{
        name: (lambda f, x, name=name: getattr(f, name)(x, 1), ())
        for name in ("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin")
    },
    **{
        f"{name} of all": (lambda f, x, name=name: getattr(f, name)(x), ())
        for name in ("prod", "max", "min")
    },
    # torch's slope of two equal elements that are huge is 1 each, not a half.
    "logsumexp": (lambda f, x: f.logsumexp(x, 1), ("huge", "near")),
    **{
        f"{name} less {c}": (lambda f, x, name=name, c=c: getattr(f, name)(x, 1, correction=c), NORMS)
        for name in ("var", "std")
        for c in (0.5, 1, 4, 9)
    },
    **{
        f"{name} of all less {c}": (lambda f, x, name=name, c=c: getattr(f, name)(x, correction=c), NORMS)
        for name in ("var", "std")
        for c in (1, 4, 9)
    },
    "var of one": (lambda f, x: f.var(x[:, :1], 1), NORMS),
    "any": (lambda f, x: f.any(x.detach(), 1), ()),
    "all": (lambda f, x: f.all(x.detach(), 1), ()),
    "softmax": (lambda f, x: f.softmax(x, 1), ()),
    "log_softmax": (lambda f, x: f.log_softmax(x, 1), ()),
    "normalize": (lambda f, x: f.normalize(x, dim=1), ()),
    "normalize by zero": (lambda f, x: f.normalize(x, dim=1, eps=0.0), ()),
    "cross_entropy": (lambda f, x: f.cross_entropy(x, torch.ones(len(x)).long(), reduction="none"), ()),
    "cross_entropy ignored": (
        lambda f, x: f.cross_entropy(x, torch.full((len(x),), -100), reduction="none"),
        (),
    ),
    "cross_entropy ignores a class": (
        lambda f, x: f.cross_entropy(x, torch.arange(len(x)) % 2 + 1, ignore_index=2, reduction="none"),
        (),
    ),
    "cross_entropy of nothing": (lambda f, x: f.cross_entropy(x, torch.full((len(x),), -100)), ()),
    "cross_entropy of some": (
        lambda f, x: f.cross_entropy(
            torch.cat([x, torch.ones_like(x)]), torch.tensor([-100, 1]).repeat_interleave(len(x))
        ),
        (),
    ),
    "layer_norm": (lambda f, x: f.layer_norm(x, (4,), W, W), NORMS),
    "rms_norm": (lambda f, x: f.rms_norm(x, (4,), W), NORMS),
    "group_norm": (lambda f, x: f.group_norm(x[:, :, None], 2, W, W), NORMS),
    "instance_norm": (lambda f, x: f.instance_norm(x[None]), NORMS),
    "batch_norm": (lambda f, x: f.batch_norm(x.T, None, None, training=True), NORMS),
    "batch_norm by running": (lambda f, x: f.batch_norm(x, *RUNNING), ()),
    "max_pool1d": (lambda f, x: f.max_pool1d(x[None], 3, 1, 1), ()),
    "avg_pool1d": (lambda f, x: f.avg_pool1d(x[None], 2, padding=1), ()),
    "adaptive_max_pool1d": (lambda f, x: f.adaptive_max_pool1d(x[None], 3), ()),
    "adaptive_avg_pool1d": (lambda f, x: f.adaptive_avg_pool1d(x[None], 3), ()),
    "cat": (lambda f, x: f.cat([x, x]), ()),
    "flip": (lambda f, x: f.flip(x, (1,)), ()),
    "gather": (lambda f, x: f.gather(x, 1, AT.expand(len(x), 4)), ()),
    "index_select": (lambda f, x: f.index_select(x, 1, AT[0]), ()),
    "embedding": (lambda f, x: f.embedding(AT, x.T, padding_idx=0), ()),
    "pad": (lambda f, x: f.pad(x, (1, 1)), ()),
    "interpolate": (lambda f, x: f.interpolate(x[None], scale_factor=2), ()),
    "pixel_shuffle": (lambda f, x: f.pixel_shuffle(x.reshape(-1, 4, 1, 1), 2), ()),
    "unfold": (lambda f, x: f.unfold(x.reshape(-1, 1, 2, 2), 2, padding=1), ()),
    "fold": (lambda f, x: f.fold(x.reshape(-1, 4, 1), (2, 2), 2), ()),
    "matmul": (lambda f, x: f.matmul(x[:, None], x[:, :, None]), ()),
    "linear": (lambda f, x: f.linear(x, W[None], W[:1]), ()),
}
"""Calls of rows, and the rows whose numbers differ for the reason that is told above it."""


def answers(call: Called, of: Any, rows: list[list[float]]) -> list[Tensor]:
    """The results of a call, and the gradient of its rows."""
    x = torch.tensor(rows, dtype=torch.float32).requires_grad_()
    y = call(of, x)
    found = [y] if isinstance(y, Tensor) else [*y]
    if found[0].requires_grad:
        g = torch.linspace(1, 2, found[0].numel()).reshape(found[0].shape)
        found += torch.autograd.grad(found[0], x, g)
    return [t.detach() for t in found]


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_functions(name: str) -> None:
    call, other = CALLS[name]
    rows = [values for row, values in ROWS.items() if row not in other]
    # torch.prod's gradient of a row depends on whether there is a zero in another one.
    for each in [[row] for row in rows] if "of all" in name or name == "prod" else [rows]:
        # torch's instance and batch norm are not exact of equal elements.
        torch.testing.assert_close(
            answers(call, functional, each),
            answers(call, TORCH, each),
            equal_nan=True,
            rtol=1e-4,
            atol=1e-4,
        )
    assert transconv.stats().native and not transconv.stats().fallback


POINTS = (
    nan,
    inf,
    -inf,
    0.0,
    -0.0,
    1e30,
    -1e30,
    1e-30,
    -1e-30,
    88.0,
    -88.0,
    710.0,
    -710.0,
    3.0,
    -3.0,
    6.0,
    20.0,
    1.0,
    -1.0,
    2.5,
)
APART = {
    "hardswish": {nan},
    "elu": {nan},  # torch's vectors say 1, its scalars NaN
    "gelu": {inf},  # torch's vectors of f32 say NaN
    "clamp": {nan},
}  # bounds that are infinite are none


@pytest.mark.every(9)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op.derivative is not None and op.arity < 3], ids=str
)
def test_operations(op: Op, dtype: torch.dtype) -> None:
    """Kernels in f32, the meaning in f64."""
    transconv.config.cpu = "interpret" if dtype is torch.float32 else "fallback"
    points = torch.tensor(
        [p for p in POINTS if not any(p == q or (p != p and q != q) for q in APART.get(op.name, ()))],
        dtype=dtype,
    )
    grid = [t.flatten() for t in torch.meshgrid(*[points] * op.arity, indexing="ij")]
    names, word = "ab"[: op.arity], "f32" if dtype is torch.float32 else "f64"
    f = transconv.computation(
        " ;; ".join(
            [
                f"compute edges_of_{op.name}",
                f"axes i={len(grid[0])}",
                *(f"tensor {n.upper()} {word} [{len(grid[0])}]" for n in names),
                *(f"read {n} = {n.upper()}[i]" for n in names),
                f"store Y[i] = {op.name}({', '.join(names)})",
            ]
        )
    )
    found = []
    for one in (f, op.function()):
        leaves = [t.clone().requires_grad_() for t in grid]
        y = one(*leaves)
        slopes = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
        found.append([y.detach(), *(torch.zeros_like(y) if t is None else t for t in slopes)])
    torch.testing.assert_close(
        known(found[0], found[1], op.name), found[1], equal_nan=True, rtol=1e-4, atol=1e-6
    )
    if dtype is torch.float32:
        assert transconv.stats().native and not transconv.stats().fallback


def known(ours: Sequence[Tensor], theirs: Sequence[Tensor], name: str) -> list[Tensor]:
    """Our results and gradients; of gelu_tanh without the gradients that torch does not know: its own are
    NaN where the argument's square or cube is infinite, ours have the limit, 0 or 1."""
    if name != "gelu_tanh":
        return [*ours]
    assert all(
        ((a == 0) | (a == 1) | a.isnan())[b.isnan()].all() for a, b in zip(ours, theirs, strict=True)
    )
    return [ours[0], *(a.where(~b.isnan(), b) for a, b in zip(ours[1:], theirs[1:], strict=True))]


ACTIVATED: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x * 1.0,
    "relu": F.relu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.every(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ACTIVATED)
def test_fused_convolutions(name: str | None) -> None:
    """By its name, and as a traced epilogue."""
    f, one = ACTIVATED[name], torch.ones(1, 1, 1)
    found = []
    for call in (
        lambda x: transconv.fused_conv1d(x, one, activation=name),
        lambda x: f(F.conv1d(x, one)),
        lambda x: transconv.fused_conv1d(x, one, epilogue=lambda a: f(a) * 1.0),
    ):
        x = torch.tensor(POINTS).reshape(1, 1, -1).requires_grad_()
        y = call(x)
        found.append([y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))])
    assert transconv.stats().native["fwd"] and not transconv.stats().fallback
    for got in (found[0], found[2]):
        torch.testing.assert_close(
            known(got, found[1], str(name)), found[1], equal_nan=True, rtol=1e-3, atol=1e-4
        )


@pytest.mark.every(3)
@pytest.mark.parametrize("again", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize(
    "call",
    [
        transconv.conv2d,
        lambda *given: transconv.fused_conv2d(*given, activation="relu"),
        lambda *given: transconv.fused_conv2d(*given, epilogue=lambda a: a * a),
    ],
    ids=["plain", "fused", "traced"],
)
def test_the_bias_of_an_empty_input(call: Callable[..., Tensor], again: bool) -> None:
    """torch computes it: no kernel takes empty tensors. The result of no channels has none."""
    for shapes, bias in ((((1, 0, 4, 4), (2, 0, 3, 3)), 2), (((0, 2, 4, 4), (2, 2, 3, 3)), 2)):
        x, w = (torch.ones(s, requires_grad=True) for s in shapes)
        b = torch.ones(bias, requires_grad=True)
        y = call(x, w, b)
        assert y.shape == F.conv2d(x, w, b).shape
        found = torch.autograd.grad(y.sum(), (x, w, b), create_graph=again)
        assert [t.shape for t in found] == [x.shape, w.shape, b.shape]
        assert not any(t.any() for t in found)
    assert {*transconv.stats().fallback} == {"shape:empty"}


def test_the_loss_of_large_logits_keeps_its_digits() -> None:
    """Of equal logits it is log(2): their size has no part in it."""
    for size in (1e4, 1e6):
        x = torch.full((1, 2), size, requires_grad=True)
        loss = functional.cross_entropy(x, torch.tensor([0]))
        torch.testing.assert_close(loss, torch.tensor(2.0).log())
        assert torch.autograd.grad(loss, x)[0].tolist() == [[-0.5, 0.5]]
    assert transconv.stats().native["cross_entropy"] == 2


def test_a_product_of_a_text_at_its_edges() -> None:
    f = transconv.computation(
        "compute prods ;; axes n=1 k=4 ;; read x = X[n, k] ;; store Y[n] = prod(x; k)"
    )
    for values in ROWS.values():
        found = []
        for one in (f, lambda x: torch.prod(x, 1)):
            x = torch.tensor([values], dtype=torch.float32).requires_grad_()
            found.append(torch.autograd.grad(one(x).sum(), x))
        torch.testing.assert_close(*found, equal_nan=True)
    assert not transconv.stats().fallback


def test_numbers_of_f64_that_f32_lacks() -> None:
    """In a condition, behind it, outside of a tensor and alone."""
    transconv.config.cpu = "interpret"
    text = """compute numbers
        tensor x f64 [n=64]
        tensor y f64 [n=64]
        tensor z f64 [n=64]
        axes n=64
        read a = x[n]
        read b = x[n + 1] else 0.1
        store y[n] = where(a < 0.1, a + 0.1, 0.7)
        store z[n] = b"""
    x = torch.full((64,), 0.1, dtype=torch.float64)
    x[::2] -= 1e-12
    transconv.stats(reset=True)
    y, z = transconv.computation(text)(x)
    assert transconv.stats().native and not transconv.stats().fallback
    assert torch.equal(y, torch.where(x < 0.1, x + 0.1, 0.7))
    assert torch.equal(z, torch.cat([x[1:], torch.tensor([0.1], dtype=torch.float64)]))
