"""Index and mask expressions as SymPy's, and back: the same values."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from tests.backend_triton.test_emit import CASES, lowered
from tests.simplify.evaluate import points, value
from tests.simplify.test_soundness import THOROUGH, _conditions, _facts, _integers, _spaces
from transconv.errors import Unsupported
from transconv.ir import (
    BoxLoad,
    BoxStore,
    Cast,
    Expr,
    Kernel,
    Lane,
    Load,
    Store,
    Var,
    boolean,
    eq,
    f32,
    find,
    i8,
    index64,
    select,
    walk,
)
from transconv.simplify import Facts, Range, from_sympy, prove, to_sympy

x, y, flag = Var("x"), Var("y"), Var("flag", boolean)


def _texts(kernel: Kernel) -> list[Expr]:
    """The addresses and masks of a kernel."""
    found: list[Expr] = []
    for at in (*find(kernel.body, Load), *find(kernel.body, Store)):
        found += [at.offset, at.mask]
    for box in (*find(kernel.body, BoxLoad), *find(kernel.body, BoxStore)):
        found += [*box.corner, *box.within]
    return list(dict.fromkeys(found))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", list(CASES))
def test_golden_kernels_return(name: str) -> None:
    """Every address and mask of every stage, the same but for the order of terms."""
    stages = lowered(name)[0]
    texts = list(dict.fromkeys(e for _, kernel in stages for e in _texts(kernel)))
    assert texts
    for e in texts:
        back = from_sympy(to_sympy(e))
        assert set(n for n in walk(back) if isinstance(n, (Var, Lane))) <= set(walk(e))
        if e.dtype.kind == "bool":
            assert prove(back, Facts(true=(e,))) and prove(e, Facts(true=(back,))), (str(e), str(back))
        else:
            assert prove(eq(back, e)), (str(e), str(back))


@THOROUGH
@given(_spaces().flatmap(lambda s: st.tuples(st.just(s), _integers(list(s)) | _conditions(list(s)))))
def test_values_are_the_same(case: tuple[dict[Expr, Range], Expr]) -> None:
    space, e = case
    there = to_sympy(e, _facts(space))
    back = from_sympy(there)
    for number, at in enumerate(points(space)):
        assert value(back, at) == value(e, at), (str(e), str(there), str(back))
        if number % 97 == 0:
            names = {to_sympy(v, _facts(space)): n for v, n in at.items()}
            found = there.subs(names)
            assert (int(found) if e.dtype is not boolean else found == sympy.true) == value(e, at)


def test_relations_that_sympy_divides_come_back() -> None:
    """SymPy makes ``x < x/2 + y/2`` of ``2*x < x + y``, and refused to come back with fractions."""
    for e in (
        select(x + x < x + y, x + y, x),
        x * 6 <= x * 3 + y * 2,
        eq(x * 4, x * 2 + y * 3),
        select(x * 3 < y * 3 + x, x, y),
    ):
        back = from_sympy(to_sympy(e))
        for at in points({x: Range(-3, 3), y: Range(-4, 4)}):
            assert value(back, at) == value(e, at), (str(e), str(back))


def test_symbols_have_the_facts() -> None:
    facts = Facts(ranges={x: Range(1, 7), y: Range(None, 0)}, multiples={y: 4})
    assert to_sympy(x, facts).is_positive
    assert to_sympy(y, facts).is_nonpositive
    assert (to_sympy(y, facts) / 4).is_integer
    assert to_sympy(y // 4 * 4 - y, facts) == 0
    assert from_sympy(to_sympy(y, facts)) is y // 4 * 4
    assert to_sympy(eq((y + 2) % 4, 2), facts) == sympy.true


@pytest.mark.parametrize(
    "e",
    [
        Lane("m", 8, 1, "M"),
        Var("big", index64),
        Cast(Var("p", i8), x.dtype),
        x & y,
        x ^ 3,
        x << y,
        (x < y) ^ flag,
        ~(x < y),
        select(x < y, x, y),
        select(flag, x < 1, y < 1),
        Cast(flag, x.dtype),
    ],
    ids=str,
)
def test_each_node_returns(e: Expr) -> None:
    back = from_sympy(to_sympy(e))
    assert back.dtype is e.dtype
    assert from_sympy(to_sympy(back)) is back
    assert str(back) == str(e) or isinstance(e, Cast) or e.dtype is boolean


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(Unsupported, match="no arithmetic of positions"):
        to_sympy(Var("f", f32) + 1.0)
    with pytest.raises(Unsupported, match="no form here"):
        from_sympy(sympy.sin(sympy.Symbol("x")))
