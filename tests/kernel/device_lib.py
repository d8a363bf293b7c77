"""The library of the proposal: a product of matrices by three intrinsics. The proposal leaves out
the shapes of its tiles, and where the sums are."""

# mypy: ignore-errors
# ruff: noqa

from transconv.kernel import Builder as spirv
from transconv.kernel import SubGroup, WorkGroup, kernel

TK = 4


def gemm(a, b, acc):
    pass


def my_hw_gemm(a, b, acc):
    pass


def my_tile_load(arr, shape):
    pass


def my_tile_store(arr, data):
    pass


@kernel.intrinsic(my_hw_gemm, scope=SubGroup)
def my_hw_gemm_impl(a, b, acc):
    def func(builder, a, b, acc):
        return builder.create(spirv.dot)(a, b, acc)

    return func


@kernel.intrinsic(my_tile_load, scope=SubGroup)
def my_tile_load_impl(arr, shape):
    return lambda builder, arr, shape: builder.create(spirv.load)(arr, shape)


@kernel.intrinsic(my_tile_store, scope=SubGroup)
def my_tile_store_impl(arr, data):
    return lambda builder, arr, data: builder.create(spirv.store)(arr, data)


@kernel.func(gemm, scope=WorkGroup)
def my_gemm(group, a, b, acc):
    i, j = group.id()
    K = a.shape[1]

    @group.subgroups
    def inner(sg):
        M, N = 8, 16  # Or from autotuner
        tile_acc = my_tile_load(acc[i * group.shape[0] :, j * group.shape[1] :], (M, N))
        for k in range(0, K, TK):
            tile_a = my_tile_load(a[i * group.shape[0] :, k:], (M, TK))
            tile_b = my_tile_load(b[k:, j * group.shape[1] :], (TK, N))
            my_hw_gemm(tile_a, tile_b, tile_acc)

        my_tile_store(acc[i * group.shape[0] :, j * group.shape[1] :], tile_acc)

    inner()
