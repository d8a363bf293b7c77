"""``simplify`` and ``prove``: rules applied bottom-up until nothing changes.

The rules are one function for each kind of node. A rule takes a node whose children are simplified. It
returns an equal expression, which the caller simplifies again, or the node itself if no case applies.
``again`` simplifies an expression that a rule builds to decide.

``reason`` says why a condition holds, in words: the facts that a proof rests on, with numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import permutations
from operator import is_
from typing import Any

from transconv import ir
from transconv.simplify.division import (
    Again,
    both_bounds,
    collect,
    compare,
    divide,
    equate,
    negate,
    remainder,
)
from transconv.simplify.facts import NO_FACTS, Facts, forget_simplified
from transconv.simplify.polynomial import expand, is_polynomial, rebuild
from transconv.simplify.presburger import decide
from transconv.simplify.ranges import range_of, range_of_poly

MAX_STEPS = 100
MAX_REMEMBERED = 100_000

# Called with the name of a rule, the expression before and after it, and the facts.
Witness = Callable[[str, ir.Expr, ir.Expr, Facts], None]
_witness: ContextVar[Witness | None] = ContextVar("_witness", default=None)


@contextmanager
def witnessed(by: Witness) -> Iterator[None]:
    """Within ``with``, call ``by`` with every rewrite and verdict of this thread, inner nodes first,
    including those that change nothing. Results that existing ``Facts`` have cached are not rewritten
    again."""
    forget_simplified()
    token = _witness.set(by)
    try:
        yield
    finally:
        _witness.reset(token)
        forget_simplified()


def tell(rule: str, before: ir.Expr, after: ir.Expr, facts: Facts) -> None:
    """Call the witness of this thread, if there is one, with a rewrite or a verdict."""
    if (witness := _witness.get()) is not None:
        witness(rule, before, after, facts)


def simplify(e: ir.Expr, facts: Facts = NO_FACTS) -> ir.Expr:
    """An equal expression of the same type that is cheaper to compute and shorter to read.

    Equal for all values that the facts allow, except where a divisor is 0. Division rounds down.
    Positions are unbounded integers; arithmetic of other integers wraps around and is not rearranged,
    nor are floats reassociated. The result simplifies to itself, and has no more operations than ``e``."""
    if facts.simple.get(e) is e:  # most of what is asked for
        return e
    facts.forget_if_large(MAX_REMEMBERED)
    made = _simple(e, facts)
    return made if operations(made) <= operations(e) else _short(e, facts)


@functools.lru_cache(maxsize=1 << 15)
def operations(e: ir.Node) -> int:
    """The number of operations of an expression: its nodes other than constants, variables and lanes; one
    that occurs twice counts twice."""
    return (not isinstance(e, (ir.Const, ir.Lane, ir.Var))) + sum(map(operations, e.children()))


def _short(e: ir.Expr, facts: Facts) -> ir.Expr:
    """An expression whose normal form has more operations, as ``(x - 1) // 4`` has: with simplified
    children."""
    seen: dict[ir.Expr, None] = {}
    while e not in seen:
        seen[e] = None
        e = _mapped(e, lambda child: simplify(child, facts))
        if operations(made := _simple(e, facts)) <= operations(e):
            e = made
    return e


def prove(cond: ir.Expr, facts: Facts = NO_FACTS) -> bool:
    """Whether a condition is known to hold for all values that the facts allow: by the rules, or by what
    they leave undecided (see ``presburger``)."""
    verdict = decide(simplify(cond, facts), facts)
    return verdict is not None and verdict.truth


def _simple(e: ir.Expr, facts: Facts) -> ir.Expr:
    found = facts.simple.get(e)
    if found is not None:
        return found
    at, seen = e, {e: None}
    while len(seen) < MAX_STEPS:
        after = facts.simple.get(at)
        if after is None:
            made = _step(at, facts)
            after = _settled(made, at, facts)
            if _witness.get() is not None:
                tell(rule_name(at), at, made, facts)
                tell("settle", made, after, facts)
        if after in seen:
            break
        seen[at := after] = None
    for before in seen:
        facts.simple[before] = at
    return at


def rule_name(e: ir.Expr) -> str:
    """The name of the rule that rewrites a node, for witnesses and traces."""
    if isinstance(e, (ir.Const, ir.Lane, ir.Var)):
        return "leaf"
    if is_polynomial(e):
        return "collect"
    if isinstance(e, (ir.And, ir.Or)) and e.dtype.kind == "bool":
        return "logic"
    rule = RULES.get(type(e))
    return "children" if rule is None else rule.__name__


def _step(e: ir.Expr, facts: Facts) -> ir.Expr:
    """Simplify the children of a node, then apply the rule of its class once."""

    def again(x: ir.Expr) -> ir.Expr:
        return _simple(x, facts)

    if isinstance(e, (ir.Const, ir.Lane, ir.Var)):
        return e
    if is_polynomial(e):
        p = expand(e, lambda at: facts.poly(_simple(at, facts)))
        return rebuild(collect(p, facts, again), e.dtype)
    if isinstance(e, (ir.And, ir.Or)) and e.dtype.kind == "bool":
        return _logic(e, facts)
    rule = RULES.get(type(e))
    e = _with_simple_children(e, facts)
    return e if rule is None else rule(e, facts, again)


def _settled(made: ir.Expr, e: ir.Expr, facts: Facts) -> ir.Expr:
    """The result of a rule, cast to the type of the node; a constant if its value is known."""
    made = _typed(made, e.dtype)
    if isinstance(made, (ir.Const, ir.Lane)):  # a lane of extent 1 is kept: it gives a tile its shape
        return made
    if made.dtype.kind == "bool":
        known = facts.truth(made)
        return made if known is None else (ir.TRUE if known else ir.FALSE)
    if made.dtype.is_integer:
        value = range_of(made, facts).value
        return made if value is None else ir.Const(value, made.dtype)
    return made


def _typed(e: ir.Expr, dtype: ir.DType) -> ir.Expr:
    if e.dtype is dtype:
        return e
    if isinstance(e, ir.Const) and e.dtype.kind == dtype.kind:
        return ir.Const(ir.held_constant(e.value, dtype), dtype)
    return ir.Cast(e, dtype)


def _with_simple_children(e: ir.Expr, facts: Facts) -> ir.Expr:
    return _mapped(e, lambda child: _simple(child, facts))


def _mapped(e: ir.Expr, child: Callable[[ir.Expr], ir.Expr]) -> ir.Expr:
    """A node with other children."""

    def new(value: Any) -> Any:
        if isinstance(value, ir.Expr):
            # Lanes are kept: a Reduce and a Spread name lanes.
            return value if isinstance(value, ir.Lane) else child(value)
        return tuple(map(new, value)) if isinstance(value, tuple) else value

    old = ir.field_values(e)
    made = [new(value) for value in old]
    return e if all(map(is_, made, old)) else type(e)(*made)


def _logic(e: ir.Logic, facts: Facts) -> ir.Expr:
    """``a & b & ...`` (or ``a | b | ...``) without parts that follow from the others.

    In a conjunction each part is simplified under the assumption that the others hold. A part that is
    then true is dropped; one that is false makes the conjunction false. A disjunction is the dual.
    Two bounds that leave one value become an equality (see ``one_value``)."""
    kind, unit, zero = (ir.And, ir.TRUE, ir.FALSE) if isinstance(e, ir.And) else (ir.Or, ir.FALSE, ir.TRUE)
    parts: dict[ir.Expr, None] = {}
    for part in _flat(e, kind):
        parts.update(dict.fromkeys(_flat(_simple(part, facts), kind)))
    parts.pop(unit, None)
    if zero in parts:
        return zero
    kept = list(parts)
    for part in reversed(list(parts)):
        others = [o for o in kept if o is not part and _leaves(o) & _leaves(part)]
        if not others or _has_load(part):
            continue
        given = others if kind is ir.And else [_simple(ir.Not(o), facts) for o in others]
        simple = _simple(part, facts.knowing(given))
        if simple is zero:
            return zero
        if simple is unit:
            kept.remove(part)
    if kind is ir.And:
        return one_value(ir.all_of(kept), facts)
    total = kept[0] if kept else ir.FALSE
    for part in kept[1:]:
        total = ir.Or(total, part)
    return total


def one_value(e: ir.Expr, facts: Facts = NO_FACTS) -> ir.Expr:
    """A conjunction with ``x == c`` instead of bounds that leave one value, ``(c <= x) & (x < c + 1)``.

    The LLVM of Triton 3.6 folds such a pair to false if x is a sum of remainders."""
    parts = ir.conjuncts(e)
    for low, high in permutations(parts, 2):
        if (equation := both_bounds(low, high, facts)) is not None:
            kept = [equation if part is low else part for part in parts if part is not high]
            return one_value(ir.all_of(kept), facts)
    return e


def _flat(e: ir.Expr, kind: type[ir.Logic]) -> list[ir.Expr]:
    if isinstance(e, kind) and e.dtype.kind == "bool":
        return _flat(e.a, kind) + _flat(e.b, kind)
    return [e]


@functools.lru_cache(maxsize=1 << 14)
def _leaves(e: ir.Expr) -> frozenset[ir.Node]:
    return frozenset(n for n in ir.walk(e) if isinstance(n, (ir.Var, ir.Lane, ir.Load)))


def _has_load(e: ir.Expr) -> bool:
    return any(isinstance(n, ir.Load) for n in ir.walk(e))


Rule = Callable[[ir.Expr, Facts, Again], ir.Expr]


def extreme(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``min`` and ``max`` of integers."""
    if not isinstance(e, (ir.Min, ir.Max)) or not e.dtype.is_integer:
        return e
    kind, fold = (ir.Min, min) if isinstance(e, ir.Min) else (ir.Max, max)
    difference = range_of_poly(facts.poly(e.a) - facts.poly(e.b), facts)
    if difference.high <= 0:
        return e.a if kind is ir.Min else e.b
    if difference.low >= 0:
        return e.b if kind is ir.Min else e.a
    match e:
        case ir.Min(ir.Const(), b) | ir.Max(ir.Const(), b) if not isinstance(b, ir.Const):
            return kind(b, e.a)
        case ir.Min(ir.Min(x, ir.Const(int(c))), ir.Const(int(d))) | ir.Max(
            ir.Max(x, ir.Const(int(c))), ir.Const(int(d))
        ):
            return kind(x, ir.Const(fold(c, d), e.b.dtype))
        case ir.Min(ir.Min(x, y), z) | ir.Max(ir.Max(x, y), z) if z is x or z is y:
            return e.a
    return e


def choose(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """Selects with a known condition, equal values or boolean constants."""
    match e:
        case ir.Select(ir.Const(cond), yes, no):
            return yes if cond else no
        case ir.Select(_, yes, no) if yes is no:
            return yes
        case ir.Select(cond, ir.Const(True, _), ir.Const(False, _)) if e.dtype.kind == "bool":
            return cond
        case ir.Select(cond, ir.Const(False, _), ir.Const(True, _)) if e.dtype.kind == "bool":
            return ir.Not(cond)
        case ir.Select(ir.Not(cond), yes, no):
            return ir.Select(cond, no, yes)
    return e


def convert(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """Casts that keep the type, of constants, and of casts that lose nothing."""
    match e:
        case ir.Cast(x, to) if to is x.dtype:
            return x
        case ir.Cast(ir.Const(int(value)), to) if e.x.dtype.kind != "float" and to.is_integer:
            return ir.Const(ir.wrapped(int(value), to), to)
        case ir.Cast(ir.Const(int(value)), to) if e.x.dtype.is_integer and to.kind == "float":
            # Integers up to 256 are exact in f16 and bf16; 8-bit floats have fewer digits.
            return ir.Const(float(value), to) if abs(value) <= min(256, 2**to.digits) else e
        case ir.Cast(ir.Cast(x, through), to) if _keeps(x.dtype, through) and to.is_integer:
            return ir.Cast(x, to)
    return e


def _keeps(inner: ir.DType, outer: ir.DType) -> bool:
    """Whether every value of ``inner`` is a value of the integer type ``outer``."""
    both = inner.kind != "float" and outer.is_integer
    return both and _holds(outer, *inner.limits)


def _holds(dtype: ir.DType, low: int, high: int) -> bool:
    least, most = dtype.limits
    return least <= low and high <= most


def shift(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``<<`` and ``>>`` by 0 and of constants."""
    match e:
        case ir.Shl(x, ir.Const(0)) | ir.Shr(x, ir.Const(0)):
            return x
        case ir.Shl(ir.Const(int(a)), ir.Const(int(n))) if 0 <= n < 64 and e.dtype.kind == "index":
            return ir.Const(a << n, e.dtype)
        case ir.Shr(ir.Const(int(a)), ir.Const(int(n))) if n >= 0 and e.dtype.kind == "index":
            return ir.Const(a >> n, e.dtype)
    return e


def exclusive(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``^`` of integers and booleans."""
    match e:
        case ir.Xor(ir.Const(int(a)), ir.Const(int(b))):
            return ir.Const(a ^ b, e.dtype)
        case ir.Xor(a, b) if a is b:
            return ir.Const(False if e.dtype.kind == "bool" else 0, e.dtype)
        case ir.Xor(x, ir.Const(0)) | ir.Xor(ir.Const(0), x):
            return x
        case ir.Xor(x, ir.Const(True, _)) | ir.Xor(ir.Const(True, _), x) if e.dtype.kind == "bool":
            return ir.Not(x)
    return e


def bits(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``&`` and ``|`` of integers."""
    match e:
        case ir.And(ir.Const(int(a)), ir.Const(int(b))):
            return ir.Const(a & b, e.dtype)
        case ir.Or(ir.Const(int(a)), ir.Const(int(b))):
            return ir.Const(a | b, e.dtype)
        case ir.And(a, b) | ir.Or(a, b) if a is b:
            return a
        case ir.And(_, ir.Const(0)) | ir.And(ir.Const(0), _):
            return ir.Const(0, e.dtype)
        case ir.Or(x, ir.Const(0)) | ir.Or(ir.Const(0), x):
            return x
    return e


def multiply(e: ir.Expr, facts: Facts, again: Again) -> ir.Expr:
    """``x * 1`` of integers that are no positions. Other products of them, which wrap around, and products
    of floats are not rewritten."""
    match e:
        case ir.Mul(x, ir.Const(1)) | ir.Mul(ir.Const(1), x) if (
            e.dtype.kind == "int" and x.dtype is e.dtype
        ):
            return x
    return e


RULES: dict[type[ir.Expr], Rule] = {
    ir.FloorDiv: divide,
    ir.Mod: remainder,
    ir.Min: extreme,
    ir.Max: extreme,
    ir.Select: choose,
    ir.Cast: convert,
    ir.Not: negate,
    ir.Lt: compare,
    ir.Le: compare,
    ir.Eq: equate,
    ir.Ne: equate,
    ir.Shl: shift,
    ir.Shr: shift,
    ir.Xor: exclusive,
    ir.And: bits,
    ir.Or: bits,
    ir.Mul: multiply,
}


def reason(condition: ir.Expr, facts: Facts) -> str:
    """The facts that decide a condition, such as ``qh - th + 1 in 0..28 by qh in 0..27, th in 0..1``, or
    ``qh*2 - th*2 is a multiple of 2`` for a test of divisibility."""
    match condition:
        case ir.Eq(ir.Mod(x, ir.Const(n)), ir.Const(0)):
            short = simplify(x, facts)
            multiple = f"is a multiple of {n}"
            return f"{ir.readable(short)} {multiple}" if short is not x else multiple
        case ir.Le(a, b) | ir.Lt(a, b) | ir.Eq(a, b):
            side, other = (b, a) if isinstance(a, ir.Const) else (a, b)
            short = simplify(side, facts)
            found = range_of(short, facts)
            used = _ranges_in_words([short, other], facts)
            if isinstance(short, (ir.Var, ir.Lane, ir.Const)) or None in (found.lo, found.hi):
                return used or f"{ir.readable(side)} is {ir.readable(short)}"
            return f"{ir.readable(short)} in {found.lo}..{found.hi}" + (f" by {used}" if used else "")
        case ir.Not(x):
            return reason(x, facts)
    return _ranges_in_words([condition], facts)


def _ranges_in_words(parts: Iterable[ir.Expr], facts: Facts) -> str:
    """``qh in 0..27, th in 0..1`` for the variables of the expressions whose ranges are finite."""
    leaves: set[ir.Var | ir.Lane] = set()
    for e in parts:
        leaves |= set(ir.free_vars(e)) | set(ir.find(e, ir.Lane))
    known = [(v, range_of(v, facts)) for v in sorted(leaves, key=lambda v: v.name)]
    return ", ".join(
        f"{v.name} in {r.lo}..{r.hi}" if r.lo != r.hi else f"{v.name} = {r.lo}"
        for v, r in known
        if r.lo is not None and r.hi is not None
    )
