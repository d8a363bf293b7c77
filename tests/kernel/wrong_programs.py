"""Programs that are refused; wrong_programs.txt has the message of each. The lines are those of this file."""

# ruff: noqa
# mypy: ignore-errors

import numpy as np

from transconv.kernel import kernel

ARRAY = np.zeros((8, 16), np.float32)


def plain(x):
    return x


@kernel
def while_loop(group, X, Y):
    while True:
        pass


@kernel
def a_result(group, X, Y):
    return X


@kernel
def an_early_end(group, X, Y):
    if group.shape[0] == 4:
        return
    x = 1


@kernel
def with_statement(group, X, Y):
    with X:
        pass


@kernel
def try_statement(group, X, Y):
    try:
        x = 1
    except ValueError:
        pass


@kernel
def import_inside(group, X, Y):
    import math

    group.store(Y, math.pi)


@kernel
def global_name(group, X, Y):
    global COUNT
    COUNT = 1


@kernel
def class_inside(group, X, Y):
    class A:
        pass


@kernel
def deleted(group, X, Y):
    x = 1
    del x


@kernel
def raised(group, X, Y):
    raise ValueError(X)


@kernel
def break_in_a_loop(group, X, Y):
    for k in range(3):
        break


@kernel
def lambda_expression(group, X, Y):
    f = lambda x=1: x


@kernel
def comprehension(group, X, Y):
    x = [k for k in range(3) if k]


@kernel
def formatted_text(group, X, Y):
    x = f"{X}"


@kernel
def unknown_name(group, X, Y):
    group.store(Y, missing)


@kernel
def loop_without_else(group, X, Y):
    for k in range(3):
        x = k
    else:
        x = 0


@kernel
def unknown_method_of_the_group(group, X, Y):
    x = group.laod(X)


@kernel
def unknown_attribute_of_a_tile(group, X, Y):
    x = group.load(X)
    y = x.real


@kernel
def attribute_of_an_array(group, X, Y):
    y = X.sum()


@kernel
def arithmetic_of_an_array(group, X, Y):
    y = X + 1


@kernel
def shape_at_run_time(group, X, Y):
    i, j = group.id()
    x = group.zeros(shape=(i,), dtype=np.float32)


@kernel
def negative_shape(group, X, Y):
    x = group.zeros(shape=(-1,), dtype=np.float32)


@kernel
def load_without_a_shape(group, X, Y):
    i, j = group.work_offset()
    x = group.load(X[i:])


@kernel
def load_of_another_rank(group, X, Y):
    x = group.load(X, shape=(16,))


@kernel
def load_of_a_tile(group, X, Y):
    x = group.load(group.load(X))


@kernel
def store_of_another_rank(group, X, Y):
    x = group.load(X)
    group.store(Y, x.sum(axis=0))


@kernel
def store_of_a_number(group, X, Y):
    group.store(Y, 1.0)


@kernel
def shapes_that_differ(group, X, Y):
    x = group.load(X)
    y = x + group.zeros(shape=(3,), dtype=np.float32)


@kernel
def unknown_type(group, X, Y):
    x = group.zeros(shape=(4,), dtype=np.complex64)


@kernel
def axis_that_is_not_there(group, X, Y):
    x = group.load(X).sum(axis=2)


@kernel
def axis_twice(group, X, Y):
    x = group.load(X).sum(axis=(0, 0))


@kernel
def truth_of_a_tile(group, X, Y):
    if group.load(X) > 0:
        pass


@kernel
def and_of_tiles(group, X, Y):
    x = group.load(X)
    y = x > 0 and x < 1


@kernel
def bits_of_floats(group, X, Y):
    x = group.load(X) & 1


@kernel
def inner_sizes_that_differ(group, X, Y):
    x = group.load(X)
    y = x @ x


@kernel
def product_of_vectors(group, X, Y):
    x = group.load(X[0])
    y = x @ x


@kernel
def slice_of_a_tile(group, X, Y):
    x = group.load(X)
    y = x[group.id()[0] :]


@kernel
def index_beyond_the_end(group, X, Y):
    x = group.load(X[8])


@kernel
def too_many_indices(group, X, Y):
    x = X[0, 0, 0]


@kernel
def index_that_is_a_float(group, X, Y):
    x = X[0.5]


@kernel
def step_backwards(group, X, Y):
    x = group.load(X[::-1], shape=(8, 16))


@kernel
def vector_that_changes(group, X, Y):
    v = group.vzeros(shape=(4,), dtype=np.float32)
    v[0] = 1.0


@kernel
def out_of_a_vector(group, X, Y):
    v = group.vzeros(shape=(8, 16), dtype=np.float32)
    np.add(group.load(X), 1.0, out=v)


@kernel
def out_of_another_shape(group, X, Y):
    v = group.zeros(shape=(4,), dtype=np.float32)
    np.add(group.load(X), 1.0, out=v)


@kernel
def mask_is_read_only(group, X, Y):
    x = group.load(X)
    x.mask[0] = True


@kernel
def array_assigned(group, X, Y):
    Y[0] = 1.0


@kernel
def argument_assigned(group, X, Y):
    X = X[1:]


@kernel
def type_that_changes(group, X, Y):
    t = group.zeros(shape=(8, 16), dtype=np.float16)
    for k in range(3):
        t = t + group.load(X)


@kernel
def shape_that_changes(group, X, Y):
    t = group.zeros(shape=(16,), dtype=np.float32)
    for k in range(3):
        t = t + group.load(X)


@kernel
def tuple_that_changes(group, X, Y):
    t = (1, 2)
    for k in range(3):
        t = (k, 2)


@kernel
def name_of_a_branch(group, X, Y):
    i, j = group.id()
    if i == 0:
        t = 1.0
    group.store(Y[i], t)


@kernel
def name_of_a_loop(group, X, Y):
    for k in range(3):
        t = group.load(X)
    group.store(Y, t)


@kernel
def step_at_run_time(group, X, Y):
    i, j = group.id()
    for k in range(0, 8, i):
        pass


@kernel
def loop_over_a_tile(group, X, Y):
    for row in group.load(X):
        pass


@kernel
def long_loop_written_out(group, X, Y):
    for k in tuple(range(300)):
        pass


@kernel
def read_behind_a_store(group, X, Y):
    group.store(Y, group.load(X))
    y = group.load(Y)


@kernel
def read_behind_a_store_in_a_loop(group, X, Y):
    for k in range(2):
        y = group.load(Y)
        group.store(Y, y + 1.0)


@kernel
def unknown_function(group, X, Y):
    x = np.linalg.norm(group.load(X))


@kernel
def function_without_decorator(group, X, Y):
    x = plain(group.load(X))


@kernel
def wrong_number_of_values(group, X, Y):
    x = np.add(group.load(X))


@kernel
def parts_that_do_not_fit(group, X, Y):
    i, j, k = group.id()


@kernel
def assertion(group, X, Y):
    assert X.shape[0] == 9


@kernel
def array_from_outside(group, X, Y):
    group.store(Y, ARRAY)


@kernel
def division_by_zero(group, X, Y):
    x = 1 // 0


@kernel
def positions_from_floats(group, X, Y):
    i = group.load(X[0]).max()
    x = group.load(X[i:], shape=(4, 16))


@kernel
def fill_without_a_value(group, X, Y):
    x = group.full(shape=(4,), dtype=np.float32)


@kernel
def arange_at_run_time(group, X, Y):
    i, j = group.id()
    x = np.arange(i)


@kernel
def a_number_beyond_the_type(group, X, Y):
    x = group.load(X, shape=X.shape).astype(np.uint8)
    group.store(Y, x + 1000)


@kernel
def a_start_before_the_array(group, X, Y):
    i, j = group.work_offset()
    group.store(Y[i:, j:], group.load(X[i - 1 :, j:], shape=group.shape))


@kernel
def an_operand_that_another_changes(group, X, Y):
    i, j = group.work_offset()
    x = group.load(X[i:, j:], shape=group.shape)
    acc = group.zeros(shape=group.shape)
    for k in range(i + 2):
        acc = acc * 2.0 + np.add(acc, x, out=acc)
    group.store(Y[i:, j:], acc)


@kernel
def a_shape_of_other_elements(group, X, Y):
    x = group.load(X).reshape(3, -1)


@kernel
def ends_of_other_sizes(group, X, Y):
    x = group.load(X)
    group.store(Y, np.concatenate((x, x[:, :4])))


@kernel
def an_order_along_all(group, X, Y):
    group.store(Y, np.cumsum(group.load(X)))


@kernel
def an_order_of_too_many(group, X, Y):
    group.store(Y, np.sort(group.zeros(2048)))


@kernel
def places_beside_an_index(group, X, Y):
    x, i = group.load(X), np.arange(4)
    group.store(Y, x[i, 0])


@kernel
def places_that_are_no_numbers(group, X, Y):
    x = group.load(X)
    group.store(Y, x[x[:, 0]])


@kernel
def an_argument_of_the_group_too_many(group, X, Y):
    i = group.work_offset(0)
    group.store(Y[i:], 0.0)


@kernel
def a_load_of_nothing(group, X, Y):
    group.store(Y, group.load())


@kernel
def a_sum_along_an_unknown_word(group, X, Y):
    group.store(Y, group.load(X).sum(dim=1))


@kernel
def a_function_with_an_unknown_word(group, X, Y):
    group.store(Y, np.sum(group.load(X), dim=1))


@kernel
def a_function_of_too_many(group, X, Y):
    group.store(Y, np.sort(group.load(X), 0, "quicksort"))
