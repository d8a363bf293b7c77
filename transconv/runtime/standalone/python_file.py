"""A package as one Python file that needs only torch and Triton.

Also here: the self-check of an exported file against torch: numbers and names for its text.

Also here: joins the sources of several kernels in one module: imports once, distinct names for distinct
texts.

Also here: translates the steps of a computation to torch, for the self-check of an exported file.

Every value is a tensor with one dimension for each axis, of size 1 along those that it does not depend
on, in f64 (whole numbers in 64 bits). Axes that nothing reduces are sampled by the file where all their
points would be too many. Nothing of a schedule or a kernel is used.
"""

from __future__ import annotations

import ast
import builtins
import io
import keyword
import tokenize
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from transconv.compute import Alone, Compute, Read, Reduction, TorchText, Value, Write
from transconv.ir import (
    TRUE,
    Add,
    And,
    Binary,
    Call,
    Cast,
    Const,
    Div,
    Eq,
    Expr,
    FloorDiv,
    Le,
    Lt,
    Max,
    Min,
    Mod,
    Mul,
    Ne,
    Neg,
    Not,
    Or,
    Select,
    Shl,
    Shr,
    Sub,
    Var,
    View,
    Xor,
    f32,
    free_vars,
    held_constant,
)
from transconv.runtime.standalone.machine_code import (
    Argument,
    PackagedKernel,
    PackagedTensor,
    PlanPackage,
)
from transconv.support import Unsupported, __version__, triton_version

WAITS = ("gdc_wait", "gdc_launch_dependents")  # instructions that Triton's interpreter lacks
DESCRIPTOR = "from triton.tools.tensor_descriptor import TensorDescriptor"
HOPPER = "from triton.experimental.gluon.nvidia import hopper as hopper_descriptor"
GLUON = "from triton.experimental.gluon import language as gl"
SEED = 0


@cache
def templates() -> Environment:
    """The templates of the files."""
    return Environment(loader=PackageLoader("transconv.runtime.standalone"), undefined=StrictUndefined,
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
    why = why_not_interpreted(package)
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
        return {**given, "check": "check_product.py.jinja", **of_text(package, text)}
    if isinstance(workload, Alone):
        return {**given, "check": "check_compute.py.jinja", **of_compute(package, workload.compute)}
    raise Unsupported("export:workload", f"{package.title}: no check is known for such a workload")


MOST = 1 << 22  # points of a computation that are compared
LEAST = 2  # positions along an axis, its ends
DROPPED = {"tf32": 2.0**-10, "tf32x3": 2.0**-19}  # relative error of a product of rounded factors
ROUNDINGS = 4  # of a result: its own, and those of the steps of an operation
OWN = 2.0**-20  # relative error of functions in f32
OWN_F64 = 2.0**-50  # sums in f64 have a smaller spacing
SUMMED = 2.0**-18  # error of a sum, relative to the sum of absolute terms
STEEP = 4  # factor by which an epilogue may enlarge the error of a sum


def why_not_interpreted(package: PlanPackage) -> str:
    """Why Triton's interpreter cannot run the kernels as the chip does; empty if it can."""
    if any(x.explicit for x in package.launches):
        return ("these kernels are written in Gluon, which Triton does not interpret; "
                "run them on a GPU, or export with --target interpreter")
    short = any(a.dtype.kind == "float" and a.dtype.bits <= 16
                for x in package.launches if x.step.schedule.unit == "mma" for a in x.arguments)
    if short and not package.target.upcast16 and any("tl.dot(" in x.source for x in package.launches):
        return ("Triton's interpreter does not multiply 16-bit matrices as the chip does; "
                "run these kernels on a GPU, or export with --target interpreter")
    return ""


def of_text(package: PlanPackage, text: TorchText) -> dict[str, Any]:
    """The values for check_product.py.jinja."""
    workload = package.plan.workload
    a, b = text.factors
    rounded = text.eps > OWN_F64 and any(package.operand(n).dtype is f32 for n in text.factors)
    tf32 = DROPPED.get(workload.math, 0.0) if rounded else 0.0
    return {
        "result": workload.result, "a": a, "b": b, "eps": _power(text.eps),
        "tf32": _power(tf32) if tf32 else "", "terms": text.terms, "program": text.program,
        "behind": text.behind,
        "blocks": {t.name: _blocks(t) for t in package.tensors if t.strides is None}}


def _power(x: float) -> str:
    """A power of two as people write it."""
    mantissa, exponent = x.hex().split("p")
    return f"2.0**{int(exponent)}" if mantissa == "0x1.0000000000000" else repr(x)


def _blocks(t: PackagedTensor) -> tuple[Any, ...]:
    """Sizes and strides of the blocks, offset, their order by dimension, sizes, shape."""
    blocks = t.layout.blocks
    order = tuple(i for d in range(t.layout.ndims) for i, b in enumerate(blocks) if b.dim == d)
    return (tuple(b.size for b in blocks), tuple(b.stride for b in blocks), t.layout.offset, order,
            t.layout.extents, t.shape)


def _ranges(package: PlanPackage, indexed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The range of the random data of integer tensors: positions where elements are coordinates, else
    small numbers."""
    return {t.name: (0, indexed[t.name]) if t.name in indexed else (max(-4, t.dtype.limits[0]), 5)
            for t in package.read if t.dtype.kind in ("int", "bool")}


def of_compute(package: PlanPackage, compute: Compute) -> dict[str, Any]:
    """The values for check_compute.py.jinja."""
    reduced = prod(x.size for x in compute.axes if x.name in compute.reduced)
    free = [x.size for x in compute.axes if x.name not in compute.reduced and x.size > 1]
    points = None
    if prod(free) * reduced > MOST and free:
        points = max(LEAST, int((MOST / max(1, reduced)) ** (1 / len(free))))
    is_tf32 = compute.math in DROPPED and compute.factors is not None and any(
        t.dtype is f32 for t in compute.tensors)
    share = (DROPPED[compute.math] if is_tf32 else SUMMED) * (STEEP if compute.finishes else 1)
    indexed: dict[str, int] = {}
    for view in compute.views():
        for d, n in zip(view.dims, view.tensor.shape, strict=True):
            for read in compute.reads:
                if read.var in compute.names.indices and read.var in free_vars(d.coord):
                    name = read.view.tensor.name
                    indexed[name] = min(n, indexed.get(name, n))
    return {"ranges": _ranges(package, indexed), "rank": max(1, len(compute.axes)), "points": points,
            "steps": lines_of(compute), "stores": "".join(f'"{t.name}", ' for t in package.stored).strip(),
            "roundings": ROUNDINGS, "own": _power(OWN), "share": _power(share)}


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
            imports.append("\n".join(lines[at.lineno - 1:at.end_lineno]))
        else:
            parts.append((_given(at), "\n".join(lines[end:at.end_lineno]).strip("\n")))
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
        clash = [name for name, lines in parts if name not in renamed and name in known
                 and known[name] != with_names(lines, renamed)]
        if not clash:
            return renamed
        for name in clash:
            renamed[name] = next(f"{name}_{n}" for n in range(2, len(known) + 3)
                                 if f"{name}_{n}" not in known)


def with_names(lines: str, renamed: dict[str, str]) -> str:
    """The text with some names replaced where they are names, not parts of words or comments."""
    if not renamed:
        return lines
    rows = lines.split("\n")
    found = [t for t in tokenize.generate_tokens(io.StringIO(lines + "\n").readline)
             if t.type == tokenize.NAME and t.string in renamed]
    for token in reversed(found):
        row, column = token.start
        text = rows[row - 1]
        rows[row - 1] = text[:column] + renamed[token.string] + text[column + len(token.string):]
    return "\n".join(rows)


SIGNS: dict[type, str] = {
    Add: "+", Sub: "-", Mul: "*", Div: "/", FloorDiv: "//", Mod: "%", Shl: "<<", Shr: ">>", Lt: "<",
    Le: "<=", Eq: "==", Ne: "!=", And: "&", Or: "|", Xor: "^"}
REDUCED = {"sum": "{}.sum({}, keepdim=True)", "prod": "product({}, {})",
           "max": "{}.amax({}, keepdim=True)", "min": "{}.amin({}, keepdim=True)"}
# Functions that torch has under other names.
TORCHS = {"nearest": "round", "ndtr": "special.ndtr", "ndtr_wide": "special.ndtr"}
# Names that the text of an exported file uses itself.
TAKEN = frozenset({
    "torch", "triton", "tl", "gl", "gluon", "sys", "check", "on", "device", "draw", "read", "stored",
    "largest", "least", "product", "points", "weight", "main", "run", "reference", "tensors", "bound",
    "logical", "box", "launch", "TensorDescriptor", "hopper", "mbarrier", "tma", "F", "nullcontext",
    "given", "got", "want", "along", "choose", "spread", "tensor", "compared", "blocks",
    "name", "dtype", "shape", "strides", "TENSORS", "POINTS", "RANK", "DEVICE", "RANGES", "BLOCKS",
    "INTERPRETED", "a", "b", "size", "added", "kind", "drawn", "convolved"})


def safe(name: str, taken: Collection[str] = TAKEN) -> str:
    """A name that is not taken in Python or in the file."""
    while keyword.iskeyword(name) or hasattr(builtins, name) or name in taken:
        name += "_"
    return name


def lines_of(compute: Compute) -> list[str]:
    """The body of ``reference``. Raises Unsupported for an operation that torch has no name for."""
    return _ReferenceWriter(compute).lines()


class _ReferenceWriter:
    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.rank = max(1, len(compute.axes))
        taken = {*TAKEN, *(safe(t.name) for t in compute.tensors)}
        self.names: dict[str, str] = {}
        for name in (*(x.name for x in compute.axes),
                     *(s.name for s in compute.steps if not isinstance(s, Write))):
            self.names[name] = safe(name, taken)
            taken.add(self.names[name])

    def lines(self) -> list[str]:
        made = ["weight = tensor(0.0)"]
        for at, axis in enumerate(self.compute.axes):
            most = "" if axis.name in self.compute.reduced else ", points"
            made.append(f"{self.names[axis.name]} = along({at}, {axis.size}{most})")
        for step in self.compute.steps:
            if isinstance(step, Read):
                made.append(f"{self.names[step.name]} = {self.read(step)}")
            elif isinstance(step, Value):
                made.append(f"{self.names[step.name]} = {self.text(step.value)}")
            elif isinstance(step, Reduction):
                made += self.reduction(step)
            else:
                made.append(self.write(step))
        return made

    def read(self, step: Read) -> str:
        held = held_constant(step.fill, step.view.tensor.dtype)
        fill = f", {_number(held)}" if held else ""
        return f"read({safe(step.view.tensor.name)}, {self.places(step.view)}{fill})"

    def write(self, step: Write) -> str:
        name = step.view.tensor.name
        if step in self.compute.statistics:
            raise Unsupported("export:reference", f"{self.compute.name}: {name} is a statistic of all of "
                              "the result, of which the file would compute some points")
        value = step.value.x if isinstance(step.value, Cast) else step.value  # the file rounds it
        return f'stored["{name}"] = ({self.places(step.view)}, {self.text(value)}, weight)'

    def places(self, view: View) -> str:
        coords = ", ".join(self.text(d.coord) for d in view.dims)
        mask = view.mask()
        return f"[{coords}], {'True' if mask is TRUE else self.text(mask)}"

    def reduction(self, step: Reduction) -> list[str]:
        """The terms, their sum, and the sum of their absolute values, which bounds the rounding error."""
        at = [i for i, x in enumerate(self.compute.axes) if x.name in step.axes]
        dims = f"({', '.join(map(str, at))},)"
        name = self.names[step.name]
        reduced = REDUCED[step.op].format(name, dims)
        return [f"{name} = spread({self.text(step.value)}, "
                f"{{{', '.join(f'{i}: {self.compute.axes[i].size}' for i in at)}}})",
                f"weight = {name}.abs().nan_to_num(posinf=0.0).sum({dims}, keepdim=True)",
                f"{name} = {reduced}"]

    # -- expressions -----------------------------------------------------------------------------

    def text(self, e: Expr, inner: bool = False) -> str:
        """An expression; one with a sign has parentheses where it is ``inner``."""
        if isinstance(e, Var):
            return self.names[e.name]
        if isinstance(e, Const):
            return _number(e.value)
        if isinstance(e, Cast):
            if e.type.kind == "float":
                return self.text(e.x, inner) if e.x.dtype.kind == "float" else self.cast(e, "double")
            return self.text(e.x, inner) if e.x.dtype.is_integer else self.cast(e, "long")
        if isinstance(e, Neg | Not):
            return f"{'-' if isinstance(e, Neg) else '~'}{self.text(e.x, True)}"
        if isinstance(e, Binary) and (sign := SIGNS.get(type(e))) is not None:
            made = f"{self.text(e.a, True)} {sign} {self.text(e.b, True)}"
            return f"({made})" if inner else made
        if isinstance(e, Min | Max):
            return f"{'least' if isinstance(e, Min) else 'largest'}({self.text(e.a)}, {self.text(e.b)})"
        if isinstance(e, Select):
            return f"choose({self.text(e.cond)}, {self.text(e.yes)}, {self.text(e.no)})"
        if isinstance(e, Call):
            return self.call(e)
        raise Unsupported("export:reference", f"{self.compute.name}: `{e}` has no text in torch")

    def cast(self, e: Cast, to: str) -> str:
        return f"tensor({self.text(e.x)}).{to}()"

    def call(self, e: Call) -> str:
        given = [self.text(a) for a in e.args]
        if e.name == "fma":
            return f"(({given[0]}) * ({given[1]}) + ({given[2]}))"
        return f"torch.{TORCHS.get(e.name, e.name)}(tensor({', '.join(given)}))"


def _number(value: float | bool) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "float('inf')" if value > 0 else "-float('inf')"
    return f"float('{value}')" if value != value else repr(value)
