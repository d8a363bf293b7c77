"""Simplification and proofs over index and mask expressions."""

from transconv.simplify.facts import Facts as Facts
from transconv.simplify.fixpoint import one_value as one_value
from transconv.simplify.fixpoint import prove as prove
from transconv.simplify.fixpoint import simplify as simplify
from transconv.simplify.interval import Range as Range
from transconv.simplify.ranges import multiple_of as multiple_of
from transconv.simplify.ranges import range_of as range_of

__all__ = ["Facts", "Range", "multiple_of", "one_value", "prove", "range_of", "simplify"]
