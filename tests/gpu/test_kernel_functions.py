"""Functions of kernels on a GPU: overloads, intrinsics with assembly, sub-groups, atomics, mappings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel import function_cases as f
from tests.kernel import test_operators
from tests.kernel.cases import Case
from tests.kernel.proposal_cases import by_hand, of_items, of_other_groups
from transconv.kernel import Group, kernel

pytestmark = pytest.mark.gpu


def rsqrt(x: Any) -> Any:
    return 1.0 / np.sqrt(x)


@kernel.intrinsic(rsqrt)
def of_the_library(x: Any, chip: Any) -> Any:
    return (lambda builder, x: builder.call("__nv_rsqrtf", x)) if chip.backend == "cuda" else None


@kernel
def roots(group: Any, X: Any, Y: Any) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], rsqrt(group.load(X[i:], shape=group.shape)))


def test_a_function_of_the_device_library() -> None:
    x = torch.rand(1000, device="cuda") + 0.1
    y = torch.zeros_like(x)
    roots(Group(1000, 256), x, y)
    torch.testing.assert_close(y, x.rsqrt())
    assert "__nv_rsqrtf" in roots.show(Group(1000, 256), x, y)


def test_an_operator() -> None:
    test_operators.check("cuda")


@pytest.mark.parametrize("case", f.CASES, ids=lambda c: c.name)
def test_it_agrees_with_the_simulator(case: Case) -> None:
    given = [torch.from_numpy(a).cuda() if isinstance(a, np.ndarray) else a for a in case.arguments]
    case.kernel.check(case.group, *given, rtol=4 * case.within, atol=4 * case.within)


def test_the_pairwise_distances_of_the_proposal_have_the_same_bits() -> None:
    x1, x2 = torch.randn(90, 21, device="cuda"), torch.randn(140, 21, device="cuda")
    found = []
    for function in (by_hand, of_items, of_other_groups):
        found.append(torch.zeros(90, 140, device="cuda"))
        function(Group((90, 140), (16, 32)), x1, x2, found[-1])
    wanted = torch.cdist(x1.double(), x2.double()).float()
    for d in found:
        torch.testing.assert_close(d, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], found[2])
