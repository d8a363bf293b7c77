"""Functions of elements, as texts: ``silu(acc + res) * gate`` is a list of rows of the operations' table.

    0  add(acc, res)
    1  silu(0)
    2  mul(1, gate)

From this list follow the IR's expression, the derivative, the value in torch and how far it may be off.
Texts are Python: arithmetic, comparisons, and calls of the table's operations, whose last arguments may be
numbers."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING

from transconv.compute.elementwise import OPS
from transconv.compute.expressions import expression_tree
from transconv.compute.steps import Value
from transconv.ir import Const, DType, Expr, boolean, f32
from transconv.support import ComputeError

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

Ref = str | int | float
"""An argument: a name, the place of an earlier step, or (a float) a number."""

JUMPS = ("round", "floor", "ceil")
CONDITIONS = ("gt", "ge", "lt", "le", "eq", "ne")
MOST_NODES = 8  # of an expression that another one contains; a larger one gets a name


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the table, and its arguments."""

    op: str
    args: tuple[Ref, ...]

    @property
    def values(self) -> tuple[Ref, ...]:
        """The arguments that are values, not the row's numbers."""
        return self.args[: OPS[self.op].arity]

    @property
    def numbers(self) -> tuple[float, ...]:
        """The row's numbers that are given."""
        return tuple(float(n) for n in self.args[OPS[self.op].arity :])


@dataclass(frozen=True, slots=True)
class Pointwise:
    """A function of named values, element by element. ``result``: a step, a name or a number."""

    steps: tuple[Operation, ...]
    result: Ref

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its values, in the order of their first use."""
        used = [a for s in self.steps for a in s.args] + [self.result]
        return tuple(dict.fromkeys(a for a in used if isinstance(a, str)))

    def of(self, name: str, inner: Pointwise) -> Pointwise:
        """This function with the result of another one in the place of a name."""
        ahead = len(inner.steps)

        def moved(ref: Ref) -> Ref:
            if isinstance(ref, str):
                return inner.result if ref == name else ref
            return ref + ahead if isinstance(ref, int) else ref

        own = tuple(Operation(s.op, tuple(map(moved, s.args))) for s in self.steps)
        return Pointwise((*inner.steps, *own), moved(self.result))

    def named(self, names: Mapping[str, str]) -> Pointwise:
        """The same function with other names for its values."""

        def other(ref: Ref) -> Ref:
            return names.get(ref, ref) if isinstance(ref, str) else ref

        return Pointwise(
            tuple(Operation(s.op, tuple(map(other, s.args))) for s in self.steps), other(self.result)
        )

    # -- the IR ----------------------------------------------------------------------------------

    def lets(self, given: Mapping[str, Expr], dtype: DType) -> tuple[list[Value], Expr]:
        """Lets and the expression of the result; ``given``: an expression of ``dtype`` for each name.
        An expression that is long and used in another one is a let."""
        made: list[Value] = []
        known: list[Expr] = []

        def value(ref: Ref) -> Expr:
            if isinstance(ref, float):
                return Const(ref, dtype)
            e = given[ref] if isinstance(ref, str) else known[ref]
            if isinstance(ref, int) and e.dtype is not boolean and nodes_of(e) > MOST_NODES:
                made.append(Value(f"value_{ref}", e))
                e = known[ref] = made[-1].var
            return e

        for step in self.steps:
            numbers = (Const(n, dtype) for n in step.numbers)
            known.append(OPS[step.op](*map(value, step.values), *numbers))
        result = self.result
        return made, (known[result] if isinstance(result, int) else value(result))

    # -- exactness -------------------------------------------------------------------------------

    @property
    def is_exact(self) -> bool:
        """Whether f32 computes it without rounding, of sums of 11 bits."""
        return self.is_exact_of(11)

    def is_exact_of(self, bits: int) -> bool:
        """Whether f32 computes it without rounding, where ``acc`` is an integer of up to ``bits`` bits,
        and the other values are of up to 4."""
        spans: list[tuple[float, float]] = []  # of each step the places of its first and its last bit

        def span(ref: Ref) -> tuple[float, float]:
            if isinstance(ref, int):
                return spans[ref]
            return _places(ref) if isinstance(ref, float) else (bits if ref == "acc" else 4, 0)

        for step in self.steps:
            if not OPS[step.op].exact:
                return False
            args = [span(a) for a in step.args]
            high, low = max(h for h, _ in args), min(n for _, n in args)
            product = sum(h for h, _ in args), sum(n for _, n in args)
            if step.op == "mul":
                high, low = product
            elif step.op == "leaky_relu":
                high, low = max(args[0][0], product[0]), min(args[0][1], product[1])
            elif step.op in ("add", "sub"):
                high += 1
            elif step.op in JUMPS:
                low = max(low, 0)
            if high - low > f32.digits:
                return False
            spans.append((high, low))
        return True

    @property
    def jumps(self) -> bool:
        """Whether the value is not continuous."""
        return any(s.op in (*JUMPS, *CONDITIONS) for s in self.steps)

    # -- derivatives -----------------------------------------------------------------------------

    def derivatives(
        self, given: Mapping[str, Expr], grad: Expr, dtype: DType
    ) -> tuple[list[Value], dict[str, Expr]]:
        """Lets, and the derivative for each name times ``grad``, by the chain rule over the rows'
        derivatives, last step first. A name that the result does not depend on is left out. ComputeError
        for a row without a derivative."""
        made: list[Value] = []
        known: list[Expr] = []

        def value(ref: Ref) -> Expr:
            if isinstance(ref, float):
                return Const(ref, dtype)
            return given[ref] if isinstance(ref, str) else known[ref]

        def named(name: str, e: Expr) -> Expr:
            made.append(Value(name, e))
            return made[-1].var

        for i, step in enumerate(self.steps):
            e = OPS[step.op](*map(value, step.values), *(Const(n, dtype) for n in step.numbers))
            known.append(e if e.dtype is boolean else named(f"value_{i}", e))
        flows: dict[Ref, Expr] = {self.result: grad}
        for i in reversed(range(len(self.steps))):
            step, row = self.steps[i], OPS[self.steps[i].op]
            flow = flows.pop(i, None)
            if flow is None or row.name in CONDITIONS:
                continue
            if row.derivative is None:
                raise ComputeError(f"{row.name} has no derivative")
            flow = named(f"grad_{i}", flow)
            numbers = (Const(n, dtype) for n in step.numbers)
            for ref, partial in zip(
                step.values, row.derivative(*map(value, step.values), *numbers), strict=True
            ):
                if partial is None or isinstance(ref, float):
                    continue
                part = flow if partial == Const(1.0, dtype) else flow * partial
                flows[ref] = flows[ref] + part if ref in flows else part
        return made, {ref: e for ref, e in flows.items() if isinstance(ref, str)}


def _places(value: float) -> tuple[float, float]:
    """The places of a number's first and last bit; both 0 for 0 and infinity."""
    if not value or not isfinite(value):
        return 0, 0
    numerator, denominator = abs(value).as_integer_ratio()
    low = (numerator & -numerator).bit_length() - 1 - (denominator.bit_length() - 1)
    return numerator.bit_length() - denominator.bit_length() + 1, low


@lru_cache(maxsize=4096)
def nodes_of(e: Expr) -> int:
    """How many nodes an expression has when it is written out."""
    return 1 + sum(nodes_of(c) for c in e.children() if isinstance(c, Expr))


IDENTITY = Pointwise((), "acc")
"""The function that gives ``acc``."""


INFIX = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
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
            isinstance(n, float) for n in args[row.arity :]
        ):
            numbers = f" and then {len(row.numbers)} numbers" if row.numbers else ""
            raise ComputeError(f"{op} of {len(args)} arguments; expected {row.arity} values{numbers}")
        for i, a in enumerate(args):
            if self.is_condition(a) is not (op == "where" and i == 0):
                raise ComputeError(
                    f"{op}: argument {i + 1} is {'a' if self.is_condition(a) else 'no'} "
                    "condition; where(condition, x, y) chooses by a comparison"
                )
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
        raise ComputeError(
            f"'{ast.unparse(at)}' is not understood; expected arithmetic, comparisons, "
            "and calls of operations"
        )


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


def in_torch(function: Pointwise, given: Tensors) -> torch.Tensor:
    """The value in torch, whose rules say the types of results."""
    known: list[torch.Tensor] = []
    for step in function.steps:
        found = OPS[step.op].function(*step.numbers)
        known.append(found(*(_tensor(a, given, known) for a in step.values)))
    return _tensor(function.result, given, known)


def _tensor(ref: Ref, given: Tensors, known: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(ref, str):
        return given[ref]
    return known[ref] if isinstance(ref, int) else next(iter(given.values())).new_tensor(ref)


def with_error(
    function: Pointwise, given: Tensors, errors: Tensors, eps: float, rounds: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value in f64, and how far one that is computed with the relative precision ``eps`` may be off,
    from what the given values are off. A step makes of its arguments' errors what it makes of arguments
    that are all moved by them: the square of what is 0 to within e is 0 to within e*e. ``rounds``: whether
    steps that are exact for integers round."""
    known: list[torch.Tensor] = []
    off: list[torch.Tensor] = []
    zero = next(iter(given.values())).new_zeros(())
    for step in function.steps:
        row = OPS[step.op]
        found = row.function(*step.numbers)
        args = [_tensor(a, given, known) for a in step.values]
        value = found(*args)
        total = zero
        if value.dtype.is_floating_point and (rounds or not row.exact):
            total = 4 * eps * value.abs() if row.exact else 32 * eps * (1 + value.abs())
        own = [
            errors.get(ref, zero) if isinstance(ref, str) else off[ref] if isinstance(ref, int) else zero
            for ref in step.values
        ]
        if step.op in CONDITIONS:  # not sure where the sides are as close as they are off
            known.append(value)
            off.append((((args[0] - args[1]).abs() <= own[0] + own[1]) & (own[0] + own[1] > 0)).double())
            continue
        for i, error in enumerate(own):
            if not args[i].dtype.is_floating_point and bool((error != 0).any()):
                other = found(~args[i], *args[1:])  # either value may be chosen if a condition is not sure
                total = total + _apart(other, value).where(error != 0, zero)
        known.append(value)
        off.append(total + _moved(found, step.values, args, own, value))
    ref = function.result
    return _tensor(ref, given, known), off[ref] if isinstance(ref, int) else errors.get(str(ref), zero)


def _moved(
    found: Callable[..., torch.Tensor],
    refs: Sequence[Ref],
    args: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    value: torch.Tensor,
) -> torch.Tensor:
    """How far a step's value is off if each of its numbers is as much too large or too small as it may be,
    or 0 where it may be that: a divisor is at its worst there. A number that it takes twice is moved
    once."""
    loose = dict.fromkeys(
        ref
        for ref, arg, e in zip(refs, args, own, strict=True)
        if arg.dtype.is_floating_point and bool((e != 0).any())
    )
    nearest = [
        a - a.clamp(-e, e) if ref in loose else a for ref, a, e in zip(refs, args, own, strict=True)
    ]
    total = _apart(found(*nearest), value) if loose else value.new_zeros(())
    for ways in itertools.product((1.0, -1.0), repeat=len(loose)):
        way = dict(zip(loose, ways, strict=True))
        given = [a + way[ref] * e if ref in way else a for ref, a, e in zip(refs, args, own, strict=True)]
        total = _apart(found(*given), value).maximum(total)
    return total


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The distance of two values; 0 where they are one, infinity where one alone is no number."""
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other).abs().nan_to_num(nan=float("inf")).where(~same, one.new_zeros(()))
