"""Kernels written in Python on a GPU: the cases of tests/kernel, and products by the matrix unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel import (
    cases,
    function_cases,
    item_cases,
    order_cases,
    proposal_cases,
    test_results,
    test_rounding,
)
from tests.kernel.cases import Case, floats, product
from tests.kernel.proposal_cases import by_hand, of_items, of_other_groups
from tests.kernel.test_arrays import Exchanged
from tests.kernel.test_drawn import FAILED_ONCE
from tests.kernel.test_engines import copies
from tests.kernel.test_mask_rules import arguments, check, loaded
from transconv.kernel import Group, kernel
from transconv.kernel.trials.draw import work

pytestmark = pytest.mark.gpu


ALL = (*cases.CASES, *item_cases.CASES, *function_cases.CASES, *order_cases.CASES, *proposal_cases.CASES)


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_a_case(case: Case) -> None:
    given = [torch.from_numpy(a).cuda() if isinstance(a, np.ndarray) else a for a in case.arguments]
    case.kernel(case.group, *given)
    wanted = case.expected(*(a.copy() if isinstance(a, np.ndarray) else a for a in case.arguments))
    for at, before in enumerate(case.arguments):
        if isinstance(before, np.ndarray):
            value = np.asarray(wanted.get(at, before), np.float64)
            np.testing.assert_allclose(
                given[at].cpu().numpy().astype(np.float64),
                value,
                rtol=4 * case.within,
                atol=4 * case.within,
            )


@pytest.mark.parametrize("columns", [3, 16])
def test_the_pairwise_distances_of_the_proposal(columns: int) -> None:
    """Up to 16 columns all three have the same bits: a product and its sum are rounded once, in order."""
    x, z, found = floats(90, columns), floats(140, columns, seed=1), []
    for function in (by_hand, of_items, of_other_groups):
        found.append(torch.zeros(90, 140, device="cuda"))
        given = torch.from_numpy(x).cuda(), torch.from_numpy(z).cuda()
        function(Group((90, 140), (4, 8)), *given, found[-1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize(("case", "wanted"), test_rounding.CASES)
def test_the_bits_of_sums_and_products(case: Case, wanted: Any) -> None:
    given = [torch.from_numpy(a).cuda() for a in copies(case)]
    case.kernel(case.group, *given)
    np.testing.assert_array_equal(given[-1].cpu().numpy(), wanted(*case.arguments))


@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_kernel(seed: int) -> None:
    row = work("gpu", seed, way="device")
    assert row["status"] == "passed", f"{row['reason']}\n{row['line']}"


@pytest.mark.parametrize("line", FAILED_ONCE)
def test_what_failed_once(line: str) -> None:
    row = work(line=line, way="device")
    assert row["status"] == "passed", row["reason"]


@pytest.mark.parametrize("seed", range(24))
def test_rules_of_masks(seed: int, tmp_path: Path) -> None:
    rules = loaded(tmp_path / "mask_rules.py")

    def run(*args: Any) -> None:
        given = [torch.from_numpy(a).cuda() if isinstance(a, np.ndarray) else a for a in args]
        rules(Group(1), *given)
        for a, t in zip(args, given, strict=True):
            if isinstance(a, np.ndarray):
                a[...] = t.cpu().numpy()

    check(arguments(seed), run)


@kernel(precision="tf32")
def rounded(group: Any, A: Any, B: Any, C: Any) -> None:
    i, j = group.work_offset()
    acc = 0.0
    for k in range(0, A.shape[1], 32):
        acc += group.load(A[i:, k:], shape=(group.shape[0], 32)) @ group.load(
            B[k:, j:], shape=(32, group.shape[1])
        )
    group.store(C[i:, j:], acc)


@kernel
def doubled(group: Any, X: Any, Y: Any) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) * 2)


class OnTheChip:
    """An array of another library: the CUDA array interface alone."""

    def __init__(self, held: torch.Tensor) -> None:
        self.__cuda_array_interface__ = held.__cuda_array_interface__


@pytest.mark.parametrize("made", [OnTheChip, Exchanged])
def test_arrays_of_other_libraries(made: Any) -> None:
    x = torch.arange(1000.0, device="cuda")
    y = torch.zeros_like(x)
    doubled(Group(1000, 128), made(x), made(y))
    assert torch.equal(y, x * 2)


def test_calls_that_leave_results_out() -> None:
    """The second one is started without looking at anything; each has memory of its own."""
    x, z = torch.randn(190, 3, device="cuda"), torch.randn(210, 3, device="cuda")
    found = [test_results.distances(x, z) for _ in range(3)]
    assert len({d.data_ptr() for d, _ in found}) == 3
    for d, near in found:
        torch.testing.assert_close(d, 2 * torch.cdist(x, z), rtol=1e-4, atol=1e-4)
        assert near.dtype == torch.int32 and near.shape == (190, 14)
    shifted = test_results.distances(x, z, 1.0)[0]
    assert torch.equal(shifted * 2, found[0][0])


def test_one_text_for_several_types() -> None:
    """The text says no types; each has a kernel of its own, here in this process and its cache."""
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.int32)
    for dtype in (*kinds, *kinds):
        x = torch.arange(-500, 500, device="cuda").to(dtype)
        y = torch.zeros_like(x)
        doubled(Group(1000, 128), x, y)
        assert torch.equal(y, x * 2), dtype


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "tf32"])
def test_products(kind: str) -> None:
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    a = torch.randn(200, 333, device="cuda", dtype=dtype)
    b = torch.randn(333, 150, device="cuda", dtype=dtype)
    c = torch.zeros(200, 150, device="cuda")
    function = rounded if kind == "tf32" else product
    function(Group((200, 150), (64, 64)), a, b, c)
    torch.testing.assert_close(
        c,
        (a.double() @ b.double()).float(),
        rtol=1e-2 if kind == "tf32" else 1e-4,
        atol=5e-2 if kind == "tf32" else 1e-3,
    )


@kernel
def held(group, X, Y):
    x = group.load(X, shape=(256, 256))
    group.store(Y, np.exp(x - x.max()) * np.sort(x.sum(axis=0)))


def test_values_that_do_not_fit_are_told() -> None:
    """512 registers of each of 128 threads; 64 of each of 1,024."""
    x, y = torch.rand(256, 256, device="cuda"), torch.zeros(256, 256, device="cuda")
    with pytest.warns(UserWarning, match="held: .* bytes of the values of each thread"):
        held(Group(1, warps_hint=4), x, y)
    torch.testing.assert_close(y, torch.exp(x - x.max()) * x.sum(0).sort().values)
