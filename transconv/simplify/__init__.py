"""Simplification and proofs over index and mask expressions.

In: an expression and what is known of its variables. Out: a shorter one, a range, a proof or None.
Knows: the IR.
"""

from transconv.simplify.facts import Facts as Facts
from transconv.simplify.facts import facts_of as facts_of
from transconv.simplify.fixpoint import one_value as one_value
from transconv.simplify.fixpoint import prove as prove
from transconv.simplify.fixpoint import reason as reason
from transconv.simplify.fixpoint import simplify as simplify
from transconv.simplify.fixpoint import witnessed as witnessed
from transconv.simplify.linear_bounds import greatest as greatest
from transconv.simplify.linear_bounds import is_inside as is_inside
from transconv.simplify.linear_bounds import linear_range as linear_range
from transconv.simplify.points import range_at_points as range_at_points
from transconv.simplify.presburger import Verdict as Verdict
from transconv.simplify.presburger import decide as decide
from transconv.simplify.presburger import truths_at_points as truths_at_points
from transconv.simplify.ranges import Range as Range
from transconv.simplify.ranges import multiple_of as multiple_of
from transconv.simplify.ranges import range_of as range_of
from transconv.simplify.translation import from_sympy as from_sympy
from transconv.simplify.translation import to_sympy as to_sympy
