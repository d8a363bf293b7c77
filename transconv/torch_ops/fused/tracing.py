"""Epilogues as functions of Python: a function of ``acc`` and tensors becomes operations of the table.

    gated = transconv.epilogue(lambda acc, res, gate: F.silu(acc + res) * gate)

The function is called once, with values that note what is done with them: Python's arithmetic and
comparisons, and torch's functions that are rows of the operations' table."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from transconv.compute import OPS, Op, Pointwise, Recorder, Ref, named, written
from transconv.support import ComputeError

# Functions of torch that have another name than their row in the table.
OTHER_NAMES = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "negative": "neg",
    "maximum": "max",
    "minimum": "min",
    "absolute": "abs",
    "clip": "clamp",
    "special_erf": "erf",
}
ALLOWED = (
    "arithmetic, comparisons, torch.where, and the functions of torch and torch.nn.functional "
    "with the names "
)
OURS = ("transconv", "torch")


class TracedEpilogue:
    """An epilogue traced from a function. ``text``: its operations on ``acc`` and ``arg0``, ``arg1``, ...;
    ``names``: those of its tensors, for messages. Call it to compute it in torch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.names = _parameters(function)
        self.text = written(_traced(function, self.names))

    def __call__(self, *tensors: Any) -> Any:
        return self.function(*tensors)

    def __repr__(self) -> str:
        return f"transconv.epilogue({self.text})"


def epilogue(function: Callable[..., Any]) -> TracedEpilogue:
    """An epilogue of ``fused_conv1d``, ``2d`` and ``3d`` from a function of the sums (with the bias) and
    of further tensors. Use it as a decorator, or give the function itself to each call, which then traces
    it. Raises ComputeError, with the function's line, for what no epilogue can do."""
    return function if isinstance(function, TracedEpilogue) else TracedEpilogue(function)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters after ``acc``."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function in C, such as torch.tanh
        return ()
    except TypeError:
        raise ComputeError(f"epilogue={function!r}: expected a function of acc and tensors") from None
    if not found or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found):
        raise ComputeError(
            f"epilogue {_where(function)}: expected a function of acc and then one tensor for each operand"
        )
    return tuple(p.name for p in found if p.default is p.empty)[1:]


def _traced(function: Callable[..., Any], names: tuple[str, ...]) -> Pointwise:
    recorder = Recorder()
    values = [_Value(recorder, "acc"), *(_Value(recorder, f"arg{i}") for i in range(len(names)))]
    made = function(*values)
    if isinstance(made, _Value) and not recorder.is_condition(made.ref):
        return Pointwise(tuple(recorder.steps), made.ref)
    what = "a condition" if isinstance(made, _Value) else type(made).__name__
    raise ComputeError(
        f"epilogue {_where(function)}: it returns {what}; expected one value of acc and the tensors"
    )


def _where(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"at {code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _line() -> str:
    """The place in the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).split(".")[0] in OURS:
        frame = frame.f_back
    return f"at {frame.f_code.co_filename}:{frame.f_lineno}"


class _Value:
    """A value of a function that is traced."""

    def __init__(self, recorder: Recorder, ref: Ref) -> None:
        self.recorder, self.ref = recorder, ref

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Value:
        some = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, _Value))
        return some._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Value:
        name = getattr(func, "__name__", str(func))
        kwargs = {k: v for k, v in kwargs.items() if v is not _usual(func, k)}
        if name in ("square", "reciprocal") and len(args) == 1 and not kwargs:
            return self._step("mul", *args * 2) if name == "square" else self._step("div", 1.0, *args)
        row = _row(func, name, kwargs)
        if row is None:
            said = f"{name}({', '.join(f'{k}={v!r}' for k, v in kwargs.items())})"
            raise ComputeError(
                f"epilogue {_line()}: {said} is no operation of epilogues; expected "
                f"{ALLOWED}{', '.join(sorted(OPS))}"
            )
        options = {k for k, _ in row.options}
        given = list(args)
        for at, (number, default) in enumerate(row.numbers, row.arity):
            if len(given) <= at and any(n in kwargs for n, _ in row.numbers[at - row.arity :]):
                given.append(kwargs.get(number, default))
        given = [
            d if g is None and i >= row.arity else g
            for i, (g, d) in enumerate(zip(given, [None] * row.arity + [*row.defaults], strict=False))
        ] + given[row.arity + len(row.numbers) :]
        if rest := [k for k in kwargs if k not in options and k not in dict(row.numbers)]:
            raise ComputeError(
                f"epilogue {_line()}: {name}({rest[0]}=...) is no operation of epilogues; "
                "expected it without this argument"
            )
        return self._step(row.name, *given)

    def _step(self, op: str, *args: Any) -> _Value:
        refs: list[Ref] = []
        for a in args:
            if isinstance(a, _Value):
                refs.append(a.ref)
            elif isinstance(a, (int, float)) and not isinstance(a, bool):
                refs.append(float(a))
            else:
                raise ComputeError(
                    f"epilogue {_line()}: {op} of {type(a).__name__}; expected values and "
                    "numbers; a tensor is an operand: a parameter of the function"
                )
        try:
            return _Value(self.recorder, self.recorder.step(op, *refs))
        except ComputeError as error:
            raise ComputeError(f"epilogue {_line()}: {error}") from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        func = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
        return lambda *args, **kwargs: self._called(func or name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise ComputeError(
            f"epilogue {_line()}: a condition of values has one truth for each element; "
            "expected torch.where(condition, x, y)"
        )

    def __neg__(self) -> _Value:
        return self._step("neg", self)

    def __abs__(self) -> _Value:
        return self._step("abs", self)

    __hash__ = None  # type: ignore[assignment]


def _usual(func: Any, name: str) -> Any:
    """The default of an argument, which torch's functions in Python hand on."""
    try:
        return inspect.signature(func).parameters[name].default
    except (TypeError, ValueError, KeyError):
        return inspect.Parameter.empty


def _row(func: Any, name: str, kwargs: Mapping[str, Any]) -> Op | None:
    """The row of a function of torch, among several the one whose options are given."""
    rows = [op for op in OPS.values() if isinstance(op.torch, str) and named(op.torch) is func]
    if any(op.options for op in rows):
        usual = {"approximate": "none"}
        return next((op for op in rows if dict(op.options) == {**usual, **kwargs}), None)
    return rows[0] if rows else OPS.get(OTHER_NAMES.get(name, name))


def _operators() -> None:
    """Python's operators on values."""
    for op, row in {
        "add": "add",
        "sub": "sub",
        "mul": "mul",
        "truediv": "div",
        "gt": "gt",
        "ge": "ge",
        "lt": "lt",
        "le": "le",
        "eq": "eq",
        "ne": "ne",
        "pow": "pow",
    }.items():

        def forward(self: _Value, other: Any, row: str = row) -> _Value:
            return self._step(row, self, other)

        def backward(self: _Value, other: Any, row: str = row) -> _Value:
            return self._step(row, other, self)

        setattr(_Value, f"__{op}__", forward)
        if op in ("add", "sub", "mul", "truediv"):
            setattr(_Value, f"__r{op}__", backward)


_operators()
