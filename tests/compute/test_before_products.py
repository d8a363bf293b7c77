"""Index changes in front of a convolution: sources are read directly, forward and for gradients, in one to
three dimensions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compute.test_transposed import back
from transconv.compute import Compute, execute, parse
from transconv.compute.sampled_points import _Told
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass

N = 6  # elements along each dim of the convolution's operand
F = torch.nn.functional
# What stands before: the lines that read x at features c and places {at}, and what torch reads there.
BEFORE = {
    "pad": ("read x = X[c, {reflect(A - 1, 4)}]", {"X": (8, 4)}, lambda g, r: _reflected(g["X"], r)),
    "reverse": ("read x = X[c, {5 - A}]", {"X": (8, 6)}, lambda g, r: g["X"].flip(tuple(range(-r, 0)))),
    "gather": ("read i = I[c]\nread x = X[i, {A}]", {"X": (11, 6)}, lambda g, r: g["X"][g["I"]]),
    "concat": (
        "read a = X[c, {A}]\nread b = U[c - 5, {A // 2}]\nlet x = where(c < 5, a, b)",
        {"X": (5, 6), "U": (3, 3)},
        lambda g, r: torch.cat([g["X"], _twice(g["U"], r)]),
    ),
    "reflect_flip": (
        "read x = X[c, {3 - reflect(A - 1, 4)}]",
        {"X": (8, 4)},
        lambda g, r: _reflected(g["X"].flip(tuple(range(-r, 0))), r),
    ),
}


def _reflected(t: torch.Tensor, rank: int) -> torch.Tensor:
    return F.pad(t[None], (1, 1) * rank, mode="reflect")[0]


def _twice(t: torch.Tensor, rank: int) -> torch.Tensor:
    for d in range(1, rank + 1):
        t = t.repeat_interleave(2, d)
    return t


def text(before: str, rank: int, weights: bool = False) -> Compute:
    """A convolution with windows of 3 of what stands before; ``weights``: the gradient of its weights."""
    letters = "dhw"[-rank:]
    lines, declared = _lines(before, [f"(o{c} + k{c})" for c in letters])
    out, taps = ", ".join(f"o{c}" for c in letters), ", ".join(f"k{c}" for c in letters)
    axes = "f=16 c=8 " + " ".join(f"o{c}={N - 2} k{c}=3" for c in letters)
    at = f"f, {out}" if weights else f"f, c, {taps}"
    kept = f"f, c, {taps}" if weights else f"f, {out}"
    summed = out.replace(",", "") if weights else f"c {taps.replace(',', '')}"
    other, stored = ("G", "D") if weights else ("W", "Y")
    return parse(
        "\n".join(
            [
                f"compute {before}{rank}",
                *declared,
                f"tensor {other} f16 [{_sizes(at)}]",
                f"axes {axes}",
                lines,
                f"read w = {other}[{at}]",
                f"store {stored}[{kept}] = sum(x*w; {summed})",
            ]
        )
    )


def _lines(before: str, places: list[str]) -> tuple[str, list[str]]:
    """The lines that read x at places, and those that declare its tensors."""
    lines, shapes, _ = BEFORE[before]
    for part in ("reflect(A - 1, 4)", "5 - A", "A // 2", "3 - reflect(A - 1, 4)", "A"):
        lines = lines.replace(f"{{{part}}}", ", ".join(part.replace("A", p) for p in places))
    declared = [
        f"tensor {n} f16 [{c}, {', '.join([str(size)] * len(places))}]" for n, (c, size) in shapes.items()
    ]
    return lines, declared + (["tensor I i64 [8]"] if before == "gather" else [])


def chain(before: str, rank: int) -> tuple[Compute, Compute]:
    """What stands before, stored as Z; and the gradient of Z, as a convolution has it."""
    letters = "dhw"[-rank:]
    lines, declared = _lines(before, [f"p{c}" for c in letters])
    at, taps = ", ".join(f"p{c}" for c in letters), ", ".join(f"k{c}" for c in letters)
    axes = "c=8 " + " ".join(f"p{c}={N}" for c in letters)
    far = ", ".join(f"p{c} - k{c}" for c in letters)
    sizes = [", ".join([str(n)] * rank) for n in (N - 2, 3)]
    view = "\n".join(
        [f"compute {before}{rank}", *declared, f"axes {axes}", lines, f"store Z[c, {at}] = x"]
    )
    product = f"""compute product
        tensor G f16 [16, {sizes[0]}]
        tensor W f16 [16, 8, {sizes[1]}]
        axes {axes} | f=16 {" ".join(f"k{c}=3" for c in letters)}
        read g = G[f, {far}]
        read w = W[f, c, {taps}]
        store Z[c, {at}] = sum(g*w; f {taps.replace(",", "")})"""
    return parse(view), parse(product)


def _sizes(at: str) -> str:
    known = {"f": "16", "c": "8"}
    return ", ".join(known.get(a, "3" if a[0] == "k" else str(N - 2)) for a in at.split(", "))


@pytest.mark.every(2)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("before", BEFORE)
def test_convolutions(before: str, rank: int) -> None:
    made = text(before, rank)
    given = {name: torch.from_numpy(a) for name, a in ComputationCase(made).given.items()}
    if "I" in given:
        given["I"] = given["I"].long().clamp(0, 10)
    x = BEFORE[before][2](given, rank).double()
    conv = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    want = conv(x[None], given["W"].double())[0]
    got = execute(made, {name: t.numpy() for name, t in given.items()})["Y"].value
    np.testing.assert_allclose(got, want.numpy(), atol=1e-9)
    back = text(before, rank, weights=True)
    for compute in (made, back):
        assert compute.factors is not None  # the matrix unit takes what the views bring
        if rank == 2:
            plan = build_compute(
                compute,
                TARGETS["sm_90"],
                Schedule.parse(
                    "oh.ow:16 f:16 c:16 | mma" if compute is made else "f:16 c.kh.kw:16 ow:16 | mma"
                ),
            )
            assert [j.problem for _, j in after_every_pass(compute, plan) if j.problem] == []
            assert "tl.dot" in plan.source and len(plan.steps) == 1


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("before", BEFORE)
def test_gradients_of_what_a_convolution_reads(before: str, rank: int) -> None:
    """The whole chain: the convolution's product, then the views transposed, against torch's autograd."""
    view, product = chain(before, rank)
    given = {
        name: torch.from_numpy(a)
        for name, a in (ComputationCase(view).given | ComputationCase(product).given).items()
    }
    if "I" in given:
        given["I"] = given["I"].long().clamp(0, 10)
    leaves = {n: given[n].double().clone().requires_grad_() for n in BEFORE[before][1]}
    conv = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    y = conv(BEFORE[before][2](given | leaves, rank)[None], given["W"].double())[0]
    want = torch.autograd.grad(y, [*leaves.values()], given["G"].double())
    arrays = {name: t.detach().numpy() for name, t in given.items()}
    g = execute(product, arrays)["Z"].value
    assert product.factors is not None
    for of, w in zip(leaves, want, strict=True):
        got = execute(back(view, of), arrays | {"G": g})["dX"].value
        np.testing.assert_allclose(got, w.numpy(), atol=1e-9)


def test_indices_that_stand_in_for_values_count_the_points() -> None:
    """For the index of a gather the number of the point at which it is read."""
    compute = parse(
        "compute g\n tensor I i32 [n=3, m=5]\n tensor X f32 [7, k=2]\n axes n=3 m=5 k=2\n"
        " read i = I[n, m]\n read x = X[i, k]\n store Y[n, m, k] = x"
    )
    (found,) = compute.names.stand_ins.values()
    points = [eval(str(found), {"n": n, "m": m}) for n in range(3) for m in range(5)]
    assert points == [*range(15)]


def test_coordinates_of_sums_that_are_one_axis() -> None:
    """Whether each position of an axis is a place of its own, by its places."""
    places = {
        "n": True,
        "n*2 + 1": True,
        "7 - n": True,
        "n // 2": False,
        "n % 4": False,
        "n + m": False,
        "3": False,
    }
    for place, alone in places.items():
        compute = parse(
            f"compute a\n tensor Y f32 [32]\n axes n=8 m=3\n read x = X[n, m]\n store Y[{place}] += x"
        )
        (write,) = compute.writes
        told = _Told(compute, write)
        assert told.is_alone(next(x for x in compute.axes if x.name == "n"), 0) is alone
