"""Operators of a kernel's source: those on what Python knows are computed, the others are of tiles."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from transconv.kernel.frontend.calls import is_static
from transconv.kernel.frontend.effects import Effects
from transconv.kernel.functions import function_of
from transconv.kernel.refusals import Refusal, spelled
from transconv.kernel.tiles.elementwise import apply, named, power
from transconv.kernel.tiles.products import PendingProduct, computed, product
from transconv.kernel.tiles.values import Tile, described, tile_of

BINARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.MatMult: operator.matmul}
UNARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
COMPARE: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne}


class ArithmeticEvaluator(Effects):
    """Evaluates operators, comparisons and conditions."""

    def value(self, node: ast.AST) -> Any:
        """The value of an expression."""
        return self.whole(self.raw(node))

    def whole(self, value: Any) -> Any:
        """A value that is no product in waiting, and of a tile what it is now."""
        return (
            computed(self.b, value, self.chip) if isinstance(value, PendingProduct) else self.latest(value)
        )

    def raw(self, node: ast.AST) -> Any:
        """The value of an expression; a product is not computed yet. Raises KernelError at its line."""
        before, self.at = self.at, node
        try:
            method = getattr(self, f"of_{type(node).__name__}", None)
            if method is None:
                raise Refusal(f"{spelled(node)} ({type(node).__name__})", "operators, calls, indices")
            return method(node)
        except Refusal as refusal:
            raise self.error(refusal) from None
        finally:
            self.at = before

    def settled(self, value: Any) -> Any:
        """A value that gets a name: a product is rounded."""
        raise NotImplementedError

    def of_BinOp(self, node: ast.BinOp) -> Any:
        left, since = self.value(node.left), len(self.b.stmts)
        right = self.value(node.right)
        return self.binary(BINARY[type(node.op)], self.still(left, since), right)

    def binary(self, function: Callable[..., Any], a: Any, b: Any) -> Any:
        """``a function b``"""
        if is_static(a) and is_static(b):
            return self.python(function, a, b)
        if function is operator.matmul:
            return product(tile_of(a), tile_of(b))
        if function is operator.pow:
            return power(self.b, a, self.b.known(b))
        row = function_of(function)
        assert row is not None
        return apply(self.b, row, [a, b])

    def python(self, function: Callable[..., Any], *values: Any) -> Any:
        """What Python computes of known values."""
        try:
            return function(*values)
        except Exception as error:
            raise Refusal(f"what Python refuses: {error}") from None

    def of_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return not value if is_static(value) else self.truth([value], negated=True)
        function = UNARY[type(node.op)]
        if is_static(value):
            return self.python(function, value)
        row = function_of(function)
        assert row is not None
        return apply(self.b, row, [value])

    def of_Compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        made: list[Any] = []
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            since = len(self.b.stmts)
            right = self.value(comparator)
            left = self.still(left, since)
            if type(op) not in COMPARE or is_static(left) and is_static(right):
                made.append(self.compared(op, left, right))
            else:
                row = function_of(COMPARE[type(op)])
                assert row is not None
                made.append(self.decided(apply(self.b, row, [left, right])))
            left = right
        if len(made) == 1:
            return made[0]
        return all(made) if is_static(made) else self.truth(made)

    def decided(self, condition: Tile) -> Tile | bool:
        """A condition; one of sizes that are arguments is decided as it is for the call's."""
        return self.b.holds(condition) if self.b.is_of_sizes(condition) else condition

    def compared(self, op: ast.AST, left: Any, right: Any) -> bool:
        """A comparison that Python decides: of known values, and whether something is None."""
        if isinstance(op, (ast.Is, ast.IsNot)):
            return (left is right) == isinstance(op, ast.Is)
        if isinstance(op, (ast.In, ast.NotIn)) and is_static(left) and is_static(right):
            return (left in right) == isinstance(op, ast.In)
        if type(op) not in COMPARE:
            raise Refusal("a search at run time", "== of numbers", "(x == a) | (x == b)")
        return bool(self.python(COMPARE[type(op)], left, right))

    def of_BoolOp(self, node: ast.BoolOp) -> Any:
        found: list[Any] = []
        value: Any = None
        both = isinstance(node.op, ast.And)
        for part in node.values:
            value = self.value(part)
            if is_static(value):
                if bool(value) != both:
                    return value
            else:
                found.append(value)
        return self.truth(found, either=not both) if found else value

    def truth(self, values: list[Any], negated: bool = False, either: bool = False) -> Tile:
        """``and``, ``or``, ``not`` of numbers that are known at run time only."""
        for value in values:
            if not isinstance(value, (Tile, bool)) or isinstance(value, Tile) and value.own:
                raise Refusal(f"the truth of {described(value)}", "numbers; of tiles & | ~",
                              "(x > 0) & (x < 1)")
        made = tile_of(values[0])
        for other in values[1:]:
            made = named(self.b, "logical_or" if either else "logical_and", made, other)
        return named(self.b, "logical_not", made) if negated else made

    def of_IfExp(self, node: ast.IfExp) -> Any:
        test = self.value(node.test)
        if is_static(test):
            return self.value(node.body if test else node.orelse)
        self.truth([test])
        return named(self.b, "where", test, self.value(node.body), self.value(node.orelse))
