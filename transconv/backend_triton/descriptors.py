"""TMA descriptors: from a tensor and its box to the descriptor that a kernel takes as an argument.

The copy engine rounds float32 to tf32 on its way, to the nearest, if a descriptor says that its elements
are tf32. Triton 3.9 has a parameter for that; for 3.6 the type is replaced when the descriptor is encoded.
In other releases the matrix unit truncates the numbers, as it does those that do not come in boxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transconv.ir import Tensor, tf32

ELEMENTS = {tf32: 11}  # CUtensorMapDataType's number


Lying = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a tensor, and its strides in elements."""


def describe_explicit(tensor: Any, box: Tensor, extents: tuple[int, ...], at: Lying | None = None) -> Any:
    """The descriptor for an explicit kernel, with the layout of the box in shared memory. ``at``: how the
    tensor lies, if sizes are arguments."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape, strides = at or _lying(box)
    layout = gl.NVMMASharedLayout.get_default_for(list(extents), getattr(gl, box.dtype.triton))
    made = TensorDescriptor(tensor, [*shape], [*strides], [*extents], layout)
    return _rounding(made, box)


def describe(tensor: Any, box: Tensor, extents: tuple[int, ...], at: Lying | None = None) -> Any:
    """The descriptor of a tensor seen as the box's dimensions; its address is a multiple of 16. ``at`` as
    above."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, strides = at or _lying(box)
    return _rounding(TensorDescriptor(tensor, [*shape], [*strides], [*extents]), box)


def _lying(box: Tensor) -> Lying:
    strides = box.layout.strides()
    assert strides is not None
    return box.shape, strides


def _rounding(descriptor: Any, box: Tensor) -> Any:
    """The descriptor, with rounding set where this release of Triton has a parameter for it."""
    if box.near and hasattr(descriptor, "round_f32_to_tf32"):
        descriptor.round_f32_to_tf32 = True
    return descriptor


def encode(descriptor: Any, meta: Mapping[str, Any], box: Tensor) -> list[Any]:
    """What Triton 3.6 passes to a kernel as a descriptor; ``meta``: the compiled kernel's record of it."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    if box.near:
        meta = {**meta, "elem_type": ELEMENTS[box.near]}
    return make_tensordesc_arg(descriptor, meta)  # type: ignore[no-any-return]
