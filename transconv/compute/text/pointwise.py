"""The texts of functions of elements, in Python: arithmetic, comparisons, and calls of the table's
operations, whose last arguments may be numbers."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping

from transconv.compute.analysis.pointwise import CONDITIONS, Operation, Pointwise, Ref
from transconv.compute.ops import OPS
from transconv.compute.text.expressions import expression_tree
from transconv.errors import ComputeError

INFIX = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Gt: "gt", ast.GtE: "ge",
         ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne"}
MOST_STEPS = 512
NEUTRAL = {("add", 0.0), ("sub", 0.0), ("mul", 1.0), ("div", 1.0)}  # with this second argument


def pointwise(text: str, numbers: Mapping[str, float] | None = None) -> Pointwise:
    """Read the text of a function; ``numbers``: names that are numbers. Names for values come before it:
    ``t = acc + res; t * sigmoid(t)``. Raises ComputeError."""
    tree = expression_tree(text, "exec")
    lines = tree.body if isinstance(tree, ast.Module) else []
    reader = _Reader(numbers or {})
    for line in lines[:-1]:
        match line:
            case ast.Assign([ast.Name(id=name)], value):
                reader.known[name] = reader.read(value)
            case _:
                lines = []
    if not lines or not isinstance(lines[-1], ast.Expr):
        raise ComputeError(f"'{text}' cannot be read; expected a Python expression")
    result = reader.read(lines[-1].value)
    if reader.is_condition(result):
        raise ComputeError(f"'{text}' is a condition; expected a number, such as where(x > 0, 1, 0)")
    return Pointwise(tuple(reader.steps), result)


class Recorder:
    """Collects the operations of a function, each once."""

    def __init__(self) -> None:
        self.steps: list[Operation] = []

    def is_condition(self, ref: Ref) -> bool:
        """Whether a value is the truth of a comparison."""
        return isinstance(ref, int) and self.steps[ref].op in CONDITIONS

    def step(self, op: str, *args: Ref) -> Ref:
        """The value of an operation. Raises ComputeError for wrong arguments."""
        if (row := OPS.get(op)) is None:
            raise ComputeError(f"{op}(...) is unknown; expected one of {' '.join(sorted(OPS))}")
        if not row.arity <= len(args) <= row.arity + len(row.numbers) or not all(
                isinstance(n, float) for n in args[row.arity:]):
            numbers = f" and then {len(row.numbers)} numbers" if row.numbers else ""
            raise ComputeError(f"{op} of {len(args)} arguments; expected {row.arity} values{numbers}")
        for i, a in enumerate(args):
            if self.is_condition(a) is not (op == "where" and i == 0):
                raise ComputeError(f"{op}: argument {i + 1} is {'a' if self.is_condition(a) else 'no'} "
                                   "condition; where(condition, x, y) chooses by a comparison")
        if len(args) == 2 and (op, args[1]) in NEUTRAL and isinstance(args[1], float):
            return args[0]
        if (known := Operation(op, args)) in self.steps:
            return self.steps.index(known)
        if len(self.steps) >= MOST_STEPS:
            raise ComputeError(f"a function of more than {MOST_STEPS} operations; expected fewer")
        self.steps.append(known)
        return len(self.steps) - 1


class _Reader(Recorder):
    def __init__(self, numbers: Mapping[str, float]) -> None:
        super().__init__()
        self.numbers = numbers
        self.known: dict[str, Ref] = {}

    def read(self, at: ast.expr) -> Ref:
        match at:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return float(value)
            case ast.Name(id="inf"):
                return float("inf")
            case ast.Name(id=name) if name in self.known:
                return self.known[name]
            case ast.Name(id=name):
                return float(self.numbers[name]) if name in self.numbers else name
            case ast.UnaryOp(ast.USub(), x):
                given = self.read(x)
                return -given if isinstance(given, float) else self.step("neg", given)
            case ast.BinOp(left, op, right) if type(op) in INFIX:
                return self.step(INFIX[type(op)], self.read(left), self.read(right))
            case ast.BinOp(left, ast.Pow(), right):
                return self.step("pow", self.read(left), self.read(right))
            case ast.Compare(left, [op], [right]) if type(op) in INFIX:
                return self.step(INFIX[type(op)], self.read(left), self.read(right))
            case ast.Call(ast.Name(id=name), args, []):
                return self.step(name, *(self.read(a) for a in args))
        raise ComputeError(f"'{ast.unparse(at)}' is not understood; expected arithmetic, comparisons, "
                           "and calls of operations")


def written(function: Pointwise) -> str:
    """The text of a function, which ``pointwise`` reads back."""
    uses = Counter(a for s in function.steps for a in s.args if isinstance(a, int))
    known: list[str] = []
    lines: list[str] = []

    def said(ref: Ref) -> str:
        return known[ref] if isinstance(ref, int) else ref if isinstance(ref, str) else number(ref)

    for i, step in enumerate(function.steps):
        known.append(f"{step.op}({', '.join(map(said, step.args))})")
        if uses[i] > 1 and step.op not in CONDITIONS:
            lines.append(f"value_{i} = {known[i]}")
            known[i] = f"value_{i}"
    return "; ".join([*lines, said(function.result)])


def number(value: float) -> str:
    """The shortest text of a number, without a plus sign."""
    return f"{value!r}".replace("e+", "e").removesuffix(".0")
