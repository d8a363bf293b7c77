"""The polynomial normal form."""

from __future__ import annotations

import subprocess
import sys

import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from transconv.ir import Const, Expr, Var, sum_of
from transconv.simplify.linear import Poly, expand, rebuild

x, y, z = Var("x"), Var("y"), Var("z")


def test_equal_polynomials_are_equal_values() -> None:
    assert expand((x + y) * (x - y)) == expand(x * x - y * y)
    assert expand((x + 1) * (y + 2)).plus(expand(x * y + x * 2 + y + 2), -1) == Poly()


def test_other_nodes_are_opaque() -> None:
    p = expand((x // 2 + 1) * 2 + x % 2)
    assert [mono for mono, _ in p.terms] == [(x // 2,), (x % 2,)]
    assert p.const == 2


def test_terms_keep_the_order_of_first_appearance() -> None:
    assert str(rebuild(expand(z + x * 2 + y - z * 3 + 1))) == "((((x * 2) - (z * 2)) + y) + 1)"


def test_factors_of_a_product_have_one_order() -> None:
    assert rebuild(expand(y * (x * z))) is rebuild(expand(z * y * x))


@given(st.lists(st.tuples(st.sampled_from([x, y, z]), st.integers(-4, 4)), max_size=6),
       st.integers(-9, 9))
def test_rebuilding_and_expanding_are_inverse(parts: list[tuple[Expr, int]], const: int) -> None:
    p = expand(sum_of([e * k for e, k in parts]) + const)
    again = expand(rebuild(p))
    assert dict(again.terms) == dict(p.terms)
    assert again.const == p.const
    assert rebuild(again) is rebuild(p)


def test_content_leaves_the_constant_out() -> None:
    assert expand(x * 6 - y * 4 + 3).content == 2
    assert expand(Const(5)).content == 0


TERMS = st.dictionaries(st.lists(st.sampled_from("xyz"), min_size=1, max_size=3).map(sorted).map(tuple),
                        st.integers(-4, 4).filter(bool), min_size=1, max_size=4)


@settings(deadline=None)
@given(TERMS, st.integers(-3, 3), TERMS, st.integers(-3, 3))
def test_products_are_those_of_sympy(p: dict[tuple[str, ...], int], a: int, q: dict[tuple[str, ...], int],
                                     b: int) -> None:
    def poly(terms: dict[tuple[str, ...], int], const: int) -> Poly:
        return Poly(tuple((tuple(Var(n) for n in names), c) for names, c in terms.items()), const)

    def said(found: Poly) -> sympy.Expr:
        return found.const + sum(c * sympy.prod(sympy.Symbol(str(f)) for f in m) for m, c in found.terms)

    left, right = poly(p, a), poly(q, b)
    product = left.times(right)
    assert sympy.expand(said(left) * said(right) - said(product)) == 0
    assert all(c for _, c in product.terms)
    assert len({m for m, _ in product.terms}) == len(product.terms)
    assert {*right.times(left).terms} == {*product.terms}


def test_sympy_is_not_imported() -> None:
    """That takes longer than a first kernel may."""
    code = """if True:
        import sys
        from transconv.ir import Var
        from transconv.simplify import simplify
        x, y = Var("x"), Var("y")
        simplify((x + y) * (x - y))
        assert "sympy" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)
