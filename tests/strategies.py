"""Hypothesis strategies: every feature joins here, so that everything is tested with everything.

Problems come from the package's one generator, which the fuzzer seeds with numbers and these tests
with Hypothesis' random numbers.
"""

from __future__ import annotations

from hypothesis import strategies as st

from transconv import ir
from transconv.conv.conv_problem import ConvProblem
from transconv.verify.fuzz import conv_problems

# Nodes of two operands.
BINARY = [
    *(ir.Add, ir.Sub, ir.Mul, ir.Div, ir.FloorDiv, ir.Mod, ir.Min, ir.Max, ir.Shl, ir.Shr),
    *(ir.Lt, ir.Le, ir.Eq, ir.Ne, ir.And, ir.Or, ir.Xor),
]


def problems(ndims: int | None = None, dtype: str = "f32") -> st.SearchStrategy[ConvProblem]:
    """Small convolutions: 1D/2D/3D, stride, dilation, asymmetric padding, groups, depthwise."""
    return st.builds(
        lambda rng: conv_problems.tiny(rng, ndims or 0, dtype), st.randoms(use_true_random=False)
    )
