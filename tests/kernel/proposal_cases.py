"""The code of the proposal, shared/seeds/kernel_api_rfc.md, with the names of imports that it leaves out, and
with what it writes as ``...`` filled in. Every engine runs all of it."""

# mypy: ignore-errors
# ruff: noqa

from __future__ import annotations

import numpy as np

from tests.kernel import device_lib
from tests.kernel.cases import Case, floats, out
from transconv.kernel import Builder as spirv
from transconv.kernel import Group, SubGroup, WorkGroup, WorkItem, kernel


@kernel
def by_hand(group, X1, X2, D):
    @group.workitems
    def inner(ind):
        i, j = ind.global_id()

        if i < X1.shape[0] and j < X2.shape[0]:
            d = 0.0
            # calculating distance with loop by dimensions
            for k in range(X1.shape[1]):
                tmp = X1[i, k] - X2[j, k]
                d += tmp * tmp
            D[i, j] = np.sqrt(d)

    inner()


@kernel
def of_items(group, X1, X2, D):
    # switch to workitem level
    # parallel loop over work items
    @group.workitems
    def inner(ind):
        i, j = ind.global_id()

        if i < X1.shape[0] and j < X2.shape[0]:
            # using high-level array api to calculate distance
            d = ((X1[i] - X2[j]) ** 2).sum()
            D[i, j] = np.sqrt(d)

    inner()


@kernel
def of_groups(group, X1, X2, D):
    gid = group.work_offset()  # global offset to current WG (i.e. group_size * group_id)

    # Create tensor of specified shape, but with boundary checks of X1 and X2
    x1 = group.load(X1[gid[0] :], shape=(group.shape[0], X1.shape[1]))
    x2 = group.load(X2[gid[0] :], shape=(group.shape[0], X2.shape[1]))

    # calculating pairwise distance with numpy-style broadcasting
    diff = ((x1[None, :, :] - x2[:, None, :]) ** 2).sum(axis=2)

    # store result to D, but with boundary checks
    group.store(D[gid[0] :, gid[1] :], np.sqrt(diff))


@kernel
def of_other_groups(group, X1, X2, D):
    gid = group.work_offset()
    x1 = group.load(X1[gid[0] :], shape=(group.shape[0], X1.shape[1]))
    x2 = group.load(X2[gid[1] :], shape=(group.shape[1], X2.shape[1]))
    diff = ((x1[:, None, :] - x2[None, :, :]) ** 2).sum(axis=2)
    group.store(D[gid[0] :, gid[1] :], np.sqrt(diff))


@kernel
def tensors(group, X1, X2, D):
    gid = group.work_offset()
    dtyp, W, H = np.float32, 4, 3
    x1 = group.load(X1[gid[0] :], shape=(group.shape[0], X1.shape[1]))
    x2 = group.load(X2[gid[0] :], shape=(group.shape[0], X1.shape[1]))
    arr = group.empty(shape=(W, H), dtype=dtyp)
    arr = group.zeros(shape=x1.shape, dtype=dtyp)
    res = np.subtract(x1, x2, out=arr)
    group.store(D[gid[0] :, gid[1] :], res)


@kernel
def vectors(group, X1, D, x, y):
    gid = group.work_offset()
    W, H = 4, 3
    v1 = group.vload(X1[gid[0] :], shape=(W, H))
    x1 = group.load(X1[gid[0] :], shape=(W, H)).vec()
    x2 = group.load(X1[gid[0] :], shape=(group.shape[0], X1.shape[1]))[x : x + W, y : y + W].vec()
    x3 = group.load(X1[gid[0] :], shape=(group.shape[0], X1.shape[1])).vec(shape=(W, H))
    group.store(D[0], v1 + group.vzeros(shape=(W, H), dtype=np.float32))
    group.store(D[1], x1 * group.vones(shape=(W, H), dtype=np.float32))
    group.store(D[2], x2)
    group.store(D[3], x3)


@kernel
def scopes(group, Y):
    @group.subgroups
    def inner(sg):
        id = sg.subgroup_id()
        size = sg.size()
        group.store(Y[1, id:], group.vfull((1,), np.float32, size))

    inner()

    @group.workitems
    def inner(wi):
        i, j, k = wi.global_id()
        Y[0, (i * 2 + j) * 3 + k] = i * 100 + j * 10 + k

    inner()


@kernel.func
def add(a, b):
    return a + b


@kernel
def free_functions(group, A, B, C):
    c = add(group.load(A), group.load(B))
    group.store(C, c)


def foo(a, b):
    pass


@kernel.func(foo, scope=WorkGroup)
def foo_wg(g, a, b):
    i, j, k = g.group_id()
    return a + b + i


@kernel.func(foo, scope=SubGroup)
def foo_wg(sg, a, b):
    i = sg.subgroup_id()
    return a - b + i


@kernel.func(foo, scope=WorkItem)
def foo_wg(wi, a, b):
    i, j, k = wi.global_id()
    return a * b + i + k


@kernel
def bar(group, A, B, C):
    # Index objects are passed implicitly
    n, _, _ = group.id()
    c1 = foo(group.load(A[0], shape=(4,)), group.load(B[0], shape=(4,)))
    group.store(C[0, n * 4 :], c1)

    @group.subgroups
    def inner1(sg):
        at = (n * 2 + sg.subgroup_id()) * 2
        c2 = foo(group.vload(A[1, at:], shape=(2,)), group.vload(B[1, at:], shape=(2,)))
        group.store(C[1, at:], c2)

    inner1()

    @group.workitems
    def inner2(wi):
        i, j, k = wi.global_id()
        at = i * 2 + k
        if at < 8:
            C[2, at] = foo(A[2, at], B[2, at])

    inner2()


def my_intrinsic(a, b):
    pass


def is_fp16(a):
    return a.dtype == "float16"


def is_int8(a):
    return a.dtype == "int8"


@kernel.intrinsic(my_intrinsic, scope=WorkGroup)
def my_intrinsic_impl(a, b):
    # Can query 'a' and 'b' types here
    if is_fp16(a) and is_int8(b):

        def func(builder, a, b):
            # Use low level MLIR python builder API here, LLVM, SPIR-V or similar
            c = builder.create(spirv.call)("multiply", a, b)
            return c

        return func

    # Can return None if intrinsic doesn't supported for specific data types.
    return None


@kernel
def calls_an_intrinsic(group, A, B, C):
    a, b = group.load(A), group.load(B)
    c = my_intrinsic(a, b)
    group.store(C, c)


@kernel
def my_kernel(group, a, b, res, device_lib):
    device_lib.my_gemm(a, b, res)


def _vectors(x, d, *_):
    made = d.copy()
    made[:, :4, :3] = x[:4, :3]
    made[2] = d[2]
    made[2, :3, :4] = x[2:, 1:5]
    return {1: made}


def _scopes(y):
    made = y.copy()
    made[0] = [100 * i + 10 * j + k for i in (0, 1) for j in (0, 1) for k in (0, 1, 2)]
    made[1, :3] = 4
    return {0: made}


def _overloads(a, b, c):
    i = np.arange(8)
    return {
        2: np.stack(
            [
                np.tile(a[0, :4] + b[0, :4], 2) + i // 4,
                a[1] - b[1] + i // 2 % 2,
                a[2] * b[2] + i // 2 + i % 2,
            ]
        )
    }


SMALL = (np.arange(6) - 3).astype(np.int8)
CASES = (
    Case(
        tensors,
        Group((5, 1), (2, 1)),
        (floats(5, 7), floats(5, 7, seed=1), out(5, 7)),
        lambda a, b, d: {2: a - b},
    ),
    Case(vectors, Group(6, 6), (floats(5, 7), out(4, 6, 6), 2, 1), _vectors),
    Case(scopes, Group((2, 2, 3), (2, 2, 3), 4), (out(2, 12),), _scopes),
    Case(free_functions, Group(1), (floats(5), floats(5, seed=2), out(5)), lambda a, b, c: {2: a + b}),
    Case(bar, Group((4, 1, 2), (2, 1, 2), 2), (floats(3, 8), floats(3, 8, seed=2), out(3, 8)), _overloads),
    Case(
        calls_an_intrinsic,
        Group(1),
        (floats(6).astype(np.float16), SMALL, out(6)),
        lambda a, b, c: {2: a * b},
        1e-3,
    ),
    Case(
        my_kernel,
        Group((20, 30), (8, 16), 128),
        (floats(20, 9), floats(9, 30), out(20, 30) * 0, device_lib),
        lambda a, b, c, _: {2: a @ b},
        1e-4,
    ),
)
