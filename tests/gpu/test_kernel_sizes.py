"""Kernels whose sizes are arguments, on a GPU: one kernel for many shapes, known calls, tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel.test_sizes import PRODUCTS, compiled, fresh, parts, row_sums, same, shifted
from tests.kernel.wrong_launches import declared
from transconv.errors import KernelError
from transconv.kernel import Group, KernelFunction, kernel

pytestmark = pytest.mark.gpu


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


def test_products_of_many_sizes() -> None:
    of = fresh(parts)
    more = ((100, 333, 77), (129, 640, 65), (64, 128, 128), (1000, 17, 1000))
    for _ in range(2):  # later calls are known
        for m, k, n in (*PRODUCTS, *more):
            a, b, c = draw(m, k), draw(k, n), torch.full((m, n), -77.0, device="cuda")
            for alpha in (0.5, 2.0):
                of(Group((m, n), (16, 16)), a, b, c, alpha, n)
                assert torch.equal(c, a @ b * alpha + n), (m, k, n)
    kept = sum(compiled(of))
    of(Group((101, 79), (16, 16)), draw(101, 331), draw(331, 79), draw(101, 79), 1.0, 79)
    assert sum(compiled(of)) == kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [31, 40, 96, 1000, 1024, 4097])
def test_row_sums(dtype: torch.dtype, n: int) -> None:
    of = fresh(row_sums)
    for m in (1, 5, 64, 129):
        x, y = draw(m, n, dtype=dtype), torch.zeros(m, device="cuda")
        of(Group(m, 4), x, y)
        want = x.float().sum(1) * (2 if n > 20 else 1) / n + x[-1, 1].float()
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


def test_known_calls() -> None:
    """Other addresses, addresses that are not aligned, shared memory, another value of a number."""
    of = fresh(same)
    memory, group = torch.arange(4096.0, device="cuda"), Group(1000, 256)
    for begin, end in ((0, 2000), (0, 2000), (1, 2000), (1, 2001), (8, 2003), (3000, 16)):
        x, y = memory[begin : begin + 1000], memory[end : end + 1000]
        want = x + 1
        for _ in range(2):
            x.copy_(want - 1)
            of(group, x, y)
            assert torch.equal(y, want)
    x = memory[:1000]
    want = x + 3
    for _ in range(3):
        of(group, x, x)  # in place
    assert torch.equal(x, want)
    times = fresh(shifted)
    for n, factor in ((3, 2), (3, 2), (9, 2), (-1, 2), (3, 5)):
        y = torch.zeros(1000, device="cuda")
        times(group, x, y, n, factor)
        assert torch.equal(y, x * factor + n)


def test_large_arrays_are_counted_in_64_bits() -> None:
    """The kernel for small arrays requires that 32 bits suffice."""
    if torch.cuda.mem_get_info()[0] < 7 << 30:
        pytest.skip("needs 7 GB")
    of = kernel(_bytes)
    for n in (1000, (1 << 31) + 3000):
        x = torch.ones(n, device="cuda", dtype=torch.int8)
        y = torch.zeros_like(x)
        of(Group(n, 1024), x, y)
        assert int(y[-1]) == 2 and int(y[::997].sum(dtype=torch.int64)) == 2 * len(y[::997])


def _bytes(group: Any, X: Any, Y: Any) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) + 1)


def test_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path))
    of = KernelFunction(declared.python, work_shape=declared.work_shape, group_shape=declared.group_shape)
    x, y, scale = draw(512, 1000), draw(512, 1000), draw(1, 1000)
    before = y.clone()
    found = of.tune(x, y, scale, 2, seconds=6.0, trials=5)
    assert torch.equal(y, before) and 0 < found.us <= found.before_us and 0 < found.tried <= 5
    of(x, y, scale, 2)
    assert torch.equal(y, x * scale + 2) and str(found) in of.explain(x, y, scale, 2)


def test_a_group_that_does_not_fit() -> None:
    """More shared memory than a chip has is an error of one line, before anything runs."""
    a = torch.ones(1024, 1024, device="cuda", dtype=torch.float16)
    c = torch.zeros(1024, 1024, device="cuda")
    with pytest.raises(KernelError, match="does not fit the chip.*expected a smaller group"):
        kernel(_product)(Group((1024, 1024), (256, 256), warps_hint=8, stages_hint=8), a, a, c)
    assert not c.any()


def _product(group: Any, A: Any, B: Any, C: Any) -> None:
    i, j = group.work_offset()
    acc = group.zeros(shape=group.shape, dtype=np.float32)
    for k in range(0, A.shape[1], 64):
        acc += group.load(A[i:, k:], shape=(group.shape[0], 64)) @ group.load(
            B[k:, j:], shape=(64, group.shape[1])
        )
    group.store(C[i:, j:], acc)
