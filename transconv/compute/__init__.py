"""What is computed: steps over axes, and the operations of steps; how views lie in memory; workloads.

In: expressions over axes. Out: a computation that prints itself. Knows: the IR and the simplifier.
"""

from transconv.compute import library as library
from transconv.compute import statistics as statistics
from transconv.compute.applied import IDENTITY, Pointwise, Ref
from transconv.compute.applied_text import Recorder, number, pointwise, written
from transconv.compute.applied_values import in_torch, with_error
from transconv.compute.compute import Compute
from transconv.compute.coordinates import COORDINATES, Coordinate
from transconv.compute.elementwise import ACTIVATION_ROWS, BINARY_ROWS, FUNCTION_ROWS
from transconv.compute.errors import SHORT, allowed, is_tf32, rounds_once, share_of
from transconv.compute.examples import of_examples
from transconv.compute.forms import ACC, moved, product, total
from transconv.compute.kernels import kernels
from transconv.compute.meaning import Answer, execute, outside
from transconv.compute.named_sizes import of_sizes, sizes_of
from transconv.compute.names import counted, fresh
from transconv.compute.one_kernel import why_not_lowered
from transconv.compute.ops import ACTIVATIONS, OPS, Op, named, register, table, unregister
from transconv.compute.page import axis_facts, describe
from transconv.compute.parts import parted
from transconv.compute.reached import reaches
from transconv.compute.returned import Derivative, differentiate
from transconv.compute.roles import with_roles
from transconv.compute.sampled import Found, examine
from transconv.compute.sized import at_sizes, usual, why_not_any_size, with_examples
from transconv.compute.steps import Axis, Read, Reduction, Step, Value, Write
from transconv.compute.stores import why_not_all_stored, why_not_stored
from transconv.compute.strides import axis_steps, axis_strides, places, touched
from transconv.compute.sweeps import Sweep, Sweeps
from transconv.compute.text import END, one_line, parse
from transconv.compute.transposed import transposed
from transconv.compute.workload import COMPUTE, Alone, TorchText, Workload

Algorithm = Compute  # deprecated alias

__all__ = [
    "ACC", "ACTIVATIONS", "ACTIVATION_ROWS", "Algorithm", "Alone", "Answer", "Axis", "BINARY_ROWS",
    "COMPUTE", "COORDINATES", "Compute", "Coordinate", "Derivative", "END", "FUNCTION_ROWS", "Found",
    "IDENTITY", "OPS", "Op", "Pointwise", "Read", "Recorder", "Reduction", "Ref", "SHORT", "Step",
    "Sweep", "Sweeps", "TorchText", "Value", "Workload", "Write", "allowed", "at_sizes", "axis_facts",
    "axis_steps", "axis_strides", "counted", "describe", "differentiate", "examine", "execute", "fresh",
    "in_torch", "is_tf32", "kernels", "library", "moved", "named", "number", "of_examples", "of_sizes",
    "one_line", "outside", "parse", "parted", "places", "pointwise", "product", "reaches", "register",
    "rounds_once", "share_of", "sizes_of", "table", "total", "touched", "transposed", "unregister",
    "usual", "why_not_all_stored", "why_not_any_size", "why_not_lowered", "why_not_stored", "with_error",
    "with_examples", "with_roles", "written",
]
