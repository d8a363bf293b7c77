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

from transconv.backend_triton import compiled
from transconv.backend_triton.descriptors import describe, describe_explicit, encode
from transconv.backend_triton.flaws import refuse
from transconv.backend_triton.interpreter import explained, mend_interpreter
from transconv.backend_triton.module import load
from transconv.ir import Tensor

Boxed = tuple[Tensor, tuple[int, ...]]
Start = Callable[[tuple[int, ...], Sequence[Any], Any], None]  # of addresses, tensors, a stream
DIRECT = "3.6."  # the release of Triton whose launch function is called without its wrapper
# Triton's interpreter keeps the place in the grid and the patched language for the whole process: kernels
# that are interpreted at the same time would compute each other's programs.
INTERPRETER = threading.Lock()
MAPS_KEPT = 256  # encoded descriptors per kernel and argument; each is bound to one address


class Launcher:
    """Runs one kernel. ``boxes`` says which arguments are passed as descriptors of boxes, ``types`` what
    torch calls the elements of each; under ``key`` it is noted that the kernel was compiled."""

    def __init__(self, source: str, function: str, path: Any, grid: int, warps: int, stages: int,
                 boxes: tuple[Boxed | None, ...] = (), explicit: bool = False,
                 early: bool = False, types: tuple[str, ...] = (), key: str = "") -> None:
        self.source, self.function, self.path = source, function, path
        self.grid, self.warps, self.stages = grid, warps, stages
        self.boxes = boxes if any(b is not None for b in boxes) else ()
        self.describe = describe_explicit if explicit else describe
        self.explicit, self.early = explicit, early
        self.types, self.key = types, key
        self.unspecialised: tuple[str, ...] = ()  # arguments, none of whose values has a kernel of its own
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
        pointers = tuple([t.data_ptr() for t in tensors])
        bits = 0
        for pointer in pointers:
            bits |= pointer
        aligned = not bits & 15
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
            mend_interpreter()
            with explained():
                self._function()[(self.grid,)](*self._arguments(tensors), **self._options())

    def _compiled(self, tensors: list[Any], aligned: bool) -> Any:
        """The kernel that Triton makes for such tensors, or has made before. Raises Miscompiled for what
        is known to be compiled wrongly."""
        function, args = self._function(), self._arguments(tensors)
        if not aligned:
            import triton

            names = [p.name for p in function.params]
            function = triton.jit(function.fn, do_not_specialize=[*self.unspecialised],
                                  do_not_specialize_on_alignment=names)
        kernel = function.warmup(*args, grid=(self.grid,), **self._options())
        refuse(kernel, self.function)
        compiled.note(self.key, aligned, kernel)
        return kernel

    def warm(self, tensors: list[Any]) -> None:
        """Compile into Triton's cache what a launch with such tensors will look for; those of torch's
        ``meta`` device look like tensors at multiples of 16 bytes."""
        if self.grid:
            args = self._arguments(tensors)
            self._function().warmup(*args, grid=(self.grid,), **self._options())

    def compile(self, aligned: bool) -> None:
        """Compile into Triton's cache, and note it. Needs no GPU where Triton was told of one. Raises
        Miscompiled, and what Triton raises."""
        if self.grid:
            torch = _torch()
            made = [torch.empty(1, dtype=getattr(torch, t), device="meta") for t in self.types]
            self._compiled(made, aligned)

    def is_ready(self, aligned: bool) -> bool:
        """Whether a launch with tensors so aligned compiles nothing: the kernel runs in this process
        already, or lies in Triton's cache."""
        return (not self.grid or any(a is aligned for _, a in self.kept)
                or compiled.is_there(self.key, aligned))

    def is_loaded(self, device: int, aligned: bool) -> bool:
        """Whether the kernel runs on a device already, for tensors so aligned."""
        return not self.grid or (device, aligned) in self.kept

    def _function(self) -> Any:
        with self.lock:
            if self.jit is None:
                self.jit = load(self.source, self.function, self.path)
        return self.jit

    def _arguments(self, tensors: list[Any]) -> list[Any]:
        """Tensors, or descriptors of boxes in their place."""
        if not self.boxes:
            return tensors
        return [t if b is None else self.describe(t, *b)
                for t, b in zip(tensors, self.boxes, strict=True)]

    def _options(self) -> dict[str, Any]:
        """What Triton is told beside the arguments: with other words it is another kernel."""
        # Fused multiply-adds are asked for: newer releases of Triton have another default.
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return options | {"launch_pdl": True} if self.early else options

    def _starter(self, kernel: Any) -> Start:
        """How to start a compiled kernel with the least work per call."""
        entry = _entry(kernel, bool(self.boxes))
        grid, function, packed, boxes = self.grid, kernel.function, kernel.packed_metadata, self.boxes
        run, describe, early = kernel.run, self.describe, self.early

        def through_triton(pointers: tuple[int, ...], tensors: Sequence[Any], stream: Any) -> None:
            args = tensors if not boxes else [t if b is None else describe(t, *b)
                                              for t, b in zip(tensors, boxes, strict=True)]
            # Newer releases of Triton unload a kernel's code when its object goes: ours stays here.
            run(grid, 1, 1, stream, kernel.function, packed, None, None, None, *args)

        if entry is None:
            return through_triton
        raw, meta = entry
        if not boxes:
            return Direct(raw, grid, function, packed, early)
        maps: list[dict[int, list[Any]]] = [{} for _ in boxes]
        calls: dict[tuple[int, ...], list[Any]] = {}

        def encoded(pointers: tuple[int, ...], tensors: Sequence[Any], stream: Any) -> None:
            args = calls.get(pointers)
            if args is None:
                args = encode_all(pointers, tensors)
            raw(grid, 1, 1, stream, function, False, early, None, None, packed, None, None, None,
                *args)

        def encode_all(at: tuple[int, ...], tensors: Sequence[Any]) -> list[Any]:
            args: list[Any] = []
            place = 0
            for pointer, tensor, box, known in zip(at, tensors, boxes, maps, strict=True):
                if box is None:
                    args.append(pointer)
                    continue
                found = known.get(pointer)
                if found is None:
                    if len(known) >= MAPS_KEPT:
                        known.clear()
                    found = known[pointer] = encode(describe(tensor, *box), meta[place], box[0])
                place += 1
                args += found
            if len(calls) >= MAPS_KEPT:
                calls.clear()
            calls[at] = args
            return args
        return encoded

    def starter(self, device: int, aligned: bool,
                order: tuple[int, ...]) -> Callable[..., None] | None:
        """A function of tensors that starts the kernel with nothing left to decide; ``order`` says
        which of them are the kernel's arguments.

        None before the first launch on the device with tensors so ``aligned``. The caller sees to it
        that the device is the current one.
        """
        start = self.kept.get((device, aligned))
        if start is None:
            return None
        stream = _torch()._C._cuda_getCurrentRawStream
        if isinstance(start, Direct):
            return start.bound(order, device, stream)
        address, pick = _torch().Tensor.data_ptr, itemgetter(*order)

        def run(*given: Any) -> None:
            tensors = pick(given)
            start(tuple(map(address, tensors)), tensors, stream(device))

        return run


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
        """The same for those of the given tensors that ``order`` names, in half the time."""
        kernel = self.grid, self.function, self.packed, self.early
        return written_out(self.raw, kernel, order, (), device, stream)


def written_out(raw: Callable[..., None], kernel: tuple[int, Any, Any, bool], order: tuple[int, ...],
                numbers: tuple[int, ...], device: int,
                stream: Callable[[int], Any]) -> Callable[..., None]:
    """A function of tensors that starts a kernel (its grid, function, metadata, whether it begins early)
    with the addresses of those that ``order`` names, and with numbers: each argument is written out."""
    made: Callable[..., None] = _spelled(order, len(numbers))(raw, *kernel, device, stream, *numbers)
    return made


@lru_cache(maxsize=256)
def _spelled(order: tuple[int, ...], count: int) -> Any:
    numbers = "".join(f", n{at}" for at in range(count))
    addresses = "".join(f", given[{int(at)}].data_ptr()" for at in order)
    return eval(f"lambda raw, grid, function, packed, early, device, stream{numbers}: lambda *given: "
                "raw(grid, 1, 1, stream(device), function, False, early, None, None, packed, None, None, "
                f"None{addresses}{numbers})")


def _entry(kernel: Any, boxed: bool) -> tuple[Callable[..., None], Any] | None:
    """The launch function that Triton's own Python wraps, and what the descriptors of boxes are
    encoded with.

    Encoding a descriptor takes as long as a launch, and depends only on the address; Triton does it
    at every launch. None where this version of Triton keeps them elsewhere, or the kernel needs
    scratch memory: then its own entry is used. The function is C code that trusts its arguments,
    and these differ from release to release (3.9 has others), so only a known one is called.
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


def launch_function(kernel: Any) -> Any:
    """The launch function of a kernel without boxes that may be called directly; None for others."""
    entry = _entry(kernel, False)
    return None if entry is None else entry[0]


@lru_cache(maxsize=1)
def _torch() -> Any:
    """torch, imported when the first kernel starts; cheaper per call than an import statement."""
    import torch

    return torch
