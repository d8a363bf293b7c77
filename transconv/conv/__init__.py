"""Convolution, a front end: problems, their text, the relation that writes their computations, plans.

In: a benchdnn descriptor or sizes. Out: problems, computations, plans, sampled checks. Knows: the runtime
and what is below it."""

from transconv.conv.compensation import TABLE as TABLE
from transconv.conv.compensation import without_zeros as without_zeros
from transconv.conv.compensation import zero_sums as zero_sums
from transconv.conv.compensation import zero_sums_shape as zero_sums_shape
from transconv.conv.compiler import CompiledDirection as CompiledDirection
from transconv.conv.compiler import LayerRegistry as LayerRegistry
from transconv.conv.compiler import build as build
from transconv.conv.conv_problem import ConvProblem as ConvProblem
from transconv.conv.conv_problem import Prop as Prop
from transconv.conv.conv_problem import TensorSpec as TensorSpec
from transconv.conv.descriptor import KEYS as KEYS
from transconv.conv.descriptor import Descriptor as Descriptor
from transconv.conv.descriptor import for_weights as for_weights
from transconv.conv.descriptor import parse_descriptor as parse_descriptor
from transconv.conv.descriptor import print_descriptor as print_descriptor
from transconv.conv.descriptor import why_not_multiplied as why_not_multiplied
from transconv.conv.epilogue import MOST_OPERATIONS as MOST_OPERATIONS
from transconv.conv.epilogue import Epilogue as Epilogue
from transconv.conv.epilogue import known as known
from transconv.conv.epilogue import post_op as post_op
from transconv.conv.epilogue import split as split
from transconv.conv.fused_conv import Surrounded as Surrounded
from transconv.conv.fused_conv import surrounded as surrounded
from transconv.conv.problem_lists import DIRECTIONS as DIRECTIONS
from transconv.conv.problem_lists import KINDS as KINDS
from transconv.conv.problem_lists import SCHEMA as SCHEMA
from transconv.conv.problem_lists import ListedLayer as ListedLayer
from transconv.conv.problem_lists import from_json as from_json
from transconv.conv.problem_lists import from_problems as from_problems
from transconv.conv.problem_lists import iter_problems as iter_problems
from transconv.conv.problem_lists import read as read
from transconv.conv.problem_lists import read_problems as read_problems
from transconv.conv.problem_lists import select as select
from transconv.conv.problem_lists import take as take
from transconv.conv.relation import any_size as any_size
from transconv.conv.relation import computes as computes
from transconv.conv.relation import marked as marked
from transconv.conv.relation import reading as reading
from transconv.conv.spotcheck import examine as examine
from transconv.conv.spotcheck import sampled as sampled
from transconv.conv.workload import ConvWorkload as ConvWorkload
from transconv.conv.workload import bias_sums as bias_sums
from transconv.conv.workload import computable as computable
from transconv.conv.workload import writable as writable
