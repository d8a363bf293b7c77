"""Programs of functions and work-items that are refused; wrong_programs.txt has the message of each. The lines
are those of this file."""

# ruff: noqa
# mypy: ignore-errors

from transconv.kernel import kernel


@kernel.func
def recursive(x):
    return recursive(x)


@kernel.func
def late(x):
    for k in range(3):
        return x


@kernel.func
def two(x, y):
    return x + y


@kernel
def a_recursive_function(group, X, Y):
    group.store(Y, recursive(group.load(X)))


@kernel
def a_return_in_a_loop(group, X, Y):
    group.store(Y, late(group.load(X)))


@kernel
def other_arguments(group, X, Y):
    group.store(Y, two(group.load(X)))


@kernel
def sub_groups(group, X, Y):
    @group.subgroups
    def inner(sg):
        @group.workitems
        def innermost(item):
            pass

    inner()


@kernel
def a_function_inside(group, X, Y):
    def inner(x):
        return x


@kernel
def a_load_of_items(group, X, Y):
    @group.workitems
    def inner(item):
        x = group.load(X)

    inner()


@kernel
def a_tile_inside_of_items(group, X, Y):
    x = group.load(X)

    @group.workitems
    def inner(item):
        i, j = item.global_id()
        x[i, j] = 1.0

    inner()


@kernel
def all_items_to_one_place(group, X, Y):
    @group.workitems
    def inner(item):
        i, j = item.global_id()
        Y[0, 0] = X[i, j]

    inner()


@kernel
def a_loop_of_each_item(group, X, Y):
    @group.workitems
    def inner(item):
        i, j = item.global_id()
        for k in range(0, 8, i):
            Y[i, j] = 1.0

    inner()


@kernel
def an_element_of_items(group, X, Y):
    @group.workitems
    def inner(item):
        i, j = item.global_id()
        row = X[i]
        row[0] = 1.0
        Y[i, j] = row[0]

    inner()


@kernel
def unknown_place_of_an_item(group, X, Y):
    @group.workitems
    def inner(item):
        i = item.get_id()

    inner()


@kernel
def neighbours_in_place(group, X, Y):
    i, j = group.work_offset()
    y = group.load(Y[i:, j + 1 :], shape=group.shape)
    group.store(Y[i:, j:], y)


@kernel
def items_in_place(group, X, Y):
    @group.workitems
    def inner(item):
        i, j = item.global_id()
        Y[i, j] = Y[i, j] + Y[j, i]

    inner()


@kernel
def pythons_sum_of_rows(group, X, Y):
    y = sum(group.load(X))
