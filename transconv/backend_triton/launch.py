"""Launches a Triton JIT function on tensors.

Before the first launch on a device Triton's dispatcher compiles; the compiled kernel is kept and
started directly. Triton specialises on addresses that are multiples of 16, so a kept kernel is only
used for tensors that are aligned like those it was compiled for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from transconv.backend_triton import absent, compiled, fingerprint
from transconv.backend_triton.descriptors import (
    Encode,
    Lying,
    describe,
    describe_explicit,
    encoding,
    lying,
)
from transconv.backend_triton.flaws import refuse
from transconv.backend_triton.interpreter import explained, prepare_interpreter
from transconv.backend_triton.module import load
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
# Triton's interpreter keeps the grid position and the patched language in globals: kernels
# that are interpreted at the same time would compute each other's programs.
INTERPRETER = threading.Lock()
MAPS_KEPT = 256  # encoded descriptors per kernel and argument; each is bound to one address


class Launcher:
    """Runs one kernel. ``boxes`` says which arguments are descriptors of boxes, ``types`` torch's element
    type of each; ``key`` is the kernel's name in the record of compiled kernels. ``fuse``: whether the
    compiler may make one instruction, with one rounding, of a product and a sum."""

    def __init__(self, source: str, function: str, path: Any, grid: int, warps: int, stages: int,
                 boxes: tuple[Boxed | None, ...] = (), explicit: bool = False,
                 early: bool = False, types: tuple[str, ...] = (), key: str = "",
                 fuse: bool = True) -> None:
        self.source, self.function, self.path = source, function, path
        self.grid, self.warps, self.stages = grid, warps, stages
        self.boxes = boxes if any(b is not None for b in boxes) else ()
        self.describe = describe_explicit if explicit else describe
        self.explicit, self.early = explicit, early
        self.types, self.key, self.fuse = types, key, fuse
        self.unspecialised: tuple[str, ...] = ()  # arguments on whose values Triton does not specialise
        self.jit: Any = None
        self.kept: dict[tuple[int, bool], Start] = {}
        self.lock = threading.Lock()

    def __call__(self, tensors: list[Any]) -> None:
        """Launch on the tensors' device and its current stream; no programs, no launch."""
        if self.grid == 0:
            return
        device = tensors[0].device
        if device.type == "cpu":
            self._interpret(tensors)
            return
        pointers, aligned = addresses(tensors)
        index = device.index
        start = self.kept.get((index, aligned))
        c = _torch()._C
        if start is not None and index == c._cuda_getDevice():
            start(pointers, tensors, c._cuda_getCurrentRawStream(index))
            return
        with _torch().cuda.device(index):
            if start is None:
                start = self.kept[index, aligned] = self._starter(self._compiled(tensors, aligned))
            start(pointers, tensors, c._cuda_getCurrentRawStream(index))

    def _interpret(self, tensors: list[Any]) -> None:
        with INTERPRETER:
            prepare_interpreter()
            with explained():
                self._function()[(self.grid,)](*self._arguments(tensors), **self._options())

    def _compiled(self, tensors: list[Any], aligned: bool) -> Any:
        """The compiled kernel for such tensors, from Triton's cache where it is there. Raises Miscompiled
        for a known miscompile."""
        kernel = compiled.again(self.key, self.function, aligned, self.types)
        if kernel is not None:
            return kernel
        function, args = self._function(), self._arguments(tensors)
        fingerprint.remember()
        if not aligned:
            import triton

            names = [p.name for p in function.params]
            function = triton.jit(function.fn, do_not_specialize=[*self.unspecialised],
                                  do_not_specialize_on_alignment=names)
        kernel = function.warmup(*args, grid=(self.grid,), **self._options())
        refuse(kernel, self.function)
        compiled.note(self.key, aligned, kernel, self.types)
        return kernel

    def warm(self, tensors: list[Any]) -> None:
        """Compile into Triton's cache the kernel for a launch with such tensors; those of torch's ``meta``
        device count as aligned to 16 bytes."""
        if self.grid:
            args = self._arguments(tensors)
            self._function().warmup(*args, grid=(self.grid,), **self._options())

    def compile(self, aligned: bool, patient: bool = True) -> None:
        """Compile into Triton's cache, with what starts it, and record it. Needs neither a GPU, after
        ``compiled.pretend``, nor torch. ``patient``: see ``compiled.build_start``. Raises Miscompiled, and
        Triton's errors."""
        if self.grid:
            compiled.build_start(self._compiled(self._nowhere(), aligned), patient)

    def _nowhere(self) -> list[Any]:
        """What stands for the tensors of a launch; without torch for the release that is known."""
        import triton

        if triton.__version__.startswith(DIRECT):
            return [absent.tensor(t) for t in self.types]
        torch = _torch()
        return [torch.empty(1, dtype=getattr(torch, t), device="meta") for t in self.types]

    def is_ready(self, aligned: bool) -> bool:
        """Whether a launch with such tensors compiles nothing: the kernel is loaded in this process or
        is in Triton's cache."""
        return (not self.grid or any(a is aligned for _, a in self.kept)
                or compiled.is_there(self.key, aligned))

    def is_loaded(self, device: int, aligned: bool) -> bool:
        """Whether the kernel is loaded on a device, for aligned tensors or for others."""
        return not self.grid or (device, aligned) in self.kept

    def _function(self) -> Any:
        with self.lock:
            if self.jit is None:
                self.jit = load(self.source, self.function, self.path)
        return self.jit

    def _arguments(self, tensors: list[Any]) -> Sequence[Any]:
        """Tensors, or descriptors of boxes in their place."""
        return arguments(tensors, self.boxes, self.describe)

    def _options(self) -> dict[str, Any]:
        """Triton's compile options; other options give another compiled kernel."""
        # Fused multiply-adds are set explicitly: the default differs between Triton's releases.
        options = {"num_warps": self.warps, "num_stages": self.stages,
                   "enable_fp_fusion": self.fuse}
        return options | {"launch_pdl": True} if self.early else options

    def _starter(self, kernel: Any) -> Start:
        """The function that starts a compiled kernel with the least work per call."""
        found = entry(kernel, bool(self.boxes))
        grid, function, packed, boxes = self.grid, kernel.function, kernel.packed_metadata, self.boxes
        run, describe, early = kernel.run, self.describe, self.early

        def through_triton(pointers: tuple[int, ...], tensors: Sequence[Any], stream: Any) -> None:
            args = arguments(tensors, boxes, describe)
            # Newer releases of Triton unload a kernel with its last reference, so it is kept here.
            run(grid, 1, 1, stream, kernel.function, packed, None, None, None, *args)

        if found is None:
            return through_triton
        raw, meta = found
        if not boxes:
            return Direct(raw, grid, function, packed, early)
        return Encoded(raw, grid, function, packed, early, Encoder(encodings(boxes, meta), MAPS_KEPT),
                       tuple([b and lying(b[0]) for b in boxes]))

    def starter(self, device: int, aligned: bool,
                order: tuple[int, ...]) -> Callable[..., None] | None:
        """A function of tensors that starts the kernel without further checks; ``order``: the indices
        of the kernel's arguments among them.

        None before the first launch on the device for this ``aligned``. The caller makes the device
        the current one.
        """
        start = self.kept.get((device, aligned))
        if start is None:
            return None
        stream = _torch()._C._cuda_getCurrentRawStream
        if isinstance(start, (Direct, Encoded)):
            return start.bound(order, device, stream)
        address, pick = _torch().Tensor.data_ptr, itemgetter(*order)

        def run(*given: Any) -> None:
            tensors = pick(given)
            start(tuple(map(address, tensors)), tensors, stream(device))

        return run


    def binding(self, device: int, aligned: bool, order: tuple[int, ...]) -> Bind | None:
        """``starter`` as a function of sizes and what is ``At`` them, on which it does not depend."""
        start = self.starter(device, aligned, order)
        return start and (lambda sizes, grid, places: start)


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
    addresses = ", ".join(f"given[{int(at)}].data_ptr()" for at in order)
    made: Callable[..., Callable[..., None]] = defined(
        "def made(raw, grid, function, packed, early, device, stream, known, encode, places"
        f"{numbers}):\n"
        "    def run(*given):\n"
        f"        at = ({addresses}{numbers},)\n"
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
def _torch() -> Any:
    """torch, imported when the first kernel starts; cheaper per call than an import statement."""
    import torch

    return torch
