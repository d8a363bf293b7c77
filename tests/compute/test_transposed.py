"""Gradients of views by one rule: ``<G, f(x)> == <gradient, x>``, and no kernel adds in place where the
places can be solved."""

from __future__ import annotations

import itertools
from math import prod
from random import Random

import numpy as np
import pytest

from transconv.compute import Axis, Compute, execute, parse, transposed
from transconv.compute.analysis.store_conflicts import covers
from transconv.compute.autodiff.affine_inverse import inverse
from transconv.compute.expressions import ComputeScope, expression
from transconv.errors import ComputeError, ScheduleError
from transconv.ir import Layout, Tensor, Var, f32, index
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass

X = "tensor X f32 [{}]"
# Text, whether the gradient is read at solved places, and over how many of them.
VIEWS = {
    "pad": ("[8, 6]\n axes i=12 j=11\n read x = X[i - 2, j - 3] else 3", 1),
    "reflect": ("[8, 6]\n axes i=12 j=11\n read x = X[reflect(i - 2, 8), reflect(j - 3, 6)]", 9),
    "replicate": ("[8]\n axes i=13\n read x = X[clamp(i - 2, 8)]", 6),
    "circular": ("[8]\n axes i=12\n read x = X[wrap(i - 2, 8)]", 3),
    "symmetric": ("[8]\n axes i=14\n read x = X[symmetric(i - 3, 8)]", 3),
    "flip": ("[8, 6]\n axes i=8 j=6\n read x = X[7 - i, j]", 1),
    "slice": ("[8, 17]\n axes i=8 j=5\n read x = X[i, j*3 + 2]", 1),
    "expand": ("[6]\n axes j=4 i=6\n read x = X[i]", 4),
    "permute": ("[2, 3, 4]\n axes i=4 j=2 k=3\n read x = X[j, k, i]", 1),
    "reshape": ("[24]\n axes i=6 j=4\n read x = X[i*4 + j]", 1),
    "reshaped": ("[6, 4]\n axes i=24\n read x = X[i // 4, i % 4]", 1),
    "nearest": ("[2, 4, 5]\n axes c=2 h=8 w=15\n read x = X[c, h // 2, w // 3]", 6),
    "shuffle": (
        "[2, 12, 3, 5]\n axes b=2 c=3 h=6 w=10\n read x = X[b, c*4 + h % 2*2 + w % 2, h // 2, w // 2]",
        1,
    ),
    "windows": ("[2, 9]\n axes c=2 k=3 o=4\n read x = X[c, o*2 + k - 1]", 3),
    "diagonal": ("[7, 7]\n axes i=7\n read x = X[i, i]", 1),
    "far": ("[3]\n axes i=20\n read x = X[reflect(i - 8, 3)]", 20),
}


def back(made: Compute, of: str = "X", adds: bool = False) -> Compute:
    x, y = next(t for t in made.tensors if t.name == of), made.c.tensor
    into = Tensor("dX", x.dims, x.shape, Layout.dense(x.dtype, x.shape))
    return transposed(made, of, into, Tensor("G", y.dims, y.shape, Layout.dense(y.dtype, y.shape)), adds)


def holds(made: Compute, gradient: Compute, of: str = "X") -> None:
    """The gradient is the transposed map, tried with random tensors."""
    assert str(parse(str(gradient))) == str(gradient)
    given, draw = dict(ComputationCase(made).given), np.random.default_rng(0)
    y, x = made.c.tensor, next(t for t in made.tensors if t.name == of)
    g, v = draw.standard_normal(y.shape), draw.standard_normal(x.shape)
    got = execute(gradient, given | {"G": g})["dX"].value
    results = [np.nan_to_num(execute(made, given | {of: t})[y.name].value) for t in (v, 0 * v)]
    apart = ((results[0] - results[1]) * g).sum() - (np.nan_to_num(got) * v).sum()
    assert abs(apart) < 1e-9 * max(1, g.size)


def kernel(gradient: Compute, schedule: str | None = None) -> str:
    plan = build_compute(gradient, TARGETS["sm_90"], Schedule.parse(schedule) if schedule else None)
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(gradient, plan) if j.problem] == []
    return plan.source


@pytest.mark.every(2)
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    text, turns = VIEWS[name]
    axes = " ".join(text.splitlines()[1].split()[1:])
    stored = ", ".join(a.partition("=")[0] for a in axes.split())
    made = parse(f"compute {name}\n tensor X f32 {text}\n store Y[{stored}] = x")
    gradient = back(made)
    holds(made, gradient)
    assert not gradient.added
    counted = np.prod([x.size for x in gradient.axes_of("K")])
    assert counted == turns, gradient
    assert "atomic" not in kernel(gradient)
    adding = back(made, adds=True)
    holds(made, adding)


def test_what_tensors_tell_is_added_in_place() -> None:
    made = parse(
        "compute take\n tensor I i64 [9]\n tensor X bf16 [11, 20]\n tensor Y bf16 [9, 20]\n"
        "axes n=9 k=20\n read i = I[n]\n read x = X[i, 19 - k]\n store Y[n, k] = x"
    )
    gradient = back(made)
    assert "store  dX[i, 19 - k] += g" in str(gradient)
    holds(made, gradient)
    source = kernel(gradient)  # sums of 16 bits are f32, and rounded once
    assert "tl.atomic_add(dX_sums" in source and "tl.store(dX " in source
    plan = build_compute(gradient, TARGETS["interpreter"])
    assert not ComputationCase(gradient, "exact").launched(plan, "cpu").problem
    with pytest.raises(ScheduleError, match="adds to dX_sums in no order"):
        from transconv.compute import Alone
        from transconv.runtime import Plan, build

        build(Alone(gradient), TARGETS["sm_90"], None, None, True, Plan)


@pytest.mark.parametrize("of", ["A", "B"])
def test_concatenations(of: str) -> None:
    made = parse("""compute concat
        tensor A f32 [2, 5, 6, 3]
        tensor B f32 [2, 3, 6, 6]
        axes   n=2 c=8 h=6 w=6
        read   a = A[n, c, 5 - h, w // 2]
        read   b = B[n, c - 5, h, reflect(w - 1, 6)]
        let    x = where(c < 5, a, b)
        store  Y[n, c, h, w] = x*3""")
    holds(made, back(made, of), of)
    kernel(back(made, of), "n:2 p1:4 | fma")


def test_sums_and_multiples() -> None:
    made = parse(
        "compute pool\n tensor X f32 [2, 9]\n axes c=2 o=4 | k=3\n read x = X[c, o*2 + k - 1]\n"
        "let s = sum(x*(k + 1); k)\n store Y[c, o] = 1 - -s / 3.0"
    )
    holds(made, back(made))


@pytest.mark.parametrize("value", ["x*(i + 2)", "(i + 2)*x"])
def test_a_factor_stands_on_either_side(value: str) -> None:
    made = parse(f"compute p\n axes i=4\n read x = X[i]\n store Y[i] = {value}")
    holds(made, back(made))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("store Y[i] = x*x", "is no multiple"),
        ("store Y[i] = exp(x)", "is no multiple"),
        ("let m = max(x; i)\n store Y[0] = m", "max"),
        ("store Y[i] = where(x > 0, x, 0)", "axes tell"),
        ("store Y[i] = 3", "does not reach"),
    ],
)
def test_what_is_not_linear_is_refused(steps: str, said: str) -> None:
    with pytest.raises(ComputeError, match=said):
        back(parse(f"compute p\n axes i=4\n read x = X[i]\n {steps}"))


def test_drawn_coordinates_are_inverted_or_refused() -> None:
    """Every position is found exactly once, for any coordinate computed from one axis."""
    draw, found = Random(0), 0
    for _ in range(80):
        text = "i"
        for _ in range(draw.randint(1, 4)):
            n = draw.randint(1, 5)
            text = draw.choice(
                (
                    f"({text}) + {n}",
                    f"{n} - ({text})",
                    f"({text})*{n}",
                    f"({text}) // {n}",
                    f"({text}) % {n + 2}",
                    f"min({text}, {n + 3})",
                    f"max({text}, {n})",
                    f"reflect({text}, {n + 2})",
                    f"clamp({text}, {n + 2})",
                )
            )
        size, places = draw.randint(1, 14), draw.randint(1, 12)
        e = expression(text, ComputeScope({"i": size}, f32, whole=index))
        made = inverse(e, Axis("i", size, ""), Var("p"), {Var("p"): places})
        if made is None:
            continue
        found += 1
        compute = parse(
            f"compute p\n tensor X f32 [{places}]\n axes i={size}\n read x = X[{text}]\nstore Y[i] = x"
        )
        holds(compute, back(compute))
    assert found > 45


STORED = (
    "i",
    "{last} - i",
    "i + 2",
    "i - 1",
    "(i + 3) % {size}",
    "i*2 + 1",
    "i*2 - 3",
    "i // 2 * 2 + (1 - i % 2)",
)


@pytest.mark.every(3)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("read", ["i", "{last} - i", "i + 1", "reflect(i - 2, {size})"])
def test_results_that_are_stored_elsewhere_than_at_their_axes(read: str, stored: str) -> None:
    """What is stored beyond the result is not there, and its gradient is 0, also where sizes are equal."""
    for size, places in ((8, 8), (8, 17), (6, 6)):
        at, to = (text.format(size=size, last=size - 1) for text in (read, stored))
        made = parse(
            f"compute p\n tensor X f32 [{size}]\n tensor Y f32 [{places}]\n axes i={size}\n"
            f"read x = X[{at}]\n store Y[{to}] where 0 <= {to} and {to} < {places} = x*2"
        )
        holds(made, back(made))


STORES = {
    "Y[i, j]": 1,
    "Y[i, i]": 0,
    "Y[i, i + j]": 0,
    "Y[i, (i + j) % 6]": 1,
    "Y[j, i*2 + k]": 1,
    "Y[i, j + k]": 0,
    "Y[7 - i, j]": 1,
    "Y[i % 4, j]": 0,
    "Y[i // 2, i % 2, j]": 1,
    "Y[i + j*8]": 1,
    "Y[i + j*7]": 0,
}


@pytest.mark.parametrize("place", STORES)
def test_which_stores_cover_a_tensor(place: str) -> None:
    """Each element once: counted over all points of the axes, whichever dims have axes in common."""
    read = "read x = X[i, j, k]" if "k" in place else "read z = X[i, j, k]\n let x = sum(z; k)"
    compute = parse(f"compute c\n axes i=8 j=6 k=2\n {read}\n store {place} = x")
    (view,) = (w.view for w in compute.writes)
    axes = {x.name: range(x.size) for x in compute.axes if x.name in place[1:]}
    found = [
        eval(f"({place[2:-1]},)", dict(zip(axes, point, strict=True)))
        for point in itertools.product(*axes.values())
    ]
    once = len({*found}) == len(found) == prod(view.tensor.shape)
    assert covers(compute, view) is once is bool(STORES[place])
