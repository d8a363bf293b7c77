"""torch's transforms of every differentiable function and of every registered operator: torch's own
numbers, or a clear refusal; no tangent is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import transconv
from tests.functional.dependent import CASES, LIBRARY, Case
from tests.functional.gradients import TEXTS, operands
from tests.transforms import TRANSFORMS, differences
from transconv.compute import parse
from transconv.functional.calls import torch_operators
from transconv.functional.norms import SOFTMAX
from transconv.torch_ops.quantized import quantized_route
from transconv.verify.computation import wide

Tensor = torch.Tensor
OPS = torch.ops.transconv
NUMBERS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
TEXT = "stride=1x1 padding=1x1"
X = torch.randn(1, 1, 2, 2, dtype=torch.float64)
W = torch.randn(1, 1, 3, 3, dtype=torch.float64)


@pytest.fixture(autouse=True)
def by_kernels(fresh: None) -> None:
    transconv.config.cpu = "interpret"


def _named(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.rand(case.shape, dtype=torch.float64) + 0.3
    return x, torch.randn_like(x)


# Every ninth runs in make test, the others in make check-all.
@pytest.mark.every(18)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n.endswith("3d") else n for n in CASES]
)
def test_functions(name: str) -> None:
    case = CASES[name]
    x, v = _named(case)
    assert not differences(case.ours, case.theirs, x, v)
    transconv.stats(reset=True)
    case.ours(x)
    assert transconv.stats().native and not transconv.stats().fallback


def test_jvp_is_the_transpose_of_create_graph() -> None:
    """Of two ways that share nothing: <u, J v> and <J' u, v>."""
    for name in ("layer_norm", "cat", "logsumexp"):
        case = LIBRARY[name]
        x, v = _named(case)
        y, moved = torch.func.jvp(case.ours, (x,), (v,))
        u = torch.randn_like(y)
        leaf = x.clone().requires_grad_()
        (back,) = torch.autograd.grad(case.ours(leaf), leaf, u, create_graph=True)
        torch.testing.assert_close((u * moved).sum(), (back * v).sum())


# -- operators -------------------------------------------------------------------------------------


def _backward(x: Tensor) -> Tensor:
    made: Tensor = torch.ops.aten.convolution_backward.default(
        x, x.sin(), W, [1], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3
    )[1]
    return made


OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "convolution": (
        lambda x: OPS.convolution(x, W + x.sum(), None, *NUMBERS),
        lambda x: F.conv2d(x, W + x.sum(), padding=1),
    ),
    "convolution_backward": (
        lambda x: OPS.convolution_backward(x, x.sin(), W, *NUMBERS, [True] * 3)[1],
        _backward,
    ),
    "fused_convolution": (
        lambda x: OPS.fused_convolution(x, W, None, x, "sigmoid", *NUMBERS),
        lambda x: (F.conv2d(x, W, padding=1) + x).sigmoid(),
    ),
    "function": (
        lambda x: OPS.function(torch_operators.spelled(SOFTMAX, (x,), (1, None, None)), [x * x])[0],
        lambda x: F.softmax(x * x, 1),
    ),
    "compute": (
        lambda x: OPS.compute(PRODUCTS, [x, W[:, :, :2, :2]])[0],
        lambda x: (x * x * W[:, :, :2, :2]).sum(1),
    ),
}
PRODUCTS = (
    "compute products ;; tensor X f64 [1, 1, 2, 2] ;; tensor W f64 [1, 1, 2, 2] ;; "
    "axes n=1 h=2 w=2 c=1 ;; read x = X[0, c, h, w] ;; read k = W[n, c, h, w] ;; "
    "store Y[n, h, w] = sum(x*x*k; c)"
)
GRAPHS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "fwd": (
        lambda x: OPS.fwd(x, W, None, x, f"{TEXT} sigmoid"),
        lambda x: (F.conv2d(x, W, padding=1) + x).sigmoid(),
    ),
    "bwd_d": (lambda x: OPS.bwd_d(x, X, W, TEXT), lambda x: F.conv_transpose2d(x, W, padding=1)),
    "bwd_w": (lambda x: OPS.bwd_w(x, x.sin(), W, TEXT), _backward),
}
"""Operators of compiled graphs, which have no derivatives beside those of torch.func."""
FUNC = ("jvp", "vmap", "vmap_last", "grad", "jacrev", "jacfwd", "hessian", "vmap_of_grad", "jvp_of_jvp")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n != "function" else n for n in OPERATORS]
)
def test_operators(name: str) -> None:
    ours, theirs = OPERATORS[name]
    assert not differences(ours, theirs, X, torch.randn_like(X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GRAPHS)
def test_operators_of_graphs(name: str) -> None:
    """torch.func knows them by what they are composed of; a tangent of forward mode alone is refused."""
    (ours, theirs), v = GRAPHS[name], torch.randn_like(X)
    for transform in FUNC:
        torch.testing.assert_close(*(TRANSFORMS[transform](f, X, v) for f in (ours, theirs)))
    with pytest.raises(RuntimeError, match=f"transconv::{name} has no derivative in forward mode"):
        TRANSFORMS["dual"](ours, X, v)


# -- texts -----------------------------------------------------------------------------------------


def test_a_tangent_is_not_dropped() -> None:
    """2x of x*x, by a kernel."""
    f = transconv.computation("compute squares ;; axes i=3 ;; read x = X[i] ;; store Y[i] = x*x")
    x, v = torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 1, 2])
    for moved in (torch.func.jvp(f, (x,), (v,))[1], TRANSFORMS["dual"](f, x, v).tangent):
        assert moved.tolist() == [2, 4, 12]
    assert torch.func.grad(lambda x: f(x).sum())(x).tolist() == [2, 4, 6]
    assert torch.vmap(f)(torch.stack([x, x * 2])).tolist() == [[1, 4, 9], [4, 16, 36]]
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(leaf), leaf, torch.eye(3), is_grads_batched=True)
    assert torch.equal(found, torch.diag(2 * x))
    assert not transconv.stats().fallback and transconv.stats().native["squares_examples"] == 1


@pytest.mark.every(20)
@pytest.mark.parametrize("name", TEXTS)
def test_texts(name: str) -> None:
    """Tangents against the Jacobian of reverse mode, examples against one call each, second tangents
    against differences."""
    transconv.config.cpu = "fallback"
    torch.manual_seed(1)
    f = transconv.computation(wide(parse(f"compute {name} ;; {TEXTS[name]}")))
    given = [t.detach() for t in operands(f)]
    floats = [i for i, t in enumerate(given) if t.is_floating_point()]
    xs = tuple(given[i] for i in floats)
    vs = tuple(torch.randn_like(x) for x in xs)

    def of(*xs: Tensor) -> Any:
        own = [*given]
        for i, x in zip(floats, xs, strict=True):
            own[i] = x
        y = f(*own)
        return y if isinstance(y, tuple) else (y,)

    slopes = torch.autograd.functional.jacobian(of, xs)
    want = [
        sum((j * v).flatten(y.dim()).sum(-1) for j, v in zip(js, vs, strict=True))
        for y, js in zip(of(*xs), slopes, strict=True)
    ]
    torch.testing.assert_close([*torch.func.jvp(of, xs, vs)[1]], want)
    with forward_ad.dual_level():
        made = of(*map(forward_ad.make_dual, xs, vs))
        torch.testing.assert_close([forward_ad.unpack_dual(y).tangent for y in made], want)
    several = [torch.stack([x, x.flip(0), x * 2]) for x in xs]
    each = zip(*(of(*(s[i] for s in several)) for i in range(3)), strict=True)
    torch.testing.assert_close([*torch.vmap(of)(*several)], [torch.stack(y) for y in each])
    places = tuple(range(len(xs)))
    torch.testing.assert_close(torch.func.jacfwd(of, places)(*xs), slopes)
    torch.testing.assert_close(torch.func.jacrev(of, places)(*xs), slopes)

    def moved(*xs: Tensor) -> Any:
        return torch.func.jvp(of, xs, vs)[1]

    step = 1e-6
    ends = [moved(*(x + s * v for x, v in zip(xs, vs, strict=True))) for s in (step, -step)]
    torch.testing.assert_close(
        [*torch.func.jvp(moved, xs, vs)[1]],
        [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)],
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_tangent_through_an_operation_without_derivative_is_refused() -> None:
    f = transconv.computation(
        "compute rests ;; axes i=3 ;; read x = X[i] ;; store Y[i] += x ;; store M[i // 3] max= x"
    )
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="max= has no derivative"):
        torch.func.jvp(f, (x,), (x,))


def test_compiled_transforms() -> None:
    f = transconv.computation("compute squares ;; axes i=3 ;; read x = X[i] ;; store Y[i] = x*x")
    x = torch.tensor([1.0, 2, 3])
    compiled = torch.compile(lambda x: torch.func.grad(lambda x: f(x).sum())(x), backend="eager")
    assert compiled(x).tolist() == [2, 4, 6]


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_call_has_no_tangent() -> None:
    x, w = torch.randint(-9, 9, (1, 2, 3, 3)).char(), torch.randint(-9, 9, (2, 2, 3, 3)).char()

    def scaled(scale: Tensor) -> Tensor:
        given = dict.fromkeys(quantized_route.QUANTITIES, 0.0) | dict.fromkeys(
            ("weight_scale", "output_scale", "residual_scale"), 1.0
        )
        numbers = [n for name, n in given.items()]
        tensors = [scale if name == "input_scale" else None for name in given]
        made: Tensor = OPS.quantized_convolution(
            x, w, None, *NUMBERS, tensors, numbers, torch.float32, "", False
        )
        return made

    one = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="has no derivative in forward mode"):
        TRANSFORMS["dual"](scaled, one, one)
    with pytest.raises(RuntimeError, match="has no derivative in forward mode"):
        torch.func.jvp(scaled, (one,), (one,))
    with pytest.raises(RuntimeError, match="transconv::quantized_convolution has no gradient"):
        torch.func.grad(lambda s: scaled(s).sum())(one)
    scales = torch.tensor([1.0, 0.5])
    torch.testing.assert_close(torch.vmap(scaled)(scales), torch.stack([scaled(s) for s in scales]))


def test_gradients_of_many_results_in_a_thread_of_their_own() -> None:
    """As the backward pass of a GPU has one, which knows of no vmap that is going on."""
    f = transconv.computation("compute squares ;; axes i=3 ;; read x = X[i] ;; store Y[i] = x*x")
    made: list[torch.Tensor] = []
    level = torch._C._vmapmode_increment_nesting()
    try:
        several = torch._add_batch_dim(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), 0, level)
        thread = threading.Thread(target=lambda: made.append(f(several)))
        thread.start()
        thread.join()
        assert torch._remove_batch_dim(made[0], level, 2, 0).tolist() == [[1, 4, 9], [16, 25, 36]]
    finally:
        torch._C._vmapmode_decrement_nesting()
    assert transconv.stats().native and not transconv.stats().fallback
