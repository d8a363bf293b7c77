"""A plan as plain data: the tensors, the scratch memory and the launches that files are written from."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from transconv.backend_triton import is_explicit
from transconv.compute import Alone
from transconv.ir import DType, Layout, Tensor
from transconv.runtime.plans import Plan, PlanStep
from transconv.schedule import is_copy
from transconv.support import Unsupported, records
from transconv.target import Target

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
        raise Unsupported("export:empty", f"{plan.workload.title}: the result has no elements, so that "
                          "there is no kernel to export")
    workload = plan.workload
    written = {w.view.tensor.name for c in workload.computations for w in c.writes}
    tensors = tuple(PackagedTensor.of(t, t.name in written) for t in workload.tensors)
    for named in (_name(plan), *(t.name for t in tensors), *plan.workspaces):
        if not records.is_name(named):
            raise Unsupported("export:name", f"{named!r} cannot be a name in an exported file; expected a "
                              "word of letters, digits and underscores")
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
    arguments = tuple(Argument(t.name, t.dtype, None if b is None else _box(*b))
                      for t, b in zip(step.kernel.params, boxes, strict=True))
    return PackagedKernel(step.kernel.name, step.source, arguments, step.triton.grid, step,
                  is_explicit(step.kernel), step.triton.early,
                  step.zero.name if step.zero is not None else "")


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
        (c.name for c in [getattr(workload, "compute", None)] if c is not None), "kernel")
    stem = f"{workload.prefix}{what}"
    shape = re.sub(r"\W", "", workload.shape_text, flags=re.ASCII)
    return f"{stem}_{shape[:max(0, MAX_NAME - len(stem) - 10)]}_{digest}"


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
    return {t.name: {"dtype": t.dtype.torch, "shape": list(t.shape),
                     "strides": None if t.strides is None else list(t.strides),
                     "layout": str(t.layout), "stored": t.stored} for t in package.tensors}
