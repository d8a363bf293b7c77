"""Convolution, a front end: problems, their text, the relation that writes their computations, plans.

In: a benchdnn descriptor or sizes. Out: problems, computations, plans, sampled checks. Knows: the runtime
and what is below it.
"""

from transconv.conv.any_size import any_size, marked
from transconv.conv.compiler import build, plan_steps
from transconv.conv.descriptor import KEYS, Descriptor, parse_descriptor, print_descriptor
from transconv.conv.epilogue import Epilogue
from transconv.conv.layers import (
    DIRECTIONS,
    KINDS,
    SCHEMA,
    Layer,
    from_json,
    from_problems,
    read,
    select,
)
from transconv.conv.plans import Compiled
from transconv.conv.problem import ConvProblem, Prop, TensorSpec
from transconv.conv.problem_lists import iter_problems, read_problems, take
from transconv.conv.registry import Chosen, Registry
from transconv.conv.relation import computes
from transconv.conv.spotcheck import examine, sampled, spot_check
from transconv.conv.tags import for_weights, write_tags
from transconv.conv.workload import ConvWorkload, computable, writable

algorithms = computes  # deprecated alias

__all__ = [
    "Chosen", "Compiled", "ConvProblem", "ConvWorkload", "DIRECTIONS", "Descriptor", "Epilogue", "KEYS",
    "KINDS", "Layer", "Prop", "Registry", "SCHEMA", "TensorSpec", "algorithms", "any_size", "build",
    "computable", "computes", "examine", "for_weights", "from_json", "from_problems", "iter_problems",
    "marked", "parse_descriptor", "plan_steps", "print_descriptor", "read", "read_problems", "sampled",
    "select", "spot_check", "take", "writable", "write_tags",
]
