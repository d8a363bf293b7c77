"""Elementwise operations: one row each, from which every list of operations is derived.

A row says what an operation means (an expression of the IR), which function of torch does the same, how
it is differentiated, and who may use it where. The rows of this package are in elementwise.py; others
are added with ``register`` from anywhere:

    register(Op("cube", 1, lambda x: x * x * x, torch="mypackage.cube", activation=True))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from transconv.ir import Expr, Rows

Expression = Callable[..., Expr]
Partials = Callable[..., tuple[Expr | None, ...]]
TorchFunction = str | Callable[..., Any]  # "torch.nn.functional.gelu", or the function itself

RESERVED = ("bias", "res")  # words of an epilogue that are no functions of its value


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """An operation of ``arity`` values: ``expression`` makes the IR's value of the operands' values, of
    any types; ``torch`` names the function of tensors that computes the same.

    ``options``: keyword arguments that torch's function takes besides the values. ``derivative``: of
    the operands, the partial derivatives by each of them, None by one that has none (a condition).
    ``gradient``: torch's function (g, y, *gradient_with) of the result's gradient and the result, where
    these two suffice; other operations are differentiated by torch from their operands.
    ``exact``: whole numbers stay whole, and no machine approximates it. ``activation``: may stand in an
    epilogue; ``drawn``: there the fuzzer may choose it. ``steepest``: what no derivative exceeds, so
    that a check knows how an error grows. ``spelled``: what else people call it: modules and functions
    of torch by their dotted names, methods as ``.relu_``; a module stands for the row whose
    ``options`` are its attributes. ``onednn``: its names there, each with alpha and beta.
    """

    name: str
    arity: int
    expression: Expression
    torch: TorchFunction
    _: KW_ONLY
    options: tuple[tuple[str, Any], ...] = ()
    derivative: Partials | None = None
    gradient: TorchFunction | None = None
    gradient_with: tuple[float, ...] = ()
    exact: bool = False
    activation: bool = False
    drawn: bool = True
    steepest: float = 1.5
    spelled: tuple[str, ...] = ()
    onednn: tuple[tuple[str, float, float], ...] = ()

    def __str__(self) -> str:
        return self.name

    def __call__(self, *values: Expr) -> Expr:
        """The IR's expression of these operands. TypeError unless there are ``arity`` of them."""
        if len(values) != self.arity:
            raise TypeError(f"{self.name} takes {self.arity} values, not {len(values)}")
        return self.expression(*values)

    def function(self) -> Callable[..., Any]:
        """The function of torch tensors. Imports torch."""
        found = named(self.torch)
        return functools.partial(found, **dict(self.options)) if self.options else found

    def from_result(self) -> Callable[..., Any] | None:
        """(g, y) -> the gradient of the one operand, of torch tensors; None where the result does not
        tell it. Imports torch."""
        if self.gradient is None:
            return None
        found, given = named(self.gradient), self.gradient_with
        return (lambda g, y: found(g, y, *given)) if given else found


OPS: Rows[Op] = Rows()
"""Every operation, by name."""
table = OPS.table
_used: dict[str, Op] = {}  # every row that there ever was: kernels are kept by their operations' names


def register(op: Op) -> Op:
    """Add a row; every table then has it. ValueError for a name that cannot be written in an
    epilogue, that is taken, or that stood for another row in this process: kernels are kept by name."""
    if not op.name.isidentifier() or op.name in RESERVED:
        raise ValueError(f"'{op.name}' cannot name an operation; expected a Python name other than "
                         f"{' and '.join(RESERVED)}")
    if _used.get(op.name, op) is not op or op.name in OPS:
        raise ValueError(f"'{op.name}' already names an operation in this process")
    _used[op.name] = op
    return OPS.add(op)


def unregister(name: str) -> None:
    """Take a row out of every table. KeyError for a name that is in none."""
    OPS.remove(name)


def named(function: TorchFunction) -> Callable[..., Any]:
    """The object of a dotted name, its first part imported as a module, and as many more as are modules;
    a function is returned as it is. ImportError or AttributeError where there is none."""
    if not isinstance(function, str):
        return function
    root, *rest = function.split(".")
    found: Any = importlib.import_module(root)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        found = getattr(found, part, None) or importlib.import_module(path)
    return found  # type: ignore[no-any-return]


# What may stand in an epilogue: the value after it, of the value before it.
ACTIVATIONS: dict[str, Expression] = table(lambda op: op if op.activation else None)
"""The operations that may stand in an epilogue, by name."""


def is_exact(words: tuple[str, ...]) -> bool:
    """Whether an epilogue of these words keeps whole numbers whole; a sum with a tensor does."""
    return all(w in RESERVED or w in OPS and OPS[w].exact for w in words)
