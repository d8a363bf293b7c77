"""Elementwise operations: one row each, from which every list of operations is derived.

A row has the meaning of an operation (an expression of the IR), the equivalent function of torch, its
derivative, and where it may be used. The rows of this package are in elementwise.py; ``register`` adds
others:

    register(Op("cube", 1, lambda x: x * x * x, torch="mypackage.cube", activation=True))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from transconv.ir import Expr, RowTable, why_not_name

Expression = Callable[..., Expr]
Partials = Callable[..., tuple[Expr | None, ...]]
TorchFunction = str | Callable[..., Any]  # "torch.nn.functional.gelu", or the function itself

RESERVED = ("bias", "res")  # words of an epilogue that are no functions of its value


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """An operation of ``arity`` values: ``expression`` builds the IR of the result from that of the
    operands, of any types; ``torch`` names the function of tensors that computes the same.

    ``numbers``: names and defaults of the numbers that follow the operands, such as the slope of a leaky
    ReLU; they are constants of the expression. ``options``: keyword arguments of torch's function.
    ``derivative``: the partial derivatives as expressions of the operands, None for an operand without one
    (a condition). ``gradient``: torch's function (g, y, *gradient_with) of the result's gradient and the
    result, if these suffice; torch differentiates other operations from their operands. ``exact``: integer
    operands give integers, without rounding on any chip. ``activation``: allowed in epilogues; ``drawn``:
    the fuzzer may choose it there. ``steepest``: a bound of the absolute derivative, by which checks scale
    errors. ``spelled``: other spellings: dotted names of torch's modules and functions, and methods such
    as ``.relu_``; a module matches the row whose ``options`` are its attributes. ``onednn``: oneDNN's
    names, each with alpha and beta, None where oneDNN's function ignores the number.
    """

    name: str
    arity: int
    expression: Expression
    torch: TorchFunction
    _: KW_ONLY
    numbers: tuple[tuple[str, float], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    derivative: Partials | None = None
    gradient: TorchFunction | None = None
    gradient_with: tuple[float, ...] = ()
    exact: bool = False
    activation: bool = False
    drawn: bool = True
    steepest: float = 1.5
    spelled: tuple[str, ...] = ()
    onednn: tuple[tuple[str, float | None, float | None], ...] = ()

    def __str__(self) -> str:
        return self.name

    def __call__(self, *values: Expr) -> Expr:
        """The IR's expression of these operands, and of numbers where they differ from the row's.
        TypeError unless there are ``arity`` operands, and at most as many numbers as the row has."""
        if not self.arity <= len(values) <= self.arity + len(self.numbers):
            numbers = f" and up to {len(self.numbers)} numbers" if self.numbers else ""
            raise TypeError(f"{self.name} takes {self.arity} values{numbers}, not {len(values)}")
        return self.expression(*values)

    @property
    def defaults(self) -> tuple[float, ...]:
        """The row's numbers."""
        return tuple(value for _, value in self.numbers)

    def function(self, *numbers: float) -> Callable[..., Any]:
        """The function of torch tensors, with these numbers or the row's. Imports torch."""
        found = named(self.torch)
        if self.numbers:
            given = (*numbers, *self.defaults[len(numbers):])
            return lambda *tensors: found(*tensors, *given)
        return functools.partial(found, **dict(self.options)) if self.options else found

    def from_result(self) -> Callable[..., Any] | None:
        """A function (g, y) of torch tensors that gives the operand's gradient; None if ``gradient`` is.
        Imports torch."""
        if self.gradient is None:
            return None
        found, given = named(self.gradient), self.gradient_with
        return (lambda g, y: found(g, y, *given)) if given else found


OPS: RowTable[Op] = RowTable()
"""Every operation, by name."""
table = OPS.table


def register(op: Op) -> Op:
    """Add a row to all tables and return it. ValueError for a name that is not an identifier, that is
    taken, or that another row had before in this process, because cached kernels have operations by
    name."""
    if why_not_name(op.name) or op.name in RESERVED:
        raise ValueError(f"'{op.name}' cannot name an operation; expected a Python name other than "
                         f"{' and '.join(RESERVED)}")
    if op.name in OPS or OPS.first(op) is not op:
        raise ValueError(f"'{op.name}' already names an operation in this process")
    return OPS.add(op)


def unregister(name: str) -> None:
    """Remove a row from all tables. KeyError for an unknown name."""
    OPS.remove(name)


def named(function: TorchFunction) -> Callable[..., Any]:
    """The object of a dotted name, whose leading parts are imported as modules; a function is returned
    unchanged. Raises ImportError or AttributeError if there is none."""
    if not isinstance(function, str):
        return function
    root, *rest = function.split(".")
    found: Any = importlib.import_module(root)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        found = getattr(found, part, None) or importlib.import_module(path)
    return cast(Callable[..., Any], found)


# The expression of each activation.
ACTIVATIONS: dict[str, Expression] = table(lambda op: op if op.activation else None)
"""The operations that are allowed in epilogues, by name."""
