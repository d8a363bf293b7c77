"""A kernel of Triton: a text, and what is compiled of it and loaded on devices, for sizes if these are
arguments. It knows nothing of plans, whose starts are written around what is loaded
(runtime/plans.py), nor of the checks of first results (runtime/launch.py).

Before the first run on a device Triton's dispatcher compiles; the compiled kernel is kept and started
directly. Triton specialises on addresses that are multiples of 16, so a kept kernel is only used for
tensors that are aligned like those it was compiled for.

A kernel whose sizes are arguments serves all of them: they are passed in 32 bits, and Triton specialises
on none. The number of programs is computed from them, and so is how the tensors of boxes lie (``At``), by
one function for all kernels of a plan (``numbers_of``). Exact sizes are the case without any.

On a CPU Triton's interpreter runs the text with NumPy, or OpenCL executes it by lanes, compiled by
Triton's release for Intel GPUs to the SPIR-V that their driver gets, without the matrix unit. A child
process does that (opencl_child.py): that Triton shares no process with another one, and what a wrong
address breaks is the child. Tensors travel in a file that it maps, whole storages of them, so that what is
written beside a tensor comes back, too."""

from __future__ import annotations

import ctypes
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transconv import ir
from transconv.backend_triton import torch_internals
from transconv.backend_triton.launch import bound_start, compile_records, jit_module
from transconv.backend_triton.launch.interpreter import alike, explained, prepare_interpreter
from transconv.backend_triton.launch.jit_module import load
from transconv.backend_triton.machine_code import stack_bytes
from transconv.backend_triton.miscompiles import refuse
from transconv.backend_triton.offline_compilation import Child
from transconv.ir import DTYPES, Expr, For, Kernel, Sizes, as_expr, function_of, minimum, walk
from transconv.simplify import facts_of, range_of
from transconv.support import DIRECT, Unsupported, knobs

LANES = 16  # of a warp, as on the chips whose SPIR-V it is
LIMIT_S = 240.0  # seconds for one kernel, compilers included
PAGE = 4096
LIBRARIES = Path(sys.prefix, "lib")


@lru_cache(maxsize=1)
def child() -> Child:
    """The process that executes."""
    folder = knobs.opencl()
    assert folder is not None
    driver = LIBRARIES / "libintelocl.so"
    named = (
        {"OCL_ICD_FILENAMES": str(driver), "LD_LIBRARY_PATH": str(LIBRARIES)} if driver.exists() else {}
    )
    return Child(
        "transconv.backend_triton.opencl_child",
        {"TRITON_CACHE_DIR": "{folder}/cache", "TMPDIR": "{folder}", "TRITON_INTERPRET": None, **named},
        (str(folder.absolute()),),
    )


def execute_by_opencl(
    source: str,
    function: str,
    types: Sequence[str],
    tensors: Sequence[Any],
    sizes: Sequence[int],
    options: dict[str, Any],
    programs: int,
) -> dict[str, Any]:
    """Execute a kernel on tensors and numbers; the seconds that it took. ``types``: torch's of each;
    ``sizes`` follow them. Raises Unsupported where it is not compiled or not in time."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if type(t) is not float
    }
    begins, end = {}, PAGE
    for address, storage in storages.items():
        begins[address] = end + address % PAGE
        end = (begins[address] + storage.nbytes() + 2 * PAGE - 1) // PAGE * PAGE
    job = {
        "source": source,
        "function": function,
        "params": [(_named(t), "", ()) for t in types],
        "numbers": sum(type(t) is float for t in tensors),
        "sizes": len(sizes),
        "explicit": False,
        "aligned": not any(t.data_ptr() % 16 for t in tensors if type(t) is not float),
        "backend": "xpu",
        "arch": "pvc",
        "warp_size": LANES,
        "dots": False,
        **options,
        "programs": programs,
        "arguments": [
            ("float", t)
            if type(t) is float
            else begins[t.untyped_storage().data_ptr()] + t.storage_offset() * t.element_size()
            for t in tensors
        ]
        + [("int", n) for n in sizes],
    }
    with tempfile.NamedTemporaryFile(prefix="transconv-memory-") as file:
        file.truncate(end)
        for address, storage in storages.items():
            file.seek(begins[address])
            file.write(ctypes.string_at(address, storage.nbytes()))
        file.flush()
        answer = child().ask(job | {"file": file.name}, LIMIT_S)
        if "reason" in answer:
            raise Unsupported("opencl:failed", f"{function}: {answer['reason']}\n{answer['log'][-2000:]}")
        for address, storage in storages.items():
            file.seek(begins[address])
            ctypes.memmove(address, file.read(storage.nbytes()), storage.nbytes())
    return answer


def _named(torch_name: str) -> str:
    """Triton's name of torch's element type in signatures."""
    return next(t.signature for t in DTYPES.values() if t.torch == torch_name)


# Triton's interpreter keeps the grid position and the patched language in globals: kernels
# that are interpreted at the same time would compute each other's programs.
INTERPRETER = threading.Lock()
EXACT: Mapping[str, int] = MappingProxyType({})
"""The sizes of a launch that has none."""
FARTHEST = 2**40 - 1  # bytes: the largest stride of a descriptor


@cache
def _current() -> tuple[Callable[[], int], Callable[[int], int]]:
    """What gives the number of the current GPU, and its stream: looked up once, as that takes longer than
    the rest of a launch."""
    return torch_internals.device_number, torch_internals.raw_stream


class TritonKernel:
    """One kernel. ``grid``: the number of its programs, of its ``sizes`` if these are arguments, which
    have to meet what it ``requires``. ``boxes`` says which arguments are descriptors of boxes,
    ``types`` torch's element type of each; ``key`` is the kernel's name in the record of compiled kernels.
    ``fuse``: whether the compiler may make one instruction, with one rounding, of a product and a sum. At
    most two kernels a device are ``kept``, for tensors that are aligned and for others."""

    def __init__(
        self,
        source: str,
        function: str,
        path: Any,
        grid: int | Expr,
        warps: int,
        stages: int,
        boxes: tuple[bound_start.Boxed | None, ...] = (),
        explicit: bool = False,
        early: bool = False,
        types: tuple[str, ...] = (),
        key: str = "",
        fuse: bool = True,
        sizes: Sizes | None = None,
        requires: Sizes | None = None,
    ) -> None:
        self.source, self.function, self.path = source, function, path
        self.programs, self.warps, self.stages = as_expr(grid), warps, stages
        self.grid = grid if isinstance(grid, int) else 1  # 0: there is nothing to launch
        self.boxes = boxes if any(b is not None for b in boxes) else ()
        self.describe = bound_start.describe_explicit if explicit else bound_start.describe
        self.explicit, self.early = explicit, early
        self.types, self.key, self.fuse = types, key, fuse
        self.sizes = sizes
        self.names = sizes.names if sizes else ()
        # Another process may have found them already.
        self.requires = requires or (sizes and _countable(self.programs, sizes, self.boxes))
        self.jit: Any = None
        self.kept: dict[tuple[int, bool], bound_start.KernelStart] = {}
        self.lock = threading.Lock()
        self.spilled = 0  # bytes of memory of a thread, once this process has compiled it

    @cached_property  # most kernels that are read from disk are never launched
    def numbers(self) -> Callable[..., tuple[bound_start.At, tuple[()]]]:
        """What is computed from sizes, in the order of their names."""
        if self.names:
            return numbers_of([self], (), self.names)
        at = self.grid, tuple([b and bound_start.lying(b[0]) for b in self.boxes])
        return lambda: (at, ())

    def run(self, tensors: list[Any], values: Mapping[str, int] = EXACT) -> None:
        """Run on the tensors' device and its current stream, or in Triton's interpreter, for sizes that
        meet the kernel's requirements: the caller has checked that."""
        if self.grid == 0:
            return
        sizes = tuple([values[n] for n in self.names])
        at, device = self.numbers(*sizes)[0], tensors[0].device
        if device.type == "cpu":
            self._interpret(tensors, sizes, at)
            return
        if device.type == "xpu":
            with bound_start.torch_module().xpu.device(device):
                self._by_triton(tensors, sizes, at)
            return
        aligned, index = bound_start.addresses(tensors)[1], device.index
        start, (current, stream) = self.kept.get((index, aligned)), _current()
        if start is not None and index == current():
            start(sizes, at, tensors, stream(index))
            return
        with bound_start.torch_module().cuda.device(index):
            if start is None:
                start = self.kept[index, aligned] = self.starting(self._compiled(tensors, aligned))
            start(sizes, at, tensors, stream(index))

    def _interpret(self, tensors: list[Any], sizes: tuple[int, ...], at: bound_start.At) -> None:
        if knobs.opencl():
            asked = {"warps": self.warps, "stages": self.stages, "fuse": self.fuse}
            execute_by_opencl(self.source, self.function, self.types, tensors, sizes, asked, at[0])
            return
        self._refuse_steps("Triton's interpreter")
        with INTERPRETER:
            prepare_interpreter()
            with explained(), alike(bool(self.names)):
                self._by_triton(tensors, sizes, at)

    def _by_triton(self, tensors: list[Any], sizes: tuple[int, ...], at: bound_start.At) -> None:
        """Compile and launch as Triton does it."""
        given = bound_start.arguments(tensors, bound_start.boxes_at(self.boxes, at[1]), self.describe)
        self._function()[(at[0],)](*given, *sizes, **self._options())

    def _refuse_steps(self, what: str) -> None:
        """Raise Unsupported where descriptors are made by what cannot take every so many-th position."""
        if stepped := next((b[0] for b in self.boxes if b is not None and b[0].every), None):
            raise Unsupported(
                "boxes:every",
                f"{self.function}: its boxes take every {list(stepped.every)} position of {stepped.name}, "
                f"which {what} cannot; expected a=gather",
            )

    def _compiled(self, tensors: list[Any], aligned: bool) -> Any:
        """The compiled kernel for such tensors, from Triton's cache where it is there. Raises Miscompiled
        for a known miscompile."""
        kernel = compile_records.again(self.key, self.function, aligned, self.types)
        if kernel is not None:
            return kernel
        function, args = self._function(), self._arguments(tensors)
        compile_records.remember()
        if not aligned:
            import triton

            names = [p.name for p in function.params]
            function = triton.jit(
                function.fn, do_not_specialize=[*self.names], do_not_specialize_on_alignment=names
            )
        kernel = function.warmup(*args, grid=(self.grid,), **self._options())
        refuse(kernel, self.function)
        self.spilled = stack_bytes(getattr(kernel, "asm", {}))
        compile_records.note(self.key, aligned, kernel, self.types)
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
            compile_records.build_start(self._compiled(self._nowhere(), aligned), patient)

    def load(self, device: Any, aligned: bool) -> None:
        """Load the kernel on a GPU, the current one, for aligned tensors or for others, without a launch.
        Raises as ``compile``."""
        if device.type != "cpu" and not self.is_loaded(device.index, aligned):
            self.kept[device.index, aligned] = self.starting(self._compiled(self._nowhere(), aligned))

    def _nowhere(self) -> list[Any]:
        """What stands for the tensors of a launch; without torch for the release that is known."""
        import triton

        if triton.__version__.startswith(DIRECT):
            return [jit_module.tensor(t) for t in self.types]
        torch = bound_start.torch_module()
        return [torch.empty(1, dtype=getattr(torch, t), device="meta") for t in self.types]

    def is_ready(self, aligned: bool) -> bool:
        """Whether a launch with such tensors compiles nothing: the kernel is loaded in this process or
        is in Triton's cache."""
        return (
            not self.grid
            or any(a is aligned for _, a in self.kept)
            or compile_records.is_there(self.key, aligned)
        )

    def is_loaded(self, device: int, aligned: bool) -> bool:
        """Whether the kernel is loaded on a device, for aligned tensors or for others."""
        return not self.grid or (device, aligned) in self.kept

    def _function(self) -> Any:
        with self.lock:
            if self.jit is None:
                self.jit = load(self.source, self.function, self.path)
        return self.jit

    def _arguments(self, tensors: list[Any]) -> Sequence[Any]:
        """Tensors, or descriptors of boxes in their place, and example sizes, on which the compiled kernel
        does not depend."""
        given = bound_start.arguments(tensors, self.boxes, self.describe)
        return [*given, *self.sizes.like.values()] if self.sizes else given

    def _options(self) -> dict[str, Any]:
        """Triton's compile options; other options give another compiled kernel."""
        # Fused multiply-adds are set explicitly: the default differs between Triton's releases.
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.fuse}
        return options | {"launch_pdl": True} if self.early else options

    def starting(self, kernel: Any) -> bound_start.KernelStart:
        """What starts a compiled kernel with the least work per call."""
        found, encoder = bound_start.entry(kernel, bool(self.boxes)), None
        if found is None:
            self._refuse_steps("Triton's own launch")
        elif self.boxes:
            encoder = bound_start.Encoder(
                bound_start.encodings(self.boxes, found[1]),
                bound_start.CALLS_KEPT if self.sizes else bound_start.MAPS_KEPT,
            )
        return bound_start.KernelStart(
            found and found[0], kernel, self.early, encoder, self.boxes, self.describe, len(self.names)
        )

    def begun(self, device: int, aligned: bool) -> bound_start.KernelStart | None:
        """What starts the kernel on a device, for aligned tensors or for others; None before it is loaded
        there."""
        return self.kept.get((device, aligned))


# -- what is computed from sizes -------------------------------------------------------------------


def programs(kernel: Kernel) -> Expr:
    """The number of programs that a kernel is launched with, as an expression of its sizes."""
    for at in walk(kernel.body):
        if isinstance(at, For) and at.kind == "grid":
            tiles = as_expr(at.stop) if at.until is None else at.until
            return minimum(tiles, at.programs) if at.programs else tiles
    return as_expr(1)


def _countable(programs: Expr, sizes: Sizes, boxes: tuple[bound_start.Boxed | None, ...]) -> Sizes:
    """The requirements of a launch: not more programs than a grid may have, and no stride of a box longer
    than a descriptor allows."""
    most = [
        (programs, ir.LARGEST_SIZE),
        *((b[0].far * b[0].dtype.bytes, FARTHEST) for b in boxes if b is not None and b[0].extents),
    ]
    facts = facts_of(sizes)
    more = []
    for value, limit in most:
        known = range_of(value, facts).hi
        if known is None or known > limit:
            more.append(value <= limit)
    return replace(sizes, where=(*sizes.where, *more)) if more else sizes


def numbers_of(
    kernels: Sequence[TritonKernel], rooms: Sequence[Expr], names: Sequence[str]
) -> Callable[..., tuple[Any, ...]]:
    """A function of sizes, in the order of their names: ``At`` for each kernel, then the shapes of
    workspaces with so many elements (``rooms``)."""
    each = [
        e
        for run in kernels
        for e in (
            run.programs,
            *(
                e
                for b in run.boxes
                if b is not None and b[0].extents
                for e in (*b[0].extents, *b[0].steps)
            ),
        )
    ]

    def said(texts: list[str]) -> tuple[list[tuple[str, str]], str]:
        left = iter(texts)
        found = [_tuple([next(left), _tuple([_place(b, left) for b in run.boxes])]) for run in kernels]
        return [], _tuple([*found, _tuple([_tuple([next(left)]) for _ in rooms])])

    return function_of([*each, *rooms], names, said)


def _place(box: bound_start.Boxed | None, left: Iterator[str]) -> str:
    """The text of how a box's tensor lies, of those of what it depends on."""
    if box is None or not box[0].extents:
        return repr(box and bound_start.lying(box[0]))
    return _tuple([_tuple([next(left) for _ in box[0].shape]) for _ in range(2)])


def _tuple(texts: Sequence[str]) -> str:
    return f"({''.join(f'{text}, ' for text in texts)})"
