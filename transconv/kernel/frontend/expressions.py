"""Expressions of a kernel's source, evaluated: what Python knows becomes its value, the rest tiles."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from transconv.ir import Expr, Var
from transconv.kernel.annotations import Tunable
from transconv.kernel.device_functions import atomic_ref, family_of
from transconv.kernel.frontend.calls import TILE_METHODS, called
from transconv.kernel.frontend.methods import ATTRIBUTES, ITEM_METHODS, METHODS
from transconv.kernel.frontend.reader import GroupScope, Item, Lambda, SourceReader, is_static
from transconv.kernel.functions import REDUCTIONS, RUNNING, cast, function_of
from transconv.kernel.source import Refusal, WrongScope, spelled
from transconv.kernel.source import named as type_named
from transconv.kernel.tiles import arrays, tile_elements
from transconv.kernel.tiles.kernel_builder import apply, named, power
from transconv.kernel.tiles.reductions import computed, product
from transconv.kernel.tiles.values import (
    ArrayView,
    BoundMethod,
    PendingProduct,
    Shape,
    Tile,
    described,
    tile_of,
)

BINARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.MatMult: operator.matmul,
}
UNARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
COMPARE: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class ExpressionEvaluator(SourceReader):
    """Evaluates expressions with the values of names."""

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

    def of_BinOp(self, node: ast.BinOp) -> Any:
        left, since = self.value(node.left), len(self.b.stmts)
        right = self.value(node.right)
        return self.binary(type(node.op), self.still(left, since), right)

    def binary(self, op: type[ast.operator], a: Any, b: Any) -> Any:
        """``a op b``"""
        function = BINARY[op]
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
            if type(op) not in COMPARE or (is_static(left) and is_static(right)):
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
            if not isinstance(value, (Tile, bool)) or (isinstance(value, Tile) and value.own):
                raise Refusal(
                    f"the truth of {described(value)}", "numbers; of tiles & | ~", "(x > 0) & (x < 1)"
                )
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

    # -- leaves --

    def of_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, (complex, bytes)):
            raise Refusal(f"{spelled(node)}", "whole numbers, floats, booleans")
        return node.value

    def of_Name(self, node: ast.Name) -> Any:
        if node.id in self.env:
            return self.env[node.id]
        if node.id in self.gone:
            raise Refusal(f"{node.id}, {self.gone[node.id]}", "names that have a value here")
        if node.id in self.outside:
            found = self.outside[node.id]
            kind = type(found)  # a type of NumPy has attributes of arrays, too
            if hasattr(kind, "__array_interface__") or hasattr(kind, "data_ptr"):
                raise Refusal(f"{node.id}, an array that is no argument", "arrays as arguments")
            if isinstance(found, Tunable):
                return self.meant.get(found.name, found.default)
            if isinstance(found, Var):
                if found.name not in self.meant:
                    raise Refusal(
                        f"{node.id}, a symbol that no argument has as a size",
                        "symbols in annotations",
                        f"def {self.source.name}(group, X: Buffer[N]):",
                    )
                return self.meant[found.name]
            return found
        raise Refusal(f"{node.id}, which has no value here", "a name that is bound before")

    def of_Tuple(self, node: ast.Tuple) -> Any:
        return tuple(self.elements_of(node))

    def of_List(self, node: ast.List) -> Any:
        return self.elements_of(node)

    def elements_of(self, node: ast.Tuple | ast.List) -> list[Any]:
        """The values of a tuple or list, each as it is behind the last."""
        return [self.latest(v) for v in [self.value(e) for e in node.elts]]

    def of_ListComp(self, node: ast.ListComp) -> Any:
        return list(self.each_of(node))

    def of_GeneratorExp(self, node: ast.GeneratorExp) -> Any:
        return tuple(self.each_of(node))

    def each_of(self, node: ast.ListComp | ast.GeneratorExp) -> Iterator[Any]:
        """The values of a comprehension over what Python knows, which is written out."""
        (loop, *more), outer = node.generators, self.env
        items = self.value(loop.iter)
        if more or loop.ifs or not isinstance(items, (tuple, list, range, zip, enumerate)):
            raise Refusal(
                f"{spelled(node)}",
                "one loop over a tuple, without if; loops over range(...)",
                "x, y = (group.load(A[i:], shape=(16,)) for A in (X, Y))",
            )
        item: Any
        for item in items:
            names = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
            values = item if isinstance(loop.target, ast.Tuple) else (item,)
            if len(names) != len(values) or not all(isinstance(n, ast.Name) for n in names):
                raise Refusal(f"{spelled(loop.target)} in a comprehension", "names, one for each value")
            held = {
                n.id: self.settled(v)
                for n, v in zip(names, values, strict=True)
                if isinstance(n, ast.Name)
            }
            try:
                self.env = {**outer, **held}
                value = self.settled(self.value(node.elt))
                # What a called function has written to elements, the names around have, too.
                outer.update({n: v for n, v in self.env.items() if n in outer and n not in held})
            finally:
                self.env = outer
            yield value

    def of_Slice(self, node: ast.Slice) -> Any:
        parts = (None if e is None else self.value(e) for e in (node.lower, node.upper, node.step))
        return slice(*parts)

    def of_Lambda(self, node: ast.Lambda) -> Any:
        a = node.args
        if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or a.defaults:
            raise Refusal("a lambda with defaults, * or /", "plain parameters", "lambda i, j: (j, i)")
        return Lambda(node, tuple(x.arg for x in a.args), dict(self.env))

    # -- arrays --

    def load(self, view: ArrayView, shape: Shape | None, vector: bool = False, fill: Any = None) -> Tile:
        """``group.load``, ``group.vload``"""
        if self.items and not view.items:
            view = replace(view, items=self.items_shape)
        made = arrays.load(self.b, view, shape, self.stem, vector or self.items, fill)
        self.accessed(view)
        return made

    def store(self, view: ArrayView, value: Any) -> None:
        """``group.store``"""
        self.check_written(view)
        if self.items and not view.items:
            view = replace(view, items=self.items_shape)
        arrays.store(self.b, view, value, tuple(self.within.within))
        self.accessed(view, writes=True)

    def write_out(self, out: Any, made: Tile) -> Any:
        """``out=``: the active elements of a result are written to a tile."""
        if not isinstance(out, Tile) or out.vector:
            raise Refusal(f"out={described(out)}", "a tile that is not a vector")
        if made.shape != out.shape:
            raise Refusal(f"a result of shape {made.shape} for out= of shape {out.shape}", "equal shapes")
        value = tile_elements.written(self.b, out, _cast(made, out), made.mask, ())
        self.replaced(out, value)
        return self.latest(out)

    # -- attributes, indices, calls --

    def of_Attribute(self, node: ast.Attribute) -> Any:
        return self.attribute(self.value(node.value), node.attr)

    def attribute(self, of: Any, name: str) -> Any:
        """``of.name``"""
        if isinstance(of, (GroupScope, Item)) and name == "barrier":
            raise WrongScope(
                "a barrier, which is not compiled: items execute each line together, and "
                "read nothing that others have written",
                "kernel.simulate, a second launch",
            )
        if isinstance(of, GroupScope):
            if name in METHODS:
                return BoundMethod(name, of, METHODS[name])
            if name in ATTRIBUTES:
                return getattr(of, name)
            raise Refusal(f"group.{name}", " ".join([*ATTRIBUTES, *METHODS]))
        if isinstance(of, ArrayView):
            return self.of_array(of, name)
        if isinstance(of, Item):
            if name in ITEM_METHODS[of.scope]:
                return BoundMethod(name, of, ITEM_METHODS[of.scope][name])
            raise Refusal(f"`.{name}` of a {of.scope.value[:-1]}", " ".join(ITEM_METHODS[of.scope]))
        if isinstance(of, (int, float)) and not isinstance(of, bool) and name == "dtype":
            raise Refusal(f"the type of the number {of}", "types of tiles and arrays")
        if isinstance(of, Tile):
            return self.of_tile(of, name)
        try:
            return getattr(of, name)
        except AttributeError as error:
            raise Refusal(str(error)) from None

    def of_array(self, of: ArrayView, name: str) -> Any:
        if name == "shape":
            return arrays.sizes(self.b, of)
        if name == "T":
            return replace(of, along=of.along[::-1])
        if name in ("dtype", "ndim"):
            return of.tensor.dtype if name == "dtype" else of.ndim
        raise Refusal(
            f"`.{name}` of an array",
            "shape dtype ndim T, slices; of a tile more",
            "x = group.load(X[i:], shape=(16,))",
        )

    def of_tile(self, of: Tile, name: str) -> Any:
        if name in ("shape", "ndim", "T", "mask"):
            self.b.not_of_elements(f"`.{name}`")
        if name in ("shape", "dtype"):
            return of.own if name == "shape" else of.dtype
        if name == "ndim":
            return len(of.own)
        if name == "T":
            return tile_elements.transposed(self.b, of)
        if name == "mask":
            return tile_elements.inactive(of)
        of_each = ("astype", "vec", "copy", "dot", "filled", *REDUCTIONS, *RUNNING)
        if of.items and name not in of_each:
            raise Refusal(
                f"`.{name}` of a value of each item",
                " ".join(["shape", "dtype", "ndim", "T", "mask", *of_each]),
            )
        if name in TILE_METHODS:
            return BoundMethod(name, of, TILE_METHODS[name])
        known = ["shape", "dtype", "ndim", "T", "mask", *TILE_METHODS]
        raise Refusal(f"`.{name}` of {of}", " ".join(known))

    def of_Subscript(self, node: ast.Subscript) -> Any:
        viewed = self.viewed
        of, self.viewed = self.value(node.value), False
        item = self.value(node.slice)
        items = item if isinstance(item, tuple) else (item,)
        if isinstance(of, ArrayView):
            return self.part_of(of, items, viewed)
        item = self.b.known(item)
        if isinstance(of, Tile):
            return tile_elements.taken(self.b, of, items)
        if is_static(item):
            return self.python(operator.getitem, of, item)
        raise Refusal(f"{described(of)} at an index that is known at run time only", "tiles and arrays")

    def part_of(self, of: ArrayView, items: tuple[Any, ...], viewed: bool) -> Any:
        """``of[items]``: a part of an array, or elements that are read. ``viewed``: a part if possible."""
        picked = [i for i in items if isinstance(i, Tile) and i.shape]
        lazy = (
            self.items
            and not any(i.own for i in picked)
            and (viewed or any(i is None or (isinstance(i, slice) and i != slice(None)) for i in items))
        )
        if picked and not lazy:
            made = arrays.gathered(self.b, of, items, self.stem)
            self.accessed(of)
            return made
        view = arrays.sliced(self.b, of, items, self.items_shape)
        if view.ndim:
            return arrays.decided(self.b, view, tuple(self.within.within))
        if picked:
            return self.load(view, ())
        value = arrays.element(self.b, view, self.stem)
        self.accessed(view)
        return value

    def of_Call(self, node: ast.Call) -> Any:
        callee = self.value(node.func)
        args: list[Any] = []
        marks: list[int] = []  # where the statements behind each begin
        for a in node.args:
            self.viewed = isinstance(a, ast.Subscript) and takes_parts(callee)
            args += list(self.value(a.value)) if isinstance(a, ast.Starred) else [self.value(a)]
            marks += [len(self.b.stmts)] * (len(args) - len(marks))
        self.viewed = False
        words: dict[str, Any] = {}
        for k in node.keywords:
            if k.arg is None:
                raise Refusal("`**` in a call", "arguments one by one")
            words[k.arg] = self.value(k.value)
            marks.append(len(self.b.stmts))
        values = [self.still(v, since) for v, since in zip((*args, *words.values()), marks, strict=True)]
        return called(
            self, callee, values[: len(args)], dict(zip(words, values[len(args) :], strict=True))
        )


def takes_parts(callee: Any) -> bool:
    """Whether an index of an array in a call's arguments is a part of it: those of the group's methods and
    of intrinsics."""
    if isinstance(callee, BoundMethod):
        return isinstance(callee.of, GroupScope)
    family = family_of(callee)
    return callee is atomic_ref or (family is not None and bool(family.intrinsics))


def _cast(made: Tile, out: Tile) -> Expr:
    if made.dtype.kind == "float" and out.dtype.kind != "float":
        raise Refusal(
            f"a result of type {type_named(made.dtype)} for out= of type {type_named(out.dtype)}",
            "a type that holds it",
        )
    return cast(made.expr, out.dtype)
