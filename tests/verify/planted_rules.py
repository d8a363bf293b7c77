"""Bugs for the simplifier, made by the dozen: every ``return`` of every rule, spoiled in turn.

A spoiled return gives its value off by one, or the other truth. Line numbers stay, so that the blame
can be held against the very line. Returns of the node itself (``return e``: no rule applies) are
left alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isinf
from types import CodeType, FunctionType, ModuleType
from typing import Any

from transconv.ir import FALSE, TRUE, Add, Const, Expr, Not
from transconv.simplify import division, facts, fixpoint, polynomial, ranges
from transconv.simplify.polynomial import Polynomial
from transconv.simplify.ranges import Range

SPOIL, REACHED = "__spoil__", "__reached__"
MODULES = (fixpoint, division, ranges, polynomial)
# What only chooses between equal expressions, or walks: any value is right, or nothing is decided.
CHOICES = {
    "_weight": "which of two equal sums is lighter",
    "_divisions_in": "which of two equal sums is lighter",
    "_divisions": "an identity holds for every y and b",
    "_width": "a type that holds the value either way; the `narrow` pass decides on overflow",
    "_leaves": "what is worth weighing",
    "_has_load": "what is worth weighing",
    "reason": "a text for people",
    "_ranges_in_words": "a text for people",
    "_name": "the order of factors",
    "ordered": "the order of factors",
    "ring_of": "SymPy's ring",
}
# Functions that apply rules, in which the witness is called.
MACHINERY = {
    "simplify",
    "prove",
    "_simple",
    "_step",
    "_with_simple_children",
    "rule_name",
    "_flat",
    "operations",
    "_short",
    "_mapped",
}


@dataclass(frozen=True)
class Mutant:
    """One return of one function."""

    module: ModuleType
    function: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.function}:{self.line}"

    @property
    def place(self) -> tuple[str, int]:
        return self.module.__name__, self.line

    @property
    def code_of(self) -> FunctionType:
        found = getattr(self.module, self.function)
        assert isinstance(found, FunctionType)
        return found


def functions(module: ModuleType) -> list[FunctionType]:
    """The functions that a module defines itself, those that are remembered or cached left out."""
    return [
        f
        for f in vars(module).values()
        if isinstance(f, FunctionType)
        and f.__module__ == module.__name__
        and f.__name__ not in {*CHOICES, *MACHINERY}
        and not inspect.isgeneratorfunction(f)
        and not hasattr(f, "__wrapped__")
    ]


def _returns(function: FunctionType) -> list[int]:
    tree, _first = _tree(function)
    return [at.lineno for at in ast.walk(tree) if _is_rewrite(at)]


def _is_rewrite(at: ast.AST) -> bool:
    if not isinstance(at, ast.Return) or at.value is None:
        return False
    plain = isinstance(at.value, ast.Name) and at.value.id == "e"
    return not plain and not (isinstance(at.value, ast.Constant) and at.value.value is None)


def _tree(function: FunctionType) -> tuple[ast.Module, int]:
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    return tree, first


def mutants(modules: tuple[ModuleType, ...] = MODULES) -> list[Mutant]:
    return [
        Mutant(m, f.__name__, line)
        for m in modules
        for f in functions(m)
        for line in dict.fromkeys(_returns(f))
    ]


class _Wrap(ast.NodeTransformer):
    """``return v`` -> ``return wrapper(line, v)``, for one line or for all."""

    def __init__(self, wrapper: str, line: int | None) -> None:
        self.wrapper, self.line = wrapper, line

    def visit_Return(self, at: ast.Return) -> ast.AST:
        if _is_rewrite(at) and self.line in (None, at.lineno):
            assert at.value is not None
            call = ast.Call(ast.Name(self.wrapper, ast.Load()), [ast.Constant(at.lineno), at.value], [])
            return ast.copy_location(ast.Return(ast.copy_location(call, at.value)), at)
        return at


def _code(function: FunctionType, wrapper: str, line: int | None) -> CodeType:
    tree, _ = _tree(function)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    # Annotations are not evaluated again.
    future = ast.parse("from __future__ import annotations").body
    whole = ast.fix_missing_locations(_Wrap(wrapper, line).visit(ast.Module([*future, definition], [])))
    made = compile(whole, function.__code__.co_filename, "exec")
    return next(c for c in made.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__)


@contextmanager
def replaced(found: list[tuple[FunctionType, CodeType]], **names: Callable[..., Any]) -> Iterator[None]:
    """The functions with other code, and the names that it calls in their modules."""
    before = [(f, f.__code__) for f, _ in found]
    facts.forget_simplified()
    for f, code in found:
        f.__globals__.update(names)
        f.__code__ = code
    try:
        yield
    finally:
        for f, code in before:
            f.__code__ = code
            for name in names:
                f.__globals__.pop(name, None)
        facts.forget_simplified()


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The simplifier with one return spoiled."""
    function = mutant.code_of
    with replaced([(function, _code(function, SPOIL, mutant.line))], **{SPOIL: spoil}):
        yield


@contextmanager
def watched(reached: set[tuple[str, int]]) -> Iterator[None]:
    """Record which returns are reached, as (module, line)."""
    codes, names = [], {}
    for place, module in enumerate(MODULES):
        name = f"{REACHED}{place}"

        def note(line: int, value: Any, module: ModuleType = module) -> Any:
            reached.add((module.__name__, line))
            return value

        names[name] = note
        codes += [(f, _code(f, name, None)) for f in functions(module)]
    with replaced(codes, **names):
        yield


def spoil(line: int, value: Any) -> Any:
    """Off by one, or the opposite."""
    match value:
        case Const(bool(truth), _):
            return FALSE if truth else TRUE
        case Expr() if value.dtype.kind == "bool":
            return Not(value)
        case Expr() if value.dtype.is_integer:
            return Add(value, Const(1, value.dtype))
        case Polynomial():
            return value + 1
        case Range():
            return Range(1 if value.lo is None else value.lo + 1, value.hi)
        case bool():
            return not value
        case Expr() if value.dtype.kind == "float":
            return Add(value, Const(1.0, value.dtype))
        case int() | float():
            return 0 if isinf(value) else value + 1
        case (int(ends), float() | int() as bound):
            return ends, bound + 1
        case (int(g), Polynomial() as inner, Polynomial() as rest):
            return g, inner + 1, rest
        case (Polynomial() as whole, Polynomial() as rest):
            return whole + 1, rest
        case (Expr(), *rest):
            return (spoil(line, value[0]), *rest)
        case ((tuple() as mono, int(c)), *rest):  # the terms of a sum
            return ((mono, c + 1), *rest)
        case _ if hasattr(value, "ring"):  # a polynomial of SymPy's
            return value + 1
    return value


ANALYSES = {"range_of", "multiple_of"}


def culprits(mutant: Mutant) -> set[str]:
    """Who may be blamed for a bug: the rules whose functions call, in some steps, the one with it;
    of the analyses and of sums, which everything rests on, these as well."""
    everything = {f.__name__: f for m in MODULES for f in functions(m)}
    starts = {
        **{f.__name__: f for f in fixpoint.RULES.values()},
        "collect": division.collect,
        "logic": fixpoint._logic,
        "settle": fixpoint._settled,
    }
    found: set[str] = set()
    if mutant.module in (ranges, ranges, polynomial):
        found |= {*ANALYSES, "collect"}
    for name, start in starts.items():
        seen: set[str] = set()
        waiting = [start.__name__]
        while waiting:
            at = waiting.pop()
            if at not in seen and at in everything:
                seen.add(at)
                waiting += _called(everything[at].__code__)
        if mutant.function in seen:
            found.add(name)
    return found


def _called(code: CodeType) -> list[str]:
    inner = [n for c in code.co_consts if isinstance(c, CodeType) for n in _called(c)]
    return [*code.co_names, *inner]
