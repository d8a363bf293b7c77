"""``simplify`` and ``prove``: rules applied bottom-up until nothing changes.

The rules are one function for each kind of node. A rule takes a node whose children are simplified. It
returns an equal expression, which the caller simplifies again, or the node itself if no case applies.
``again`` simplifies an expression that a rule builds to decide. Division and comparison have their own
files.

``reason`` says why a condition holds, in words: the facts that a proof rests on, with numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import permutations
from typing import Any

from transconv.ir import (
    FALSE,
    TRUE,
    And,
    Cast,
    Const,
    DType,
    Eq,
    Expr,
    FloorDiv,
    Lane,
    Le,
    Load,
    Logic,
    Lt,
    Max,
    Min,
    Mod,
    Mul,
    Ne,
    Node,
    Not,
    Or,
    Select,
    Shl,
    Shr,
    Var,
    Xor,
    all_of,
    conjuncts,
    field_names,
    find,
    free_vars,
    held_constant,
    readable,
    walk,
    wrapped,
)
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
Witness = Callable[[str, Expr, Expr, Facts], None]
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


def tell(rule: str, before: Expr, after: Expr, facts: Facts) -> None:
    """Call the witness of this thread, if there is one, with a rewrite or a verdict."""
    if (witness := _witness.get()) is not None:
        witness(rule, before, after, facts)


def simplify(e: Expr, facts: Facts = NO_FACTS) -> Expr:
    """An equal expression of the same type that is cheaper to compute and shorter to read.

    Equal for all values that the facts allow, except where a divisor is 0. Division rounds down.
    Positions are unbounded integers; arithmetic of other integers wraps around and is not rearranged,
    nor are floats reassociated. The result simplifies to itself, and has no more operations than ``e``.
    """
    if facts.simple.get(e) is e:  # most of what is asked for
        return e
    facts.forget_if_large(MAX_REMEMBERED)
    made = _simple(e, facts)
    return made if operations(made) <= operations(e) else _short(e, facts)


@functools.lru_cache(maxsize=1 << 15)
def operations(e: Node) -> int:
    """The number of operations of an expression: its nodes other than constants, variables and lanes; one
    that occurs twice counts twice."""
    return (not isinstance(e, (Const, Lane, Var))) + sum(map(operations, e.children()))


def _short(e: Expr, facts: Facts) -> Expr:
    """An expression whose normal form has more operations, as ``(x - 1) // 4`` has: with simplified
    children."""
    seen: dict[Expr, None] = {}
    while e not in seen:
        seen[e] = None
        e = _mapped(e, lambda child: simplify(child, facts))
        if operations(made := _simple(e, facts)) <= operations(e):
            e = made
    return e


def prove(cond: Expr, facts: Facts = NO_FACTS) -> bool:
    """Whether a condition is known to hold for all values that the facts allow: by the rules, or by what
    they leave undecided (see ``presburger``)."""
    verdict = decide(simplify(cond, facts), facts)
    return verdict is not None and verdict.truth


def _simple(e: Expr, facts: Facts) -> Expr:
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


def rule_name(e: Expr) -> str:
    """The name of the rule that rewrites a node, for witnesses and traces."""
    if isinstance(e, (Const, Lane, Var)):
        return "leaf"
    if is_polynomial(e):
        return "collect"
    if isinstance(e, (And, Or)) and e.dtype.kind == "bool":
        return "logic"
    rule = RULES.get(type(e))
    return "children" if rule is None else rule.__name__


def _step(e: Expr, facts: Facts) -> Expr:
    """Simplify the children of a node, then apply the rule of its class once."""

    def again(x: Expr) -> Expr:
        return _simple(x, facts)

    if isinstance(e, (Const, Lane, Var)):
        return e
    if is_polynomial(e):
        p = expand(e, lambda at: facts.poly(_simple(at, facts)))
        return rebuild(collect(p, facts, again), e.dtype)
    if isinstance(e, (And, Or)) and e.dtype.kind == "bool":
        return _logic(e, facts)
    rule = RULES.get(type(e))
    e = _with_simple_children(e, facts)
    return e if rule is None else rule(e, facts, again)


def _settled(made: Expr, e: Expr, facts: Facts) -> Expr:
    """The result of a rule, cast to the type of the node; a constant if its value is known."""
    made = _typed(made, e.dtype)
    if isinstance(made, (Const, Lane)):  # a lane of extent 1 is kept: it gives a tile its shape
        return made
    if made.dtype.kind == "bool":
        known = facts.truth(made)
        return made if known is None else (TRUE if known else FALSE)
    if made.dtype.is_integer:
        value = range_of(made, facts).value
        return made if value is None else Const(value, made.dtype)
    return made


def _typed(e: Expr, dtype: DType) -> Expr:
    if e.dtype is dtype:
        return e
    if isinstance(e, Const) and e.dtype.kind == dtype.kind:
        return Const(held_constant(e.value, dtype), dtype)
    return Cast(e, dtype)


def _with_simple_children(e: Expr, facts: Facts) -> Expr:
    return _mapped(e, lambda child: _simple(child, facts))


def _mapped(e: Expr, child: Callable[[Expr], Expr]) -> Expr:
    """A node with other children."""

    def new(value: Any) -> Any:
        if isinstance(value, Expr):
            # Lanes are kept: a Reduce and a Spread name lanes.
            return value if isinstance(value, Lane) else child(value)
        return tuple(map(new, value)) if isinstance(value, tuple) else value

    old = [getattr(e, name) for name in field_names(type(e))]
    made = [new(value) for value in old]
    return e if all(a is b for a, b in zip(made, old, strict=True)) else type(e)(*made)


def _logic(e: Logic, facts: Facts) -> Expr:
    """``a & b & ...`` (or ``a | b | ...``) without parts that follow from the others.

    In a conjunction each part is simplified under the assumption that the others hold. A part that is
    then true is dropped; one that is false makes the conjunction false. A disjunction is the dual.
    Two bounds that leave one value become an equality (see ``one_value``).
    """
    kind, unit, zero = (And, TRUE, FALSE) if isinstance(e, And) else (Or, FALSE, TRUE)
    parts: dict[Expr, None] = {}
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
        given = others if kind is And else [_simple(Not(o), facts) for o in others]
        simple = _simple(part, facts.knowing(given))
        if simple is zero:
            return zero
        if simple is unit:
            kept.remove(part)
    if kind is And:
        return one_value(all_of(kept), facts)
    total = kept[0] if kept else FALSE
    for part in kept[1:]:
        total = Or(total, part)
    return total


def one_value(e: Expr, facts: Facts = NO_FACTS) -> Expr:
    """A conjunction with ``x == c`` instead of bounds that leave one value, ``(c <= x) & (x < c + 1)``.

    The LLVM of Triton 3.6 folds such a pair to false if x is a sum of remainders.
    """
    parts = conjuncts(e)
    for low, high in permutations(parts, 2):
        if (equation := both_bounds(low, high, facts)) is not None:
            kept = [equation if part is low else part for part in parts if part is not high]
            return one_value(all_of(kept), facts)
    return e


def _flat(e: Expr, kind: type[Logic]) -> list[Expr]:
    if isinstance(e, kind) and e.dtype.kind == "bool":
        return _flat(e.a, kind) + _flat(e.b, kind)
    return [e]


def _leaves(e: Expr) -> frozenset[Node]:
    return frozenset(n for n in walk(e) if isinstance(n, (Var, Lane, Load)))


def _has_load(e: Expr) -> bool:
    return any(isinstance(n, Load) for n in walk(e))


Rule = Callable[[Expr, Facts, Again], Expr]


def extreme(e: Expr, facts: Facts, again: Again) -> Expr:
    """``min`` and ``max`` of integers."""
    if not isinstance(e, (Min, Max)) or not e.dtype.is_integer:
        return e
    kind, fold = (Min, min) if isinstance(e, Min) else (Max, max)
    difference = range_of_poly(facts.poly(e.a) - facts.poly(e.b), facts)
    if difference.high <= 0:
        return e.a if kind is Min else e.b
    if difference.low >= 0:
        return e.b if kind is Min else e.a
    match e:
        case Min(Const(), b) | Max(Const(), b) if not isinstance(b, Const):
            return kind(b, e.a)
        case Min(Min(x, Const(int(c))), Const(int(d))) | Max(Max(x, Const(int(c))), Const(int(d))):
            return kind(x, Const(fold(c, d), e.b.dtype))
        case Min(Min(x, y), z) | Max(Max(x, y), z) if z is x or z is y:
            return e.a
    return e


def choose(e: Expr, facts: Facts, again: Again) -> Expr:
    """Selects with a known condition, equal values or boolean constants."""
    match e:
        case Select(Const(cond), yes, no):
            return yes if cond else no
        case Select(_, yes, no) if yes is no:
            return yes
        case Select(cond, Const(True, _), Const(False, _)) if e.dtype.kind == "bool":
            return cond
        case Select(cond, Const(False, _), Const(True, _)) if e.dtype.kind == "bool":
            return Not(cond)
        case Select(Not(cond), yes, no):
            return Select(cond, no, yes)
    return e


def convert(e: Expr, facts: Facts, again: Again) -> Expr:
    """Casts that keep the type, of constants, and of casts that lose nothing."""
    match e:
        case Cast(x, to) if to is x.dtype:
            return x
        case Cast(Const(int(value)), to) if e.x.dtype.kind != "float" and to.is_integer:
            return Const(wrapped(int(value), to), to)
        case Cast(Const(int(value)), to) if e.x.dtype.is_integer and to.kind == "float":
            # Integers up to 256 are exact in f16 and bf16; 8-bit floats have fewer digits.
            return Const(float(value), to) if abs(value) <= min(256, 2**to.digits) else e
        case Cast(Cast(x, through), to) if _keeps(x.dtype, through) and to.is_integer:
            return Cast(x, to)
    return e


def _keeps(inner: DType, outer: DType) -> bool:
    """Whether every value of ``inner`` is a value of the integer type ``outer``."""
    both = inner.kind != "float" and outer.is_integer
    return both and _holds(outer, *inner.limits)


def _holds(dtype: DType, low: int, high: int) -> bool:
    least, most = dtype.limits
    return least <= low and high <= most


def shift(e: Expr, facts: Facts, again: Again) -> Expr:
    """``<<`` and ``>>`` by 0 and of constants."""
    match e:
        case Shl(x, Const(0)) | Shr(x, Const(0)):
            return x
        case Shl(Const(int(a)), Const(int(n))) if 0 <= n < 64 and e.dtype.kind == "index":
            return Const(a << n, e.dtype)
        case Shr(Const(int(a)), Const(int(n))) if n >= 0 and e.dtype.kind == "index":
            return Const(a >> n, e.dtype)
    return e


def exclusive(e: Expr, facts: Facts, again: Again) -> Expr:
    """``^`` of integers and booleans."""
    match e:
        case Xor(Const(int(a)), Const(int(b))):
            return Const(a ^ b, e.dtype)
        case Xor(a, b) if a is b:
            return Const(False if e.dtype.kind == "bool" else 0, e.dtype)
        case Xor(x, Const(0)) | Xor(Const(0), x):
            return x
        case Xor(x, Const(True, _)) | Xor(Const(True, _), x) if e.dtype.kind == "bool":
            return Not(x)
    return e


def bits(e: Expr, facts: Facts, again: Again) -> Expr:
    """``&`` and ``|`` of integers."""
    match e:
        case And(Const(int(a)), Const(int(b))):
            return Const(a & b, e.dtype)
        case Or(Const(int(a)), Const(int(b))):
            return Const(a | b, e.dtype)
        case And(a, b) | Or(a, b) if a is b:
            return a
        case And(_, Const(0)) | And(Const(0), _):
            return Const(0, e.dtype)
        case Or(x, Const(0)) | Or(Const(0), x):
            return x
    return e


def multiply(e: Expr, facts: Facts, again: Again) -> Expr:
    """``x * 1`` of integers that are no positions. Other products of them, which wrap around, and products
    of floats are not rewritten."""
    match e:
        case Mul(x, Const(1)) | Mul(Const(1), x) if e.dtype.kind == "int" and x.dtype is e.dtype:
            return x
    return e


RULES: dict[type[Expr], Rule] = {
    FloorDiv: divide,
    Mod: remainder,
    Min: extreme,
    Max: extreme,
    Select: choose,
    Cast: convert,
    Not: negate,
    Lt: compare,
    Le: compare,
    Eq: equate,
    Ne: equate,
    Shl: shift,
    Shr: shift,
    Xor: exclusive,
    And: bits,
    Or: bits,
    Mul: multiply,
}


def reason(condition: Expr, facts: Facts) -> str:
    """The facts that decide a condition, such as ``qh - th + 1 in 0..28 by qh in 0..27, th in 0..1``, or
    ``qh*2 - th*2 is a multiple of 2`` for a test of divisibility."""
    match condition:
        case Eq(Mod(x, Const(n)), Const(0)):
            short = simplify(x, facts)
            multiple = f"is a multiple of {n}"
            return f"{readable(short)} {multiple}" if short is not x else multiple
        case Le(a, b) | Lt(a, b) | Eq(a, b):
            side, other = (b, a) if isinstance(a, Const) else (a, b)
            short = simplify(side, facts)
            found = range_of(short, facts)
            used = _ranges_in_words([short, other], facts)
            if isinstance(short, (Var, Lane, Const)) or None in (found.lo, found.hi):
                return used or f"{readable(side)} is {readable(short)}"
            return f"{readable(short)} in {found.lo}..{found.hi}" + (f" by {used}" if used else "")
        case Not(x):
            return reason(x, facts)
    return _ranges_in_words([condition], facts)


def _ranges_in_words(parts: Iterable[Expr], facts: Facts) -> str:
    """``qh in 0..27, th in 0..1`` for the variables of the expressions whose ranges are finite."""
    leaves: set[Var | Lane] = set()
    for e in parts:
        leaves |= set(free_vars(e)) | set(find(e, Lane))
    known = [(v, range_of(v, facts)) for v in sorted(leaves, key=lambda v: v.name)]
    return ", ".join(
        f"{v.name} in {r.lo}..{r.hi}" if r.lo != r.hi else f"{v.name} = {r.lo}"
        for v, r in known
        if r.lo is not None and r.hi is not None
    )
