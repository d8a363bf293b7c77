"""TMA descriptors: from a tensor and its box to the descriptor that a kernel takes as an argument.

The copy engine rounds float32 to tf32 on its way, to the nearest, if a descriptor says that its elements
are tf32. Triton 3.9 has a parameter for that; for 3.6 the type is replaced when the descriptor is encoded.
In other releases the matrix unit truncates the numbers, as it does those that do not come in boxes.

Where a box takes every so many-th position (``Tensor.every``), the driver encodes the descriptor again:
Triton has no word for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import CDLL, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from transconv.backend_triton.offline import fake_tensors
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
    if isinstance(tensor, fake_tensors.Absent):
        return fake_tensors.tensor(box.dtype.boxed.torch)
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
        made = fill(address, *fixed, shape, strides, 0)
        if box.every:
            _step(made, address, fixed, lying, box.every)
        return [made, *shape, *strides]

    return encode


class NotEncoded(RuntimeError):
    """A descriptor that the driver refuses."""


MAP_BYTES = 128  # of a CUtensorMap, the last ones of Triton's object
LINES_OF_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B, as Triton has it


def _step(made: Any, address: int, fixed: tuple[Any, ...], lying: Lying, every: tuple[int, ...]) -> None:
    """Encode a descriptor again, whose boxes take every so many-th position: a box then reaches over all
    positions between them. Raises NotEncoded if the driver refuses it."""
    swizzle, size, elements, box = fixed
    shape, strides = (each[::-1] for each in lying)  # innermost first
    rank, steps = len(shape), every[::-1]
    ends = type(made).__basicsize__
    if ends != 2 * MAP_BYTES:  # a header, padded to that many bytes, and the descriptor
        raise NotEncoded(f"Triton's object for a descriptor has {ends} bytes, expected {2 * MAP_BYTES}")
    reach = [n * step for n, step in zip(box[::-1], steps, strict=True)]
    code = _driver().cuTensorMapEncodeTiled(
        c_void_p(id(made) + ends - MAP_BYTES), elements, rank, c_void_p(address),
        (c_uint64 * rank)(*shape), (c_uint64 * (rank - 1))(*[size * n for n in strides[1:]]),
        (c_uint32 * rank)(*reach), (c_uint32 * rank)(*steps), 0, swizzle, LINES_OF_128, 0)
    if code:
        raise NotEncoded(f"cuTensorMapEncodeTiled returned {code} for a tensor of {lying[0]} elements, "
                         f"{lying[1]} apart, in boxes of {box}, every {every}")


@cache
def _driver() -> Any:
    """The driver's library, which is loaded already."""
    return CDLL("libcuda.so.1")
