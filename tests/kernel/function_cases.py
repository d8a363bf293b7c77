"""Kernels with functions of every kind, sub-groups and atomic additions, as cases.py has them."""

# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from tests.kernel.cases import Case, floats, ints, out
from transconv.kernel import (
    Group,
    SubGroup,
    WorkGroup,
    WorkItem,
    atomic_ref,
    create_mapping,
    index_map,
    kernel,
)


def which(x):
    pass


@kernel.func(which, scope=WorkGroup)
def which_of_group(group, x):
    return x + group.shape[0]


@kernel.func(which, scope=SubGroup)
def which_of_sub_group(sg, x):
    return x + sg.subgroup_id() * 100


@kernel.func(which, scope=WorkItem)
def which_of_item(wi, x):
    (i,) = wi.global_id()
    return x * i


@kernel
def overloads(group, X, Y):
    (i,) = group.work_offset()
    group.store(Y[0, i:], which(group.load(X[i:], shape=group.shape)))

    @group.subgroups
    def each(sg):
        j = i + sg.subgroup_id() * sg.size()
        group.store(Y[1, j:], which(group.vload(X[j:], shape=(sg.size(),))))

    each()

    @group.workitems
    def inner(wi):
        (k,) = wi.global_id()
        if k < X.shape[0]:
            Y[2, k] = which(X[k])

    inner()


@kernel.func(inline=False)
def gate(x, y):
    t = np.tanh(x)
    return np.where(t > 0, t * y, 0.0)


@kernel
def functions_of_their_own(group, X, Z, Y):
    (i,) = group.work_offset()
    x, z = group.load(X[i:], shape=group.shape), group.load(Z[i:], shape=group.shape)
    group.store(Y[i:], gate(x, z) + gate(z, x))


@kernel.func(inline=False)
def mixed(n, m):
    return np.where(n > m, n * 3 - m, np.maximum(n, -m)) & 127


@kernel
def whole_functions_of_their_own(group, N, M, Y):
    n, m = group.load(N, shape=(11,)), group.load(M, shape=(11,))
    group.store(Y, mixed(n, m) + mixed(m, n))


@kernel.func
def raised(x, n):
    for k in range(n):
        x[...] = x + k
    x[0] = -1.0


@kernel
def written_by_functions(group, X, Y):
    x = group.load(X, shape=(8,))
    y = x.copy()
    raised(x, 3)
    for _ in range(2):
        raised(y, 4)
    group.store(Y[0], x)
    group.store(Y[1], y)


def fast_exp2(x):
    return np.exp2(x)


@kernel.intrinsic(fast_exp2)
def fast_exp2_impl(x, chip):
    if x.dtype == "float32" and chip.backend == "cuda":
        return lambda builder, x: builder.asm("ex2.approx.ftz.f32 $0, $1;", x)
    return None


def fused(x, y):
    return x * y + 1.0


@kernel.intrinsic(fused)
def fused_impl(x, y):
    if x.dtype != "float32" or y.dtype != "float32":
        return None
    return lambda builder, x, y: builder.text("{tl}.math.fma({0}, {1}, 1.0)", x, y)


@kernel
def intrinsics(group, X, H, Y):
    x, h = group.load(X, shape=(20,)), group.load(H, shape=(20,))
    group.store(Y[0], fused(fast_exp2(x), x))
    group.store(Y[1], fused(h, x))


def matrix_unit(a, b, acc):
    pass


@kernel.intrinsic(matrix_unit, scope=SubGroup)
@kernel.intrinsic(matrix_unit, scope=WorkGroup)
def matrix_unit_impl(a, b, acc):
    return lambda builder, a, b, acc: builder.dot(a, b, acc)


@kernel
def products_by_intrinsics(group, A, B, C):
    i, j = group.work_offset()
    m, n = group.shape
    acc = group.zeros(m, n)
    for k in range(0, A.shape[1], 16):
        a, b = group.load(A[i:, k:], shape=(m, 16)), group.load(B[k:, j:], shape=(16, n))
        matrix_unit(a, b, acc)
    group.store(C[i:, j:], acc)


@kernel
def products_of_sub_groups(group, A, B, C):
    i, j = group.work_offset()

    @group.subgroups
    def inner(sg):
        row = i + sg.subgroup_id() * 8
        acc = group.vzeros(8, 16)
        for k in range(0, A.shape[1], 4):
            a = group.vload(A[row:, k:], shape=(8, 4))
            b = group.vload(B[k:, j:], shape=(4, 16))
            matrix_unit(a, b, acc)
        if sg.subgroup_id() != 1:
            group.store(C[row:, j:], acc)

    inner()


@kernel
def sums_of_sub_groups(group, X, Y, Z):
    (i,) = group.work_offset()
    size = 8

    @group.subgroups
    def inner(sg):
        me = sg.subgroup_id()
        x = group.vload(X[i + me * sg.size() :], shape=(size,))
        total = x.sum()
        if me > 0:
            total = total * 10.0
        group.store(Y[(i + me * 8) // 8 :], total + group.vzeros(1))
        if i + me * 8 < X.shape[0]:
            group.store(Z[i + me * 8 :], group.vload(X[i + me * 8 :], 4) * X[i + me * 8])

    inner()


@kernel
def added_up(group, X, B, S, T):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=group.shape)
    atomic_ref(S)[group.load(B[i:], shape=group.shape)] += x
    atomic_ref(T)[0] += x.sum()
    atomic_ref(T)[1:] -= x[None, :].sum(axis=1)

    @group.workitems
    def inner(item):
        (j,) = item.global_id()
        if j < X.shape[0]:
            if X[j] > 0:
                atomic_ref(T)[2] += 1.0

    inner()


@kernel
def added_to_one_place(group, N, T):
    n = group.load(N, shape=(8,))
    atomic_ref(T)[(n ^ n) & 31] += 1.0  # simplified, an index that does not vary


@kernel
def loops_of_items(group, X, N, Y):
    @group.workitems
    def inner(item):
        (i,) = item.global_id()
        if i < X.shape[0]:
            total, odd = 0.0, 0
            for k in range(N[i]):
                if k != 2:
                    total += X[i, k]
                for m in range(i, 0, -2):
                    odd = odd + m
            Y[i] = total + odd

    inner()


@kernel
def filled(group, X, Y):
    (i,) = group.work_offset()
    x = group.load(X[i:], shape=(8,))
    group.store(Y[0, i:], x.filled(-1.0))
    group.store(Y[1, i:], x[2:7:2].filled(i) + group.ones(3))


@kernel
def rows_of_items(group, X, Y):
    @group.workitems
    def inner(item):
        (i,) = item.global_id()
        row = X[i] * 2.0
        if i % 2 == 0:
            row = row + 1.0
        if i < Y.shape[0] - 1:
            Y[i] = row
        else:
            Y[i] = 7.0

    inner()


H, W, KH, KW = 5, 6, 3, 2
OH, OW = H - KH + 3, W - KW + 1
rows = create_mapping(lambda m, k: (m // OW + k // KW - 1, m % OW + k % KW))
SWIZZLED = index_map((8, 8), lambda i, j: i * 8 + (j + i) % 8)
OVERLAPPING = index_map((4, 3), lambda i, j: i + j)


@kernel
def implicit_gemm(group, X, F, Y):
    a = group.load(X, shape=(OH * OW, KH * KW), mapping=rows)
    out = create_mapping(lambda m, n: (n, m // OW, m % OW))
    group.store(Y, (a[:, :, None] * group.load(F)[None]).sum(axis=1), mapping=out)


@kernel
def layouts(group, X, Y, Z):
    (i,) = group.id()
    x = group.load(OVERLAPPING(X), shape=(4, 3))
    z = SWIZZLED(Z)
    group.store(Y[i], x)
    group.store(z[i * 4 :, 2:], group.load(SWIZZLED(X)[i * 4 :], shape=(4, 6)) + 1.0)
    moved = create_mapping(lambda a, b: (b + i * 4, a))
    group.store(z, group.full((2, 4), np.float32, 5.0), mapping=moved)


def _overloads(x, y):
    j = np.arange(len(x))
    return {1: np.stack([x + 16, x + j % 16 // 8 * 100, x * j])}


def _gate(x, z, y):
    def gated(a, b):
        return np.where(np.tanh(a) > 0, np.tanh(a) * b, 0)

    return {2: gated(x, z) + gated(z, x)}


def _raised(x, y):
    once, twice = x + 3, x + 12
    once[0] = twice[0] = -1
    return {1: np.stack([once, twice])}


def _intrinsics(x, h, y):
    return {2: np.stack([np.exp2(x) * x + 1, h.astype(np.float32) * x + 1])}


def _of_sub_groups(a, b, c):
    made = a @ b
    rows = np.arange(len(a)) // 8 % 3
    return {2: np.where(rows[:, None] == 1, c, made)}


def _sums(x, y, z):
    first = (np.arange(48) % 8 < 4) & (np.arange(48) < len(x))
    made = [x[n : n + 8].sum() * (10 if n // 8 % 3 else 1) for n in range(0, len(x), 8)]
    products = np.pad(x, (0, 3)) * np.repeat(x[::8], 8)
    return {1: np.array([*made, *y[len(made) :]]), 2: np.where(first, products, z)}


def _added(x, b, s, t):
    made, total = s.copy(), t.copy()
    np.add.at(made, b, x)
    total[0] += x.sum()
    total[1] -= x.sum()
    total[2] += (x > 0).sum()
    return {2: made, 3: total}


def _loops(x, n, y):
    made = [
        sum(x[i, k] for k in range(n[i]) if k != 2) + n[i] * sum(range(i, 0, -2)) for i in range(len(x))
    ]
    return {2: np.array(made)}


def _filled(x, y):
    made = np.pad(x, (0, 5), constant_values=8.0)
    second = y[1].copy()
    for at in (0, 8):
        second[at : at + 3] = made[at + 2 : at + 7 : 2] + 1
    return {1: np.stack([np.where(np.arange(16) < 11, made, -1), second])}


def _rows(x, y):
    made = x * 2 + (1 - np.arange(len(x)) % 2)[:, None]
    made[-1] = 7
    return {1: made}


def _convolved(x, f, y):
    padded = np.pad(x, ((1, 1), (0, 0)))
    taps = [padded[a : a + OH, b : b + OW] for a in range(KH) for b in range(KW)]
    return {2: np.einsum("kyx,kn->nyx", np.stack(taps), f)}


def _mixed(n, m):
    return np.where(n > m, n * 3 - m, np.maximum(n, -m)) & 127


def _layouts(x, y, z):
    at = np.arange(8)[:, None] * 8 + (np.arange(8) + np.arange(8)[:, None]) % 8
    made, seen = z.copy(), x[at]
    made[at[:, 2:]] = seen[:, :6] + 1
    made[at[:, :2]] = 5
    return {1: np.stack([x[np.arange(4)[:, None] + np.arange(3)]] * 2), 2: made}


CASES = (
    Case(implicit_gemm, Group(1), (floats(H, W), floats(KH * KW, 4), out(4, OH, OW)), _convolved, 1e-4),
    Case(layouts, Group(8, 4), (floats(64), out(2, 4, 3), out(64)), _layouts),
    Case(overloads, Group(40, 16, 8), (floats(40), out(3, 40)), _overloads),
    Case(added_to_one_place, Group(1), (ints(5), np.zeros(3, np.float32)), lambda n, t: {1: [5.0, 0, 0]}),
    Case(functions_of_their_own, Group(20, 8), (floats(20), floats(20, seed=4), out(20)), _gate),
    Case(
        whole_functions_of_their_own,
        Group(1),
        (ints(11), ints(11)[::-1].copy(), out(11, dtype=np.int32)),
        lambda n, m, y: {2: _mixed(n, m) + _mixed(m, n)},
    ),
    Case(written_by_functions, Group(1), (floats(8), out(2, 8)), _raised),
    Case(intrinsics, Group(1), (floats(20), floats(20).astype(np.float16), out(2, 20)), _intrinsics, 2e-3),
    Case(
        products_by_intrinsics,
        Group((20, 18), (16, 16)),
        (floats(20, 33), floats(33, 18), out(20, 18)),
        lambda a, b, c: {2: a @ b},
        1e-4,
    ),
    Case(
        products_of_sub_groups,
        Group((48, 16), (24, 16), 128),
        (floats(48, 10), floats(10, 16), out(48, 16)),
        _of_sub_groups,
        1e-4,
    ),
    Case(sums_of_sub_groups, Group(48, 24, 8), (floats(45), out(7), out(48)), _sums, 1e-4),
    Case(
        added_up,
        Group(40, 16),
        (floats(40), ints(40, low=0, high=5), out(5) * 0, out(3) * 0),
        _added,
        1e-4,
    ),
    Case(loops_of_items, Group(11, 4), (floats(11, 6), ints(11, low=0, high=6), out(11)), _loops, 1e-4),
    Case(filled, Group(16, 8), (floats(11), out(2, 16)), _filled),
    Case(rows_of_items, Group(6, 6), (floats(6, 6), out(6, 6)), _rows),
)
