"""TMA descriptors: from a tensor and its box to the descriptor that a kernel takes as an argument.

The copy engine rounds float32 to tf32 on its way, to the nearest, if a descriptor says that its elements
are tf32. Triton 3.9 has a parameter for that; for 3.6 the type is replaced when the descriptor is encoded.
In other releases the matrix unit truncates the numbers, as it does those that do not come in boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transconv.backend_triton import absent
from transconv.ir import Tensor, tf32

ELEMENTS = {tf32: 11}  # CUtensorMapDataType's number


Lying = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a tensor, and its strides in elements."""
Encode = Callable[[int, Lying], list[Any]]
"""From an address and how a tensor lies there to what a kernel takes as its descriptor."""


def describe_explicit(tensor: Any, box: Tensor, extents: tuple[int, ...], at: Lying | None = None) -> Any:
    """The descriptor for an explicit kernel, with the layout of the box in shared memory. ``at``: how the
    tensor lies, if sizes are arguments."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape, strides = at or lying(box)
    layout = gl.NVMMASharedLayout.get_default_for(list(extents), getattr(gl, box.dtype.boxed.triton))
    made = TensorDescriptor(_moved(tensor, box), [*shape], [*strides], [*extents], layout)
    return _rounding(made, box)


def describe(tensor: Any, box: Tensor, extents: tuple[int, ...], at: Lying | None = None) -> Any:
    """The descriptor of a tensor seen as the box's dimensions; its address is a multiple of 16. ``at`` as
    above."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, strides = at or lying(box)
    return _rounding(TensorDescriptor(_moved(tensor, box), [*shape], [*strides], [*extents]), box)


def _moved(tensor: Any, box: Tensor) -> Any:
    """The tensor with elements that the copy engine has a type for."""
    if box.dtype.boxed is box.dtype:
        return tensor
    if isinstance(tensor, absent.Absent):
        return absent.tensor(box.dtype.boxed.torch)
    import torch

    return tensor.view(getattr(torch, box.dtype.boxed.torch))


def lying(box: Tensor) -> Lying:
    """How a tensor lies whose sizes are numbers."""
    strides = box.layout.strides()
    assert strides is not None
    return box.shape, strides


def _rounding(descriptor: Any, box: Tensor) -> Any:
    """The descriptor, with rounding set where this release of Triton has a parameter for it."""
    if box.near and hasattr(descriptor, "round_f32_to_tf32"):
        descriptor.round_f32_to_tf32 = True
    return descriptor


def encoding(meta: Mapping[str, Any], box: Tensor) -> Encode:
    """A function that makes what Triton 3.6 passes to a kernel as a descriptor; ``meta``: the compiled
    kernel's record of it. The descriptor's checks were made when the kernel was compiled; the driver makes
    those of addresses and strides again."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    fill: Callable[..., Any] = driver.active.utils.fill_tma_descriptor
    elements = TMA_DTYPE_DEVICE_TO_HOST[ELEMENTS[box.near] if box.near else meta["elem_type"]]
    fixed = meta["swizzle"], meta["elem_size"], elements, meta["block_size"]

    def encode(address: int, lying: Lying) -> list[Any]:
        shape, strides = lying
        return [fill(address, *fixed, shape, strides, 0), *shape, *strides]

    return encode
