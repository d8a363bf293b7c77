"""Sums of 8-bit floats in explicit kernels, which move to f32 after at most 128 products (``math=ieee``).

    for turn in 0..36:                   held = 0
        wait landed                      for pair in 0..18:
        dot_async(acc, a, b)                 even = 0; wait landed; dot_async(even, a, b)
        dot_wait(1); free          ->        acc = acc + held
                                             odd = 0; wait landed; dot_async(odd, a, b)
                                             part_wait(1, even, acc); free; acc = acc + even
                                             part_wait(0, odd, acc); free; held = odd
                                         acc = acc + held

While the matrix unit makes one part of a sum, the part before it is added to ``acc``, so that additions
take no time of their own. At the end of a pair all products have ended: where products run across the end
of an iteration, ptxas does not see which registers they still write, and waits after each instruction (its
warning C7514). A part is one step of the sum, or as many as 128 products have. The steps that are left
behind the last pair are parts that nothing runs beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transconv.ir import (
    DOT_ASYNC,
    EXACT_TERMS,
    ONE,
    PART_WAIT,
    ZERO,
    Alloc,
    Const,
    Expr,
    For,
    FuncCall,
    SlotTile,
    Stmt,
    Update,
    Var,
    lanes_of,
    seq,
)

PAIR = Var("pair")


@dataclass(frozen=True, slots=True)
class Multiplying:
    """A consumer's sum ``acc`` over the loop ``turns``. ``start`` are the statements of a step that add
    its product to an accumulator and go on to the next slot; ``free`` those that free the slot of so many
    steps before."""

    turns: For
    acc: Alloc
    each: int  # steps of a part
    start: Callable[[Var, Expr], tuple[Stmt, ...]]
    free: Callable[[int], tuple[Stmt, ...]]

    def products(self, acc: Var, first: Expr, steps: range) -> list[Stmt]:
        """Start the products of some steps behind the ``first``."""
        return [s for i in steps for s in self.start(acc, first + i)]

    def zero(self, acc: Var) -> Alloc:
        return Alloc(acc, self.acc.lanes, self.acc.init)

    def add(self, part: Var) -> Update:
        return Update(self.acc.var, self.acc.var + part)


def steps_of_a_part(left: SlotTile, right: SlotTile, precision: str, slots: int) -> int:
    """How many steps have 128 products, and leave one of the ``slots`` to be filled; 0 if sums of these
    operands are not moved."""
    if not (precision == "ieee" and left.dtype.is_short and right.dtype.is_short):
        return 0
    summed = next(x for x in lanes_of(left) if x in lanes_of(right))
    return max(1, min(EXACT_TERMS // summed.extent, slots - 1))


def in_parts(m: Multiplying) -> tuple[Stmt, ...]:
    """The statements of the whole sum, behind which all slots are free."""
    even, odd, held = (Var(name, m.acc.var.type) for name in ("even", "odd", "held"))
    each, turns = m.each, m.turns
    both = 2 * each
    pairs, until = turns.stop // both, None if turns.until is None else turns.until // both
    first, second, others = PAIR * both, PAIR * both + each, range(1, each)
    body = seq(
        m.zero(even), *m.products(even, first, range(1)), m.add(held), *m.products(even, first, others),
        m.zero(odd), *m.products(odd, second, range(1)),
        FuncCall(PART_WAIT, (ONE, even, m.acc.var)), *_freed(m, range(each + 1, 1, -1)), m.add(even),
        *m.products(odd, second, others),
        FuncCall(PART_WAIT, (ZERO, odd, m.acc.var)), *_freed(m, range(each, 0, -1)), Update(held, odd))
    whole: list[Stmt] = []
    if pairs:
        whole = [m.zero(held), For(PAIR, pairs, body, until=until), m.add(held)]
    if until is not None or turns.stop % both:
        alone = seq(m.zero(even), *m.products(even, turns.var, range(1)),
                    FuncCall(PART_WAIT, (ZERO, even, m.acc.var)), *m.free(1), m.add(even))
        start = Const(pairs * both) if until is None else until * both
        whole.append(For(turns.var, turns.stop, alone, start=start, until=turns.until))
    return tuple(whole)


def in_groups(m: Multiplying, landed: tuple[Stmt, ...], pairs: list[tuple[SlotTile, SlotTile]],
              onward: list[Stmt]) -> tuple[Stmt, ...]:
    """The statements of a whole sum of groups of steps, whose products have these ``pairs`` of operands in
    a slot that has ``landed``. ``onward``: those that go on to the next slot."""
    held = Var("held", m.acc.var.type)
    body, before = list(landed), held
    for at in range(0, len(pairs), m.each):
        part = Var(f"part{at // m.each}", m.acc.var.type)
        first, *others = (FuncCall(DOT_ASYNC, (part, *pair)) for pair in pairs[at:at + m.each])
        body += [m.zero(part), first]
        body += [FuncCall(PART_WAIT, (ONE, before, m.acc.var))] if at else []
        body += [m.add(before), *others]
        before = part
    body += [*onward, FuncCall(PART_WAIT, (ZERO, before, m.acc.var)), *m.free(1), Update(held, before)]
    return m.zero(held), replace(m.turns, body=seq(*body), stages=0), m.add(held)


def _freed(m: Multiplying, before: range) -> list[Stmt]:
    return [s for steps in before for s in m.free(steps)]
