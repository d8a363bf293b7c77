"""Footprints: which addresses each access of a kernel reaches, and which it only forms, with a proof.

An access that is masked forms the addresses of all its lanes and reaches those where its mask holds. Both
are intervals of offsets, in elements from the first one of the tensor's memory:

    load  X            0..3135 of 0..3135, by ranges; masked lanes form -57..3192

They follow from the kernel as the last pass has left it: an offset is a sum over the positions of loops
and lanes, and of what divides these, whose ranges are known. Rules, in the order in which they are tried:

==========  ================================================================================
``ranges``  the ranges of the sum's terms, under the mask (interval arithmetic)
``digits``  divided by the strides, sizes that are arguments, it has a coordinate inside of each extent
``linear``  multiples of the mask's inequalities, and of what ``//`` and ``%`` mean, bound it
``points``  it was computed for all loops and lanes, where there are few
``box``     the copy engine leaves out what is outside of the tensor
``never``   its mask holds nowhere
``cases``   one of these does where a condition holds that the offset depends on, and where it does not
==========  ================================================================================

Where sizes are arguments of a kernel, the proof is for all sizes that meet its requirements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from transconv import ir
from transconv.simplify import (
    Facts,
    Range,
    facts_of,
    is_inside,
    linear_range,
    range_at_points,
    range_of,
    simplify,
)

RULE = "addresses-are-inside"


@dataclass(frozen=True)
class Footprint:
    """An access of a kernel: what it ``does`` (load, store, add, part, fetch, send), the statement, the
    offset in elements and the mask over positions of loops and lanes, and what is known of these.
    ``boxed``: the copy engine moves it."""

    does: str
    stmt: ir.Stmt
    tensor: ir.Tensor
    offset: ir.Expr
    mask: ir.Expr
    facts: Facts
    boxed: bool = False

    @property
    def room(self) -> Range:
        """The offsets of the tensor's elements, of the examples if sizes are arguments."""
        layout = self.tensor.layout
        ends = [(b.size - 1) * b.stride for b in layout.blocks]
        low = layout.offset + sum(min(n, 0) for n in ends)
        return Range(low, layout.offset + sum(max(n, 0) for n in ends))

    @cached_property
    def formed(self) -> Range:
        """The offsets of all lanes: those of all positions where these can be counted, else bounds, which
        are exact for sums whose terms are independent."""
        counted = range_at_points(self.offset, [], self.facts)
        return bounds(self.offset, self.facts) if counted is None else counted

    @cached_property
    def where(self) -> Facts:
        """What is known where the mask holds."""
        parts = [c for c in ir.conjuncts(self.mask) if c is not ir.TRUE]
        return self.facts.knowing([*parts, *_of_dividends(parts)]) if parts else self.facts

    @cached_property
    def proof(self) -> tuple[str, Range]:
        """The rule by which all reached offsets are inside of the tensor, empty if none says so, and the
        interval of these."""
        if self.mask is ir.FALSE:
            return "never", Range(0, -1)
        if self.boxed:
            return "box", self.room
        rule, found = self._by_bounds()
        if not rule and (twin := self._with_sums_named()):
            rule, found = twin._by_bounds()
        if not rule and simplify(self.mask, self.facts) is ir.FALSE:
            return "never", Range(0, -1)
        if not rule and (cases := self._cases()) and all(case.proof[0] for case in cases):
            return "cases", found
        return rule, found

    def _by_bounds(self) -> tuple[str, Range]:
        """The rule that bounds the offset, and the interval."""
        return (self._for_all_sizes(), Range()) if self.tensor.extents else self._for_its_sizes()

    def _with_sums_named(self) -> Footprint | None:
        """The same access with a variable for each sum of a size and a number in extents and divisors: of
        OH for ``IH // 2 + 1``, products are single terms, as those of sizes are. None: no sum."""
        if not (sums := self._sums()):
            return None
        new = {x: ir.Var(f"{x}{more:+}") - more for x, more in sums.items()}
        known = [r.lo <= x for x in sums if (r := range_of(x, self.facts)).lo is not None]
        for x in (x for x in sums if isinstance(x, ir.FloorDiv)):
            known += [x.b * x <= x.a, x.a < x.b * x + x.b]

        def named(e: ir.Expr) -> ir.Expr:
            return simplify(ir.substitute(e, new))

        return replace(
            self,
            tensor=replace(self.tensor, extents=tuple(map(named, self.tensor.extents))),
            offset=named(self.offset),
            mask=named(self.mask),
            facts=Facts(
                {e: r for e, r in self.facts.ranges.items() if isinstance(e, ir.Var) and e not in new},
                [named(c) for c in (*self.facts.true, *known)],
                self.facts.multiples,
            ),
        )

    def _sums(self) -> dict[ir.Expr, int]:
        """The sizes and quotients of sizes to which a number is added in extents and divisors, by it."""
        whole = [*self.tensor.extents]
        for e in ir.find(self.offset, ir.Expr):
            match e:
                case ir.FloorDiv(_, by) | ir.Mod(_, by) | ir.Call("quotient" | "remainder", (_, by)):
                    whole.append(by)
        found: dict[ir.Expr, int] = {}
        for p in map(self.facts.poly, whole):
            for factor, _ in p.factors()[1] if p.terms else ():
                if (alone := factor.whole.single) and alone[1] == 1 and factor.const:
                    found.setdefault(alone[0], factor.const)
        return found

    def _cases(self) -> list[Footprint]:
        """The access where a condition of its offset holds, and where it does not: an index from the end
        is ``select(i < 0, i + N, i)``. Of choices in choices the innermost is the first, so that none
        is in a condition that is known then."""
        for e in ir.find(self.offset, ir.Select):
            if isinstance(e.cond, ir.Lt) and len(ir.find(e, ir.Select)) == 1:
                made = (e.cond, e.yes), (e.cond.b <= e.cond.a, e.no)
                return [
                    replace(
                        self,
                        offset=ir.substitute(self.offset, {e: value}),
                        mask=ir.substitute(self.mask, {e: value}),
                        facts=self.facts.knowing([holds]),
                    )
                    for holds, value in made
                ]
        return []

    def _for_its_sizes(self) -> tuple[str, Range]:
        """The rule and the interval where no size is an argument."""
        found = range_of(self.offset, self.where)
        if is_within(found, self.room):
            return "ranges", found
        found &= linear_range(self.where.poly(self.offset), self.where)
        if is_within(found, self.room):
            return "linear", found
        exact = range_at_points(self.offset, ir.conjuncts(self.mask), self.facts)
        if exact is None:
            return "", found
        return ("points" if exact.low > exact.high or is_within(exact, self.room) else ""), exact

    def _for_all_sizes(self) -> str:
        """The rule that bounds the offset by the room of the tensor, an expression of sizes."""
        facts, t = self.where, self.tensor
        if range_of(self.offset, facts).low >= 0 and range_of(t.room - 1 - self.offset, facts).low >= 0:
            return "ranges"
        facts = facts.knowing(_of_dividends(facts.true))  # of the ends of loops, too
        one: dict[ir.Node, ir.Expr] = {  # M in 1..8 with M % 8 == 0, which the offset already has as 8
            v: ir.Const(r.lo)
            for v in ir.free_vars(t.room)
            if (r := range_of(v, facts)).lo == r.hi and r.lo is not None
        }
        offset, room, *extents = (
            facts.poly(ir.substitute(e, one))
            for e in (self.offset, t.room, *(t.extents[b.dim] for b in t.layout.blocks))
        )
        if not t.pitches and is_inside(offset, extents, facts):
            return "digits"
        return "linear" if is_inside(offset, [room], facts) else ""

    @property
    def why_not(self) -> str:
        """The reason for which an access is not proved to be inside; empty if it is."""
        if self.proof[0]:
            return ""
        where = "" if self.mask is ir.TRUE else f" where {ir.readable(self.mask)}"
        reached = self.proof[1]
        told = "is not bounded by the sizes" if self.tensor.extents else f"is in {interval(reached)}"
        of = self.tensor.room if self.tensor.extents else interval(self.room)
        return (
            f"the offset {ir.readable(self.offset)}{where} {told}; expected one in the memory of "
            f"{self.tensor.name}, of {of} elements"
        )


def footprints(kernel: ir.Kernel) -> tuple[Footprint, ...]:
    """The accesses of a kernel at the level of lanes, in the order of its statements."""
    found = _Accesses(kernel)
    found.visit(kernel.body, facts_of(kernel.sizes))
    return tuple(found.made)


def why_not_inside(kernel: ir.Kernel) -> str:
    """The first access without a mask that is not proved to be inside of its tensor, as a sentence; empty
    if there is none. Those with a mask take ten times as long, see ``verify_addresses``."""
    left = _unproved(kernel, masked=False)
    return left[0].why_not if left else ""


def _of_dividends(parts: Sequence[ir.Expr]) -> list[ir.Expr]:
    """What conditions of quotients say of what is divided: ``x // 8 < 3`` that ``x < 24``, and
    ``3 < x // 8`` that ``32 <= x``; below a minimum is below both."""
    found: list[ir.Expr] = []
    for part in parts:
        match part:
            case ir.Lt(ir.FloorDiv(x, ir.Const(by)), ir.Const(limit)) if by > 0:
                found.append(x < by * limit)
            case ir.Lt(a, ir.FloorDiv(x, ir.Const(by))) if by > 0:
                found.append((a + 1) * by <= x)
            case ir.Lt(a, ir.Min(x, y)):
                found += [a < x, a < y, *_of_dividends([a < x, a < y])]
    return found


def _unproved(kernel: ir.Kernel, masked: bool) -> list[Footprint]:
    """The accesses, without ``masked`` those that have no mask, that are not proved; where sizes are
    arguments, neither for all of them nor for the examples."""
    known = footprints(kernel)
    left = [i for i, f in enumerate(known) if (masked or f.mask is ir.TRUE) and not f.proof[0]]
    if left and kernel.sizes:
        at = footprints(kernel.at(kernel.sizes.like))
        left = [i for i in left if not at[i].proof[0]]
    return [known[i] for i in left]


def verify_addresses(kernel: ir.Kernel, stage: str = "", masked: bool = True) -> None:
    """Raise VerifyError unless every access, masked or not, is proved to be inside of its tensor. Where
    sizes are arguments the proof is for all of them; an access that no rule bounds for all sizes is
    proved for the examples. Without ``masked`` only those without a mask are."""
    if left := _unproved(kernel, masked):
        raise ir.VerifyError([(RULE, access.stmt, access.why_not) for access in left], stage=stage)


def told_addresses(kernel: ir.Kernel) -> str:
    """The footprints of a kernel, a line for each tensor and what is done with it."""
    shown = kernel.at(kernel.sizes.like) if kernel.sizes else kernel
    known = footprints(kernel)
    each = [*zip(footprints(shown), known, strict=True)] if kernel.sizes else [(f, f) for f in known]
    each.sort(key=lambda pair: (pair[0].does, pair[0].tensor.name))
    lines = []
    for (does, name), group in groupby(each, key=lambda pair: (pair[0].does, pair[0].tensor.name)):
        pairs = [*group]
        lines.append(f"    {does:<6}{name:<12} {_told(pairs, bool(kernel.sizes))}")
    at = ", at the examples" if kernel.sizes else ""
    return "\n".join([f"addresses  in elements of each tensor's memory{at}", *lines])


def _told(pairs: list[tuple[Footprint, Footprint]], sized: bool) -> str:
    """What accesses of one kind form and reach, and why that is inside."""
    formed = _joined([f.formed for f, _ in pairs])
    reached = _joined([f.formed & f.room if f.boxed else f.proof[1] for f, _ in pairs])
    rules = " and ".join(dict.fromkeys(known.proof[0] or "nothing" for _, known in pairs))
    times = f" ({len(pairs)} of them)" if len(pairs) > 1 else ""
    same = formed == reached
    of = f"of {interval(pairs[0][0].room)}{times}"
    sure = f"by {rules}{' for all sizes' * sized}"
    if same:
        return f"{interval(formed)} {of}, {sure}"
    return f"{interval(reached)} {of}, {sure}; masked lanes form {interval(formed)}"


def _joined(ranges: list[Range]) -> Range:
    held = [r for r in ranges if r.low <= r.high] or ranges[:1]
    found = held[0]
    for r in held[1:]:
        found |= r
    return found


def interval(r: Range) -> str:
    """A range in words."""
    if r.low > r.high:
        return "nothing"
    low, high = ("" if n is None else str(n) for n in (r.lo, r.hi))
    return low if low == high and low else f"{low}..{high}"


def is_within(inner: Range, outer: Range) -> bool:
    """Whether a range is part of another one."""
    return inner.low >= outer.low and inner.high <= outer.high


def bounds(offset: ir.Expr, facts: Facts) -> Range:
    """The range of an offset by its terms and by what these mean."""
    return range_of(offset, facts) & linear_range(facts.poly(offset), facts)


class _Accesses:
    """Finds accesses, with the lets before them expanded."""

    def __init__(self, kernel: ir.Kernel) -> None:
        self.made: list[Footprint] = []
        self.defs: dict[ir.Node, ir.Expr] = {}  # expanded
        self.plain = Plain()

    def visit(self, s: ir.Stmt, facts: Facts) -> Facts:
        """Note the accesses of a statement; the facts behind it."""
        match s:
            case ir.Seq(stmts):
                for part in stmts:
                    facts = self.visit(part, facts)
            case ir.For():
                self.visit(s.body, self._of_loop(s, facts))
            case ir.If(cond, then, other):
                self._reads(s, cond, facts)
                self.visit(then, facts.knowing(ir.conjuncts(self.whole(cond))))
                if other is not None:
                    self.visit(other, facts)
            case ir.Roles(roles):
                for role in roles:
                    self.visit(role.body, facts)
            case ir.FuncCall(func, (condition,)) if func is ir.ASSUME:
                assert isinstance(condition, ir.Expr)
                return facts.knowing(ir.conjuncts(self.whole(condition)))
            case ir.Let(var, value) if value.dtype.kind == "int":
                self._access(s, facts)
                r = range_of(self.whole(value), facts)
                return facts if r == range_of(var, facts) else facts.with_range(var, r.lo, r.hi)
            case _:
                self._access(s, facts)
        return facts

    def _of_loop(self, loop: ir.For, facts: Facts) -> Facts:
        first = range_of(self.whole(loop.start), facts).lo
        facts = facts.with_range(loop.var, first, max(first or 0, loop.stop - 1))
        if loop.until is not None:
            facts = facts.knowing([ir.Lt(loop.var, self.whole(loop.until))])
        return facts

    def _access(self, s: ir.Stmt, facts: Facts) -> None:
        match s:
            case ir.Let(var, value):
                self._reads(s, value, facts)
                if value.dtype.kind in ("index", "bool") and not ir.find(value, ir.MemoryRead):
                    self.defs[var] = self.whole(value)
            case ir.Alloc(init=value) | ir.Update(value=value):
                self._reads(s, value, facts)
            case ir.Store(tensor, offset, value, mask):
                self._reads(s, value, facts)
                self._note("store", s, tensor, offset, mask, facts)
            case ir.BoxStore(tensor, corner, within, value=value):
                self._reads(s, value, facts)
                self._box("store", s, tensor, corner, within, facts)
            case ir.Fetch(tensor, corner, piece):
                self._box("fetch", s, tensor, corner, piece.within, facts)
            case ir.Send(tensor, corner, piece):
                self._box("send", s, tensor, corner, piece.within, facts)
            case ir.FuncCall(func, (ir.Tensor() as tensor, offset, value, mask, *_)):
                assert isinstance(offset, ir.Expr) and isinstance(mask, ir.Expr)
                assert isinstance(value, ir.Expr)
                self._reads(s, value, facts)
                does = {"atomic_add": "add", "partial": "part"}[func.name]
                self._note(does, s, tensor, offset, mask, facts)

    def _reads(self, s: ir.Stmt, value: ir.Expr, facts: Facts) -> None:
        for x in ir.find(value, ir.Load):
            self._note("load", s, x.tensor, x.offset, x.mask, facts)
        for box in ir.find(value, ir.BoxLoad):
            self._box("load", s, box.tensor, box.corner, box.within, facts)

    def _note(
        self, does: str, s: ir.Stmt, t: ir.Tensor, offset: ir.Expr, mask: ir.Expr, facts: Facts
    ) -> None:
        whole = self.whole(mask)
        if any(c is ir.FALSE for c in ir.conjuncts(whole)):
            whole = ir.FALSE
        self.made.append(Footprint(does, s, t, self.whole(offset), whole, facts))

    def _box(
        self,
        does: str,
        s: ir.Stmt,
        tensor: ir.Tensor,
        corner: tuple[ir.Expr, ...],
        within: tuple[ir.Expr, ...],
        facts: Facts,
    ) -> None:
        """A box, by the offset that each of its elements would have."""
        steps = tensor.every or (1,) * len(corner)
        coords = [self.whole(a + b * n) for a, b, n in zip(corner, within, steps, strict=True)]
        at = self.plain.mutate(tensor.offset_of(coords))
        self.made.append(Footprint(does, s, tensor, at, ir.TRUE, facts, True))

    def whole(self, e: ir.Expr) -> ir.Expr:
        """The expression over positions of loops and lanes, in integers without bounds."""
        named: dict[ir.Node, ir.Expr] = {v: self.defs[v] for v in ir.free_vars(e) if v in self.defs}
        made: ir.Expr = self.plain.mutate(ir.substitute(e, named))
        return made


class Plain(ir.ExprMutator):
    """The same positions without what only concerns their form: lanes that are renamed or spread, casts
    between 32 and 64 bits, shifts, and divisions that are spelled for operands of any sign."""

    def mutate_Renamed(self, e: ir.Renamed) -> ir.Expr:
        made: ir.Expr = self.mutate(e.x)
        return ir.substitute(made, dict(zip(e.old, e.new, strict=True)))

    def mutate_Spread(self, e: ir.Spread) -> ir.Expr:
        made: ir.Expr = self.mutate(e.x)
        return made

    def mutate_Cast(self, e: ir.Cast) -> ir.Expr:
        inner: ir.Expr = self.mutate(e.x)
        if e.dtype.kind != "index":
            return ir.Cast(inner, e.type)
        if e.x.dtype.kind == "index":
            return inner
        return ir.Cast(inner, e.type if e.x.dtype.bits > 32 else ir.index)

    def mutate_Const(self, e: ir.Const) -> ir.Expr:
        return ir.Const(e.value) if e.type is ir.index64 else e

    def mutate_Shl(self, e: ir.Shl | ir.Shr) -> ir.Expr:
        x: ir.Expr = self.mutate(e.a)
        by = self.mutate(e.b)
        if e.dtype.kind != "index" or not isinstance(by, ir.Const):
            return ir.Shl(x, by) if isinstance(e, ir.Shl) else ir.Shr(x, by)
        return x * (1 << int(by.value)) if isinstance(e, ir.Shl) else x // (1 << int(by.value))

    mutate_Shr = mutate_Shl

    def mutate_Select(self, e: ir.Select) -> ir.Expr:
        cond, yes, no = self.mutate(e.cond), self.mutate(e.yes), self.mutate(e.no)
        match cond, no:
            case ir.Lt(x, ir.Const(0)), ir.FloorDiv(y, c) if x is y and yes is -1 - (-1 - x) // c:
                return no
            case ir.Lt(x, ir.Const(0)), ir.Mod(y, c) if x is y and yes is _most(c) - (-1 - x) % c:
                return no
            case ir.Lt(x, ir.Const(0)), ir.Mod(_, c) if x is no and yes is no + c:
                return no
            case ir.And(ir.Ne(ir.Mod(_, c) as rest, ir.Const(0)), ir.Ne(ir.Lt(x, ir.Const(0)), _)), _ if (
                rest is x and ((no is rest and yes is no + c) or (no is x.a // c and yes is no - 1))
            ):
                return no  # a rest that has the other sign than its divisor, which none has
        return ir.Select(cond, yes, no)


def _most(divisor: ir.Expr) -> ir.Expr:
    """The largest remainder."""
    return divisor + ir.Const(-1) if not isinstance(divisor, ir.Const) else ir.Const(divisor.value - 1)
