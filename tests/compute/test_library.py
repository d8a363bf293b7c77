"""The library's texts: what they mean is what torch computes, of any layout, and so are their gradients;
and kernels compute what they mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from transconv.compute import execute, library, parse
from transconv.compute.library import Gradient, LibraryFormula, NamedSpace, Strided
from transconv.functional.calls import symbolic_bind
from transconv.ir import bf16, f32
from transconv.runtime import build_compute
from transconv.target import Target
from transconv.verify.computation import ComputationCase, after_every_pass

D = torch.float64
Values = dict[str, torch.Tensor]


def strided(t: torch.Tensor) -> Strided:
    """A tensor as the library has it."""
    return symbolic_bind.strided(symbolic_bind.lying(t))


def evaluated(formula: LibraryFormula, text: str, values: Values) -> None:
    """Add what a text stores to the values, both in the shapes of the formula's tensors."""
    compute = parse(text)
    stored = {w.view.tensor.name for w in compute.writes}
    read = {}
    for t in compute.tensors:
        if t.name not in stored:
            seen = formula.page.seen[t.name]
            view = values[t.name].detach().reshape(seen.shape).permute(seen.order).reshape(seen.sizes)
            read[t.name] = view.numpy()
    for name, answer in execute(compute, read).items():
        seen = formula.page.seen[name]
        made = torch.from_numpy(answer.value).reshape([seen.shape[i] for i in seen.order])
        values[name] = made.permute([seen.order.index(i) for i in range(len(seen.order))])


def holds(formula: LibraryFormula, tensors: list[torch.Tensor], function: Callable[..., Any]) -> None:
    """The formula's results and gradients are those of torch's function."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    want = function(*leaves)
    wanted = want if isinstance(want, tuple) else (want,)
    values = dict(zip(formula.given, tensors, strict=True))
    evaluated(formula, formula.text, values)
    for name, w in zip(formula.results, wanted, strict=True):
        close(values[name].reshape(w.shape), w.detach().double())
    if not formula.gradients:
        return
    values["G"] = torch.randn_like(wanted[0])
    of = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(wanted[0], of, values["G"], allow_unused=True)
    for gradient in formula.gradients:
        evaluated(formula, gradient.text, values)
    for name, g in zip(
        [n for n, t in zip(formula.given, leaves, strict=True) if t.requires_grad], grads, strict=True
    ):
        if g is not None:
            close(values[f"d{name}"].reshape(g.shape), g)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9, equal_nan=True, check_stride=False)


@st.composite
def tensors(draw: Any, least: int = 1) -> torch.Tensor:
    """Small, of any rank and order of dims in memory, with gaps or without."""
    shape = draw(st.lists(st.integers(1, 4), min_size=least, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.sampled_from([1, 1, 2]))
    made = torch.randn([shape[d] for d in order[:-1]] + [shape[order[-1]] * gap], dtype=D)[..., ::gap]
    return made.permute([order.index(d) for d in range(len(shape))])


REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": torch.logsumexp,
    "var": torch.var,
    "std": torch.std,
}


@given(tensors(), st.data())
@settings(max_examples=40, deadline=None)
def test_reductions(x: torch.Tensor, data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(REDUCTIONS)))
    over = data.draw(st.sets(st.integers(0, x.dim() - 1), min_size=1))
    keep = data.draw(st.booleans())
    if name in ("var", "std") and np.prod([x.shape[d] for d in over]) < 2:
        return
    holds(
        library.reduced(name, strided(x), sorted(over), keep),
        [x],
        lambda t: REDUCTIONS[name](t, dim=sorted(over), keepdim=keep),
    )


@given(tensors(), st.data())
@settings(max_examples=20, deadline=None)
def test_rows_of_any_layout(x: torch.Tensor, data: Any) -> None:
    dim = data.draw(st.integers(0, x.dim() - 1))
    name = data.draw(st.sampled_from(["softmax", "log_softmax", "normalize", "norm"]))
    if name == "normalize":
        holds(library.normalize(strided(x), [dim]), [x], lambda t: F.normalize(t, dim=dim))
    elif name == "norm":
        order = data.draw(st.sampled_from(sorted(library.NORMS)))
        holds(
            library.reduced("norm", strided(x), [dim], order=order),
            [x],
            lambda t: torch.linalg.vector_norm(t, order, dim),
        )
    else:
        holds(getattr(library, name)(strided(x), dim), [x], lambda t: getattr(F, name)(t, dim))


@given(tensors(), st.data())
@settings(max_examples=20, deadline=None)
def test_norms_of_rows(x: torch.Tensor, data: Any) -> None:
    count = data.draw(st.integers(1, x.dim()))
    shape = x.shape[-count:]
    w, b = torch.randn(shape, dtype=D), torch.randn(shape, dtype=D)
    with_w = data.draw(st.booleans())
    given_w = [w, b] if with_w else []
    specs = [strided(t) for t in given_w]
    holds(
        library.layer_norm(strided(x), count, *specs, eps=0.1, saves=True),
        [x, *given_w],
        lambda t, *wb: F.layer_norm(t, shape, *wb, eps=0.1),
    )
    holds(
        library.rms_norm(strided(x), count, *specs[:1], eps=0.1, saves=True),
        [x, *given_w[:1]],
        lambda t, *ws: F.rms_norm(t, shape, *ws, eps=0.1),
    )


@given(
    st.integers(1, 3),
    st.sampled_from([(6, 3), (6, 1), (4, 4), (1, 1)]),
    st.lists(st.integers(1, 3), max_size=3),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_norms_of_features(
    n: int, groups: tuple[int, int], rest: list[int], last: bool, scaled: bool
) -> None:
    size, count = groups
    x = torch.randn(n, *rest, size, dtype=D).movedim(-1, 1)
    x = x if last else x.contiguous()
    w, b, p = torch.randn(size, dtype=D), torch.randn(size, dtype=D), torch.rand(size, dtype=D)
    wb = [w, b] if scaled else []
    specs = [strided(t) for t in wb]
    if x.numel() > count:  # torch refuses groups of one element
        holds(
            library.group_norm(strided(x), count, *specs, eps=0.1, saves=True),
            [x, *wb],
            lambda t, *wb: F.group_norm(t, count, *wb, eps=0.1),
        )
    given_w, given_b = specs or (None, None)
    holds(
        library.batch_norm(strided(x), strided(p), strided(p), given_w, given_b, False, eps=0.1),
        [x, p, p, *wb],
        lambda t, p, q, *wb: F.batch_norm(t, p.detach(), q.detach(), *wb, eps=0.1),
    )
    if n * np.prod(rest) > 1:

        def trained(t: torch.Tensor, p: torch.Tensor, q: torch.Tensor, *wb: torch.Tensor) -> Any:
            p, q = p.detach().clone(), q.detach().clone()
            return F.batch_norm(t, p, q, *wb, training=True, momentum=0.3, eps=0.1), p, q

        made = library.batch_norm(
            strided(x), strided(p), strided(p), given_w, given_b, momentum=0.3, eps=0.1, saves=True
        )
        holds(made, [x, p, p, *wb], trained)


POOLS = [
    ((3, 3), (2, 2), (1, 1), (1, 1), False),
    ((2, 3), (2, 1), (0, 1), (1, 2), False),
    ((3, 2), (2, 2), (1, 1), (1, 1), True),
    ((1, 1), (3, 3), (0, 0), (1, 1), False),
    ((9, 8), (9, 8), (0, 0), (1, 1), False),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("window", "stride", "padding", "dilation", "ceil"), POOLS)
def test_pools(window: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> None:
    x = torch.randint(0, 9, (2, 3, 9, 8)).double()  # with ties
    largest = F.max_pool2d(x, window, stride, padding, dilation, ceil)
    holds(
        library.max_pool(strided(x), window, stride, padding, dilation, strided(largest), True),
        [x],
        lambda t: F.max_pool2d(t, window, stride, padding, dilation, ceil),
    )
    for pads in (True, False):
        mean = F.avg_pool2d(x, window, stride, padding, ceil, pads)
        holds(
            library.average_pool(strided(x), window, stride, padding, strided(mean), pads),
            [x],
            lambda t, pads=pads: F.avg_pool2d(t, window, stride, padding, ceil, pads),
        )


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4, 5), (3, 5, 6)),
        ((4, 5), (3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)),
        ((2, 3, 4, 5), (2, 1, 5, 6)),
        ((4, 5), (5,)),
        ((5,), (5, 6)),
        ((5,), (5,)),
        ((1, 1), (1, 1)),
        ((3, 1), (1, 2)),
        ((3, 4, 5), (5,)),
    ],
)
def test_products(shapes: Any) -> None:
    a, b = (torch.randn(s, dtype=D) for s in shapes)
    holds(library.matmul(strided(a), strided(b)), [a, b], torch.matmul)


@pytest.mark.every(2)
@pytest.mark.parametrize("activation", ["", "relu", "gelu", "gelu_tanh", "silu", "hardswish", "tanh"])
def test_linear(activation: str) -> None:
    from transconv.torch_ops.fused.fused_route import ACTIVATIONS

    x, w, b = (torch.randn(s, dtype=D) for s in ((3, 4, 7), (5, 7), (5,)))
    holds(
        library.linear(strided(x), strided(w), strided(b), activation, saves=True),
        [x, w, b],
        lambda x, w, b: ACTIVATIONS[activation](F.linear(x, w, b)),
    )


def test_cross_entropy_and_truth() -> None:
    x, t = torch.randn(5, 4, dtype=D), torch.tensor([0, 1, -100, 3, 2])
    for a, b, dim in ((x, t, 1), (x[:, :1], t.clamp(max=0), 1), (x[1], t[1], 0)):
        holds(
            library.cross_entropy(strided(a), strided(b), dim),
            [a, b],
            lambda x, t: F.cross_entropy(x, t, reduction="none"),
        )
    z = torch.tensor([[0.0, 0, 2], [0, 0, 0], [3, 1, 2]], dtype=D)
    for dim in (0, 1):
        holds(library.reduced("prod", strided(z), [dim]), [z], lambda t, dim=dim: t.prod(dim))
        for name, f in (("any", torch.any), ("all", torch.all)):
            for given_z in (z, z > 0):
                formula = library.reduced(name, strided(given_z), [dim])
                values = {"X": given_z}
                evaluated(formula, formula.text, values)
                assert torch.equal(values["Y"].bool(), f(given_z, dim))


# -- the builder -----------------------------------------------------------------------------------


def test_dims_of_one_name_are_one_axis_where_strides_let_them() -> None:
    """Rows of features that lie last are one axis; with a gap between them, two."""
    last = Strided((2, 8, 3, 4), (96, 1, 32, 8), bf16)
    assert "X bf16 [k=24, f=8]" in library.batch_norm(last, training=True).text
    gaps = Strided((2, 8, 3, 4), (192, 1, 64, 8), bf16)
    assert "X bf16 [k=6, k1=4, f=8] strides(64,8,1)" in library.batch_norm(gaps, training=True).text


def test_every_text_reads_back_and_has_ten_lines_of_steps() -> None:
    x, w = Strided.dense((4, 6, 5), f32), Strided.dense((6, 5), f32)
    formulas = [
        library.softmax(x, 1),
        library.layer_norm(x, 2, w, w, saves=True),
        library.rms_norm(x, 2, w),
        library.group_norm(x, 3),
        library.reduced("var", x, [0, 2]),
    ]
    for formula in formulas:
        for text in (formula.text, *(g.text for g in formula.gradients)):
            assert parse(str(parse(text))) == parse(text)
            assert len([line for line in text.splitlines() if line.split()[0] in ("let", "store")]) <= 10
    assert formulas[0].gradients == (Gradient(formulas[0].gradients[0].text, {"dX": "X"}),)


def test_a_page_says_which_words_stand_for_what() -> None:
    x = Strided.dense((2, 3, 40), f32)
    page = NamedSpace(["n", "n", "k"], x.shape, {"X": (x, (0, 1, 2)), "Y": (x, (0, 1, 2))})
    assert (page["X"], page["k"], page.count("n"), page["z"]) == ("X[n, k]", "k", 6, "z")


# -- kernels ---------------------------------------------------------------------------------------

X = Strided.dense((5, 6, 9), f32)
W = Strided.dense((6, 9), f32)
KERNELS = {
    "layer": library.layer_norm(X, 2, W, W, saves=True),
    "group": library.group_norm(X, 3, saves=True),
    "max": library.max_pool(X, (3,), (2,), (1,), (1,), Strided.dense((5, 6, 5), f32), True),
    "linear": library.linear(X, Strided.dense((7, 9), f32), Strided.dense((7,), f32), "gelu", saves=True),
}
TEXTS = [(name, at) for name, f in KERNELS.items() for at in range(1 + len(f.gradients))]


def text_of(name: str, at: int) -> str:
    formula = KERNELS[name]
    return [formula.text, *(g.text for g in formula.gradients)][at]


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "at"), TEXTS)
def test_kernels_in_tritons_interpreter(name: str, at: int) -> None:
    compute = parse(text_of(name, at))
    plan = build_compute(compute, Target.parse("interpreter"))
    assert not ComputationCase(compute, "float").launched(plan, "cpu").problem


@pytest.mark.parametrize("name", ["layer", "max"])
def test_every_pass_keeps_the_meaning(name: str) -> None:
    for at in range(2):
        compute = parse(text_of(name, at))
        plan = build_compute(compute, Target.parse("sm_90"))
        assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(compute, plan) if j.problem] == []


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5), (3, 0, 5), (0, 4), (2, 0, 0, 3), (1, 4), ()])
def test_a_tensor_like_another_lies_as_torchs(shape: tuple[int, ...]) -> None:
    whole = min(shape, default=2) > 1  # torch's order of dims without a place of their own is another
    for order in itertools.permutations(range(len(shape))) if whole else [(*range(len(shape)),)]:
        x = torch.empty(shape).permute(order)
        found = Strided(tuple(x.shape), x.stride(), f32).like(bf16)
        assert found == Strided(tuple(x.shape), torch.empty_like(x).stride(), bf16)


def test_a_word_of_no_dims_has_one_point() -> None:
    space = NamedSpace(["n", "c"], [3, 4], {"X": (Strided.dense((3, 4), f32), [0, 1])})
    assert space["k"] == "k" and space.count("k", "n") == 3 and space["n"] == "n"
