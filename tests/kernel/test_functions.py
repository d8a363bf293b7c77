"""Functions of kernels: which body a call gets, intrinsics beside their bodies, layouts; their text."""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np
import pytest

from tests.kernel import function_cases as f
from tests.kernel.cases import floats, out
from transconv.kernel import (
    Builder,
    Group,
    IntrinsicArgument,
    KernelError,
    ScopeError,
    SubGroup,
    WorkItem,
    atomic_ref,
    index_map,
    kernel,
)


def doubled(x):
    return x * 2.0


@kernel.intrinsic(doubled)
def wrongly_doubled(x):
    return lambda builder, x: builder.text("{0} * 2.0 + ({0} > 1.0).to({tl}.float32) * 0.125", x)


@kernel
def planted(group, X, Y):
    group.store(Y, doubled(group.load(X, shape=X.shape)))


def test_a_planted_wrong_intrinsic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, y = np.array([0.5, -3.0, 1.5, 4.0], np.float32), out(4)
    said = (
        r"planted: Y\[2\] is 3.125, and 3 in the simulator \(2 of 4 elements differ\); "
        r"it has functions of a chip: doubled_f32"
    )
    with pytest.raises(KernelError, match=said):
        planted.check(Group(1), x, y)
    assert (y == -77).all()  # copies alone were written
    planted.check(Group(1), x / 8, y)


@pytest.mark.parametrize("case", f.CASES[:3], ids=lambda c: c.name)
def test_a_check_of_right_kernels(case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case.kernel.check(case.group, *case.arguments, rtol=1e-4, atol=1e-4)


def text_of(case_name: str, target: str = "sm_90") -> str:
    case = next(c for c in f.CASES if c.name == case_name)
    return case.kernel.show(case.group, *case.arguments, target=target)


def test_what_an_intrinsic_becomes() -> None:
    text = text_of("intrinsics")
    assert (
        "    return tl.inline_asm_elementwise('ex2.approx.ftz.f32 $0, $1;', '=f,f', [x0],\n" in text
        and "fast_exp2_f32(x_tile)" in text
    )
    assert "    return tl.math.fma(x0, x1, 1.0)\n" in text
    assert "inline_asm" not in text_of("intrinsics", "interpreter")
    assert "acc = tl.dot(a_tile, b_tile, acc" in text_of("products_by_intrinsics")


def test_a_function_of_its_own() -> None:
    text = text_of("functions_of_their_own")
    assert text.count("gate_f32(") == 3 and text.count("def tanh(x)") == 1
    assert "@triton.jit\ndef gate_f32(x0, x1):\n    value = tanh(x0)\n" in text.replace("t = ", "value = ")


asked: list[tuple[IntrinsicArgument, ...]] = []


def queried(x, y, n, Z):
    return x + y


@kernel.intrinsic(queried)
def with_queries(x, y, n, Z):
    asked.append((x, y, n, Z))


@kernel
def queries(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    group.store(Y[i:], queried(x.astype(np.float16), i, 3, X[::2]).astype(np.float32))


def test_what_an_intrinsic_is_told() -> None:
    asked.clear()
    queries.lower(Group(10, 4), floats(10), out(10), target="sm_90")
    assert asked == [
        (
            IntrinsicArgument("tile", "float16", (4,), masked=True),
            IntrinsicArgument("number", "int"),
            IntrinsicArgument("number", "int", value=3),
            IntrinsicArgument("array", "float32", (None,)),
        )
    ]


def test_a_body_of_another_scope() -> None:
    @kernel
    def calls(group, X):
        @group.workitems
        def inner(item):
            only_sub_groups(1.0)

        inner()

    for attempt in (
        lambda: calls.lower(Group(4), floats(4), target="sm_90"),
        lambda: calls.simulate(Group(4), floats(4)),
    ):
        with pytest.raises(ScopeError) as caught:
            attempt()
        said = "which has no body for work-items; allowed: for sub-groups at test_functions.py:"
        assert said in str(caught.value)


def only_sub_groups(x):
    """Nothing."""


@kernel.func(only_sub_groups, scope=SubGroup)
def of_sub_groups(sg, x):
    return x


def test_layouts() -> None:
    assert index_map((3, 4), lambda i, j: i * 4 + j).collision == ""
    assert index_map((3, 3), lambda i, j: i + j).collision == "(0, 1) and (1, 0) are one element"
    with pytest.raises(KernelError, match=r"found the place 8; allowed: 0 to 7"):
        index_map((3, 3), lambda i, j: i * 3 + j, storage_size=8)
    with pytest.raises(KernelError, match="found a mapping that fails"):
        index_map((3, 3), lambda i: i)
    with pytest.raises(KernelError, match="arrays inside of kernels"):
        atomic_ref([1])


def test_operations_of_a_library() -> None:
    """``create`` takes functions whose first parameter is a builder: ours, and those of a library."""

    def product(builder, x, y):
        return builder.create(Builder.dot)(x, y)

    def times(x, y):
        pass

    @kernel.intrinsic(times)
    def impl(x, y):
        return lambda builder, x, y: builder.create(product)(x, y)

    @kernel
    def of_library(group, X, Y):
        x = group.load(X)
        group.store(Y, times(x, x))

    x, y = floats(4, 4), out(4, 4)
    of_library.simulate(Group(1), x, y)
    np.testing.assert_allclose(y, x @ x, 1e-5)
    assert "x_0[:, None] * x_0_2[None, :]" in of_library.show(Group(1), x, y, target="sm_90")


def test_sub_groups_need_no_hint() -> None:
    @kernel
    def sizes(group, Y):
        @group.subgroups
        def inner(sg):
            Y[sg.subgroup_id()] = sg.size()

        inner()

    y = np.zeros(4, np.int32)
    sizes.simulate(Group(128, 128), y)
    assert y.tolist() == [32] * 4
    assert "row4" not in sizes.show(Group(128, 128), y, target="sm_90")


def test_the_scope_of_an_overload_called_by_its_own_name() -> None:
    @kernel.func(scope=WorkItem)
    def of_items(item, x):
        return x

    @kernel
    def calls(group, X):
        of_items(1.0)

    with pytest.raises(ScopeError, match="a call of of_items by work-groups, which is for work-items"):
        calls.lower(Group(4), floats(4), target="sm_90")


def test_sub_groups_that_write_to_one_place() -> None:
    @kernel
    def writes(group, Y):
        @group.subgroups
        def inner(sg):
            group.store(Y[0:], group.vfull((1,), np.float32, 1.0) * sg.subgroup_id())

        inner()

    with pytest.raises(ScopeError, match="a store of all sub-groups to one place"):
        writes.lower(Group(64, 64, 16), out(8), target="sm_90")
    with pytest.raises(KernelError, match="a race: an element of Y"):
        writes.simulate(Group(64, 64, 16), out(8))


@kernel
def divided(group, X, Y):
    group.store(Y, group.load(X, shape=X.shape) // 7.0)


@kernel
def tl(group, X, Y):
    group.store(Y, np.floor(group.load(X, shape=X.shape)))


@kernel
def erf(group, X, Y):
    group.store(Y, group.load(X, shape=X.shape) * 2.0)


@pytest.mark.parametrize(
    ("named", "meant"),
    [(divided, lambda x: x // np.float32(7)), (tl, np.floor), (erf, lambda x: x * 2)],
    ids=["divided", "tl", "erf"],
)
def test_a_kernel_may_have_a_name_that_its_module_defines(named, meant) -> None:
    x, y = floats(32) * 50, out(32)
    named(Group(32, 32), x, y)
    np.testing.assert_array_equal(y, meant(x))
