"""A package: a plan as plain data (the tensors, the scratch memory and the launches that files are written
from), and its machine code: each kernel compiled offline, with the arguments of its launch.

A kernel that Triton compiled takes addresses, for a box a map of the tensor (CUtensorMap) with fixed
sizes and strides, and at the end two addresses of scratch memory for profilers and for descriptors made
on the device. Exported kernels use neither, so both are null."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transconv.backend_triton import Answer, CompileFailure, Resources, compile_offline, is_explicit
from transconv.compute import Alone
from transconv.ir import DType, Layout, Tensor
from transconv.runtime.plans import Plan, PlanStep
from transconv.runtime.steps import job_of
from transconv.schedule import is_copy
from transconv.support import Unsupported, records
from transconv.target import Target, expect_release

KINDS = {"cuda": "cubin", "hip": "hsaco"}
ALIGNED = 16  # bytes: kernels are compiled for such addresses
SPACED = 256  # bytes between the parts of the workspace
# Triton's numbers of element types that differ from CUtensorMapDataType's, and the latter's names.
ELEMENTS = {8: 10, 9: 8, 10: 9}
ELEMENT_NAMES = tuple(
    "UINT8 UINT16 UINT32 INT32 UINT64 INT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16 FLOAT32_FTZ TFLOAT32".split()
)
NEAREST_TF32 = 11
SWIZZLES = ("NONE", "32B", "64B", "128B")


@dataclass(frozen=True, slots=True)
class KernelBinary:
    """A kernel's machine code, and the arguments of its launch in order: see ``_passed``."""

    launch: PackagedKernel
    code: bytes
    resources: Resources
    passed: tuple[dict[str, Any], ...]

    @property
    def warps(self) -> int:
        return int(self.resources.launch["num_warps"])


def machine_code(
    packages: Sequence[PlanPackage], timeout_s: float = 120.0, workers: int = 1
) -> list[list[KernelBinary]]:
    """Every kernel of some packages compiled for its chip. Raises Unsupported, with the reason in words,
    where there is none, or where a launch needs something that the launchers lack."""
    for package in packages:
        if package.target.backend not in KINDS:
            raise Unsupported(
                f"export:{package.target.backend}",
                f"no machine code is made ahead of time for {package.target.name}; expected "
                "a chip of NVIDIA's or AMD's as target, such as sm_90 or gfx942",
            )
        expect_release(package.target)
        if reason := why_not_cleared(package):
            raise Unsupported("export:clear", f"{package.title}: {reason}")
    jobs = [
        replace(job_of(x.step, package.target, words=False), code=True)
        for package in packages
        for x in package.launches
    ]
    answers = iter(compile_offline(jobs, timeout_s, workers))
    return [[_binary(package, x, next(answers)) for x in package.launches] for package in packages]


def _binary(package: PlanPackage, x: PackagedKernel, answer: Answer) -> KernelBinary:
    """What was compiled. Raises Unsupported."""
    about = f"{x.kernel} for {package.target.name}"
    if isinstance(answer, CompileFailure):
        raise Unsupported("export:compile", f"{about}: {answer.reason}")
    if answer.flaw:
        raise Unsupported("export:miscompiled", f"{about}: {answer.flaw}")
    if reason := _why_not(answer.launch):
        raise Unsupported("export:launch", f"{about}: {reason}")
    return KernelBinary(x, answer.code, answer, tuple(_passed(package, x, answer.launch)))


def why_not_cleared(package: PlanPackage) -> str:
    """Why the memory that must be 0 before the launches cannot be cleared in one piece; empty if it can,
    or if there is none."""
    cleared = {x.zero for x in package.launches if x.zero}
    cleared |= {t.name for t in package.stored} if package.padding else set()
    for name in sorted(cleared):
        layout = package.operand(name).layout
        if not layout.is_dense or layout.offset:
            return f"{name} is cleared before, and has gaps in its layout {layout}, which are not ours"
    boxed = {a.tensor for x in package.launches for a in x.arguments if a.box}
    if package.padding and boxed & cleared:
        return f"{' '.join(sorted(boxed & cleared))} is stored in boxes, which write into its padding"
    return ""


def _why_not(known: dict[str, Any]) -> str:
    """Why the launchers cannot launch a kernel; empty if they can."""
    for what in ("global_scratch_size", "profile_scratch_size"):
        if known.get(what):
            return f"it needs {known[what]} bytes of scratch memory for each program ({what})"
    if known.get("num_ctas", 1) != 1:
        return f"its programs are clusters of {known['num_ctas']} blocks"
    if known.get("launch_cooperative_grid"):
        return "all of its programs have to run at once (a cooperative launch)"
    return ""


def _passed(package: PlanPackage, x: PackagedKernel, known: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of the machine code: ``address`` of a tensor, ``workspace`` at an offset, ``map`` of a
    tensor, numbers, and ``null``."""
    made: list[dict[str, Any]] = []
    metas = list(known.get("tensordesc_meta") or [])
    for a in x.arguments:
        if a.box is None:
            made.append(_place(package, a.tensor))
            continue
        if not metas or metas[0] is None:
            raise Unsupported(
                "export:boxes",
                f"{x.kernel}: {package.target.name} has no copy engine for "
                f"the boxes of {a.tensor}; use a=gather b=gather",
            )
        made.append(_map(package, a, metas.pop(0)))
        made += [{"kind": "i32", "value": n} for n in a.box.shape]
        made += [{"kind": "i64", "value": n} for n in a.box.strides]
    return [*made, {"kind": "null"}, {"kind": "null"}]


def _place(package: PlanPackage, name: str) -> dict[str, Any]:
    offset, _ = workspace(package)
    if name in offset:
        return {"kind": "workspace", "tensor": name, "offset": offset[name]}
    return {"kind": "address", "tensor": name}


def _map(package: PlanPackage, a: Argument, meta: dict[str, Any]) -> dict[str, Any]:
    """A tensor as its TMA descriptor has it: innermost dimension first, as CUtensorMap has it."""
    assert a.box is not None
    element = NEAREST_TF32 if a.box.near else ELEMENTS.get(meta["elem_type"], meta["elem_type"])
    return {
        "kind": "map",
        "of": _place(package, a.tensor),
        "tensor": a.tensor,
        "elements": element,
        "elements_name": ELEMENT_NAMES[element],
        "rank": len(a.box.shape),
        "sizes": list(reversed(a.box.shape)),
        "strides": [n * meta["elem_size"] for n in reversed(a.box.strides[:-1])],
        "box": list(reversed(meta["block_size"])),
        "swizzle": meta["swizzle"],
        "swizzle_name": SWIZZLES[meta["swizzle"]],
    }


def workspace(package: PlanPackage) -> tuple[dict[str, int], int]:
    """Where each scratch tensor begins in one piece of memory, and its size, in bytes."""
    at, offset = 0, {}
    for t in package.scratch:
        offset[t.name] = at
        at += -(-t.span * t.dtype.bytes // SPACED) * SPACED
    return offset, at


def requirements(package: PlanPackage, binaries: Sequence[KernelBinary]) -> list[str]:
    """The requirements of the machine code, a sentence each."""
    target = package.target
    says = [f"GPU: {_machine(target)}."]
    if target.backend == "cuda":
        says.append("Driver: one for CUDA 12.0 or later.")
    most = max(b.resources.shared_bytes for b in binaries)
    says.append(f"Shared memory: {most} bytes for a block.")
    names = " ".join(t.name for t in package.tensors)
    says.append(f"Addresses of {names} are multiples of {ALIGNED} bytes.")
    if workspace(package)[1]:
        says.append(
            f"Workspace: {workspace(package)[1]} bytes of device memory at a multiple of {SPACED} "
            "bytes, which no other call uses meanwhile."
        )
    return [*says, "Element types, sizes and strides are those said here; the kernels check none."]


def _machine(target: Target) -> str:
    if target.backend == "hip":
        return f"AMD {target.name}"
    major, minor = divmod(int(target.arch), 10)
    later = "" if major >= 9 else f", or a later {major}.x"
    return f"NVIDIA, compute capability {major}.{minor}{later}"


def kind_of(target: Target) -> str:
    """The suffix of machine-code files."""
    return KINDS[target.backend]


def readable_copy(name: str) -> str:
    """The text of a file of this folder that is handed out as it is."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


MAX_NAME = 64  # characters, as kernels' names have


@dataclass(frozen=True, slots=True)
class PackagedTensor:
    """A tensor that a launcher takes, makes or holds as scratch memory. ``strides``: none where only the
    layout says where elements lie (blocks): such a tensor is handed over as memory, in one dimension."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    strides: tuple[int, ...] | None
    stored: bool = False

    @staticmethod
    def of(tensor: Tensor, stored: bool = False) -> PackagedTensor:
        strides = None if tensor.layout.offset else tensor.layout.strides()
        return PackagedTensor(tensor.name, tensor.dims, tensor.shape, tensor.layout, strides, stored)

    @property
    def dtype(self) -> DType:
        return self.layout.dtype

    @property
    def span(self) -> int:
        """The elements of memory that it takes."""
        return self.layout.span

    @property
    def held(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides as they are handed over."""
        return (self.shape, self.strides) if self.strides is not None else ((self.span,), (1,))


@dataclass(frozen=True, slots=True)
class CopyBox:
    """A tensor that the copy engine moves: sizes, strides in elements, and the extents of one box.
    ``near``: float32 is rounded to the nearest tf32 by the copy."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    extents: tuple[int, ...]
    near: bool


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel: the address of a tensor, or a descriptor of it."""

    tensor: str
    dtype: DType
    box: CopyBox | None = None


@dataclass(frozen=True, slots=True)
class PackagedKernel:
    """One kernel and its launch. ``zero``: the tensor that is cleared first; ``early``: the kernel may be
    prepared while the launch before it ends."""

    kernel: str
    source: str
    arguments: tuple[Argument, ...]
    programs: int
    step: PlanStep
    explicit: bool
    early: bool
    zero: str = ""


@dataclass(frozen=True, slots=True)
class PlanPackage:
    """A plan as data that need no transconv. ``about``: the lines of the file's header; ``padding``: boxes
    of the result's blocks that hold no element and are cleared after the launches."""

    name: str
    title: str
    about: tuple[str, ...]
    target: Target
    tensors: tuple[PackagedTensor, ...]
    scratch: tuple[PackagedTensor, ...]
    launches: tuple[PackagedKernel, ...]
    plan: Plan
    padding: tuple[tuple[slice, ...], ...] = ()

    @property
    def read(self) -> tuple[PackagedTensor, ...]:
        return tuple(t for t in self.tensors if not t.stored)

    @property
    def stored(self) -> tuple[PackagedTensor, ...]:
        return tuple(t for t in self.tensors if t.stored)

    @property
    def boxed(self) -> tuple[str, ...]:
        """The tensors whose addresses have to be multiples of 16 bytes."""
        return tuple(dict.fromkeys(a.tensor for x in self.launches for a in x.arguments if a.box))

    def operand(self, name: str) -> PackagedTensor:
        return next(t for t in (*self.tensors, *self.scratch) if t.name == name)


def packaged(plan: Plan) -> PlanPackage:
    """The package of a plan. Raises Unsupported for a plan without launches: there is nothing to
    export."""
    if not plan.steps:
        raise Unsupported(
            "export:empty",
            f"{plan.workload.title}: the result has no elements, so that there is no kernel to export",
        )
    workload = plan.workload
    written = {w.view.tensor.name for c in workload.computations for w in c.writes}
    tensors = tuple(PackagedTensor.of(t, t.name in written) for t in workload.tensors)
    for named in (_name(plan), *(t.name for t in tensors), *plan.workspaces):
        if not records.is_name(named):
            raise Unsupported(
                "export:name",
                f"{named!r} cannot be a name in an exported file; expected a "
                "word of letters, digits and underscores",
            )
    return PlanPackage(
        _name(plan),
        _said(workload.title),
        _about(plan),
        plan.target,
        tensors,
        tuple(PackagedTensor.of(t) for t in plan.workspaces.values()),
        tuple(map(_launch, plan.steps)),
        plan,
        tuple(plan.padding),
    )


def _launch(step: PlanStep) -> PackagedKernel:
    boxes = step.triton.boxes or (None,) * len(step.params)
    arguments = tuple(
        Argument(t.name, t.dtype, None if b is None else _box(*b))
        for t, b in zip(step.kernel.params, boxes, strict=True)
    )
    return PackagedKernel(
        step.kernel.name,
        step.source,
        arguments,
        step.triton.grid,
        step,
        is_explicit(step.kernel),
        step.triton.early,
        step.zero.name if step.zero is not None else "",
    )


def _box(seen: Tensor, extents: tuple[int, ...]) -> CopyBox:
    strides = seen.layout.strides()
    assert strides is not None
    return CopyBox(seen.shape, strides, extents, seen.near is not None)


def _name(plan: Plan) -> str:
    """``softmax_sizes_1f3a90bc``: what it computes, its sizes, and a digest of its kernels and chip."""
    workload = plan.workload
    rest = f"{workload.title} {workload} {plan.target.name} {[s.kernel.name for s in plan.steps]}"
    digest = hashlib.blake2b(rest.encode(), digest_size=4).hexdigest()
    what = workload.direction or next(
        (c.name for c in [getattr(workload, "compute", None)] if c is not None), "kernel"
    )
    stem = f"{workload.prefix}{what}"
    shape = re.sub(r"\W", "", workload.shape_text, flags=re.ASCII)
    return f"{stem}_{shape[: max(0, MAX_NAME - len(stem) - 10)]}_{digest}"


def _about(plan: Plan) -> tuple[str, ...]:
    """The schedule of each kernel, and the workload, for people, as lines of comments."""
    workload = plan.workload
    said = list(str(workload.compute).splitlines()) if isinstance(workload, Alone) else []
    for step in plan.steps:
        what = "copies" if is_copy(step.compute) else "computes"
        said.append(f"{step.compute.name} {what}: {step.schedule}")
    return tuple(map(_said, said))


def _said(text: str) -> str:
    """A text as it may stand in a comment of Python or C: it ends neither, and escapes nothing."""
    plain = "".join(c if c.isprintable() else " " for c in text).rstrip()
    return plain.replace("\\", "/").replace('""', "''").replace("*/", "* /").replace("/*", "/ *")


def described(package: PlanPackage) -> dict[str, Any]:
    """The tensors for an index: a caller's arguments and results."""
    return {
        t.name: {
            "dtype": t.dtype.torch,
            "shape": list(t.shape),
            "strides": None if t.strides is None else list(t.strides),
            "layout": str(t.layout),
            "stored": t.stored,
        }
        for t in package.tensors
    }
