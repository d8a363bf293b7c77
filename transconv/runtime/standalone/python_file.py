"""A package as one Python file that needs only torch and Triton.

The sources of several kernels become one module: imports once, distinct names for distinct texts. The file
compares its own results with torch's (reference_check.py)."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from transconv.compute import Alone
from transconv.runtime.standalone.machine_code import Argument, PackagedKernel, PackagedTensor, PlanPackage
from transconv.runtime.standalone.reference_check import of_compute, of_text, safe
from transconv.support import Unsupported, __version__, triton_version

WAITS = ("gdc_wait", "gdc_launch_dependents")  # instructions that Triton's interpreter lacks
DESCRIPTOR = "from triton.tools.tensor_descriptor import TensorDescriptor"
HOPPER = "from triton.experimental.gluon.nvidia import hopper as hopper_descriptor"
GLUON = "from triton.experimental.gluon import language as gl"
SEED = 0


@cache
def templates() -> Environment:
    """The templates of the files."""
    return Environment(
        loader=PackageLoader("transconv.runtime.standalone"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def python_text(package: PlanPackage) -> str:
    """The file of a package. Raises Unsupported where torch cannot check what it computes."""
    if not package.read:
        raise Unsupported(
            "export:reads",
            f"{package.title}: it reads no tensor, whose device it would "
            "run on; there is nothing to export",
        )
    return (
        templates()
        .get_template("kernel.py.jinja")
        .render(**_top(package), **_launcher(package), **_check(package))
    )


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
    target = (
        package.target.name
        if package.target.backend != "interpreter"
        else ("Triton's interpreter, and for GPUs that have room for its tiles")
    )
    about = list(package.about)
    if package.plan.workload.meaning:
        about.insert(0, package.plan.workload.meaning)
    why = why_not_interpreted(package)
    return {
        "name": package.name,
        "title": package.title,
        "about": about,
        "version": __version__,
        "target": target,
        "triton": f"made with {triton_version()}",
        "since": package.target.since,
        "why_since": package.target.why_since.rstrip(","),
        "imports": sorted(imports, key=lambda i: (i.startswith("from"), i)),
        "waits": used,
        "kernels": kernels,
        "call": f"{results} = run({reads})",
        "seed": SEED,
        "interpretable": not why,
        "why_not_interpreted": why,
        "tensors": [
            {
                "name": t.name,
                "dtype": t.dtype.torch,
                "shape": t.held[0],
                "strides": t.held[1],
                "note": _note(t),
            }
            for t in package.tensors
        ],
    }


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
        "parameters": ", ".join(
            [*(safe(t.name) for t in reads), *(f"{safe(t.name)}=None" for t in stored)]
        ),
        "promise": f"Compute {made}, and return {'it' if len(stored) == 1 else 'them'}; what is not "
        "given to write into is made.",
        "first": safe(reads[0].name),
        "made": [safe(t.name) for t in stored],
        "pairs": ", ".join(
            f"({_quoted(n.name)}, {s})" for n, s in zip((*reads, *stored), tensors, strict=True)
        ),
        "scratch": [
            {"name": safe(t.name), "span": t.span, "dtype": t.dtype.torch, "note": _note(t)}
            for t in package.scratch
        ],
        "launches": [line for x in package.launches for line in _launch(x, bool(near))],
        "padding": _padding(package),
        "results": ", ".join(safe(t.name) for t in stored),
        "boxed": tuple(n for n in package.boxed if n in {t.name for t in package.tensors}),
        "explicit": explicit,
        "near": bool(near),
    }


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
        return [
            *lines,
            f"launch({x.kernel}, {x.programs}, [{', '.join(names)}], {rounded},",
            f"       {options})",
        ]
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
    lines = [
        f"blocks = {name}.as_strided({[b.size for b in blocks]}, {[b.stride for b in blocks]}, "
        f"{name}.storage_offset() + {result.layout.offset})"
    ]
    for box in package.padding:
        said = ", ".join(
            ":" if s == slice(None) else f"{s.start}:{'' if s.stop is None else s.stop}" for s in box
        )
        lines.append(f"blocks[{said}] = 0  # beyond the shape, where blocks have no elements")
    return lines


def _check(package: PlanPackage) -> dict[str, Any]:
    workload = package.plan.workload
    reads = [safe(t.name) for t in package.read]
    comma = "," if len(reads) == 1 else ""
    given = {
        "reads": "".join(f"{_quoted(t.name)}, " for t in package.read).strip(),
        "reads_bare": ", ".join(reads) + comma,
        "parameters_read": ", ".join(reads),
    }
    if (text := workload.torch_text) is not None:
        return {**given, "check": "check_product.py.jinja", **of_text(package, text)}
    if isinstance(workload, Alone):
        return {**given, "check": "check_compute.py.jinja", **of_compute(package, workload.compute)}
    raise Unsupported("export:workload", f"{package.title}: no check is known for such a workload")


def why_not_interpreted(package: PlanPackage) -> str:
    """Why Triton's interpreter cannot run the kernels as the chip does; empty if it can."""
    if any(x.explicit for x in package.launches):
        return (
            "these kernels are written in Gluon, which Triton does not interpret; "
            "run them on a GPU, or export with --target interpreter"
        )
    short = any(
        a.dtype.kind == "float" and a.dtype.bits <= 16
        for x in package.launches
        if x.step.schedule.unit == "mma"
        for a in x.arguments
    )
    if short and not package.target.upcast16 and any("tl.dot(" in x.source for x in package.launches):
        return (
            "Triton's interpreter does not multiply 16-bit matrices as the chip does; "
            "run these kernels on a GPU, or export with --target interpreter"
        )
    return ""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The parts of a generated text: the comments above it, its imports, and its definitions by name."""

    comments: tuple[str, ...]
    imports: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]  # (name, lines), in order


def split(source: str) -> GeneratedText:
    """Take a generated module apart."""
    lines = source.splitlines()
    tree = ast.parse(source)
    imports: list[str] = []
    parts: list[tuple[str, str]] = []
    first = lines.index("") if "" in lines else 0
    comments = tuple(line for line in lines[:first] if line.startswith("#"))
    end = len(comments)
    for at in tree.body:
        assert at.end_lineno is not None
        if isinstance(at, (ast.Import, ast.ImportFrom)):
            imports.append("\n".join(lines[at.lineno - 1 : at.end_lineno]))
        else:
            parts.append((_given(at), "\n".join(lines[end : at.end_lineno]).strip("\n")))
        end = at.end_lineno
    return GeneratedText(comments, tuple(imports), tuple(parts))


def _given(at: ast.stmt) -> str:
    """The name that a statement of a module defines."""
    if isinstance(at, ast.FunctionDef):
        return at.name
    assert isinstance(at, ast.Assign) and isinstance(at.targets[0], ast.Name), ast.dump(at)
    return at.targets[0].id


def joined(sources: Sequence[str]) -> tuple[list[str], list[tuple[tuple[str, ...], str]]]:
    """The common imports, and the comments and definitions of each. A repeated definition is left out; one
    of the same name with another text gets a number."""
    imports: dict[str, None] = {}
    known: dict[str, str] = {}
    made = []
    for text in map(split, sources):
        imports |= dict.fromkeys(text.imports)
        renamed = _renamed(text.parts, known)
        kept = []
        for name, lines in text.parts:
            new, lines = renamed.get(name, name), with_names(lines, renamed)
            if new not in known:
                kept.append(lines)
            known[new] = lines
        made.append((text.comments, "\n\n\n".join(kept)))
    return list(imports), made


def _renamed(parts: tuple[tuple[str, str], ...], known: dict[str, str]) -> dict[str, str]:
    """New names for definitions that exist with another text, or that call a renamed one."""
    renamed: dict[str, str] = {}
    while True:
        clash = [
            name
            for name, lines in parts
            if name not in renamed and name in known and known[name] != with_names(lines, renamed)
        ]
        if not clash:
            return renamed
        for name in clash:
            renamed[name] = next(
                f"{name}_{n}" for n in range(2, len(known) + 3) if f"{name}_{n}" not in known
            )


def with_names(lines: str, renamed: dict[str, str]) -> str:
    """The text with some names replaced where they are names, not parts of words or comments."""
    if not renamed:
        return lines
    rows = lines.split("\n")
    found = [
        t
        for t in tokenize.generate_tokens(io.StringIO(lines + "\n").readline)
        if t.type == tokenize.NAME and t.string in renamed
    ]
    for token in reversed(found):
        row, column = token.start
        text = rows[row - 1]
        rows[row - 1] = text[:column] + renamed[token.string] + text[column + len(token.string) :]
    return "\n".join(rows)
