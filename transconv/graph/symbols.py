"""The symbols of torch's dynamic shapes as sizes: which names a graph has, what its guards tell of them,
and where a call tells their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add, floordiv, ge, le, mod, mul
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch.utils._sympy import functions

from transconv.graph.lowerings.table import NotOurs, ResultSpec
from transconv.graph.sizes import Fraction, Known, Length
from transconv.ir import LARGEST_SIZE, Const, Expr, Var, as_expr, value_at

ROUNDED, EXTREMES, DIVIDED, TIMES = (
    tuple(found for name in names.split() if (found := getattr(functions, name, None)))  # of this release
    for names in (
        "TruncToInt FloorToInt CeilToInt",
        "Max Min",
        "IntTrueDiv FloatTrueDiv",
        "FloatTrueMul FloatMul",
    )
)
OPERATIONS: tuple[tuple[Any, Callable[[Expr, Expr], Expr]], ...] = (
    (sympy.Add, add),
    (sympy.Mul, mul),
    (functions.FloorDiv, floordiv),
    ((functions.Mod, functions.PythonMod), mod),
)


class Told(NamedTuple):
    """The source of a symbol's value: an input, or a dim of one; it is a multiple of ``times``."""

    place: int
    dim: int | None
    times: int


class Symbols:
    """The symbols of a graph. ``values``: an example, in the order of ``told``; default: torch's own.
    ``ones``: terms that are 1 by a guard, as sizes are that torch broadcasts. ``bounded``: whether the
    ranges of guards are known; they may divide the sizes of calls among graphs."""

    def __init__(self, graph: fx.Graph, values: Sequence[int] = (), bounded: bool = True) -> None:
        self.known, self.bounded = Known(), bounded
        self.told: list[Told] = []
        self.names: dict[sympy.Symbol, Expr] = {}
        self.ones: set[sympy.Expr] = set()
        self.missing = ""
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        env = next((s.node.shape_env for n in graph.nodes for s in _symbolic(n.meta.get("val"))), None)
        if env is not None:
            self._enter(env, _places(placeholders), values)

    @property
    def any(self) -> bool:
        """Whether the graph has any."""
        return bool(self.told)

    def _enter(
        self, env: Any, places: Mapping[sympy.Symbol, tuple[int, int | None]], values: Sequence[int]
    ) -> None:
        guards = [g.expr for g in env.guards]
        equal = [g for g in guards if isinstance(g, sympy.Eq)]
        self.ones = {g.lhs if g.rhs == 1 else g.rhs for g in equal if 1 in g.args}
        for i, (symbol, (place, dim)) in enumerate(places.items()):
            times = _times(symbol, guards)
            reach = env.var_to_range.get(symbol) if self.bounded else None
            example = values[i] * times if values else int(_examples(env)[symbol])
            least = (
                int(reach.lower) if reach is not None and reach.lower.is_Integer else int(not self.bounded)
            )
            most = int(reach.upper) if reach is not None and reach.upper.is_Integer else LARGEST_SIZE
            var = self.known.name(example // times, -(-least // times), most // times)
            self.names[symbol] = var * times if times > 1 else var
            self.told.append(Told(place, dim, times))

    def values(self, given: Sequence[Any]) -> tuple[int, ...]:
        """The values of the names, in their order, of a call's inputs."""
        return tuple(
            [
                (int(given[t.place]) if t.dim is None else given[t.place].shape[t.dim]) // t.times
                for t in self.told
            ]
        )

    def by_name(self, values: Sequence[int]) -> dict[str, int]:
        """The same by name, derived ones too."""
        known = self.known
        first = dict(zip(known.names, values, strict=True))
        return first | {v.name: value_at(e, first) for v, e in known.derived.items() if isinstance(v, Var)}

    def length(self, n: Any) -> Length:
        """A size of torch's. Raises NotOurs for one that data tell."""
        if not isinstance(n, torch.SymInt):
            return int(n)
        return self._product(n.node.expr)

    def result(self, t: torch.Tensor) -> ResultSpec:
        """Shape, type and strides of a tensor without values. Raises NotOurs."""
        return ResultSpec(
            tuple([self.length(n) for n in t.shape]), t.dtype, tuple([self.length(n) for n in t.stride()])
        )

    def number(self, n: Any) -> Length | Fraction:
        """A number of torch's, whole or broken. Raises NotOurs for one that data tell."""
        if isinstance(n, torch.SymFloat):
            return self._broken(n.node.expr)
        return self.length(n)

    def numbered(self, n: Any, values: Sequence[int]) -> int | float:
        """The value of a number for sizes of a call."""
        if isinstance(n, torch.SymFloat):
            whole = {
                s: value_at(e, dict(zip(self.known.names, values, strict=True)))
                for s, e in self.names.items()
            }
            return float(n.node.expr.subs(whole))
        return self.known.value(self.length(n), self.by_name(values))

    def _broken(self, e: Any) -> Fraction:
        """A broken number. Raises NotOurs."""
        if isinstance(e, sympy.Float):
            return Fraction.of(float(e))
        if isinstance(e, DIVIDED):
            over, under = (self._broken(x) for x in e.args)
            ratio: Fraction = over / under
            return ratio
        if isinstance(e, (sympy.Add, sympy.Mul)) and any(not x.is_integer for x in e.args):
            first, *rest = map(self._broken, e.args)
            for x in rest:
                first = first + x if isinstance(e, sympy.Add) else first * x
            return first
        return Fraction.of(self._product(e.args[0] if isinstance(e, functions.ToFloat) else e))

    def _product(self, e: sympy.Expr) -> Length:
        if isinstance(e, sympy.Mul) and e not in self.ones:
            found: Length = 1
            for x in e.args:
                found = found * self._product(x)
            return found
        return self.known.made(self._expr(e))

    def _expr(self, e: Any) -> Expr:
        """An expression of sympy. Raises NotOurs."""
        if e in self.ones:
            return as_expr(1)
        if isinstance(e, sympy.Integer):
            return as_expr(int(e))
        if isinstance(e, sympy.Symbol):
            if e not in self.names:
                raise NotOurs("a size that data tell")
            return self.names[e]
        if isinstance(e, ROUNDED) and (whole := _whole(e.args[0])) is not None:
            return self._expr(whole)
        if isinstance(e, sympy.Pow) and e.exp.is_Integer and 0 < e.exp <= 4:
            return math.prod([self._expr(e.base)] * int(e.exp), start=as_expr(1))
        if isinstance(e, (sympy.Max, sympy.Min, *EXTREMES)):
            return self._extreme(e)
        for kinds, op in OPERATIONS:
            if isinstance(e, kinds):
                return reduce(op, map(self._expr, e.args))
        raise NotOurs(f"a size that is {e}")

    def _extreme(self, e: Any) -> Expr:
        """The largest or least of several sizes: the one that is it for all sizes, or else the one that it
        is for the example, which is assumed. Of equal ones that is no number: torch has strides of
        ``max(1, n)``, which are those of n elements for all sizes but 0."""
        found = [self._expr(x) for x in e.args]
        order = ge if "Max" in type(e).__name__ else le
        for one in found:
            if all(one is other or self.known.proves(order(one, other)) for other in found):
                return one
        names = sorted(found, key=lambda x: isinstance(x, Const))
        values = [value_at(self.known.plain(x), self.known.like) for x in names]
        most = names[values.index((max if order is ge else min)(values))]
        for other in found:
            self.known.assume(order(most, other))
        return most


def _symbolic(val: Any) -> Iterable[torch.SymInt]:
    """The sizes in what a node has for a value."""
    if isinstance(val, torch.SymInt):
        return [val]
    if isinstance(val, torch.Tensor):
        sizes: Sequence[Any] = val.shape
        return [n for n in sizes if isinstance(n, torch.SymInt)]
    return []


def _places(placeholders: Sequence[fx.Node]) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Of each symbol, the first input that is it, or has it as a dim."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for i, node in enumerate(placeholders):
        val = node.meta.get("val")
        sizes: list[tuple[Any, int | None]] = []
        if isinstance(val, torch.SymInt):
            sizes = [(val, None)]
        elif isinstance(val, torch.Tensor):
            sizes = [(n, d) for d, n in enumerate(val.shape)]
        for n, d in sizes:
            if (
                isinstance(n, torch.SymInt)
                and isinstance(n.node.expr, sympy.Symbol)
                and (n.node.expr in _examples(n.node.shape_env))
            ):
                found.setdefault(n.node.expr, (i, d))
    return found


def _examples(env: Any) -> Mapping[Any, Any]:
    """The sizes of the call for which a graph was made, by symbol: none for those that data tell."""
    found: Mapping[Any, Any] = (
        env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    )
    return found


def _times(symbol: sympy.Symbol, guards: Sequence[Any]) -> int:
    """What the guards say that a symbol is a multiple of."""
    found = 1
    for e in guards:
        if not isinstance(e, sympy.Eq) or e.free_symbols != {symbol}:
            continue
        a, b = e.args
        for one, other in ((a, b), (b, a)):
            if isinstance(one, (functions.Mod, functions.PythonMod)) and other == 0:
                if one.args[0] == symbol and one.args[1].is_Integer:
                    found = math.lcm(found, int(one.args[1]))
            elif one == symbol and not other.is_Integer:
                content = other.primitive()[0]  # divides each term of a sum
                found = math.lcm(found, int(content) if content.is_Integer else 1)
    return found


def _whole(e: Any) -> Any:
    """What a product of fractions is where its factors are integers; else None."""
    args: Sequence[Any] = e.args
    if isinstance(e, functions.ToFloat):
        return args[0]
    if isinstance(e, sympy.Float) and e == int(e):
        return sympy.Integer(int(e))
    if not isinstance(e, (sympy.Mul, *TIMES)):
        return None
    parts = [_whole(x) for x in args]
    return None if None in parts else sympy.Mul(*parts)
