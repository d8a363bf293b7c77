"""Translates the steps of a computation to torch, for the self-check of an exported file.

Every value is a tensor with one dimension for each axis, of size 1 along those that it does not depend
on, in f64 (whole numbers in 64 bits). Axes that nothing reduces are sampled by the file where all their
points would be too many. Nothing of a schedule or a kernel is used.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Collection

from transconv.compute import Compute, Read, Reduction, Value, Write
from transconv.errors import Unsupported
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
)

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
        fill = f", {_number(step.fill)}" if step.fill else ""
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


def _number(value: float | int | bool) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "float('inf')" if value > 0 else "-float('inf')"
    return f"float('{value}')" if value != value else repr(value)
