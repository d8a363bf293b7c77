"""Programs of overloads, intrinsics, mappings and atomic additions that are refused; wrong_programs.txt has the
message of each. The lines are those of this file."""

# ruff: noqa
# mypy: ignore-errors

import numpy as np

from transconv.kernel import SubGroup, WorkGroup, WorkItem, atomic_ref, create_mapping, index_map, kernel


def one_scope(x):
    pass


@kernel.func(one_scope, scope=SubGroup)
def one_scope_of_sub_groups(sg, x):
    return x


def hardware(x):
    pass


@kernel.intrinsic(hardware)
def for_halves(x):
    return (lambda builder, x: x) if x.dtype == "float16" else None


@kernel.intrinsic(hardware, scope=WorkItem)
def for_items(x):
    return 3


def broken(x):
    pass


@kernel.intrinsic(broken)
def with_one_value_more(x):
    return lambda builder, x, y: x


def unknown(x):
    pass


@kernel.intrinsic(unknown)
def calls_what_is_not_there(x):
    return lambda builder, x: builder.call("hypotenuse", x)


@kernel.func(inline=False)
def total(x):
    return x.sum()


@kernel.func(inline=False)
def stepped(x):
    for k in range(3):
        x = x + k
    return x


@kernel.func
def written_and_bound(x):
    x[...] = 1.0
    x = x + 1.0


DIAGONALS = index_map((4, 4), lambda i, j: i + j)
DIAGONAL = create_mapping(lambda i, j: (i + j, 0))
ROWS = create_mapping(lambda i: (i, 0))


@kernel
def a_body_for_another_scope(group, X, Y):
    group.store(Y, one_scope(group.load(X)))


@kernel
def the_body_of_another_scope(group, X, Y):
    group.store(Y, one_scope_of_sub_groups(group.load(X)))


@kernel
def an_intrinsic_for_other_types(group, X, Y):
    group.store(Y, hardware(group.load(X)))


@kernel
def an_intrinsic_that_gives_a_number(group, X, Y):
    @group.workitems
    def inner(item):
        i, j = item.global_id()
        Y[i, j] = hardware(X[i, j])

    inner()


@kernel
def an_intrinsic_by_name(group, X, Y):
    group.store(Y, hardware(x=group.load(X)))


@kernel
def an_intrinsic_that_fails(group, X, Y):
    group.store(Y, broken(group.load(X)))


@kernel
def an_intrinsic_of_nothing(group, X, Y):
    group.store(Y, unknown(group.load(X)))


@kernel
def a_reduction_of_its_own(group, X, Y):
    group.store(Y, total(group.load(X)))


@kernel
def a_loop_of_its_own(group, X, Y):
    group.store(Y, stepped(group.load(X)))


@kernel
def a_parameter_written_and_bound(group, X, Y):
    written_and_bound(group.load(X))


@kernel
def two_names_of_a_tile(group, X, Y):
    x = group.load(X)
    y = x
    for k in range(3):
        y[0] = 1.0
    group.store(Y, x)


@kernel
def a_mapping_without_a_shape(group, X, Y):
    x = group.load(X, mapping=DIAGONAL)


@kernel
def a_mapping_of_one_index(group, X, Y):
    x = group.load(X, shape=(4, 4), mapping=ROWS)


@kernel
def a_mapping_that_is_a_function(group, X, Y):
    x = group.load(X, shape=(4, 4), mapping=lambda i, j: (i, j))


@kernel
def two_elements_in_one_place(group, X, Y):
    group.store(Y, group.ones(4, 4), mapping=DIAGONAL)


@kernel
def two_elements_in_one_place_of_each_group(group, X, Y):
    m, _ = group.id()
    at = create_mapping(lambda i, j: (i // 2 + m, j))
    group.store(Y, group.ones(4, 4), mapping=at)


@kernel
def a_mapping_of_items(group, X, Y):
    @group.workitems
    def inner(item):
        x = group.vload(X, shape=(4, 4), mapping=DIAGONAL)

    inner()


@kernel
def a_layout_of_rows(group, X, Y):
    x = group.load(DIAGONALS(X))


@kernel
def a_product_by_an_atomic(group, X, Y):
    atomic_ref(Y)[0, 0] *= 2.0


@kernel
def a_read_of_what_is_added_to(group, X, Y):
    atomic_ref(Y)[0, 0] += 1.0
    group.store(X, group.load(Y))


@kernel
def a_tile_of_a_sub_group(group, X, Y):
    @group.subgroups
    def inner(sg):
        x = group.zeros(4, 4)

    inner()


@kernel
def a_work_items_place_of_a_sub_group(group, X, Y):
    @group.subgroups
    def inner(sg):
        i, j = sg.global_id()

    inner()


@kernel
def a_barrier_of_items(group, X, Y):
    @group.workitems
    def inner(item):
        item.barrier()

    inner()


@kernel
def a_tile_without_a_shape(group, X, Y):
    x = group.zeros(dtype=np.float32)


@kernel
def a_tile_instead_of_inactive_elements(group, X, Y):
    x = group.load(X)
    group.store(Y, x.filled(x))


def of_groups(x):
    pass


@kernel.func(of_groups, scope=WorkGroup)
def of_groups_of_one_tile(group, x):
    return x


@kernel
def two_tiles_for_one(group, X, Y):
    x = group.load(X)
    group.store(Y, of_groups(x, x))
