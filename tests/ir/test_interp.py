"""The interpreter: kernels that have nothing to do with convolution equal NumPy, and every wrong
access is an error that says where."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from transconv import ir
from transconv.ir import bf16, f16, f32, f64, i8, i32, index
from transconv.ir.functions.calls import CALLS
from transconv.ir.functions.rounding import rounded
from transconv.ir.interp.evaluate import contract

I, J, K, P = (ir.Var(n) for n in ("i", "j", "k", "pid"))  # noqa: E741
ACC = ir.Var("acc", f32)
ZERO = ir.Const(0.0, f32)
RNG = np.random.default_rng(7)


def tensor(name: str, *shape: int, dtype: ir.DType = f32) -> ir.Tensor:
    dims = tuple(f"d{i}" for i in range(len(shape)))
    return ir.Tensor(name, dims, shape, ir.Layout.dense(dtype, shape))


def randoms(t: ir.Tensor) -> Any:
    values = (
        RNG.integers(-8, 8, t.layout.span) if t.dtype.kind == "int" else RNG.standard_normal(t.layout.span)
    )
    return np.ascontiguousarray(values.astype(t.dtype.numpy))


def zeros(t: ir.Tensor) -> Any:
    return np.zeros(t.layout.span, t.dtype.numpy)


def value_of(e: ir.Expr, dtype: ir.DType = f64) -> Any:
    """What a scalar expression of no variables comes to, stored as a type."""
    t = tensor("t", 1, dtype=dtype)
    data = zeros(t)
    ir.run(ir.Kernel("value", (t,), ir.store(t, 0, e)), {"t": data})
    return data[0]


# ---- whole kernels ----


@pytest.mark.parametrize("inner", ["serial", "unroll", "tile"])
@pytest.mark.parametrize("outer", ["parallel", "grid", "tile", "serial"])
def test_row_sums_by_loops(outer: str, inner: str) -> None:
    src, dst = tensor("src", 5, 7), tensor("dst", 5)
    row = ir.seq(
        ir.Alloc(ACC, (), ZERO),
        ir.For(J, 7, ir.Update(ACC, ACC + ir.Load(src, I * 7 + J, ir.TRUE)), inner),
        ir.store(dst, I, ACC),
    )
    kernel = ir.Kernel("rows", (src, dst), ir.For(I, 5, row, outer))
    x, y = randoms(src), zeros(dst)
    ir.run(kernel, {"src": x, "dst": y}, outputs=["dst"])
    np.testing.assert_allclose(y, x.reshape(5, 7).sum(1), rtol=1e-5)


def test_softmax_with_lanes() -> None:
    rows, cols = 6, 11
    src, dst = tensor("src", rows, cols, dtype=f16), tensor("dst", rows, cols, dtype=f16)
    r, c = ir.Lane("r", 4, 1), ir.Lane("c", 16, 3)
    row, x, e = ir.Var("row"), ir.Var("x", f32), ir.Var("e", f32)
    inside = (row < rows) & (c < cols)
    body = ir.seq(
        ir.Let(row, P * 4 + r),
        ir.Let(x, ir.select(inside, ir.Cast(ir.Load(src, row * cols + c, inside), f32), -1e30)),
        ir.Let(e, ir.Call("exp", (x - ir.Reduce("max", x, c),))),
        ir.store(dst, row * cols + c, e / ir.Reduce("sum", e, c), inside),
    )
    kernel = ir.Kernel("softmax", (src, dst), ir.For(P, 2, body, "grid"))
    ir.verify(kernel, "lanes")
    a, b = randoms(src), zeros(dst)
    ir.run(kernel, {"src": a, "dst": b}, outputs=["dst"])
    up = np.exp(a.reshape(rows, cols).astype("f4"))
    np.testing.assert_allclose(b.reshape(rows, cols), up / up.sum(1, keepdims=True), rtol=2e-3)


def matmul(m: int, n: int, k: int, dtype: ir.DType, acc_type: ir.DType, split: int) -> ir.Kernel:
    """c += a b in tiles of 16 x 8 x 4, with the sum over k dealt out to ``split`` programs."""
    a, b = tensor("a", m, k, dtype=dtype), tensor("b", k, n, dtype=dtype)
    c = tensor("c", m, n, dtype=acc_type)
    grid_m, grid_n, steps = -(-m // 16), -(-n // 8), -(-k // (4 * split))
    row, col, kk = ir.Var("row"), ir.Var("col"), ir.Var("kk")
    left, right, acc = ir.Var("left", dtype), ir.Var("right", dtype), ir.Var("acc", acc_type)
    lm, lk, ln = ir.Lane("m", 16, 1), ir.Lane("k", 4, 2), ir.Lane("n", 8, 3)
    inside = (row < m) & (col < n)
    write = (
        ir.store(c, row * n + col, acc, inside)
        if split == 1
        else ir.FuncCall(ir.ATOMIC_ADD, (c, row * n + col, acc, inside))
    )
    body = ir.seq(
        ir.Let(row, P % grid_m * 16 + lm),
        ir.Let(col, P // grid_m % grid_n * 8 + ln),
        ir.Alloc(acc, (lm, ln), ir.Const(0, acc_type)),
        ir.For(
            J,
            steps,
            ir.seq(
                ir.Let(kk, (J * split + P // (grid_m * grid_n)) * 4 + lk),
                ir.Let(left, ir.Load(a, row * k + kk, (row < m) & (kk < k))),
                ir.Let(right, ir.Load(b, kk * n + col, (kk < k) & (col < n))),
                ir.FuncCall(ir.FENCE, ()),
                ir.FuncCall(ir.dot("ieee"), (acc, left, right)),
            ),
        ),
        write,
    )
    grid = ir.For(P, grid_m * grid_n * split, body, "grid")
    return ir.Kernel("matmul", (a, b, c), grid)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("dtype", "acc_type"), [(f16, f32), (f32, f32), (f64, f64), (i8, i32)])
@pytest.mark.parametrize("shape", [(16, 8, 4), (20, 13, 37), (1, 1, 1)])
def test_matmul_with_dot(
    shape: tuple[int, int, int], dtype: ir.DType, acc_type: ir.DType, split: int
) -> None:
    m, n, k = shape
    kernel = matmul(m, n, k, dtype, acc_type, split)
    ir.verify(kernel)
    a, b, c = (randoms(t) for t in kernel.params)
    c[:] = 0
    ir.run(kernel, {"a": a, "b": b, "c": c}, outputs=["c"])
    expected = a.reshape(m, k).astype("f8") @ b.reshape(k, n).astype("f8")
    np.testing.assert_allclose(c.reshape(m, n), expected, rtol=1e-4, atol=1e-4)


def test_programs_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and errors are those of the loop that runs at once."""
    monkeypatch.setattr("transconv.ir.interp.execution._VOLUME", 3)
    test_matmul_with_dot((20, 13, 37), f32, f32, 3)
    test_row_sums_by_loops("parallel", "serial")
    t = tensor("t", 4)
    with pytest.raises(ir.InterpError, match=r"offset 4 of t is not in 0..4 at i=2, j=0"):
        ir.run(
            ir.Kernel(
                "k", (t,), ir.For(I, 5, ir.For(J, 2, ir.store(t, I * 2 + J, I), "parallel"), "parallel")
            ),
            {"t": zeros(t)},
        )


@settings(deadline=None)
@given(
    draw.lists(
        draw.tuples(draw.sampled_from([1, 3]), draw.sampled_from([1, 3]), draw.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_contract_is_a_broadcast_product_summed(axes: list[tuple[int, int, bool]]) -> None:
    x = RNG.standard_normal([a for a, _, _ in axes])
    y = RNG.standard_normal([b for _, b, _ in axes])
    summed = [i for i, (_, _, s) in enumerate(axes) if s]
    expected = (x * y).sum(axis=tuple(summed), keepdims=True)
    np.testing.assert_allclose(contract(x, y, summed, np.dtype("f8")), expected, atol=1e-12)


def test_branches_on_programs_mask_both_sides() -> None:
    src, dst = tensor("src", 3), tensor("dst", 6)
    x = ir.Var("x", f32)
    kernel = ir.Kernel(
        "k",
        (src, dst),
        ir.For(
            I,
            6,
            ir.seq(
                ir.Alloc(ACC, (), ZERO),
                ir.If(
                    I % 2 < 1,
                    ir.seq(ir.Let(x, ir.Load(src, I // 2, ir.TRUE)), ir.Update(ACC, x)),
                    ir.Update(ACC, ACC - ir.Cast(6 // (I % 2), f32)),
                ),
                ir.store(dst, I, ACC),
            ),
            "grid",
        ),
    )
    y = zeros(dst)
    ir.run(kernel, {"src": np.array([1, 2, 3], "f4"), "dst": y}, outputs=["dst"])
    assert y.tolist() == [1, -6, 2, -6, 3, -6]


def test_a_branch_without_axes_is_taken_or_not() -> None:
    t = tensor("t", 2)
    missing = ir.Var("missing", f32)
    body = ir.For(
        I,
        2,
        ir.If(
            I < 1,
            ir.store(t, I, 5.0 + ir.Cast(I, f32)),
            ir.If(I < 1, ir.store(t, I, missing), ir.store(t, I, ZERO - 1.0)),
        ),
    )
    data = zeros(t)
    ir.run(ir.Kernel("k", (t,), body), {"t": data}, outputs=["t"])
    assert data.tolist() == [5, -1]


def test_masked_loads_are_zero_and_touch_nothing() -> None:
    src, empty, dst = tensor("src", 3), tensor("empty", 0), tensor("dst", 8)
    m = ir.Lane("m", 8, 0)
    e = ir.Load(src, m - 2, (m >= 2) & (m < 5)) + ir.Load(empty, m, ir.FALSE)
    data = zeros(dst)
    ir.run(
        ir.Kernel("k", (src, empty, dst), ir.store(dst, m, e)),
        {"src": np.array([1, 2, 3], "f4"), "empty": zeros(empty), "dst": data},
    )
    assert data.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]


def test_blocked_layout_needs_its_logical_elements_only() -> None:
    """nc4 of 3 channels holds 4: the padding may stay unwritten."""
    blocks = (ir.LayoutBlock(1, 1, 8), ir.LayoutBlock(0, 2, 4), ir.LayoutBlock(1, 4, 1))
    dst = ir.Tensor("dst", ("n", "c"), (2, 3), ir.Layout(f32, 2, blocks))
    at = dst.layout.offset_of([I, J])
    for channels, missing in ((3, ""), (2, r"dst\[n=0, c=2\] is never written .* 1 more of 6")):
        body = ir.For(I, 2, ir.For(J, channels, ir.store(dst, at, ZERO + 1.0), "tile"), "grid")
        kernel = ir.Kernel("k", (dst,), body)
        if missing:
            with pytest.raises(ir.InterpError, match=missing):
                ir.run(kernel, {"dst": zeros(dst)}, outputs=["dst"])
        else:
            memory = ir.run(kernel, {"dst": zeros(dst)}, outputs=["dst"])
            assert np.flatnonzero(memory.covered["dst"]).tolist() == [0, 1, 2, 4, 5, 6]


# ---- scalars ----

ints = draw.recursive(
    draw.integers(-20, 20).map(ir.Const),
    lambda inner: draw.tuples(
        draw.sampled_from([ir.Add, ir.Sub, ir.Mul, ir.FloorDiv, ir.Mod, ir.Min, ir.Max]), inner, inner
    ).map(lambda t: t[0](t[1], t[2])),
    max_leaves=6,
)


@settings(deadline=None)
@given(ints)
def test_integer_arithmetic_is_that_of_python(e: ir.Expr) -> None:
    names = {"min": min, "max": max}
    try:
        expected = eval(str(e), names)
    except ZeroDivisionError:
        with pytest.raises(ir.InterpError, match="divides by zero"):
            value_of(e, index)
    else:
        assert value_of(e, index) == expected


@pytest.mark.parametrize("x", [0.25, 1.0, 2.5])
@pytest.mark.parametrize("name", sorted(n for n, c in CALLS.items() if c.arity == 1 and 64 in c.floats))
def test_functions(name: str, x: float) -> None:
    table = {
        "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
        "rsqrt": lambda v: v**-0.5,
        "abs": abs,
        "exp2": lambda v: 2**v,
        "nearest": round,
        "ndtr_wide": lambda v: math.erfc(-v / math.sqrt(2)) / 2,
    }
    expected = table.get(name, getattr(math, name, None))
    assert expected is not None
    assert value_of(ir.Call(name, (ir.Const(x, f64),))) == pytest.approx(expected(x))
    if name in ("abs", "floor", "erf", "tanh"):
        assert value_of(ir.Call(name, (ir.Const(-x, f64),))) == pytest.approx(expected(-x))


def test_functions_of_several_values() -> None:
    x, y, z = (ir.Const(v, ir.f32) for v in (1.5, 0.25, 2.0))
    assert value_of(ir.Call("fma", (x, y, z))) == 2.375 and value_of(ir.Call("divided", (x, y))) == 6
    with pytest.raises(ir.VerifyError, match="takes 32-bit floats, not f64"):
        ir.verify(ir.Let(ir.Var("q", f64), ir.Call("divided", (ir.Const(1.0, f64), ir.Const(2.0, f64)))))


def test_the_nearest_tf32() -> None:
    """Ten bits of mantissa, ties away from zero; NaN stays NaN."""
    given = [1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 2**-11, 3.4028235e38, math.inf, -math.inf, 0.0]
    wanted = [1 + 2**-10, 1.0, -1 - 2**-10, math.inf, math.inf, -math.inf, 0.0]
    assert list(ir.convert(np.array(given, np.float32), ir.tf32)) == wanted
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(ir.convert(bits, ir.tf32)).all()


def test_more_scalars() -> None:
    two = ir.Const(2.0, f64)
    assert value_of(ir.Call("fma", (two, two, ir.Const(0.5, f64)))) == 4.5
    assert value_of(ir.Const(3) / ir.Const(2)) == 1.5
    assert value_of(-two) == -2
    assert value_of(ir.Cast(ir.Const(-1.7, f32), i32), i32) == -1
    assert value_of(ir.Const(5) << 2 >> 1, index) == 10
    assert value_of((ir.Const(6) & 3) | (ir.Const(8) ^ 1), index) == (6 & 3) | (8 ^ 1)
    assert value_of(ir.select(~(ir.Const(1) < 2), 1, 7), index) == 7
    assert value_of(ir.eq(1, 1) ^ ir.ne(1, 1), ir.boolean) == np.True_
    lane = ir.Lane("m", 8, 0)
    assert value_of(ir.Reduce("sum", ir.ONE, lane), index) == 8, "broadcast along the lane"
    assert value_of(ir.Reduce("max", -lane, lane), index) == 0


def test_shared_expressions_are_computed_once() -> None:
    e: ir.Expr = ir.Const(3)
    for _ in range(60):
        e = ir.maximum(e, e)
    assert value_of(e, index) == 3


def test_arithmetic_happens_in_the_promoted_type() -> None:
    big = ir.Const(60000.0, f16)
    assert value_of(big + big) == np.inf
    assert value_of(big + ir.Const(60000.0, f32)) == 120000
    assert value_of(ir.Const(1, f16) / 3, f64) == np.float16(1 / 3)
    assert value_of(ir.Const(2**31 - 1, i32) + 1, index) == -(2**31)
    assert value_of(ir.Const(2**31 - 1, index) + 1, index) == 2**31


@pytest.mark.parametrize("dtype", [i8, i32, ir.i64, f16, f32, f64], ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_reductions_happen_in_the_type_of_what_they_reduce(op: str, dtype: ir.DType) -> None:
    """Integers wrap around, floats become infinite where their type ends."""
    lane, held = ir.Lane("m", 8, 1), tensor("x", 8, dtype=dtype)
    out = tensor("y", 1, dtype=f64)
    most = np.iinfo(dtype.numpy).max if dtype.is_integer else np.finfo(dtype.numpy).max
    x = np.array([most, most, 3, 5, 1, 2, 1, 1], dtype.numpy)
    value = ir.Var("v", dtype)
    body = ir.seq(
        ir.Let(value, ir.Load(held, lane, ir.TRUE)), ir.store(out, 0, ir.Reduce(op, value, lane))
    )
    data = {"x": x, "y": zeros(out)}
    with np.errstate(all="ignore"):
        ir.run(ir.Kernel("reduced", (held, out), ir.For(I, 1, body, "grid")), data)
        want = getattr(np, op)(x, **({"dtype": x.dtype} if op in ("sum", "prod") else {}))
    assert data["y"][0] == np.float64(want)


@settings(deadline=None)
@given(draw.floats(width=32))
def test_bf16_rounds_to_nearest_even(x: float) -> None:
    made = float(rounded(np.array([x], np.float32), ir.bf16)[0])
    if not math.isfinite(x):
        assert made == x or (math.isnan(x) and math.isnan(made))
        return
    # The two bf16 values around x: its upper 16 bits, and those with the next magnitude.
    low = int(np.float32(x).view(np.uint32)) >> 16
    near, far = (float(np.uint32(b << 16).view(np.float32)) for b in (low, low + 1))
    limit = math.copysign(2.0**128, x)  # the value that takes infinity's place when rounding
    to_near, to_far = abs(x - near), abs((limit if math.isinf(far) else far) - x)
    if to_near == to_far:
        assert made == (near if low % 2 == 0 else far)
    else:
        assert made == (near if to_near < to_far else far)


def test_bf16_is_rounded_when_stored_or_cast() -> None:
    x = ir.Const(1 + 2**-9, f32)
    assert value_of(x, bf16) == 1
    assert value_of(ir.Cast(x, bf16), f32) == 1
    assert value_of(x, f32) == 1 + 2**-9
    tie = ir.Const(1 + 2**-7 + 2**-8, f32)  # halfway; the even neighbour is above
    assert value_of(tie, bf16) == 1 + 2**-6
    assert value_of(ir.Const(1 + 2**-8, f32), bf16) == 1


# ---- errors ----

T = tensor("t", 8)
LANE = ir.Lane("m", 8, 0)


def fails(body: ir.Stmt, match: str, *params: ir.Tensor, **buffers: Any) -> None:
    kernel = ir.Kernel("broken", params or (T,), body)
    with pytest.raises(ir.InterpError, match=match) as e:
        ir.run(kernel, buffers or {p.name: zeros(p) for p in kernel.params})
    assert "broken" in str(e.value)


@pytest.mark.parametrize("kind", ["grid", "serial"])
def test_load_out_of_bounds(kind: str) -> None:
    def load(mask: ir.Expr) -> ir.Stmt:
        return ir.For(I, 5, ir.Let(ACC, ir.Load(T, I * 2 + LANE - 2, mask)), kind)

    fails(load(ir.TRUE), r"`let acc = load\(t, .*offset -2 of t is not in 0..8 at i=0, m=0$")
    fails(load(I * 2 + LANE >= 2), r"offset 8 of t is not in 0..8 at i=2, m=6$")
    inside = (I * 2 + LANE >= 2) & (I * 2 + LANE < 10)
    ir.run(ir.Kernel("fine", (T,), load(inside)), {"t": zeros(T)})


@pytest.mark.parametrize("what", ["store", "atomic_add"])
def test_write_out_of_bounds(what: str) -> None:
    def write(mask: ir.Expr) -> ir.Stmt:
        if what == "store":
            return ir.store(T, I * 8 + LANE, ZERO, mask)
        return ir.FuncCall(ir.ATOMIC_ADD, (T, I * 8 + LANE, ZERO, mask))

    fails(ir.For(I, 2, write(ir.TRUE), "grid"), "offset 8 of t is not in 0..8 at i=1, m=0")
    ir.run(ir.Kernel("fine", (T,), ir.For(I, 2, write(I < 1), "grid")), {"t": zeros(T)})
    ir.run(ir.Kernel("fine", (T,), ir.For(I, 2, ir.If(I < 1, write(ir.TRUE)), "grid")), {"t": zeros(T)})


@pytest.mark.parametrize("kind", ["grid", "parallel", "tile", "serial", "unroll"])
def test_one_element_stored_by_two_iterations(kind: str) -> None:
    fails(ir.For(I, 4, ir.store(T, I // 2, ZERO), kind), "element 0 of t is written twice at i=1")
    fails(ir.For(I, 4, ir.store(T, 3, ZERO), kind), "element 3 of t is written twice at i=1")
    once = ir.For(I, 4, ir.store(T, I // 2, ZERO, I % 2 < 1), kind)
    ir.run(ir.Kernel("fine", (T,), once), {"t": zeros(T)})


def test_one_element_stored_by_two_lanes() -> None:
    fails(ir.store(T, LANE // 4, ZERO), "element 0 of t is written twice at m=1")
    fails(ir.store(T, 0, ir.Cast(LANE, f32)), "element 0 of t is written twice at m=1")
    fails(ir.store(T, 0, ZERO, LANE < 2), "element 0 of t is written twice at m=1")
    ir.run(ir.Kernel("fine", (T,), ir.store(T, 0, ZERO, LANE < 1)), {"t": zeros(T)})


def test_one_element_stored_by_two_statements() -> None:
    fails(ir.seq(ir.store(T, LANE, ZERO), ir.store(T, 5, ZERO)), "element 5 .* written twice")


def test_atomic_additions_may_meet_but_not_with_stores() -> None:
    add = ir.FuncCall(ir.ATOMIC_ADD, (T, LANE // 4, ZERO + 1.0, ir.TRUE))
    data = zeros(T)
    ir.run(ir.Kernel("fine", (T,), ir.For(I, 3, add, "grid")), {"t": data})
    assert data.tolist() == [12, 12, 0, 0, 0, 0, 0, 0]
    store = ir.store(T, 1, ZERO)
    fails(ir.seq(store, add), r"`atomic_add.*element 1 of t is both stored and added to at m=4")
    fails(ir.seq(add, store), r"`store.*element 1 of t is both stored and added to")


def test_kernels_of_one_launch_share_the_record_of_writes() -> None:
    def half(name: str, start: int) -> ir.Kernel:
        return ir.Kernel(name, (T,), ir.For(I, 4, ir.store(T, I + start, ZERO), "grid"))

    memory = ir.Memory({"t": zeros(T)})
    ir.run(half("low", 0), memory)
    with pytest.raises(ir.InterpError, match=r"t\[d0=4\] is never written .*3 more of 8"):
        memory.check_written(T)
    with pytest.raises(ir.InterpError, match="kernel overlap: .*element 3 .* twice at i=0"):
        ir.run(half("overlap", 3), memory)
    ir.run(half("high", 4), memory, outputs=["t"])
    memory.new_launch()
    memory.check_written(T)
    ir.run(half("again", 2), memory)


def test_unbound_variables() -> None:
    fails(ir.store(T, I, ZERO), "the variable i is not bound")
    used_after = ir.seq(ir.For(I, 2, ir.Let(J, I), "grid"), ir.store(T, J, ZERO))
    fails(used_after, "the variable j is not bound")
    in_a_branch = ir.seq(ir.If(ir.TRUE, ir.Let(J, ir.ONE)), ir.store(T, J, ZERO))
    fails(in_a_branch, "the variable j is not bound")
    fails(ir.seq(ir.Let(I, ir.ONE), ir.store(T, ir.Var("i", i32), ZERO)), "i is not bound")


def test_division_by_zero_where_it_counts() -> None:
    for e in (6 // (I - 2), 6 % (I - 2)):
        fails(ir.For(I, 4, ir.Let(J, e), "grid"), "divides by zero at i=2")
        guarded = ir.For(I, 4, ir.If(ir.ne(I, 2), ir.Let(J, e)), "grid")
        ir.run(ir.Kernel("fine", (T,), guarded), {"t": zeros(T)})
    assert value_of(ir.Const(1.0, f64) / 0.0) == np.inf


def test_assumptions_are_checked() -> None:
    assume = ir.FuncCall(ir.ASSUME, (I < 3,))
    fails(ir.For(I, 5, assume, "grid"), r"`assume\(i < 3\)`: .* does not hold at i=3")
    ir.run(ir.Kernel("fine", (T,), ir.For(I, 3, assume, "grid")), {"t": zeros(T)})


def test_updates() -> None:
    fails(ir.Update(ACC, ZERO), "acc is updated but not allocated")
    fails(ir.seq(ir.Let(ACC, ZERO), ir.Update(ACC, ZERO)), "acc is updated but not allocated")
    fails(
        ir.seq(ir.Let(ACC, ZERO), ir.FuncCall(ir.dot("ieee"), (ACC, ZERO, ZERO))),
        "acc is updated but not allocated",
    )
    fails(
        ir.seq(ir.Alloc(ACC), ir.Update(ACC, ir.Cast(LANE, f32))),
        "acc does not have the lanes m of its value",
    )
    fails(
        ir.seq(ir.Alloc(ACC), ir.For(I, 2, ir.Update(ACC, ACC + 1.0), "grid")),
        "grid loop are not independent when they update acc, allocated outside",
    )


def test_what_has_no_meaning() -> None:
    fails(ir.FuncCall(ir.Func("sneeze"), ()), "no meaning is known for sneeze")
    fails(ir.FuncCall(ir.dot("ieee"), (ACC,)), "no meaning is known for dot with 1")
    fails(ir.store(T, 0, ir.Call("sneeze", (ZERO,))), "the function sneeze is not known")
    fails(ir.store(T, 0, ir.Call("exp", (ZERO, ZERO))), "exp takes 1 arguments, not 2")
    fails(ir.store(T, 0, ir.Reduce("median", ir.Cast(LANE, f32), LANE)), "reduction median is not")
    other = tensor("other", 8)
    fails(ir.store(other, 0, ZERO), "other is not a tensor of the kernel")
    fails(ir.store(T, 0, ir.Load(other, ir.ZERO, ir.TRUE)), "other is not a tensor of the kernel")


def test_buffers_that_do_not_fit() -> None:
    fails(ir.Seq(()), r"has shape \(7,\), its layout spans 8 elements", T, t=np.zeros(7, "f4"))
    fails(ir.Seq(()), "is float64, f32 is held in float32", T, t=np.zeros(8))
    fails(ir.Seq(()), "no buffer is given for the tensor t", T, u=np.zeros(8, "f4"))


@pytest.mark.parametrize(("held", "digits"), [("int8", 6), ("int32", 20), ("int32", 30), ("int64", 62)])
def test_sums_of_products_of_integers_wrap(held: str, digits: int) -> None:
    """In the type of the sum, whatever type they are multiplied in."""
    draw = np.random.default_rng(5)
    x, y = (draw.integers(-1 << digits, 1 << digits, (7, 300)).astype(held) for _ in "xy")
    total = np.dtype("int32" if held == "int8" else held)
    got = contract(x[:, :, None], y.T[None], [1], total)[:, 0]
    want = x.astype(object) @ y.T.astype(object)
    end = 1 << (8 * total.itemsize - 1)
    np.testing.assert_array_equal(got, ((want + end) % (2 * end) - end).astype(total))
