"""Nodes: one object per structure, immutable, usable as keys, the same in another process."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

import transconv.ir as ir
from tests import programs
from tests.shown import ROOT
from tests.strategies import BINARY
from transconv.ir import node as node_decorator

A, B = ir.Var("a"), ir.Var("b")
SRC = ir.Tensor("src", ("n", "c"), (4, 17), ir.Layout.dense(ir.f16, (4, 32)))

numbers = draw.one_of(
    draw.integers(-9, 9).map(ir.Const),
    draw.booleans().map(lambda b: ir.Const(b, ir.boolean)),
    draw.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda x: ir.Const(x, ir.f32)),
)
leaves = draw.one_of(
    numbers,
    draw.builds(ir.Var, draw.sampled_from("abcd"), draw.sampled_from(list(ir.DTYPES.values()))),
    draw.builds(ir.Lane, draw.sampled_from("mnk"), draw.sampled_from([1, 4]), draw.integers(0, 3)),
)


def grown(inner: draw.SearchStrategy[ir.Expr]) -> draw.SearchStrategy[ir.Expr]:
    lane = draw.builds(ir.Lane, draw.sampled_from("mnk"), draw.just(4), draw.just(1))
    return draw.one_of(
        draw.tuples(draw.sampled_from(BINARY), inner, inner).map(lambda t: t[0](t[1], t[2])),
        draw.tuples(draw.sampled_from([ir.Neg, ir.Not]), inner).map(lambda t: t[0](t[1])),
        draw.builds(ir.Select, inner, inner, inner),
        draw.builds(ir.Cast, inner, draw.sampled_from(list(ir.DTYPES.values()))),
        draw.builds(ir.Call, draw.just("fma"), draw.tuples(inner, inner, inner)),
        draw.builds(ir.Load, draw.just(SRC), inner, inner),
        draw.builds(ir.Reduce, draw.sampled_from(["sum", "max"]), inner, lane),
    )


exprs = draw.recursive(leaves, grown, max_leaves=8)


def rebuilt_by_eval(e: ir.Node) -> object:
    return eval(repr(e), vars(ir))


@settings(deadline=None)
@given(exprs)
def test_repr_rebuilds_the_node(e: ir.Expr) -> None:
    assert rebuilt_by_eval(e) is e


@settings(deadline=None)
@given(exprs)
def test_copies_are_the_node_itself(e: ir.Expr) -> None:
    assert pickle.loads(pickle.dumps(e)) is e
    assert copy.copy(e) is e
    assert copy.deepcopy(e) is e
    assert copy.deepcopy([e, e])[1] is e


@settings(deadline=None)
@given(exprs, exprs)
def test_equal_exactly_when_it_looks_equal(a: ir.Expr, b: ir.Expr) -> None:
    assert (a is b) == (repr(a) == repr(b))
    assert a.is_equal(b) == (a is b)
    assert (a.get_hash() == b.get_hash()) == (a is b)


def test_statements_rebuild_and_pickle() -> None:
    loop = ir.For(A, 4, ir.seq(ir.Let(B, A * 2), ir.Store(SRC, B, ir.Load(SRC, B, ir.TRUE))))
    kernel = ir.Kernel("copy", (SRC,), loop, ("a note",))
    assert rebuilt_by_eval(kernel) is kernel
    assert pickle.loads(pickle.dumps(kernel)) is kernel


def test_building_twice_gives_one_object() -> None:
    assert A + B is A + B
    assert ir.Const(value=1) is ir.Const(1, ir.index)
    assert ir.Add(a=A, b=B) is A + B
    assert A + B is not B + A
    assert ir.Var("a", ir.i32) is not A


def test_numbers_that_python_calls_equal_stay_apart() -> None:
    same_type = [ir.Const(1), ir.Const(True), ir.Const(1.0), ir.Const(0.0), ir.Const(-0.0)]
    assert len(set(same_type)) == 5
    assert len({c.get_hash() for c in same_type}) == 5
    assert [repr(c.value) for c in same_type] == ["1", "True", "1.0", "0.0", "-0.0"]
    assert ir.Func("f", (("a", "1"),)) is not ir.Func("f", (("a", "2"),))


def test_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        A.name = "z"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del A.name
    with pytest.raises((AttributeError, TypeError)):
        A.new_attribute = 1  # type: ignore[attr-defined]
    assert A.name == "a"


def test_truth_and_equality_do_not_build_nodes() -> None:
    assert (A == A) is True
    assert (A == ir.Var("a")) is True
    assert (A == B) is False
    with pytest.raises(TypeError, match="is not known while the kernel is built"):
        bool(A < B)


def test_object_map_and_set_are_keyed_by_structure() -> None:
    table = ir.ObjectMap()
    table[A + B] = 1
    table[A + 1] = 2
    assert table[ir.Var("a") + ir.Var("b")] == 1
    assert table[A + ir.Const(1)] == 2
    assert A + ir.Const(1.0) not in table
    assert B + A not in table
    seen = ir.ObjectSet([A + B, A + B, B + A])
    assert len(seen) == 2
    assert A + B in seen


@settings(deadline=None)
@given(draw.lists(exprs, max_size=12))
def test_object_map_behaves_like_a_searched_list(keys: list[ir.Expr]) -> None:
    table = ir.ObjectMap()
    pairs: list[tuple[ir.Expr, int]] = []
    for i, key in enumerate(keys):
        table[key] = i
        pairs = [(k, v) for k, v in pairs if not k.is_equal(key)] + [(key, i)]
    assert len(table) == len(pairs)
    assert all(table[k] == v for k, v in pairs)


@pytest.mark.usefixtures("own_garbage")
def test_unused_nodes_are_forgotten() -> None:
    gone = weakref.ref(ir.Var("nobody_keeps_this") + 12345)
    gc.collect()
    assert gone() is None


def test_threads_get_one_object() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: ir.Var("t") * 7 + 3, range(200)))
    assert len({id(e) for e in made}) == 1


def test_other_processes_agree() -> None:
    """The hash is the same there, and a type that was sent there is still the type."""
    e = ir.Load(SRC, A * 3 + ir.Lane("m", 16, 1), A < 4)
    code = (
        f"import pickle, transconv.ir as ir; e = pickle.loads({pickle.dumps(e)!r});"
        "print(e.get_hash(), e.dtype is ir.f16, ir.promote(e.offset.dtype, ir.i32))"
    )
    assert programs.run(["-c", code], cwd=ROOT, check=True).stdout == f"{e.get_hash()} True i32\n"


def test_children_in_field_order() -> None:
    call = ir.Call("fma", (A, B, ir.ONE))
    assert list(call.children()) == [A, B, ir.ONE]
    branch = ir.If(A < B, ir.Comment("x"))
    assert list(branch.children()) == [A < B, ir.Comment("x")]


def test_dump_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    (A + B).dump()
    assert capsys.readouterr().out == "(a + b)\n"


def test_a_new_node_class_needs_only_fields() -> None:
    @node_decorator
    class Twice(ir.Expr):
        x: ir.Expr

    assert Twice(A) is Twice(A)
    assert list(Twice(A).children()) == [A]
    assert ir.substitute(Twice(A), {A: B}) is Twice(B)
