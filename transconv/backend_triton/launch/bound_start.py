"""What starts a compiled kernel with the least work for a call: Triton's launch function in C, addresses,
and the descriptors of boxes, which are encoded once for an address and kept.

    Direct     a kernel that takes addresses          Encoded    one that takes descriptors as well
    Begun      either of them, for a text that is written out around its start (runtime/launch_codegen.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transconv.backend_triton.launch.descriptors import Encode, Lying, encoding
from transconv.ir import Tensor, defined
from transconv.target import DIRECT

Boxed = tuple[Tensor, tuple[int, ...]] | tuple[Tensor, tuple[int, ...], Lying | None]
"""A tensor and the extents of its box; how it lies, if sizes are arguments."""
Start = Callable[[tuple[int, ...], Sequence[Any], Any], None]  # of addresses, tensors, a stream
Places = tuple[Lying | None, ...]
"""How the tensor of each argument that is a descriptor lies."""
At = tuple[int, Places]
"""Of a launch for given sizes: the number of programs, and how the tensors of boxes lie."""
Bind = Callable[[tuple[int, ...], int, Places], Callable[..., None]]
"""From sizes and what is ``At`` them to a function of tensors that starts a kernel for them."""
MAPS_KEPT = 256  # encoded descriptors per kernel and argument; each is bound to one address


def addresses(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], bool]:
    """The addresses of tensors, and whether all are multiples of 16; floats, which are passed themselves,
    stay."""
    pointers = tuple([t if type(t) is float else t.data_ptr() for t in tensors])
    bits = 0
    for pointer in pointers:
        if type(pointer) is int:
            bits |= pointer
    return pointers, not bits & 15


def arguments(tensors: Sequence[Any], boxes: tuple[Boxed | None, ...],
              describe: Callable[..., Any]) -> Sequence[Any]:
    """Tensors, or descriptors of boxes in their place."""
    if not boxes:
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
        self.maps: list[dict[tuple[int, Lying], list[Any]]] = [{} for _ in each]
        self.calls: dict[tuple[int, ...], Sequence[Any]] = {}

    def __call__(self, at: tuple[int, ...], places: Places) -> Sequence[Any]:
        """The arguments for tensors at these addresses, which lie as ``places`` says; behind addresses,
        ``at`` may have numbers, which are passed on."""
        args = self.calls.get(at)
        if args is not None:
            return args
        args = []
        for pointer, encode, place, known in zip(at, self.each, places, self.maps, strict=False):
            if encode is None or place is None:
                args.append(pointer)
                continue
            found = known.get((pointer, place))
            if found is None:
                if len(known) >= self.most:
                    known.clear()
                found = known[pointer, place] = encode(pointer, place)
            args += found
        args += at[len(self.each):]
        if len(self.calls) >= self.most:
            self.calls.clear()
        self.calls[at] = args
        return args


class BoundStart(NamedTuple):
    """What a start without further checks passes to Triton's launch function ``raw``, but for the number
    of programs and addresses. ``encoder``: of a kernel with boxes, which lie as ``places`` says, or as
    sizes tell; ``sized``: whether sizes follow the addresses; ``stream``: from a device to its current
    one."""

    raw: Callable[..., None]
    function: Any
    packed: Any
    early: bool
    encoder: Encoder | None
    places: Places | None
    sized: bool
    stream: Callable[[int], Any]


class Encoded:
    """Starts a kernel some of whose arguments are descriptors of boxes of tensors that lie as ``places``
    says."""

    def __init__(self, raw: Callable[..., None], grid: int, function: Any, packed: Any, early: bool,
                 encoder: Encoder, places: Places) -> None:
        self.raw, self.kernel = raw, (grid, function, packed, early)
        self.encoder, self.places = encoder, places

    def __call__(self, pointers: tuple[int, ...], tensors: Sequence[Any], stream: Any) -> None:
        grid, function, packed, early = self.kernel
        self.raw(grid, 1, 1, stream, function, False, early, None, None, packed, None, None, None,
                 *self.encoder(pointers, self.places))

    def bound(self, order: tuple[int, ...], device: int,
              stream: Callable[[int], Any]) -> Callable[..., None]:
        """The same for the tensors at the indices ``order``, in half the time."""
        made: Callable[..., None] = encoded(order, 0)(
            self.raw, *self.kernel, device, stream, self.encoder.calls.get, self.encoder, self.places)
        return made


class Direct:
    """Starts a kernel whose arguments are addresses alone."""

    def __init__(self, raw: Callable[..., None], grid: int, function: Any, packed: Any,
                 early: bool = False) -> None:
        self.raw, self.grid, self.function, self.packed = raw, grid, function, packed
        self.early = early

    def __call__(self, pointers: tuple[int, ...], tensors: Sequence[Any], stream: Any) -> None:
        self.raw(self.grid, 1, 1, stream, self.function, False, self.early, None, None, self.packed,
                 None, None, None, *pointers)

    def bound(self, order: tuple[int, ...], device: int,
              stream: Callable[[int], Any]) -> Callable[..., None]:
        """The same for the tensors at the indices ``order``, in half the time."""
        return written_out(order, 0)(self.raw, self.grid, self.function, self.packed, self.early, device,
                                     stream)


@lru_cache(maxsize=256)
def written_out(order: tuple[int, ...], count: int) -> Callable[..., Callable[..., None]]:
    """A function of what starts a kernel, its grid, function, metadata, whether it begins early, device,
    stream, and ``count`` numbers, that returns a function of tensors: it starts the kernel with the
    addresses of those at the indices ``order``, and the numbers; each argument is written out. ``~at``
    instead of an index: the argument is a float, passed itself."""
    numbers = "".join(f", n{at}" for at in range(count))
    addresses = "".join(f", given[{int(at)}].data_ptr()" if at >= 0 else f", given[{~int(at)}]"
                        for at in order)
    made: Callable[..., Callable[..., None]] = defined(
        f"made = lambda raw, grid, function, packed, early, device, stream{numbers}: lambda *given: "
        "raw(grid, 1, 1, stream(device), function, False, early, None, None, packed, None, None, "
        f"None{addresses}{numbers})", "made")
    return made


@lru_cache(maxsize=256)
def encoded(order: tuple[int, ...], count: int) -> Callable[..., Callable[..., None]]:
    """``written_out`` for a kernel with boxes, which also takes, before the numbers, how to find the
    arguments of calls that are kept, the encoder, and how tensors lie."""
    numbers = "".join(f", n{at}" for at in range(count))
    arguments = [f"given[{int(at)}].data_ptr()" for at in order] + [f"n{at}" for at in range(count)]
    made: Callable[..., Callable[..., None]] = defined(
        "def made(raw, grid, function, packed, early, device, stream, known, encode, places"
        f"{numbers}):\n"
        "    def run(*given):\n"
        f"        at = ({''.join(f'{a}, ' for a in arguments)})\n"
        "        raw(grid, 1, 1, stream(device), function, False, early, None, None, packed, None,\n"
        "            None, None, *(known(at) or encode(at, places)))\n"
        "    return run", "made")
    return made


def entry(kernel: Any, boxed: bool) -> tuple[Callable[..., None], Any] | None:
    """The launch function that Triton's own Python wraps, and the metadata for encoding descriptors.

    Encoding a descriptor takes as long as a launch, and depends only on the address; Triton does it
    at every launch. None for another version of Triton, or for a kernel that needs scratch memory:
    then Triton's own launch is used. The function is C code that does not check its arguments, which
    differ between releases (3.9 has others), so only that of a known release is called.
    """
    try:
        import triton

        if not triton.__version__.startswith(DIRECT):
            return None
        launcher = kernel.run
        if launcher.global_scratch_size or launcher.profile_scratch_size or (
                launcher.launch_cooperative_grid):
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
