"""The start of a compiled kernel, with the least work for a call: Triton's launch function in C,
addresses, and the descriptors of boxes, which are encoded once for an address and kept.

    KernelStart    a kernel that takes addresses, numbers, descriptors and sizes; a plan's start is written
                   around several (runtime/plans.py)

**Overlapping launches** (feature ``early``): CUDA's programmatic dependent launch. A kernel may be made
ready, its programs placed and its barriers laid out, while the one before it in the stream ends. Every
kernel begins by waiting until all before it have ended and their writes are visible. It touches no memory
before that, so any kernel may come before it, with this feature or without.

A kernel that writes the parts of a sum, or the copy of an operand, lets the next one, which reads them, be
prepared. That happens when all of its own programs run: none of them is kept from a multiprocessor by
one that waits.

**Descriptors.** The copy engine rounds float32 to tf32 on its way, to the nearest, if a descriptor says
that its elements are tf32. Triton 3.9 has a parameter for that; for 3.6 the type is replaced when the
descriptor is encoded. In other releases the matrix unit truncates the numbers, as it does those that do
not come in boxes.

Where a box takes every so many-th position (``Tensor.every``), the driver encodes the descriptor again:
Triton has no word for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any, NamedTuple

from transconv.backend_triton.launch import jit_module
from transconv.backend_triton.miscompiles import Miscompiled
from transconv.ir import BoxStore, FuncCall, Kernel, Send, Store, Tensor, find, tf32
from transconv.support import DIRECT

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
    if isinstance(tensor, jit_module.Absent):
        return jit_module.tensor(box.dtype.boxed.torch)
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
        c_void_p(id(made) + ends - MAP_BYTES),
        elements,
        rank,
        c_void_p(address),
        (c_uint64 * rank)(*shape),
        (c_uint64 * (rank - 1))(*[size * n for n in strides[1:]]),
        (c_uint32 * rank)(*reach),
        (c_uint32 * rank)(*steps),
        0,
        swizzle,
        LINES_OF_128,
        0,
    )
    if code:
        raise NotEncoded(
            f"cuTensorMapEncodeTiled returned {code} for a tensor of {lying[0]} elements, "
            f"{lying[1]} apart, in boxes of {box}, every {every}"
        )


@cache
def _driver() -> Any:
    """The driver's library, which is loaded already."""
    return CDLL("libcuda.so.1")


Boxed = tuple[Tensor, tuple[int, ...]] | tuple[Tensor, tuple[int, ...], Lying | None]
"""A tensor and the extents of its box; how it lies, if sizes are arguments."""
Places = tuple[Lying | None, ...]
"""How the tensor of each argument that is a descriptor lies."""
At = tuple[int, Places]
"""Of a launch for given sizes: the number of programs, and how the tensors of boxes lie."""
MAPS_KEPT = 256  # encoded descriptors per kernel and argument; each is bound to one address
CALLS_KEPT = 1024  # of a kernel whose sizes are arguments


def addresses(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], bool]:
    """The addresses of tensors, and whether all are multiples of 16; floats, which are passed themselves,
    stay."""
    pointers = tuple([t if type(t) is float else t.data_ptr() for t in tensors])
    bits = 0
    for pointer in pointers:
        if type(pointer) is int:
            bits |= pointer
    return pointers, not bits & 15


def arguments(
    tensors: Sequence[Any], boxes: tuple[Boxed | None, ...], describe: Callable[..., Any] | None
) -> Sequence[Any]:
    """Tensors, or descriptors of boxes in their place."""
    if not boxes or describe is None:
        return tensors
    return [t if b is None else describe(t, *b) for t, b in zip(tensors, boxes, strict=True)]


def encodings(boxes: tuple[Boxed | None, ...], meta: Any) -> list[Encode | None]:
    """What encodes the descriptor of each argument that is one; ``meta``: the compiled kernel's records of
    them, in their order."""
    records = iter(meta)
    return [b and encoding(next(records), b[0]) for b in boxes]


class Encoder:
    """The arguments of a kernel with boxes. ``each``: what encodes the descriptor of an argument, None for
    others. Encoded ones are kept by addresses, ``most`` at a time, and so are the arguments of calls."""

    def __init__(self, each: Sequence[Encode | None], most: int) -> None:
        self.each, self.most = each, most
        self.maps: list[dict[tuple[int, Lying], tuple[Any, ...]]] = [{} for _ in each]
        self.calls: dict[tuple[int, ...], Sequence[Any]] = {}

    def __call__(self, at: tuple[int, ...], places: Places) -> Sequence[Any]:
        """The arguments for tensors at these addresses, which lie as ``places`` says; behind addresses,
        ``at`` may have numbers, which are passed on."""
        args = self.calls.get(at)
        if args is not None:
            return args
        args = list[Any]()
        for pointer, encode, place, known in zip(at, self.each, places, self.maps, strict=False):
            if encode is None or place is None:
                args.append(pointer)
                continue
            found = known.get((pointer, place))
            if found is None:
                if len(known) >= self.most:
                    known.clear()
                found = known[pointer, place] = tuple(encode(pointer, place))
            args += found
        args += at[len(self.each) :]
        if len(self.calls) >= self.most:
            self.calls.clear()
        kept = self.calls[at] = tuple(args)  # tuples of numbers are not looked through for cycles
        return kept


class KernelStart(NamedTuple):
    """A compiled kernel and what starts it: ``raw``, Triton's launch function in C, or Triton's own launch
    where ``raw`` is None. ``encoder``: of a kernel with ``boxes``, which ``describe`` is for otherwise;
    ``sizes``: how many sizes follow the addresses. The kernel is kept: newer releases of Triton unload its
    code with its last reference."""

    raw: Callable[..., None] | None
    kernel: Any
    early: bool = False
    encoder: Encoder | None = None
    boxes: tuple[Boxed | None, ...] = ()
    describe: Callable[..., Any] | None = None
    sizes: int = 0

    def __call__(self, sizes: tuple[int, ...], at: At, tensors: Sequence[Any], stream: Any) -> None:
        """Start the kernel ``at`` given sizes."""
        kernel, (grid, places) = self.kernel, at
        if self.raw is None:
            given = arguments(tensors, boxes_at(self.boxes, places), self.describe)
            kernel.run(
                grid,
                1,
                1,
                stream,
                kernel.function,
                kernel.packed_metadata,
                None,
                None,
                None,
                *given,
                *sizes,
            )
            return
        given = *addresses(tensors)[0], *sizes
        if self.encoder:
            try:
                given = self.encoder(given, places)
            except NotEncoded as error:  # the next best schedule takes this one's place
                raise Miscompiled(kernel.name, str(error)) from error
        self.raw(
            grid,
            1,
            1,
            stream,
            kernel.function,
            False,
            self.early,
            None,
            None,
            kernel.packed_metadata,
            None,
            None,
            None,
            *given,
        )


def boxes_at(boxes: tuple[Boxed | None, ...], places: Places) -> tuple[Boxed | None, ...]:
    """Which arguments are descriptors, each with its tensor and how it lies."""
    return tuple([b and (b[0], b[1], at) for b, at in zip(boxes, places, strict=True)])


def entry(kernel: Any, boxed: bool) -> tuple[Callable[..., None], Any] | None:
    """The launch function that Triton's own Python wraps, and the metadata for encoding descriptors.

    Encoding a descriptor takes as long as a launch, and depends only on the address; Triton does it
    at every launch. None for another version of Triton, or for a kernel that needs scratch memory:
    then Triton's own launch is used. The function is C code that does not check its arguments, which
    differ between releases (3.9 has others), so only that of a known release is called."""
    try:
        import triton

        if not triton.__version__.startswith(DIRECT):
            return None
        launcher = kernel.run
        if (
            launcher.global_scratch_size
            or launcher.profile_scratch_size
            or (launcher.launch_cooperative_grid)
        ):
            return None
        inner = launcher.launch
        if not boxed:
            return inner, None
        raw = inner.__closure__[inner.__code__.co_freevars.index("launcher")].cell_contents
        meta = kernel.metadata.tensordesc_meta
    except (ImportError, AttributeError, ValueError, TypeError):
        return None
    return raw, meta


@lru_cache(maxsize=1)
def torch_module() -> Any:
    """torch, imported when the first kernel starts; cheaper per call than an import statement."""
    import torch

    return torch


INSTRUCTIONS = "triton.language.extra.cuda"  # the module of these functions
WAIT = "gdc_wait()  # until the kernels before this one have ended"
NEXT = "gdc_launch_dependents()  # the next one may be made ready meanwhile"


def first_lines(kernel: Kernel) -> tuple[str, ...]:
    """The first lines of a kernel's body."""
    written = [s.tensor for s in find(kernel, Store)] + [s.tensor for s in find(kernel, BoxStore)]
    written += [s.tensor for s in find(kernel, Send)]
    written += [a for s in find(kernel, FuncCall) for a in s.args if isinstance(a, Tensor)]
    return (WAIT, NEXT) if any(t.parts_of or t.copy_of for t in written) else (WAIT,)


def imported(lines: tuple[str, ...]) -> list[str]:
    """The import of the functions that the lines call."""
    names = ", ".join(sorted(line.partition("(")[0] for line in lines))
    return [f"from {INSTRUCTIONS} import {names}"] if lines else []


def begun(lines: tuple[str, ...]) -> list[str]:
    return [f"    {line}" for line in lines]
