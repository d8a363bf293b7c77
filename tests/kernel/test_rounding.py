"""A product that is written in a sum is not rounded, one that has a name is: the same bits everywhere."""

# mypy: ignore-errors

from __future__ import annotations

import os
from fractions import Fraction

import numpy as np
import pytest
import torch

import transconv
from tests.kernel.cases import Case, floats, out
from tests.kernel.test_engines import copies, interpreted
from transconv.backend_triton import CompileJob, Resources, compile_offline
from transconv.ir import multiply_add
from transconv.kernel import Group, kernel
from transconv.target import Target

N = 200


@kernel.func
def squared(x):
    return x * x


@kernel.func
def added(x, y):
    return x + y


@kernel
def sums(group, A, B, C, Y):
    (i,) = group.work_offset()
    a, b = group.load(A[i:], shape=group.shape), group.load(B[i:], shape=group.shape)
    c = group.load(C[i:], shape=group.shape)
    product = a * b
    group.store(Y[0, i:], c + a * b)
    group.store(Y[1, i:], a * b - c)
    group.store(Y[2, i:], c - a * b)
    group.store(Y[3, i:], a * b + c * c)
    group.store(Y[4, i:], c + product)
    group.store(Y[5, i:], product - product)
    group.store(Y[6, i:], c + squared(a))
    group.store(Y[7, i:], added(c, a * b))
    group.store(Y[8, i:], c + (a - b) ** 3)
    total = c
    for _ in range(3):
        total += a * b
        total -= product
    group.store(Y[9, i:], total)


def expected(a, b, c, y):
    p, cube = a * b, (a - b) * (a - b)
    total = c
    for _ in range(3):
        total = multiply_add(a, b, total) - p
    return np.stack(
        [
            multiply_add(a, b, c),
            multiply_add(a, b, -c),
            multiply_add(-a, b, c),
            multiply_add(c, c, p),
            c + p,
            p - p,
            c + a * a,
            c + p,
            multiply_add(cube, a - b, c),
            total,
        ]
    )


@kernel.func
def rows(group, X, i):
    return group.load(X[i:], shape=(8, 3))


@kernel
def reduced(group, A, B, Y):
    (i,) = group.work_offset()
    group.store(Y[0, i:], (rows(group, A, i) * rows(group, B, i)).sum(axis=1))
    product = rows(group, A, i) * rows(group, B, i)
    group.store(Y[1, i:], product.sum(axis=1))
    group.store(Y[2, i:], np.sum((rows(group, A, i) - rows(group, B, i)) ** 2, axis=1))
    x = group.load(A[i:, :2], shape=(8, 3))  # of three columns one is inactive
    group.store(Y[3, i:], (x * rows(group, B, i)).sum(axis=1))


def reduced_in_order(a, b, y):
    p, d = a * b, a - b
    first = multiply_add(a[:, 1], b[:, 1], p[:, 0])
    squares = multiply_add(d[:, 2], d[:, 2], multiply_add(d[:, 1], d[:, 1], d[:, 0] * d[:, 0]))
    return np.stack([multiply_add(a[:, 2], b[:, 2], first), p[:, 0] + p[:, 1] + p[:, 2], squares, first])


NUMBERS = tuple(floats(N, seed=seed) for seed in range(3))
CASES = (
    (Case(sums, Group(N, 64), (*NUMBERS, out(10, N)), None), expected),
    (
        Case(reduced, Group(20, 8), (floats(20, 3), floats(20, 3, seed=1), out(4, 20)), None),
        reduced_in_order,
    ),
)
each = pytest.mark.parametrize(("case", "wanted"), CASES, ids=lambda c: getattr(c, "name", ""))


@each
def test_the_bits_of_the_simulator(case, wanted) -> None:
    given = copies(case)
    case.kernel.simulate(case.group, *given)
    np.testing.assert_array_equal(given[-1], wanted(*case.arguments))


@each
def test_the_bits_of_compiled_kernels(case, wanted) -> None:
    low = case.kernel.lower(case.group, *copies(case), target="sm_90")
    np.testing.assert_array_equal(interpreted(case, low.stages[-1][1])[-1], wanted(*case.arguments))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@each
def test_the_bits_of_tritons_interpreter(case, wanted) -> None:
    given = copies(case)
    case.kernel(case.group, *given)
    np.testing.assert_array_equal(given[-1], wanted(*case.arguments))


@pytest.mark.slow
def test_the_compiler_fuses_nothing_else() -> None:
    """None of the products that have names is fused in the machine code."""

    @kernel
    def rounded(group, A, B, Y):
        (i,) = group.work_offset()
        a, b = group.load(A[i:], shape=group.shape), group.load(B[i:], shape=group.shape)
        product = a * b
        group.store(Y[i:], b + product)

    assert fused(rounded, floats(N), floats(N), out(N)) == 0
    case, _ = CASES[0]
    assert fused(sums, *case.arguments) > 0


def fused(function, *given) -> int:
    """The fused operations of the machine code."""
    chip = Target.parse("sm_90")
    low = function.lower(Group(N, 64), *given, target=chip)
    params = tuple((t.dtype.name, ()) for t in low.kernel.params)
    job = CompileJob(
        low.source,
        low.kernel.name,
        params,
        chip.name,
        chip.backend,
        chip.arch,
        chip.warp_size,
        low.warps,
        low.num_stages,
        ("sass",),
        sizes=len(low.kernel.sizes.names),
        fuse=False,
    )
    (found,) = compile_offline([job])
    assert isinstance(found, Resources), found
    return found.texts["sass"].count("FFMA")


def test_one_rounding() -> None:
    """Beside fractions, also where a sum in float64 is rounded to a number between two of float32."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(2000).astype(np.float32) for _ in range(2))
    z = (x * y * 2.0 ** rng.integers(-30, 30, 2000)).astype(np.float32)
    x[0] = y[0] = 1 + 2**-12
    z[0] = 2.0**-60
    for a, b, c, got in zip(x, y, z, multiply_add(x, y, z), strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        near = [np.nextafter(got, np.float32(s)) for s in (-np.inf, np.inf)]
        off = abs(Fraction(float(got)) - exact)
        assert all(off <= abs(Fraction(float(n)) - exact) for n in near)


@kernel
def numbers(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    group.store(Y[0, i:], x * 1e-7)
    group.store(Y[1, i:], np.where(x > 0.1, 1e-7, x))
    group.store(Y[2, i:], np.where(x > 1, 0.1, 0.2))
    group.store(Y[3, i:], np.maximum(x, 1.2345e-5))
    group.store(Y[4, i:], group.load(X[i + 3 :], shape=group.shape, fill=0.1))
    group.store(Y[5, i:], x + (x < 0.3) * 0.1)


SHORT_AND_WIDE = ("float64", "float32", "float16", "bfloat16")


def numbers_beside_tiles(dtype, device="cpu"):
    """What the kernel stores, and what it should: each number rounded to the type of its tile; those
    without a tile of floats are float32, and products of 16 bits are rounded once."""
    kind = getattr(torch, dtype)
    x = torch.tensor([0.1, 0.3, -1.0, 2.0, 0.0, 0.2, 0.7, 1e-6], dtype=kind)
    found = torch.zeros(6, 8, dtype=kind, device=device)
    numbers(Group(8, 8), x.to(device), found)

    def typed(n):
        return torch.tensor(n, dtype=torch.float64).to(kind)

    wide, alone = torch.float64 if kind is torch.float64 else torch.float32, torch.tensor([0.1, 0.2])
    outside = torch.cat([x[3:], typed(0.1).repeat(3)])
    return found.cpu(), torch.stack(
        [
            (x.to(wide) * typed(1e-7).to(wide)).to(kind),
            torch.where(x > typed(0.1), typed(1e-7), x),
            torch.where(x > 1, *alone).to(kind),
            torch.maximum(x, typed(1.2345e-5)),
            outside,
            (x.to(wide) + (x < typed(0.3)).to(wide) * alone[0].to(wide)).to(kind),
        ]
    )


@pytest.mark.parametrize("dtype", SHORT_AND_WIDE)
def test_numbers_beside_tiles_have_their_type(dtype):
    """Also where Triton makes f32 of them: of a comparison, a choice, and what a load gives outside."""
    transconv.config.cpu = "interpret"
    torch.testing.assert_close(*numbers_beside_tiles(dtype), rtol=0, atol=0)
