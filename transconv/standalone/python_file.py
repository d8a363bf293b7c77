"""A package as one Python file that needs only torch and Triton."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from transconv.compute import Alone
from transconv.errors import Unsupported
from transconv.standalone import checks
from transconv.standalone.package import Argument, PackagedKernel, PackagedTensor, PlanPackage
from transconv.standalone.reference import safe
from transconv.standalone.sources import joined
from transconv.target import triton_version
from transconv.version import __version__

WAITS = ("gdc_wait", "gdc_launch_dependents")  # instructions that Triton's interpreter lacks
DESCRIPTOR = "from triton.tools.tensor_descriptor import TensorDescriptor"
HOPPER = "from triton.experimental.gluon.nvidia import hopper as hopper_descriptor"
GLUON = "from triton.experimental.gluon import language as gl"
SEED = 0


@cache
def templates() -> Environment:
    """The templates of the files."""
    return Environment(loader=PackageLoader("transconv.standalone"), undefined=StrictUndefined,
                       keep_trailing_newline=True)


def python_text(package: PlanPackage) -> str:
    """The file of a package. Raises Unsupported where torch cannot check what it computes."""
    if not package.read:
        raise Unsupported("export:reads", f"{package.title}: it reads no tensor, whose device it would "
                          "run on; there is nothing to export")
    return templates().get_template("kernel.py.jinja").render(
        **_top(package), **_launcher(package), **_check(package))


def _top(package: PlanPackage) -> dict[str, Any]:
    imports, kernels = joined([x.source for x in package.launches])
    boxed = [a for x in package.launches for a in x.arguments if a.box]
    explicit = any(x.explicit for x in package.launches if any(a.box for a in x.arguments))
    if boxed:
        imports += [HOPPER, GLUON] if explicit else [DESCRIPTOR]
    used = [w for w in WAITS if any(w in line for line in imports)]
    imports = [i for i in dict.fromkeys(imports) if i != "import triton"]
    reads = ", ".join(safe(t.name) for t in package.read)
    results = ", ".join(safe(t.name) for t in package.stored)
    target = package.target.name if package.target.backend != "interpreter" else (
        "Triton's interpreter, and for GPUs that have room for its tiles")
    about = list(package.about)
    if package.plan.workload.meaning:
        about.insert(0, package.plan.workload.meaning)
    why = checks.why_not_interpreted(package)
    return {"name": package.name, "title": package.title, "about": about, "version": __version__,
            "target": target, "triton": f"made with {triton_version()}",
            "imports": sorted(imports, key=lambda i: (i.startswith("from"), i)), "waits": used,
            "kernels": kernels, "call": f"{results} = run({reads})", "seed": SEED,
            "interpretable": not why, "why_not_interpreted": why,
            "tensors": [{"name": t.name, "dtype": t.dtype.torch, "shape": t.held[0],
                         "strides": t.held[1], "note": _note(t)} for t in package.tensors]}


def _quoted(name: str) -> str:
    return f'"{name}"'


def _note(t: PackagedTensor) -> str:
    sizes = " ".join(f"{d}={n}" for d, n in zip(t.dims, t.shape, strict=True))
    return sizes if t.strides is not None else f"{sizes}, laid out as {t.layout}"


def _launcher(package: PlanPackage) -> dict[str, Any]:
    reads, stored = package.read, package.stored
    tensors = [safe(t.name) for t in (*reads, *stored)]
    near = [a for x in package.launches for a in x.arguments if a.box and a.box.near]
    explicit = any(x.explicit and any(a.box for a in x.arguments) for x in package.launches)
    made = " and ".join(safe(t.name) for t in stored)
    return {
        "parameters": ", ".join([*(safe(t.name) for t in reads),
                                 *(f"{safe(t.name)}=None" for t in stored)]),
        "promise": f"Compute {made}, and return {'it' if len(stored) == 1 else 'them'}; what is not "
                   "given to write into is made.",
        "first": safe(reads[0].name), "made": [safe(t.name) for t in stored],
        "pairs": ", ".join(f"({_quoted(n.name)}, {s})"
                           for n, s in zip((*reads, *stored), tensors, strict=True)),
        "scratch": [{"name": safe(t.name), "span": t.span, "dtype": t.dtype.torch, "note": _note(t)}
                    for t in package.scratch],
        "launches": [line for x in package.launches for line in _launch(x, bool(near))],
        "padding": _padding(package), "results": ", ".join(safe(t.name) for t in stored),
        "boxed": tuple(n for n in package.boxed if n in {t.name for t in package.tensors}),
        "explicit": explicit, "near": bool(near)}


def _launch(x: PackagedKernel, near: bool) -> list[str]:
    """The lines that start one kernel."""
    lines = [f"{safe(x.zero)}.zero_()  # what the kernels add to"] if x.zero else []
    names = []
    for a in x.arguments:
        names.append(f"{safe(a.tensor)}_box" if a.box else safe(a.tensor))
        if a.box:
            lines.append(f"{names[-1]} = {_box(a, x.explicit, near)}")
    schedule = x.step.schedule
    options = f"num_warps={schedule.warps}, num_stages={schedule.stages}, enable_fp_fusion=True"
    options += ", launch_pdl=True" if x.early else ""
    boxes = [a for a in x.arguments if a.box]
    rounded = [i for i, a in enumerate(boxes) if a.box and a.box.near]
    if not x.programs:
        return []
    if rounded:
        return [*lines, f"launch({x.kernel}, {x.programs}, [{', '.join(names)}], {rounded},",
                f"       {options})"]
    return [*lines, f"{x.kernel}[({x.programs},)](", f"    {', '.join(names)}, {options})"]


def _box(a: Argument, explicit: bool, near: bool) -> str:
    assert a.box is not None
    b = a.box
    moved = a.dtype.boxed
    view = "" if moved is a.dtype else f".view(torch.{moved.torch})"
    said = f"{safe(a.tensor)}{view}, {list(b.shape)}, {list(b.strides)}, {list(b.extents)}"
    said += f", gl.{moved.triton}" if explicit else ""
    said += ", tf32=True" if b.near else ""
    return f"box({said})" if explicit or near else f"TensorDescriptor({said})"


def _padding(package: PlanPackage) -> list[str]:
    """The lines that clear the parts of blocks beyond the result's shape."""
    if not package.padding:
        return []
    (result,) = package.stored
    blocks = result.layout.blocks
    name = safe(result.name)
    lines = [f"blocks = {name}.as_strided({[b.size for b in blocks]}, {[b.stride for b in blocks]}, "
             f"{name}.storage_offset() + {result.layout.offset})"]
    for box in package.padding:
        said = ", ".join(":" if s == slice(None) else f"{s.start}:{'' if s.stop is None else s.stop}"
                         for s in box)
        lines.append(f"blocks[{said}] = 0  # beyond the shape, where blocks have no elements")
    return lines


def _check(package: PlanPackage) -> dict[str, Any]:
    workload = package.plan.workload
    reads = [safe(t.name) for t in package.read]
    comma = "," if len(reads) == 1 else ""
    given = {"reads": "".join(f"{_quoted(t.name)}, " for t in package.read).strip(),
             "reads_bare": ", ".join(reads) + comma, "parameters_read": ", ".join(reads)}
    if (text := workload.torch_text) is not None:
        return {**given, "check": "check_product.py.jinja", **checks.of_text(package, text)}
    if isinstance(workload, Alone):
        return {**given, "check": "check_compute.py.jinja", **checks.of_compute(package, workload.compute)}
    raise Unsupported("export:workload", f"{package.title}: no check is known for such a workload")
