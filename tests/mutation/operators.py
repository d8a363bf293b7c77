"""Mutants of a file's text: the operators of mutmut, and those that matter where masks, brackets, bounds
and keys decide what a kernel computes.

An operator is a function from a node of libcst to nodes that may stand in its place. Nothing is changed in
what only people read: annotations, docstrings, errors that are raised, assertions and imports.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import libcst as cst
from libcst import matchers
from mutmut.mutation import mutators

Operator = Callable[[Any], Iterable[cst.CSTNode]]


@dataclass(frozen=True)
class Mutant:
    """One change of a file of the package: its first line, what is changed and into what, as lines."""

    file: str
    line: int
    operator: str
    before: str
    after: str
    text: str = field(repr=False, compare=False)  # the whole file

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from others, wherever its line is moved to."""
        return self.file, self.operator, self.before, self.after


@dataclass(frozen=True)
class Site:
    """A place where an operator applies, and the node that it puts there."""

    operator: str
    node: cst.CSTNode
    other: cst.CSTNode


# -- operators of mutmut ----------------------------------------------------------------------------


def changed_number(node: cst.BaseNumber) -> Iterator[cst.CSTNode]:
    """One more; of whole numbers one less, too."""
    yield from mutators.operator_number(node)
    if isinstance(node, cst.Integer) and node.evaluated_value > 0:
        yield node.with_changes(value=str(node.evaluated_value - 1))


def changed_string(node: cst.SimpleString) -> Iterator[cst.CSTNode]:
    yield from list(mutators.operator_string(node))[:1]


def argument_gone(node: cst.Call) -> Iterator[cst.CSTNode]:
    """A named argument, or the last of several."""
    kept = [
        i
        for i, a in enumerate(node.args)
        if not _is_said(a) and (a.keyword or len(node.args) > 1 == len(node.args) - i)
    ]
    for i in kept:
        yield node.with_changes(args=[*node.args[:i], *node.args[i + 1 :]])


# -- ours -------------------------------------------------------------------------------------------


def operand_gone(node: cst.BinaryOperation | cst.BooleanOperation) -> Iterator[cst.CSTNode]:
    """A mask, a condition, a term or a factor is dropped."""
    yield _bracketed(node.left, node)
    yield _bracketed(node.right, node)


def operands_swapped(node: cst.BinaryOperation) -> Iterator[cst.CSTNode]:
    if isinstance(
        node.operator,
        (cst.Subtract, cst.Divide, cst.FloorDivide, cst.Modulo, cst.Power, cst.LeftShift, cst.RightShift),
    ):
        yield node.with_changes(left=_closed(node.right), right=_closed(node.left))


def arguments_swapped(node: cst.Call) -> Iterator[cst.CSTNode]:
    """The first two positional ones."""
    if len(node.args) > 1 and not any(a.keyword or a.star for a in node.args[:2]):
        first, second, *rest = node.args
        if matchers.matches(node.func, matchers.Name("isinstance")):
            return
        yield node.with_changes(
            args=[first.with_changes(value=second.value), second.with_changes(value=first.value), *rest]
        )


def brackets_gone(node: cst.BinaryOperation | cst.Comparison) -> Iterator[cst.CSTNode]:
    """``a - (b - c)`` becomes ``a - b - c``."""
    if isinstance(node, cst.BinaryOperation):
        for side in ("left", "right"):
            inner = getattr(node, side)
            if isinstance(inner, (cst.BinaryOperation, cst.BooleanOperation, cst.IfExp)) and inner.lpar:
                yield node.with_changes(**{side: inner.with_changes(lpar=[], rpar=[])})


def element_gone(node: cst.Tuple | cst.List | cst.Set) -> Iterator[cst.CSTNode]:
    """Of a result, a key, a list."""
    if len(node.elements) > 1:
        for i in range(len(node.elements)):
            left = [*node.elements[:i], *node.elements[i + 1 :]]
            if len(left) == 1 and isinstance(node, cst.Tuple):
                left = [left[0].with_changes(comma=cst.Comma())]
            yield node.with_changes(elements=left)


OTHERS = {
    "min": "max",
    "minimum": "maximum",
    "any": "all",
    "floor": "ceil",
    "amin": "amax",
    "argmin": "argmax",
    "zeros": "ones",
    "zeros_like": "ones_like",
}
OTHERS |= {b: a for a, b in OTHERS.items()}


def function_swapped(node: cst.Call) -> Iterator[cst.CSTNode]:
    """``min`` and ``max``, ``any`` and ``all``."""
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(name, cst.Name) and name.value in OTHERS:
        yield node.with_deep_changes(name, value=OTHERS[name.value])


def condition_changed(node: cst.If | cst.While | cst.CompIf | cst.IfExp) -> Iterator[cst.CSTNode]:
    """Negated, or always false; of a comprehension, and of ``if`` without ``else``, always true."""
    test = node.test
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), _closed(test)))
    if isinstance(node, cst.While):
        return
    yield node.with_changes(test=cst.Name("False"))
    if isinstance(node, cst.CompIf) or (isinstance(node, cst.If) and node.orelse is None):
        yield node.with_changes(test=cst.Name("True"))


def statement_gone(node: cst.SimpleStatementLine) -> Iterator[cst.CSTNode]:
    """A call for its effect, or an update."""
    for small in node.body:
        if isinstance(small, cst.AugAssign) or (
            isinstance(small, cst.Expr) and isinstance(small.value, cst.Call) and not _is_said(small)
        ):
            yield node.with_changes(body=[cst.Pass()])


def constant_result(node: cst.Return) -> Iterator[cst.CSTNode]:
    """0, 1, True or False where a condition or a number is returned."""
    if isinstance(node.value, (cst.Comparison, cst.BooleanOperation)):
        yield from (node.with_changes(value=cst.Name(word)) for word in ("True", "False"))
    elif isinstance(node.value, cst.BinaryOperation):
        yield from (node.with_changes(value=cst.Integer(word)) for word in ("0", "1"))


def _closed(node: cst.BaseExpression) -> cst.BaseExpression:
    return (
        node
        if node.lpar or isinstance(node, (cst.Name, cst.Call, cst.Attribute, cst.Subscript))
        else node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    )


def _bracketed(part: cst.BaseExpression, whole: cst.BaseExpression) -> cst.BaseExpression:
    """A part in the place of the whole, with its brackets."""
    return part.with_changes(lpar=[*whole.lpar, *part.lpar], rpar=[*part.rpar, *whole.rpar])


# Name, the nodes it is asked for, the operator, and how often it is drawn.
OPERATORS: tuple[tuple[str, Any, Operator, int], ...] = (
    ("mutmut: other operator", cst.CSTNode, mutators.operator_swap_op, 5),
    ("mutmut: other keyword", cst.CSTNode, mutators.operator_keywords, 2),
    ("mutmut: other truth", cst.Name, mutators.operator_name, 2),
    ("mutmut: other number", cst.BaseNumber, changed_number, 5),
    ("mutmut: update assigned", cst.AugAssign, mutators.operator_augmented_assignment, 1),
    ("mutmut: unary operator dropped", cst.UnaryOperation, mutators.operator_remove_unary_ops, 1),
    ("mutmut: other string method", cst.Call, mutators.operator_symmetric_string_methods_swap, 1),
    ("mutmut: case dropped", cst.Match, mutators.operator_match, 1),
    ("mutmut: one branch", cst.IfExp, mutators.operator_if_exp, 2),
    ("mutmut: other string", cst.SimpleString, changed_string, 1),
    ("argument dropped", cst.Call, argument_gone, 3),
    ("operand dropped", (cst.BinaryOperation, cst.BooleanOperation), operand_gone, 5),
    ("operands swapped", cst.BinaryOperation, operands_swapped, 2),
    ("arguments swapped", cst.Call, arguments_swapped, 1),
    ("brackets dropped", cst.BinaryOperation, brackets_gone, 1),
    ("element dropped", (cst.Tuple, cst.List, cst.Set), element_gone, 4),
    ("min for max", cst.Call, function_swapped, 3),
    ("condition changed", (cst.If, cst.While, cst.CompIf, cst.IfExp), condition_changed, 5),
    ("statement dropped", cst.SimpleStatementLine, statement_gone, 3),
    ("constant result", cst.Return, constant_result, 1),
)
WEIGHTS = {name: weight for name, _, _, weight in OPERATORS}


class _Finder(cst.CSTVisitor):
    """Visits what may be mutated, and collects the places."""

    def __init__(self) -> None:
        self.found: list[Site] = []
        self.targets: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if (
            isinstance(node, UNCHANGED)
            or _is_said(node)
            or (isinstance(node, cst.Tuple) and any(node is target for target in self.targets))
        ):
            return False
        if isinstance(node, (cst.AssignTarget, cst.For, cst.CompFor)):
            self.targets.append(node.target)
        for name, nodes, operator, _ in OPERATORS:
            if isinstance(node, nodes):
                self.found += [Site(name, node, other) for other in operator(node)]
        return True


UNCHANGED = (cst.Annotation, cst.Raise, cst.Assert, cst.Import, cst.ImportFrom, cst.Decorator)


def _is_said(node: cst.CSTNode) -> bool:
    """Docstrings, the list of what a file exports, a condition about types alone, a log's line, whether
    ``zip`` asks for equal lengths."""
    string = matchers.Expr(matchers.SimpleString() | matchers.ConcatenatedString())
    exports = matchers.Assign(targets=[matchers.AssignTarget(matchers.Name("__all__"))])
    log = matchers.Name("log") | matchers.Attribute(attr=matchers.Name("log"))
    logged = matchers.Expr(matchers.Call(func=matchers.Attribute(value=log)))
    strict = matchers.Arg(keyword=matchers.Name("strict"))
    types = matchers.If(test=matchers.Name("TYPE_CHECKING"))
    return matchers.matches(node, string | exports | logged | strict | types)


class Source:
    """A file of the package, and the places where it may be changed."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.module = cst.parse_module(text)
        finder = _Finder()
        self.module.visit(finder)
        self.sites = finder.found

    def mutant(self, site: Site) -> Mutant | None:
        """The file changed there; none where it does not compile, or to the same code."""
        changed = self.module.deep_replace(site.node, site.other)
        assert isinstance(changed, cst.Module)
        text = changed.code
        try:
            with warnings.catch_warnings(action="ignore"):
                if _compiled(text) == _compiled(self.text):
                    return None
        except SyntaxError:
            return None
        old, new = self.text.splitlines(), text.splitlines()
        first = _same(old, new)
        last = _same(old[:first:-1], new[:first:-1])
        return Mutant(
            self.file,
            first + 1,
            site.operator,
            _line(old[first : len(old) - last]),
            _line(new[first : len(new) - last]),
            text,
        )


def _same(a: list[str], b: list[str]) -> int:
    """The number of lines at the beginning that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _line(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def _compiled(text: str) -> CodeType:
    return compile(text, "", "exec", dont_inherit=True)
