"""The source of a kernel's function: its tree with the lines of the user's file, the names around it,
the types that it names, and refusals: the place, what was found, what is allowed, an example.

    demo.py:7: found a while loop; allowed: a for loop over range(...)
        while total < 10:
      for example: for k in range(0, n, 16):
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transconv.ir import DTYPES, DType, boolean, why_not_depth, why_not_name
from transconv.support import KernelError, ScopeError


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A line of the user's file."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Refusal(Exception):
    """Why a piece of source cannot be compiled; whoever knows the place makes a KernelError of it."""

    error: type[KernelError] = KernelError

    def __init__(self, found: str, allowed: str = "", example: str = "") -> None:
        super().__init__(found)
        self.found, self.allowed, self.example = found, allowed, example

    def at(self, place: SourcePlace) -> KernelError:
        """The error for the user."""
        said = f"{place}: found {self.found}" + (f"; allowed: {self.allowed}" if self.allowed else "")
        lines = [said, f"    {place.text.strip()}"]
        if self.example:
            lines.append(f"  for example: {self.example}")
        return self.error("\n".join(lines))


ONE_VALUE = ("an assignment to chosen elements", "a mask of the tile's shape, one value", "x[x < 0] = 0.0")


class WrongScope(Refusal):
    """What is said in one scope and is for another one."""

    error = ScopeError


def spelled(at: ast.AST) -> str:
    """A piece of source as one short line."""
    text = ast.unparse(at).split("\n")[0]
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function as a tree. ``first``: the line of the file before the tree's first one."""

    function: Callable[..., Any]
    tree: ast.FunctionDef
    file: str
    lines: tuple[str, ...]
    first: int

    @staticmethod
    def of(function: Callable[..., Any]) -> FunctionSource:
        """The source of a function. KernelError for one without source, such as a lambda or a builtin."""
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):
            name = getattr(function, "__name__", repr(function))
            raise KernelError(
                f"{name} has no Python source that could be read; expected a function that "
                "is defined by def in a file"
            ) from None
        text = textwrap.dedent("".join(lines))
        file = inspect.getsourcefile(function) or "<unknown>"
        try:
            tree = ast.parse(text).body[0]
        except RecursionError:
            raise KernelError(
                f"{Path(file).name}:{first}: more operations inside one another than Python "
                "reads; expected parts of them with names"
            ) from None
        if not isinstance(tree, ast.FunctionDef):
            raise KernelError(
                f"{Path(file).name}:{first}: found {type(tree).__name__}; expected a "
                "function that is defined by def"
            )
        found = FunctionSource(function, tree, file, tuple(lines), first - 1)
        found.check()
        return found

    def check(self) -> None:
        """Raise KernelError, with the line, for a name that no kernel's text has, and for an expression
        that is too deep for the passes behind."""
        for at in ast.walk(self.tree):
            match at:
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name):
                    reason = f"'{name}' is no name here: {why}" if (why := why_not_name(name)) else ""
                case ast.stmt():
                    parts = (why_not_depth(e) for e in ast.iter_child_nodes(at) if isinstance(e, ast.expr))
                    reason = next(filter(None, parts), "")
                case _:
                    continue
            if reason:
                line = self.first + getattr(at, "lineno", 1)
                raise KernelError(f"{Path(self.file).name}:{line}: {reason}")

    @property
    def name(self) -> str:
        """The function's name."""
        return self.tree.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(a.arg for a in self.tree.args.args)

    def place(self, at: ast.AST) -> SourcePlace:
        """The line of the file at which a piece of the tree begins."""
        line = getattr(at, "lineno", 1)
        return SourcePlace(Path(self.file).name, self.first + line, self.lines[line - 1])

    def outside(self) -> dict[str, Any]:
        """The values of the names around the function: of its closure, its module, Python's own."""
        return outside(self.function)


def outside(function: Any) -> dict[str, Any]:
    """The values of the names around a function: of its closure, its module, Python's own."""
    found: dict[str, Any] = {**vars(builtins), **function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # bound later in the function around it
            continue
    return found


NUMPY = {
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
    "bool": "boolean",
}
NAMES = {t.name: t.torch for t in DTYPES.values() if t.torch and t.within is None}


def named(dtype: DType) -> str:
    """The name of a type in messages: NumPy's or torch's."""
    return "int" if dtype.kind == "index" else NAMES.get(dtype.name, dtype.name)


def dtype_of(value: Any) -> DType:
    """The type that a value names: a type of NumPy, torch or the IR, or its name. Refuses others."""
    if isinstance(value, DType):
        return value
    if value is bool:
        return boolean
    text = value if isinstance(value, str) else getattr(value, "__name__", "") or str(value)
    text = text.removeprefix("torch.")
    name = next((k for k, torch in NAMES.items() if torch == text), NUMPY.get(text.rstrip("_"), ""))
    if not name:
        raise Refusal(f"the type {text or value!r}", " ".join(NAMES.values()), "dtype=np.float32")
    return DTYPES[name]


def is_number(value: Any) -> bool:
    """Whether a value is a number that Python knows."""
    return isinstance(value, (bool, int, float))


def number_of(value: Any) -> Any:
    """A number of Python. Refuses integers beyond 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Refusal(f"the number {value}", "whole numbers of 64 bits")
    return value


def used_names(code: Any) -> list[str]:
    """The names around a function that it and those inside of it use."""
    inside = [n for c in code.co_consts if hasattr(c, "co_names") for n in used_names(c)]
    return [*code.co_names, *code.co_freevars, *inside]
