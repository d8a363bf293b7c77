"""What starts a compiled kernel with the least work for a call: Triton's launch function in C, addresses,
and the descriptors of boxes, which are encoded once for an address and kept.

    KernelStart    a kernel that takes addresses, descriptors and sizes; a plan's text is written around
                   several (runtime/plans.py)

Also here: overlapping launches (feature ``early``): CUDA's programmatic dependent launch.

A kernel may be made ready, its programs placed and its barriers laid out, while the one before it in the
stream ends. Every kernel begins by waiting until all before it have ended and their writes are visible.
It touches no memory before that, so any kernel may come before it, with this feature or without.

A kernel that writes the parts of a sum, or the copy of an operand, lets the next one, which reads them, be
prepared. That happens when all of its own programs run: none of them is kept from a multiprocessor by
one that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transconv.backend_triton.launch.descriptors import Encode, Lying, NotEncoded, encoding
from transconv.backend_triton.miscompiles import Miscompiled
from transconv.ir import BoxStore, FuncCall, Kernel, Send, Store, Tensor, find
from transconv.support import DIRECT, defined

Boxed = tuple[Tensor, tuple[int, ...]] | tuple[Tensor, tuple[int, ...], Lying | None]
"""A tensor and the extents of its box; how it lies, if sizes are arguments."""
Places = tuple[Lying | None, ...]
"""How the tensor of each argument that is a descriptor lies."""
At = tuple[int, Places]
"""Of a launch for given sizes: the number of programs, and how the tensors of boxes lie."""
Bind = Callable[[tuple[int, ...], int, Places], Callable[..., None]]
"""From sizes and what is ``At`` them to a function of tensors that starts a kernel for them."""
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


def arguments(tensors: Sequence[Any], boxes: tuple[Boxed | None, ...],
              describe: Callable[..., Any] | None) -> Sequence[Any]:
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
            kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None,
                       *given, *sizes)
            return
        given = *addresses(tensors)[0], *sizes
        if self.encoder:
            try:
                given = self.encoder(given, places)
            except NotEncoded as error:  # the next best schedule takes this one's place
                raise Miscompiled(kernel.name, str(error)) from error
        self.raw(grid, 1, 1, stream, kernel.function, False, self.early, None, None,
                 kernel.packed_metadata, None, None, None, *given)

    def binding(self, order: tuple[int, ...], device: int, stream: Callable[[int], Any]) -> Bind:
        """From sizes to a function of tensors that starts the kernel for them without further checks;
        ``order``: the indices of its arguments among the tensors, ``~at`` of a float."""
        raw, encoder, kernel, early = self.raw, self.encoder, self.kernel, self.early
        if raw is None:
            places_of = [at if at >= 0 else ~at for at in order]
            return lambda sizes, grid, places: lambda *given: self(
                sizes, (grid, places), [given[n] for n in places_of], stream(device))
        function, packed = kernel.function, kernel.packed_metadata
        if encoder is None:
            plain = written_out(order, self.sizes)
            return lambda sizes, grid, places: plain(
                raw, grid, function, packed, early, device, stream, *sizes)
        made, calls = encoded(order, self.sizes), encoder.calls.get
        return lambda sizes, grid, places: made(
            raw, grid, function, packed, early, device, stream, calls, encoder, places, *sizes)


def boxes_at(boxes: tuple[Boxed | None, ...], places: Places) -> tuple[Boxed | None, ...]:
    """Which arguments are descriptors, each with its tensor and how it lies."""
    return tuple([b and (b[0], b[1], at) for b, at in zip(boxes, places, strict=True)])


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
