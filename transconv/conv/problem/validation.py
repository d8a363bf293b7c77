"""What the sizes, element types and layouts of a convolution must meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transconv.conv.problem.element_types import results
from transconv.errors import ProblemError
from transconv.ir import multiplied

if TYPE_CHECKING:
    from transconv.conv.problem.conv_problem import ConvProblem, TensorSpec


def check_sizes(p: ConvProblem) -> None:
    """Raises ProblemError for sizes that describe no convolution."""
    n = len(p.i)
    if not 1 <= n <= 3:
        raise ProblemError(f"{n} spatial axes; expected 1, 2 or 3")
    least = {"mb": 0, "g": 1, "ic": 1, "oc": 1, "i": 1, "o": 1, "k": 1, "stride": 1,
             "dilation": 1, "pad_lo": 0}
    for what, low in least.items():
        sizes = getattr(p, what)
        if isinstance(sizes, tuple) and len(sizes) != n:
            raise ProblemError(f"{what} = {sizes} has {len(sizes)} entries; expected {n}, "
                               f"one for each of {', '.join(p.spatial)}")
        for size in sizes if isinstance(sizes, tuple) else (sizes,):
            if size < low:
                raise ProblemError(f"{what} = {sizes} is out of range; expected at least {low}")
    for what in ("ic", "oc"):
        if getattr(p, what) % p.g:
            raise ProblemError(f"{what} = {getattr(p, what)} does not divide into {p.g} "
                               f"groups; expected a multiple of g")


def check_tensors(p: ConvProblem) -> None:
    """Raises ProblemError for element types or layouts that do not go with the sizes."""
    alone = sum(not t.operand for t in p.dtypes) > 1  # a direction has one result
    for what, shape in p.shapes.items():
        spec: TensorSpec = getattr(p, what)
        legal = multiplied() if alone and not spec.dtype.operand else results()
        if spec.dtype not in legal:
            raise ProblemError(f"{what} of dtype {spec.dtype}; "
                               f"expected one of {' '.join(map(str, legal))}")
        if spec.layout.dtype != spec.dtype:
            raise ProblemError(f"{what} is {spec.dtype} but its layout holds "
                               f"{spec.layout.dtype}; expected one dtype")
        if spec.layout.offset < 0 or any(b.stride < 0 for b in spec.layout.blocks):
            raise ProblemError(f"the layout of {what}, {spec.layout}, has a negative stride or "
                               "offset, which leads out of its memory; expected 0 or more")
        if spec.layout.ndims != len(shape):
            raise ProblemError(f"the layout of {what} has {spec.layout.ndims} dims; "
                               f"expected {len(shape)}, for shape {shape}")
        if spec.layout.extents != spec.layout.padded(shape):
            raise ProblemError(f"the layout of {what} covers {spec.layout.extents}; "
                               f"expected {spec.layout.padded(shape)}, for shape {shape}")
