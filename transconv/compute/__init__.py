"""What is computed: steps over axes, and the operations of steps; how views lie in memory; workloads.

In: expressions over axes. Out: a computation that prints itself. Knows: the IR and the simplifier.
"""

from transconv.compute import library as library
from transconv.compute.analysis import statistics as statistics
from transconv.compute.analysis.axis_roles import axis_steps, axis_strides, places, touched, with_roles
from transconv.compute.analysis.pointwise import (
    IDENTITY,
    Pointwise,
    Recorder,
    Ref,
    in_torch,
    number,
    pointwise,
    with_error,
    written,
)
from transconv.compute.analysis.rfactor import parted
from transconv.compute.analysis.store_conflicts import why_not_all_stored, why_not_stored
from transconv.compute.autodiff.gradient_stores import Derivative, differentiate, transposed
from transconv.compute.autodiff.reverse import reaches
from transconv.compute.batch import (
    BATCH,
    batch_axis,
    in_bands,
    nearest,
    of_any_batch,
    samples,
    with_reference,
    with_samples,
)
from transconv.compute.compute import Compute
from transconv.compute.elementwise import (
    ACTIVATION_ROWS,
    ACTIVATIONS,
    BINARY_ROWS,
    FUNCTION_ROWS,
    OPS,
    Op,
    named,
    register,
    table,
    unregister,
)
from transconv.compute.error_bounds import SHORT, allowed, is_tf32, rounds_once, share_of
from transconv.compute.evaluation import Answer, execute, outside
from transconv.compute.expressions import COORDINATES, Coordinate
from transconv.compute.kernel_split import kernels, why_not_lowered
from transconv.compute.parser import END, axis_facts, describe, one_line, parse
from transconv.compute.restriction import (
    AxisSizes,
    AxisSpan,
    TensorWindow,
    pace,
    positions,
    restricted,
    span_of,
    without_statistics,
)
from transconv.compute.sampled_points import SampleOutcome, examine
from transconv.compute.steps import (
    Axis,
    Read,
    Reduction,
    Step,
    Sweep,
    Sweeps,
    Value,
    Write,
    counted,
    fresh,
    needed,
    render,
)
from transconv.compute.symbolic_compute import of_sizes, sizes_of, usual, why_not_any_size, with_examples
from transconv.compute.workload import (
    ACC,
    COMPUTE,
    Alone,
    TorchText,
    Workload,
    moved,
    of_examples,
    product,
    total,
)

Algorithm = Compute  # deprecated alias

__all__ = [
    "ACC",
    "ACTIVATIONS",
    "ACTIVATION_ROWS",
    "BATCH",
    "BINARY_ROWS",
    "COMPUTE",
    "COORDINATES",
    "END",
    "FUNCTION_ROWS",
    "IDENTITY",
    "OPS",
    "SHORT",
    "Algorithm",
    "Alone",
    "Answer",
    "Axis",
    "AxisSizes",
    "AxisSpan",
    "Compute",
    "Coordinate",
    "Derivative",
    "Op",
    "Pointwise",
    "Read",
    "Recorder",
    "Reduction",
    "Ref",
    "SampleOutcome",
    "Step",
    "Sweep",
    "Sweeps",
    "TensorWindow",
    "TorchText",
    "Value",
    "Workload",
    "Write",
    "allowed",
    "axis_facts",
    "axis_steps",
    "axis_strides",
    "batch_axis",
    "counted",
    "describe",
    "differentiate",
    "examine",
    "execute",
    "fresh",
    "in_bands",
    "in_torch",
    "is_tf32",
    "kernels",
    "library",
    "moved",
    "named",
    "nearest",
    "needed",
    "number",
    "of_any_batch",
    "of_examples",
    "of_sizes",
    "one_line",
    "outside",
    "pace",
    "parse",
    "parted",
    "places",
    "pointwise",
    "positions",
    "product",
    "reaches",
    "register",
    "render",
    "restricted",
    "rounds_once",
    "samples",
    "share_of",
    "sizes_of",
    "span_of",
    "table",
    "total",
    "touched",
    "transposed",
    "unregister",
    "usual",
    "why_not_all_stored",
    "why_not_any_size",
    "why_not_lowered",
    "why_not_stored",
    "with_error",
    "with_examples",
    "with_reference",
    "with_roles",
    "with_samples",
    "without_statistics",
    "written",
]
