"""Results that a call leaves out are allocated and returned, and defaults are taken."""

# mypy: ignore-errors

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.kernel.cases import Case, floats
from tests.kernel.test_engines import interpreted as interpreted_by
from transconv.errors import KernelError
from transconv.kernel import Buffer, Group, kernel, uniform
from transconv.kernel.decorator import KernelLaunches
from transconv.kernel.sizes import C, M, N

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


@kernel(work_shape=(M, N), group_shape=(8, 16), results={"D": None, "near": np.int32})
def distances(
    group, X: Buffer[M, C], Z: Buffer[N, C], D: Buffer[M, N], near: Buffer[M, (N + 15) // 16], scale=2.0
):
    (i, j), (_, g), (m, n) = group.work_offset(), group.id(), group.shape
    x, z = group.load(X[i:], shape=(m, X.shape[1])), group.load(Z[j:], shape=(n, Z.shape[1]))
    apart = np.sqrt(((x[:, None] - z[None]) ** 2).sum(axis=2))
    group.store(D[i:, j:], apart * scale)
    group.store(near[i:, g], j + apart.argmin(axis=1))


X, Z = floats(19, 3), floats(21, 3, seed=1)
APART = np.sqrt(((X[:, None] - Z[None]) ** 2).sum(2))
NEAR = np.stack([APART[:, :16].argmin(1), 16 + APART[:, 16:].argmin(1)], 1)


def check(found, scale=2.0) -> None:
    d, near = (np.asarray(a) for a in found)
    np.testing.assert_allclose(d, scale * APART, 1e-5)
    assert near.dtype == np.int32 and (near == NEAR).all()


@interpreted
def test_a_call_without_results() -> None:
    check(distances(X, Z))
    found = distances(torch.from_numpy(X), torch.from_numpy(Z), scale=3.0)
    assert all(isinstance(a, torch.Tensor) for a in found)
    check(found, 3.0)
    check(distances(Group((19, 21), (8, 16)), X, Z, 1.0), 1.0)


def test_simulated_and_shown() -> None:
    check(distances.simulate(X, Z, 0.5), 0.5)
    meta = (torch.empty(19, 3, device="meta"), torch.empty(21, 3, device="meta"))
    assert "def distances(X, Z, D, near, scale" in distances.show(*meta, target="sm_90")


@interpreted
def test_a_call_with_results_returns_nothing() -> None:
    given = np.zeros((19, 21), np.float32), np.zeros((19, 2), np.int32)
    assert distances(X, Z, *given, 1.0) is None
    check(given, 1.0)
    assert distances(X, Z, D=given[0], near=given[1]) is None
    check(given)
    distances.check(X, Z)


@interpreted
def test_like_the_first_array() -> None:
    @kernel(results="Y")
    def doubled(group, X, Y):
        (i,) = group.work_offset()
        group.store(Y[i:], group.load(X[i:], shape=group.shape) * 2)

    x = torch.arange(9, dtype=torch.float16)
    assert torch.equal(doubled(Group(9, 4), x), x * 2)


def test_what_is_remembered_of_a_call() -> None:
    """A later call is filled with what it leaves out, in its place, and with new memory each time."""
    asked = distances.asked((X, Z), {})
    recipe = distances.recipe((X, Z), asked)
    (full, found), (again, _) = recipe.filled((X, Z)), recipe.filled((X, Z))
    assert full[:2] == (X, Z) and full[2] is found[0] and full[3] is found[1] and full[4] == 2.0
    assert again[2] is not full[2] and full[2].shape == (19, 21) and full[3].shape == (19, 2)
    assert distances.recipe((X, Z, *found, 1.0), distances.asked((X, Z, *found, 1.0), {})) is None


def test_a_known_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a call like one before is started with what it left out."""
    x, z = torch.from_numpy(X), torch.from_numpy(Z)
    launches, started = KernelLaunches(distances), []
    key = (x.dtype, x.shape, x.stride(), x.device, z.dtype, z.shape, z.stride(), z.device)
    recipe = distances.recipe((x, z), distances.asked((x, z), {}))
    launches.calls[key] = recipe, lambda *args: started.append(args) or True
    found = launches((x, z), {})
    ((a, b, d, near, scale),) = started
    assert a is x and b is z and d is found[0] and near is found[1] and scale == 2.0


@pytest.mark.parametrize(
    ("arguments", "words", "said"),
    [
        ((X,), {}, r"distances\(group, _\); expected distances\(group, X, Z, scale\), or with D near too"),
        ((X, Z), {"D": APART}, "or with D near too"),
        ((2.0, 3.0), {}, "X is no array"),
    ],
)
def test_wrong_calls(arguments, words, said) -> None:
    with pytest.raises(KernelError, match=said):
        distances(*arguments, **words)


@pytest.mark.parametrize(
    ("results", "said"),
    [("Q", "has the result Q; expected some of X Y"), ({"Y": "float3"}, "found the type 'float3'")],
)
def test_wrong_results(results, said) -> None:
    @kernel(results=results)
    def wrong(group, X, Y):
        pass

    with pytest.raises(KernelError, match=said):
        wrong(Group(1), X, X)


@kernel
def noise(group, Y, seed):
    (i,) = group.work_offset()
    group.store(Y[i:], uniform(i + np.arange(group.shape[0]), seed))


def test_random_numbers() -> None:
    """Equally distributed, other ones for another seed, and the same in compiled kernels."""
    found = []
    for seed in (7, 8):
        y = np.zeros(4096, np.float32)
        noise.simulate(Group(4096, 1024), y, seed)
        found.append(y)
        parts, _ = np.histogram(y, 16, (0, 1))
        assert 0 <= y.min() and y.max() < 1 and abs(y.mean() - 0.5) < 0.02
        assert parts.min() > 200 and parts.max() < 320 and abs(np.corrcoef(y[1:], y[:-1])[0, 1]) < 0.05
    assert abs(np.corrcoef(*found)[0, 1]) < 0.05
    low = noise.lower(Group(4096, 1024), found[0], 7, target="sm_90")
    case = Case(noise, Group(4096, 1024), (np.zeros(4096, np.float32), 7), None)
    compiled = interpreted_by(case, low.kernel)
    np.testing.assert_array_equal(compiled[0], found[0])
