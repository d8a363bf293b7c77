"""Convolution, a front end: problems, their text, the relation that writes their computations, plans.

In: a benchdnn descriptor or sizes. Out: problems, computations, plans, sampled checks. Knows: the runtime
and what is below it.
"""

from transconv.conv.compensation import TABLE, without_zeros, zero_sums, zero_sums_shape
from transconv.conv.compiler import CompiledDirection, LayerRegistry, build, plan_steps
from transconv.conv.conv_problem import ConvProblem, Prop, TensorSpec
from transconv.conv.descriptor import (
    KEYS,
    Descriptor,
    for_weights,
    parse_descriptor,
    print_descriptor,
    why_not_multiplied,
    write_tags,
)
from transconv.conv.epilogue import MOST_OPERATIONS, Epilogue, known, post_op, split
from transconv.conv.fused_conv import Surrounded, surrounded
from transconv.conv.problem_lists import (
    DIRECTIONS,
    KINDS,
    SCHEMA,
    ListedLayer,
    from_json,
    from_problems,
    iter_problems,
    read,
    read_problems,
    select,
    take,
)
from transconv.conv.relation import any_size, computes, marked, reading
from transconv.conv.spotcheck import examine, sampled, spot_check
from transconv.conv.workload import ConvWorkload, bias_sums, computable, writable

algorithms = computes  # deprecated alias

__all__ = [
    "DIRECTIONS",
    "KEYS",
    "KINDS",
    "MOST_OPERATIONS",
    "SCHEMA",
    "TABLE",
    "CompiledDirection",
    "ConvProblem",
    "ConvWorkload",
    "Descriptor",
    "Epilogue",
    "LayerRegistry",
    "ListedLayer",
    "Prop",
    "Surrounded",
    "TensorSpec",
    "algorithms",
    "any_size",
    "bias_sums",
    "build",
    "computable",
    "computes",
    "examine",
    "for_weights",
    "from_json",
    "from_problems",
    "iter_problems",
    "known",
    "marked",
    "parse_descriptor",
    "plan_steps",
    "post_op",
    "print_descriptor",
    "read",
    "read_problems",
    "reading",
    "sampled",
    "select",
    "split",
    "spot_check",
    "surrounded",
    "take",
    "why_not_multiplied",
    "without_zeros",
    "writable",
    "write_tags",
    "zero_sums",
    "zero_sums_shape",
]
