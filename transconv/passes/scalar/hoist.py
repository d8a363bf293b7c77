"""The pass ``hoist``: moves loop-invariant expressions out of the loop of the sum.

    for step in 0..9:                            A_m = (n*3136 + h*56 + w)*64
        kh = step // 3; kw = step % 3            for step in 0..9:
        a = load(A, n*3136*64 +          ->          kh = step // 3; kw = step % 3
                 (h + kh)*56*64 + ...)               a = load(A, kh*3584 + kw*64 + A_m + k)

Of the tiles that one persistent program computes, what all of them load is loaded once. Lets whose value
is invariant move as a whole. A sum is split into the part that changes and one invariant
part per set of lanes. The invariant conditions of a mask move together, per set of lanes.

Where accesses of a tensor differ in their constants alone, these are added last, to a pointer of 64
bits: the accesses share the sum of all other terms, and the assembler makes the constants parts of the
instructions. Inside a sum of 32 bits it could not, because it does not know that the sum does not
overflow. (LLVM's pass separate-const-offset-from-gep does this where it knows.) Not so where positions are
summed: there ptxas puts loads that share an address where their first products stand, and a step waits for
memory 14 times instead of twice.

    load(A, A_base_2 + m)       A_base_2 = h*W + 64     ->     load(A, A_base + m + 64)       A_base = h*W
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transconv import ir
from transconv.simplify import simplify


def hoist(kernel: ir.Kernel, apart: bool = False) -> ir.Kernel:
    """Move loop-invariant lets, addends and conditions in front of the serial loops. ``apart``: each
    address keeps its constant."""
    names = {v.name for v in ir.bound_vars(kernel)}
    return _Hoist(names, set() if apart else _shared(kernel)).rebuilt(kernel)


class _Hoist(ir.Mutator):
    def __init__(self, names: set[str], shared: set[tuple[str, frozenset[ir.Expr]]]) -> None:
        self.names, self.shared = names, shared
        self.taken: dict[str, int] = {}  # the last number given to each name
        self.scope: dict[ir.Var, tuple[ir.Lane, ...]] = {}

    def mutate_Let(self, let: ir.Let) -> ir.Stmt:
        if isinstance(load := let.value, ir.Load):
            let = ir.Let(
                let.var,
                replace(
                    load, offset=self.address(load.tensor, load.offset), mask=self.together(load.mask)
                ),
                let.origin,
            )
        self.scope[let.var] = ir.lanes_of(let.value, self.scope)
        return let

    def mutate_Store(self, at: ir.Store) -> ir.Stmt:
        return ir.Store(at.tensor, self.address(at.tensor, at.offset), at.value, self.together(at.mask))

    def address(self, tensor: ir.Tensor, e: ir.Expr) -> ir.Expr:
        """``grouped``; the constant is at the end if other accesses share the sum of the other terms."""
        terms, constant = _without_constant(e)
        if not constant or (tensor.name, frozenset(terms)) not in self.shared:
            return self.grouped(e)
        shared = self.grouped(_joined(terms))
        return shared + constant if constant > 0 else shared - -constant

    def grouped(self, e: ir.Expr) -> ir.Expr:
        """The same sum with terms of equal lanes next to each other, scalars first."""
        if not isinstance(e, (ir.Add, ir.Sub)):
            return e
        groups: dict[tuple[ir.Lane, ...], list[ir.Expr]] = {}
        for term in signed_terms(e):
            groups.setdefault(ir.lanes_of(term, self.scope), []).append(term)
        order = sorted(groups, key=lambda lanes: (len(lanes), [x.axis for x in lanes]))
        return ir.sum_of([_joined(groups[lanes]) for lanes in order])

    def together(self, mask: ir.Expr) -> ir.Expr:
        """The same conditions with those of equal lanes next to each other."""
        groups: dict[tuple[ir.Lane, ...], list[ir.Expr]] = {}
        for part in ir.conjuncts(mask):
            groups.setdefault(ir.lanes_of(part, self.scope), []).append(part)
        return ir.all_of([ir.all_of(parts) for parts in groups.values()])

    def mutate_Alloc(self, alloc: ir.Alloc) -> ir.Stmt:
        self.scope[alloc.var] = alloc.lanes
        return alloc

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        body = self.mutate(loop.body) or ir.Seq(())
        if loop.kind == "dealt":
            return self.dealt(loop, body)
        if loop.kind not in ("serial", "unroll"):
            return loop if body is loop.body else replace(loop, body=body)
        split = _Loop(self, loop.var, body)
        stmts = [split.statement(s) for s in ir.statements(body)]
        kept = ir.seq(*(s for s in stmts if s is not None))
        made = replace(loop, body=kept)
        return ir.seq(*split.outside, made)

    def dealt(self, loop: ir.For, body: ir.Stmt) -> ir.Stmt:
        """Elements that all tiles of a program read are loaded once, in front of its loop."""
        split = _Loop(self, loop.var, body)
        stored = {s.tensor for s in ir.find(body, ir.Store)}
        kept: list[ir.Stmt] = []
        for s in ir.statements(body):
            if (
                isinstance(s, ir.Let)
                and not ir.free_vars(s.value) & split.changing
                and not {x.tensor for x in ir.find(s.value, ir.MemoryRead)} & stored
            ):
                split.outside.append(s)
                split.changing.discard(s.var)
            else:
                kept.append(s)
        return ir.seq(*split.outside, loop if not split.outside else replace(loop, body=ir.seq(*kept)))

    def fresh(self, stem: str, lanes: Sequence[ir.Lane]) -> str:
        """A new name from a stem and the lanes along which the value varies: ``A_m``, ``A_base``."""
        name = "_".join([stem, *(x.name for x in lanes)]) if lanes else f"{stem}_base"
        number = self.taken.get(name, 1)
        while (name if number == 1 else f"{name}_{number}") in self.names:
            number += 1
        self.taken[name] = number
        name = name if number == 1 else f"{name}_{number}"
        self.names.add(name)
        return name


class _Loop:
    """One loop being split: ``outside``, the statements moved out so far, and ``changing``, the variables
    that change inside."""

    def __init__(self, owner: _Hoist, var: ir.Var, body: ir.Stmt) -> None:
        self.owner = owner
        self.changing = {var, *ir.bound_vars(body)}
        self.changing |= ir.updated(body)
        self.outside: list[ir.Stmt] = []
        self.moved: dict[tuple[str, ir.Expr], ir.Var] = {}

    def invariant(self, e: ir.Expr) -> bool:
        return not ir.free_vars(e) & self.changing and not ir.find(e, ir.MemoryRead)

    def statement(self, s: ir.Stmt) -> ir.Stmt | None:
        match s:
            case ir.Let(var, ir.Load(tensor, offset, mask) as load, origin):
                return ir.Let(
                    var,
                    replace(
                        load,
                        offset=self.address(offset, tensor.name),
                        mask=self.conditions(mask, f"{tensor.name}_in"),
                    ),
                    origin,
                )
            case ir.Let(var, value) if self.invariant(value):
                self.outside.append(s)
                self.changing.discard(var)
                return None
            case ir.Let(var, value, origin) if value.dtype.kind == "index":
                made = self.sums(value, var.name)
                self.owner.scope[var] = ir.lanes_of(made, self.owner.scope)
                return ir.Let(var, made, origin)
            case ir.Store(tensor, offset, value, mask):
                return ir.Store(
                    tensor,
                    self.address(offset, tensor.name),
                    value,
                    self.conditions(mask, f"{tensor.name}_in"),
                )
            case ir.If() | ir.For() | ir.FuncCall() | ir.Update():
                return s
        return s

    def address(self, e: ir.Expr, stem: str) -> ir.Expr:
        """``sums``; a constant at the end stays there."""
        match e:
            case ir.Add(terms, ir.Const(constant)):
                return self.sums(terms, stem) + constant
            case ir.Sub(terms, ir.Const(constant)):
                return self.sums(terms, stem) - constant
        return self.sums(e, stem)

    def sums(self, e: ir.Expr, stem: str) -> ir.Expr:
        """Split every sum inside an index expression."""
        if isinstance(e, (ir.Add, ir.Sub)):
            return self.split(e, stem)
        changes: dict[ir.Node, ir.Expr] = {}
        for child in e.children():
            if isinstance(child, ir.Expr) and (made := self.sums(child, stem)) is not child:
                changes[child] = made
        return ir.substitute(e, changes)

    def split(self, e: ir.Expr, stem: str) -> ir.Expr:
        """``changing + one name per set of lanes of what does not change``."""
        groups: dict[tuple[ir.Lane, ...], list[ir.Expr]] = {}
        changing: list[ir.Expr] = []
        for term in signed_terms(e):
            if self.invariant(term) and not isinstance(term, ir.Const):
                groups.setdefault(ir.lanes_of(term, self.owner.scope), []).append(term)
            else:
                changing.append(term)
        constant: list[ir.Expr] = [t for t in changing if isinstance(t, ir.Const)]
        changing = [t for t in changing if not isinstance(t, ir.Const)]
        if not groups:
            return e
        parts: list[ir.Expr] = []
        for lanes, terms in groups.items():
            if constant:  # the constant is added to the first invariant part
                terms, constant = terms + constant, []
            total = _joined(terms)
            leaf = isinstance(total, (ir.Var, ir.Lane))
            parts.append(total if leaf else self.name(total, stem, lanes))
        return self.owner.grouped(_joined(changing + parts))

    def name(self, value: ir.Expr, stem: str, lanes: Sequence[ir.Lane]) -> ir.Var:
        found = self.moved.get((stem, value))
        if found is None:
            found = ir.Var(self.owner.fresh(stem, lanes), value.dtype)
            self.moved[stem, value] = found
            self.owner.scope[found] = tuple(lanes)
            self.outside.append(ir.Let(found, value))
        return found

    def conditions(self, mask: ir.Expr, stem: str) -> ir.Expr:
        """Move invariant conditions out of the loop, under one name per set of lanes."""
        groups: dict[tuple[ir.Lane, ...], list[ir.Expr]] = {}
        changing: list[ir.Expr] = []
        for part in ir.conjuncts(mask):
            if self.invariant(part):
                groups.setdefault(ir.lanes_of(part, self.owner.scope), []).append(part)
            else:
                changing.append(part)
        if not groups:
            return mask
        named = [self.name(ir.all_of(parts), stem, lanes) for lanes, parts in groups.items()]
        return self.owner.together(ir.all_of([*named, *changing]))


def signed_terms(e: ir.Expr) -> list[ir.Expr]:
    """The terms of a sum; subtracted terms are multiplied by -1."""
    match e:
        case ir.Add(a, b):
            return signed_terms(a) + signed_terms(b)
        case ir.Sub(a, b):
            return signed_terms(a) + [_negated(t) for t in signed_terms(b)]
    return [e]


def _without_constant(e: ir.Expr) -> tuple[list[ir.Expr], int]:
    """The terms of a sum that are no constants, and the sum of those that are."""
    terms = signed_terms(e)
    constants = [t for t in terms if isinstance(t, ir.Const)]
    return [t for t in terms if t not in constants], sum(int(t.value) for t in constants)


def _shared(kernel: ir.Kernel) -> set[tuple[str, frozenset[ir.Expr]]]:
    """The tensors and terms of addresses that appear with several constants."""
    constants: dict[tuple[str, frozenset[ir.Expr]], set[int]] = {}
    accesses: list[ir.Load | ir.Store] = [*ir.find(kernel, ir.Load), *ir.find(kernel, ir.Store)]
    for access in accesses:
        terms, constant = _without_constant(access.offset)
        if terms:
            constants.setdefault((access.tensor.name, frozenset(terms)), set()).add(constant)
    return {key for key, found in constants.items() if len(found) > 1}


def _negated(e: ir.Expr) -> ir.Expr:
    return ir.Const(-e.value, e.type) if isinstance(e, ir.Const) else e * -1


def _joined(terms: list[ir.Expr]) -> ir.Expr:
    return simplify(ir.sum_of(terms)) if any("-" in str(t) for t in terms) else ir.sum_of(terms)
