"""The polynomial normal form."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.polys.rings import PolyElement  # type: ignore[import-untyped]

from transconv.ir import Const, Expr, Var, sum_of
from transconv.simplify.polynomial import Polynomial, expand, rebuild

x, y, z = Var("x"), Var("y"), Var("z")


def test_equal_polynomials_are_equal_values() -> None:
    assert expand((x + y) * (x - y)) == expand(x * x - y * y)
    assert (expand((x + 1) * (y + 2)) - expand(x * y + x * 2 + y + 2)).is_zero


def test_other_nodes_are_opaque() -> None:
    p = expand((x // 2 + 1) * 2 + x % 2)
    assert [mono for mono, _ in p.terms] == [(x // 2,), (x % 2,)]
    assert p.const == 2


def test_terms_keep_the_order_of_first_appearance() -> None:
    assert str(rebuild(expand(z + x * 2 + y - z * 3 + 1))) == "((((x * 2) - (z * 2)) + y) + 1)"


def test_factors_of_a_product_have_one_order() -> None:
    assert rebuild(expand(y * (x * z))) is rebuild(expand(z * y * x))


@given(st.lists(st.tuples(st.sampled_from([x, y, z]), st.integers(-4, 4)), max_size=6), st.integers(-9, 9))
def test_rebuilding_and_expanding_are_inverse(parts: list[tuple[Expr, int]], const: int) -> None:
    p = expand(sum_of([e * k for e, k in parts]) + const)
    again = expand(rebuild(p))
    assert dict(again.terms) == dict(p.terms)
    assert again.const == p.const
    assert rebuild(again) is rebuild(p)


def test_content_leaves_the_constant_out() -> None:
    assert expand(x * 6 - y * 4 + 3).content == 2
    assert expand(Const(5)).content == 0


def test_sums_over_other_atoms_meet_in_the_ring_of_both() -> None:
    p, q = expand(x * y + z), expand(z - x * 2)
    assert p.atoms != q.atoms
    assert str(rebuild(p - q)) == "((x * y) + (x * 2))"
    assert p - q == expand(x * 2 + y * x) != p
    assert (p + q) - p == q


def test_a_sum_is_divided_by_a_sum() -> None:
    n = expand(y + 1)
    q, r = expand(x * y + x + 5).divided(n)
    assert (str(rebuild(q)), str(rebuild(r))) == ("x", "5")


TERMS = st.dictionaries(
    st.lists(st.sampled_from("xyz"), min_size=1, max_size=3).map(sorted).map(tuple),
    st.integers(-4, 4).filter(bool),
    min_size=1,
    max_size=4,
)
Terms = dict[tuple[str, ...], int]


@settings(deadline=None)
@given(TERMS, st.integers(-3, 3), TERMS, st.integers(-3, 3))
def test_arithmetic_is_that_of_sympys_expressions(p: Terms, a: int, q: Terms, b: int) -> None:
    def poly(terms: Terms, const: int) -> Polynomial:
        return Polynomial.of(((tuple(Var(n) for n in names), c) for names, c in terms.items()), const)

    def said(found: Polynomial) -> sympy.Expr:
        return found.const + sum(c * sympy.prod(sympy.Symbol(str(f)) for f in m) for m, c in found.terms)

    left, right = poly(p, a), poly(q, b)
    for made, meant in (
        (left * right, said(left) * said(right)),
        (left + right, said(left) + said(right)),
        (left - right, said(left) - said(right)),
        (left * 3 - 1, said(left) * 3 - 1),
    ):
        assert sympy.expand(said(made) - meant) == 0
        assert all(c for _, c in made.terms)
        assert len({m for m, _ in made.terms}) == len(made.terms)
    p, q, atoms = left._both(right)
    assert (left + right).terms == Polynomial(atoms, p + q).terms  # in the order of SymPy's sum
    assert (left - right).terms == Polynomial(atoms, p - q).terms
    assert {*(right * left).terms} == {*(left * right).terms}


def test_the_ring_is_sympys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is formed in a ring of SymPy's: where that multiplies wrongly, products are wrong."""
    assert isinstance(expand(x + y).element, PolyElement)
    monkeypatch.setattr(PolyElement, "__mul__", lambda self, other: self)
    assert (expand(x + 1) * expand(y + 1)) == expand(x + 1)
