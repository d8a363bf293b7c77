"""The two programs of a case: the example of the kernel API, and the file in ``by_hand``; their lines."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.environment import ROOT
from transconv.kernel import KernelFunction

EXAMPLES = ROOT / "examples" / "kernels"
BY_HAND = Path(__file__).parent / "by_hand"


@functools.cache
def example(name: str) -> ModuleType:
    """The module of a kernel in the API."""
    return _module(f"example_{name}", EXAMPLES / f"{name}.py")


@functools.cache
def by_hand(name: str) -> ModuleType:
    """The module of a kernel in Triton."""
    return _module(f"by_hand_{name}", BY_HAND / f"{name}.py")


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(path: Path) -> int:
    """Lines of a file without imports, blank ones, comments and docstrings."""
    text = path.read_text("utf-8")
    rows, numbers = text.splitlines(), set[int]()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or isinstance(node, ast.Expr):
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        numbers |= set(range(first, (node.end_lineno or first) + 1))
        for at in ast.walk(node):
            if isinstance(at, ast.FunctionDef) and ast.get_docstring(at):
                numbers -= set(range(at.body[0].lineno, (at.body[0].end_lineno or 0) + 1))
    return sum(bool(rows[n - 1].split("#")[0].strip()) for n in numbers)


def masks(path: Path) -> int:
    """How often a mask is written in a file."""
    return path.read_text("utf-8").count("mask=")


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[tuple[KernelFunction, tuple[Any, ...]]]]:
    """The kernels of an example that are called, with what they are called with."""
    found: list[tuple[KernelFunction, tuple[Any, ...]]] = []
    kernels = {n: k for n, k in vars(module).items() if isinstance(k, KernelFunction)}

    def through(kernel: KernelFunction) -> Any:
        def call(*args: Any) -> Any:
            found.append((kernel, args))
            return kernel(*args)

        return call

    try:
        for name, kernel in kernels.items():
            setattr(module, name, through(kernel))
        yield found
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
