"""Index and mask expressions as SymPy's, and back.

=====================  ================================================================
here                   SymPy
=====================  ================================================================
a variable, a lane     a symbol whose name says what it is, ``m[0:128]@1M``, with
                       the assumptions that it is an integer and of the sign of its range
a variable that n      n times a symbol, ``x//n``
divides
``x // y``, ``x % y``  ``floor(x / y)``, ``Mod(x, y)``: both round down
``min``, ``max``       ``Min``, ``Max``
comparisons            relations
``& | ^ ~`` of         ``And``, ``Or``, ``Xor``, ``Not``
conditions
``select``             ``Piecewise``; of conditions ``ITE``
shifts by numbers      products, and ``floor`` of quotients
other operations of    functions without meaning for SymPy, ``bits_and(x, y)``
bits
=====================  ================================================================

Values are the same everywhere, the order of terms is SymPy's, and its constants have no width."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from math import lcm
from typing import TYPE_CHECKING, Any

from transconv import ir
from transconv.simplify.facts import NO_FACTS, Facts
from transconv.simplify.ranges import range_of
from transconv.support import Unsupported

if TYPE_CHECKING:
    import sympy

BITS: dict[str, type[ir.Binary]] = {
    "bits_and": ir.And,
    "bits_or": ir.Or,
    "bits_xor": ir.Xor,
    "shl": ir.Shl,
    "shr": ir.Shr,
}
_BITS = {kind: name for name, kind in BITS.items()}
_SYMBOL = re.compile(
    r"(?P<name>.*?)"
    r"(\[0:(?P<extent>\d+)\]@(?P<axis>-?\d+)(?P<kind>[BMNK]?)|:(?P<dtype>\w+))?"
    r"(//(?P<n>\d+))?"
)


def to_sympy(e: ir.Expr, facts: Facts = NO_FACTS) -> sympy.Basic:
    """The expression in SymPy, whose symbols have what the facts say of their signs and divisors. Raises
    Unsupported for a node that is no arithmetic of integers or conditions, such as a load."""
    import sympy

    def of(x: ir.Expr) -> Any:
        return to_sympy(x, facts)

    match e:
        case ir.Const(value) if e.dtype.kind != "float":
            return sympy.true if value is True else sympy.false if value is False else sympy.Integer(value)
        case ir.Var() | ir.Lane():
            return _symbol(e, facts)
        case ir.Neg(x) if e.dtype.kind == "index":
            return -of(x)
        case ir.Not(x) if e.dtype.kind == "bool":
            return sympy.Not(of(x))
        case ir.Cast(x) if e.dtype.kind == "index" and x.dtype.kind in ("index", "int"):
            return of(x)
        case ir.Cast(x) if e.dtype.kind == "index" and x.dtype.kind == "bool":
            return sympy.Piecewise((1, of(x)), (0, True))
        case ir.Select(cond, yes, no) if e.dtype.kind == "bool":
            return sympy.ITE(of(cond), of(yes), of(no))
        case ir.Select(cond, yes, no) if e.dtype.kind == "index":
            return sympy.Piecewise((of(yes), of(cond)), (of(no), True))
        case ir.Call(name, args) if e.dtype.kind == "index" and name in ("quotient", "remainder"):
            return sympy.Function(name)(*map(of, args))
        case ir.Binary() if {e.a.dtype.kind, e.b.dtype.kind} in ({"index"}, {"bool"}):
            return _binary(e, of(e.a), of(e.b))
    raise Unsupported(f"`{e}` is no arithmetic of positions or conditions, so SymPy has no form of it")


def _binary(e: ir.Binary, a: Any, b: Any) -> Any:
    import sympy

    if e.dtype.kind == "bool" and e.a.dtype.kind == "bool":
        kinds: dict[type[ir.Expr], Callable[[Any, Any], Any]] = {
            ir.And: sympy.And,
            ir.Or: sympy.Or,
            ir.Xor: sympy.Xor,
            ir.Eq: sympy.Equivalent,
            ir.Ne: sympy.Xor,
        }
        return kinds[type(e)](a, b)
    match e:
        case ir.Shl(_, ir.Const(int(n))) if n >= 0:
            return a * 2**n
        case ir.Shr(_, ir.Const(int(n))) if n >= 0:
            return sympy.floor(a / 2**n)
        case ir.And() | ir.Or() | ir.Xor() | ir.Shl() | ir.Shr():
            return sympy.Function(_BITS[type(e)])(a, b)
    meant: dict[type[ir.Expr], Callable[[Any, Any], Any]] = {
        ir.Add: lambda x, y: x + y,
        ir.Sub: lambda x, y: x - y,
        ir.Mul: lambda x, y: x * y,
        ir.FloorDiv: lambda x, y: sympy.floor(x / y),
        ir.Mod: sympy.Mod,
        ir.Min: sympy.Min,
        ir.Max: sympy.Max,
        ir.Lt: sympy.Lt,
        ir.Le: sympy.Le,
        ir.Eq: sympy.Eq,
        ir.Ne: sympy.Ne,
    }
    return meant[type(e)](a, b)


def _symbol(e: ir.Var | ir.Lane, facts: Facts) -> Any:
    import sympy

    if e.dtype is ir.boolean:
        return sympy.Symbol(f"{e.name}:bool")
    r, n = range_of(e, facts), facts.stated_multiple(e)
    if isinstance(e, ir.Lane):
        name = f"{e.name}[0:{e.extent}]@{e.axis}{e.kind}"
    else:
        name = e.name if e.dtype is ir.index else f"{e.name}:{e.dtype.name}"
    given: dict[str, bool] = {"integer": True}
    if r.low >= 0:
        given["positive" if r.low > 0 else "nonnegative"] = True
    elif r.high <= 0:
        given["negative" if r.high < 0 else "nonpositive"] = True
    return sympy.Symbol(name, **given) if n <= 1 else n * sympy.Symbol(f"{name}//{n}", **given)


def from_sympy(e: sympy.Basic) -> ir.Expr:
    """The expression of one of SymPy's, over the variables and lanes that its symbols name. Raises
    Unsupported for what ``to_sympy`` does not make and has no meaning here."""
    import sympy

    if isinstance(e, (sympy.floor, sympy.Mod)):
        return _division(e)
    if isinstance(e, sympy.Integer):
        return ir.Const(int(e))
    if e is sympy.true or e is sympy.false:
        return ir.TRUE if e is sympy.true else ir.FALSE
    if isinstance(e, sympy.Symbol):
        return _named(e.name)
    if isinstance(e, sympy.Pow) and e.exp.is_Integer and e.exp > 0:
        return functools.reduce(ir.Mul, [from_sympy(e.base)] * int(e.exp))
    if isinstance(e, sympy.ceiling):
        return ir.Neg(from_sympy(sympy.floor(-e.args[0])))
    if isinstance(e, sympy.Piecewise):
        return _chosen(e)
    args = _without_fractions(e) if isinstance(e, sympy.core.relational.Relational) else e.args
    if isinstance(e, (sympy.Add, sympy.Mul)):
        args = sorted(args, key=lambda x: x.is_Integer)  # constants behind
    parts = [from_sympy(x) for x in args]
    if isinstance(e, (sympy.Gt, sympy.Ge)):
        return (ir.Lt if isinstance(e, sympy.Gt) else ir.Le)(parts[1], parts[0])
    name = type(e).__name__
    if name in BITS and len(parts) == 2:
        return BITS[name](*parts)
    if name in ("quotient", "remainder"):
        return ir.Call(name, tuple(parts))
    if isinstance(e, sympy.Not):
        return ir.Not(parts[0])
    if isinstance(e, sympy.ITE):
        return ir.Select(*parts)
    for kind, made in (
        (sympy.Add, ir.Add),
        (sympy.Mul, ir.Mul),
        (sympy.Min, ir.Min),
        (sympy.Max, ir.Max),
        (sympy.And, ir.And),
        (sympy.Or, ir.Or),
        (sympy.Xor, ir.Xor),
        (sympy.Lt, ir.Lt),
        (sympy.Le, ir.Le),
        (sympy.Eq, ir.Eq),
        (sympy.Ne, ir.Ne),
        (sympy.Equivalent, ir.Eq),
    ):
        if isinstance(e, kind):
            return functools.reduce(made, parts)
    raise Unsupported(f"SymPy's `{e}` has no form here: {name} is no arithmetic of integers or conditions")


def _without_fractions(e: Any) -> tuple[Any, ...]:
    """The sides of a relation times their common denominator: SymPy divides ``2*a < a + b`` by 2."""
    sides = [x.as_numer_denom() for x in e.args]
    if all(under == 1 for _, under in sides) or not all(under.is_Integer for _, under in sides):
        return tuple(e.args)
    common = lcm(*(int(under) for _, under in sides))
    return tuple((over * (common // int(under))).expand() for over, under in sides)


def _division(e: Any) -> ir.Expr:
    """``floor`` of a quotient, or ``Mod`` of integers; of fractions, which SymPy may make, by their
    common denominator."""
    import sympy

    if isinstance(e, sympy.Mod):
        (a, c), (b, d) = (sympy.fraction(sympy.together(x)) for x in e.args)
        common = sympy.lcm(c, d)
        rest = ir.Mod(from_sympy(a * (common / c)), from_sympy(b * (common / d)))
        return rest if common == 1 else ir.FloorDiv(rest, from_sympy(common))
    a, b = sympy.fraction(sympy.together(e.args[0]))
    return from_sympy(a) if b == 1 else ir.FloorDiv(from_sympy(a), from_sympy(b))


def _chosen(e: Any) -> ir.Expr:
    """The cases of a ``Piecewise``, the last of which holds always."""
    *first, (last, always) = e.args
    if always != True:  # noqa: E712  SymPy's true
        raise Unsupported(f"SymPy's `{e}` has no value where none of its conditions holds")
    made = from_sympy(last)
    for value, cond in reversed(first):
        made = ir.Select(from_sympy(cond), from_sympy(value), made)
    return made


def _named(name: str) -> ir.Expr:
    found = _SYMBOL.fullmatch(name)
    assert found is not None
    made: ir.Expr
    if found["extent"]:
        made = ir.Lane(found["name"], int(found["extent"]), int(found["axis"]), found["kind"])
    else:
        named = found["dtype"] or "index"
        kind: ir.DType = ir.boolean if named == "bool" else ir.type_named(named)
        made = ir.Var(found["name"], kind)
        made = ir.Cast(made, ir.index) if kind.kind == "int" else made
    return ir.FloorDiv(made, ir.Const(int(found["n"]))) if found["n"] else made
