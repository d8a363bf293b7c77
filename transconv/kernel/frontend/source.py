"""The source of a Python function: its tree with the lines of the user's file, and the names around it."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transconv.ir import why_not_depth, why_not_name
from transconv.kernel.refusals import SourcePlace
from transconv.support import KernelError


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
            raise KernelError(f"{name} has no Python source that could be read; expected a function that "
                              "is defined by def in a file") from None
        text = textwrap.dedent("".join(lines))
        file = inspect.getsourcefile(function) or "<unknown>"
        try:
            tree = ast.parse(text).body[0]
        except RecursionError:
            raise KernelError(f"{Path(file).name}:{first}: more operations inside one another than Python "
                              "reads; expected parts of them with names") from None
        if not isinstance(tree, ast.FunctionDef):
            raise KernelError(f"{Path(file).name}:{first}: found {type(tree).__name__}; expected a "
                              "function that is defined by def")
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
