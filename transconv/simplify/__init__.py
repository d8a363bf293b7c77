"""Simplification and proofs over index and mask expressions.

In: an expression and what is known of its variables. Out: a shorter one, a range, a proof or None.
Knows: the IR."""

from transconv.simplify.facts import Facts, facts_of
from transconv.simplify.fixpoint import one_value, prove, reason, simplify, witnessed
from transconv.simplify.linear_bounds import greatest, is_inside, linear_range
from transconv.simplify.presburger import Verdict, decide, range_at_points, truths_at_points
from transconv.simplify.ranges import Range, multiple_of, range_of
from transconv.simplify.translation import from_sympy, to_sympy

__all__ = [
    "Facts",
    "Range",
    "Verdict",
    "decide",
    "facts_of",
    "from_sympy",
    "greatest",
    "is_inside",
    "linear_range",
    "multiple_of",
    "one_value",
    "prove",
    "range_at_points",
    "range_of",
    "reason",
    "simplify",
    "to_sympy",
    "truths_at_points",
    "witnessed",
]
