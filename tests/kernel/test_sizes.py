"""Sizes that are arguments of kernels: one compiled kernel for many shapes, and when it is another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel import wrong_launches
from tests.kernel.wrong_launches import declared
from transconv.backend_triton import KernelStart
from transconv.errors import KernelError
from transconv.ir import Kernel, Load, Memory, Mutator, VerifyError, run
from transconv.kernel import Constant, Group, KernelFunction, kernel
from transconv.kernel.launch import kernel_plan
from transconv.kernel.launch.arguments import Number, sizing, tensors_of, unit_of
from transconv.kernel.launch.declaration import signature
from transconv.passes.scalar import index_width
from transconv.runtime import Launch, torch_internals
from transconv.support import knobs
from transconv.target import TARGETS

KERNEL = SimpleNamespace(function="f", packed_metadata="m")
GOLDEN = Path(__file__).with_name("wrong_launches.txt")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@kernel
def parts(group: Any, A: Any, B: Any, C: Any, alpha: Any, n: Any) -> None:
    i, j = group.work_offset()
    acc = group.zeros(shape=group.shape, dtype=np.float32)
    for k in range(0, A.shape[1], 16):
        acc += group.load(A[i:, k:], shape=(group.shape[0], 16)) @ group.load(
            B[k:, j:], shape=(16, group.shape[1])
        )
    group.store(C[i:, j:], acc * alpha + n)


@kernel
def row_sums(group: Any, X: Any, Y: Any) -> None:
    (i,) = group.work_offset()
    s = group.zeros(shape=group.shape, dtype=np.float32)
    for k in range(0, X.shape[1], 8):
        s += group.load(X[i:, k:], shape=(group.shape[0], 8)).sum(axis=1)
    if X.shape[1] > 20:
        s = s * 2.0
    group.store(Y[i:], s / X.shape[1] + X[-1, 1])


def compiled(of: KernelFunction) -> list[int]:
    """How many kernels there are for each kind of arguments."""
    return sorted(len(k.compiled) for k in of._launches.kinds.values())


def fresh(of: KernelFunction) -> KernelFunction:
    return KernelFunction(of.python)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def draw(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(np.float32)


PRODUCTS = ((5, 7, 3), (13, 19, 21), (20, 17, 40), (11, 2, 9), (16, 24, 40), (3, 0, 4), (0, 3, 4))


@pytest.mark.slow
def test_one_kernel_for_products_of_many_sizes() -> None:
    """Simulator and Triton's interpreter; odd sizes share a kernel, divided and empty ones have others."""
    of = fresh(parts)
    for m, k, n in PRODUCTS:
        a, b, c, again = draw(m, k), draw(k, n), draw(m, n), draw(m, n)
        of(Group((m, n), (8, 16)), a, b, c, 0.5, n)
        of.simulate(Group((m, n), (8, 16)), a, b, again, 0.5, n)
        np.testing.assert_array_equal(c, a @ b * 0.5 + n)
        np.testing.assert_array_equal(c, again)
    made = [low for k in of._launches.kinds.values() for low in k.compiled]
    assert len(made) == 5  # the odd ones; n % 8 == 0; m and all; no k; no m
    text = made[0].plan.source
    assert "tl.range(0, (A_d1 + 15) // 16)" in text and "C_d1" not in text  # the columns are those of B
    assert "A_in_row8 = id_0 * 8 + row8 < A_d0" in text


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", [(9, 11), (40, 6), (13, 21), (2, 50), (24, 64)])
def test_after_all_passes_for_other_sizes(shape: tuple[int, int]) -> None:
    """The interpreter of the IR, on the kernel that was made for one size, at the others."""
    low = row_sums.lower(Group(30, 8), draw(30, 23 if shape[1] > 20 else 7), draw(30), target="sm_90")
    numbers = (*shape, shape[0], shape[0])
    for _, made in (low.stages[0], low.stages[-1]):
        assert Kernel.parse(str(made)) is made and made.sizes is not None
        if not low.sizing.fits(numbers):
            assert any(unit_of(n) > 1 for n in shape)
            return
        values = low.sizing.values(numbers)
        assert not made.sizes.why_not(values)
        x, y = draw(*shape), draw(shape[0])
        run(made.at(values), Memory({"X": x.reshape(-1), "Y": y}))
        scale = 2 if shape[1] > 20 else 1
        np.testing.assert_allclose(y, x.sum(1) * scale / shape[1] + x[-1, 1], 1e-5, 1e-5)


def test_what_a_branch_depends_on_is_required() -> None:
    of = fresh(row_sums)
    for cols in (7, 9, 21, 23, 11):
        x, y = draw(5, cols), draw(5)
        of(Group(5, 4), x, y)
        np.testing.assert_allclose(y, x.sum(1) * (2 if cols > 20 else 1) / cols + x[-1, 1], 1e-5)
    assert compiled(of) == [2]
    said = of.explain(Group(5, 4), draw(5, 21), draw(5), target="sm_90")
    assert "size       X.shape[1] = X_d1" in said and "requires   21 <= X_d1" in said


@kernel
def same(group: Any, X: Any, Y: Any) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) + 1.0)


class Moved(Mutator):
    """Loads of the next element."""

    def mutate_Load(self, at: Load) -> Load:
        return replace(at, offset=at.offset + 1)


@pytest.mark.parametrize(("rows", "checked"), [(128, False), (128, True), (100, True)])
def test_a_stray_address_is_refused(rows: int, checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask in every process; with one where kernels are verified, although a few of its
    elements are outside for the last group alone."""
    given = Group(rows, 64), draw(rows), draw(rows)
    told = fresh(same).explain(*given, target="sm_90")
    assert re.search(rf"load  X +0\.\.{rows - 1} of 0\.\.{rows - 1}, by \w+ for all sizes", told)
    narrow = index_width.narrow
    monkeypatch.setattr(index_width, "narrow", lambda k: Moved().rebuilt(narrow(k)))
    monkeypatch.setattr(knobs, "verify", lambda: checked)
    with pytest.raises(VerifyError, match=r"addresses-are-inside(?s:.*) in the memory of X"):
        fresh(same).lower(*given, target="sm_90")


def test_equal_sizes_share_a_name_and_others_do_not() -> None:
    """One mask where array and work have one size; a call in which they differ has a kernel of its own."""
    of = fresh(same)
    text = of.show(Group(24, 8), draw(24), draw(24), target="sm_90")
    assert "mask" not in text and "do_not_specialize=['X_d0_by8']" in text
    for n, m, work in ((24, 24, 24), (8, 8, 8), (24, 8, 24), (40, 24, 24), (5, 9, 7), (9, 5, 7)):
        x, y = draw(n), np.full(m, -1, np.float32)
        of(Group(work, 8), x, y)
        reach = min(n, m, -(-work // 8) * 8)
        assert np.array_equal(y[:reach], x[:reach] + 1) and (y[reach:] == -1).all()
    assert compiled(of) == [4]


def test_strides_and_orders() -> None:
    """Dense arrays of any order have sizes; the strides of others belong to the kernel."""
    of = fresh(same)
    two = kernel(_copied)
    for n in (10, 12):
        wide = torch.arange(4.0 * n).reshape(n, 4)
        out = torch.zeros(n)
        of(Group(n, 4), wide[:, 1], out)
        assert torch.equal(out, wide[:, 1] + 1)
        turned = torch.zeros(5, n).T
        two(Group((n, 5), (4, 4)), torch.arange(5.0 * n).reshape(n, 5), turned)
        assert torch.equal(turned, torch.arange(5.0 * n).reshape(n, 5))
    assert compiled(of) == [1] and compiled(two) == [1]
    assert "apart [4]" in of.show(Group(10, 4), wide[:10, 1], out, stage="written", target="sm_90")


def _copied(group: Any, X: Any, Y: Any) -> None:
    i, j = group.work_offset()
    group.store(Y[i:, j:], group.load(X[i:, j:], shape=group.shape))


@kernel
def shifted(group: Any, X: Any, Y: Any, n: Any, times: Constant) -> None:
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) * times + n)


def test_whole_numbers() -> None:
    """Numbers from 2 on are arguments, constants and others belong to the kernel."""
    of = fresh(shifted)
    for n, times in ((3, 2), (5, 2), (7, 2), (1, 2), (-4, 2), (0, 2), (2**40, 2), (5, 3), (7, 3)):
        x, y = draw(10), draw(10)
        of(Group(10, 4), x, y, n, times)
        np.testing.assert_allclose(y, x * times + n, rtol=1e-6)
    assert compiled(of) == [6]  # any n, four numbers that are constants, another constant


@pytest.mark.every(2)
@pytest.mark.parametrize("shape", [(3, 40), (33, 64), (0, 7)])
def test_declared_geometry(shape: tuple[int, int]) -> None:
    """Symbols, numbers in annotations and tunable numbers, in two engines."""
    x, y, scale, z = draw(*shape), draw(*shape), draw(1, shape[1]), draw(*shape)
    for of in (declared, declared.parametrize(ROWS=8)):
        of(x, y, scale, 3)
        of.simulate(x, z, scale, n=3)
        np.testing.assert_array_equal(y, x * scale + 3)
        np.testing.assert_array_equal(y, z)


def test_every_message_of_a_launch(request: pytest.FixtureRequest) -> None:
    text = "".join(f"{name}\n    {_refused(call)}\n" for name, call in wrong_launches.LAUNCHES.items())
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def _refused(call: Callable[[], Any]) -> str:
    with pytest.raises(KernelError) as caught:
        call()
    return str(caught.value).replace("\n", "\n    ")


def test_a_known_call_is_started_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless arrays share memory, another device is the current one, a view is negated, or no kernel is
    loaded for the alignment."""
    started: list[tuple[Any, ...]] = []
    device = [0]
    monkeypatch.setattr(torch_internals, "current_device", lambda: lambda: device[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    memory, of = torch.arange(64.0), fresh(shifted)
    x, y = memory[:16], memory[32:48]
    args = Group(16, 4), x, y, 5, 2
    asked = of.asked(args, {})
    arguments = tensors_of(asked.given)
    made, values = of._launches.of(asked, arguments, TARGETS["sm_90"])

    def entry(*aligned: bool) -> Any:
        for a in aligned:
            made.step.triton.kept[0, a] = KernelStart(
                lambda *given, a=a: started.append((a, *given[13:])), KERNEL, sizes=len(values)
            )
        found = Launch(made.plan, True).at(values)
        return found.guarded(0, ("", *arguments.kinds), {"X": 64, "Y": 64})

    assert entry() is None
    go, near = Group(16), (True, x.data_ptr(), y.data_ptr(), *values.values())
    known = entry(True)
    assert known(go, x, y, 5, 2) is True and started == [near]
    assert known(go, memory[1:17], y, 5, 2) is False and len(started) == 1
    known = entry(True, False)
    assert known(go, x, y, 5, 2) and known(go, memory[1:17], y, 5, 2)
    assert started[1:] == [near, (False, memory[1:].data_ptr(), *near[2:])]
    assert not known(go, x, memory[8:24], 5, 2) and not known(go, memory[24:40], y, 5, 2)
    assert known(go, memory[16:32], y, 5, 2)  # neighbours
    assert not known(go, torch.zeros(16, dtype=torch.complex64).conj().imag, y, 5, 2)
    device[0] = 1
    assert not known(go, x, y, 5, 2) and len(started) == 4


def test_the_signature_of_a_call() -> None:
    x, group = torch.zeros(4, 6), Group(4)
    of = signature((group, x, 1, 2.0))
    assert of == signature((Group(4), torch.ones(4, 6), 1, 3.0))
    others = [
        (Group(5), x, 1, 2.0),
        (group, x.T, 1, 2.0),
        (group, x.double(), 1, 2.0),
        (group, x[:, :5], 1, 2.0),
        (group, x, 2, 2.0),
        (group, x, True, 2.0),
        (group, x, 1, 2),
    ]
    assert all(signature(other) != of for other in others)
    assert signature((group, x.numpy())) is None and signature((group, torch.nn.Parameter(x))) is not None


def test_numbers_become_arguments() -> None:
    numbers = [Number(f"n{i}", f"n{i}", n) for i, n in enumerate((12, 1, 64, 12, 640, 0))]
    made = sizing(numbers, fixed={4})
    assert made.names == ("n0", "n2_by64") and [str(e) for e in made.exprs] == [
        "n0",
        "1",
        "(n2_by64 * 64)",
        "n0",
        "640",
        "0",
    ]
    assert made.fits((13, 1, 192, 13, 640, 0)) and made.values((13, 1, 192, 13, 640, 0)) == {
        "n0": 13,
        "n2_by64": 3,
    }
    for other in (
        (13, 1, 192, 12, 640, 0),
        (13, 2, 192, 13, 640, 0),
        (13, 1, 128, 13, 640, 0),
        (24, 1, 192, 24, 640, 0),
        (13, 1, 192, 13, 641, 0),
        (1, 1, 192, 1, 640, 0),
    ):
        assert not made.fits(other)
    assert made.places(["n0"]) == {0, 3} and made.told == ("n0 = n3 = n0", "n2 = n2_by64 * 64")
    assert sizing(numbers, plain={2}).fits((12, 1, 65, 12, 640, 0)) is True


def test_kernels_of_one_text_and_several_types_have_their_own_records() -> None:
    """The text does not say the types of the arrays: a process may not load one for another."""
    lows = [
        same.lower(Group(24, 8), *(torch.empty(24, dtype=t, device="meta") for _ in "XY"), target="sm_90")
        for t in (torch.bfloat16, torch.float16, torch.float32)
    ]
    assert lows[1].source == lows[2].source
    workload = kernel_plan.KernelWorkload("same", "", "ieee", ())
    assert len({kernel_plan.compiled(low, TARGETS["sm_90"], workload).step.digest for low in lows}) == 3
