"""Facts and definitions in scope at each statement, names for the variables that a pass adds, and what a
size that is an argument decides about the sums of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from transconv import ir
from transconv.compute import Compute, Read, Step, Write
from transconv.simplify import facts_of, range_of, simplify

NOT_AFFINE = (ir.FloorDiv, ir.Mod, ir.Min, ir.Max, ir.Select)


class ScopedMutator(ir.Mutator):
    """A mutator that has, at every statement, the facts and the lets in scope."""

    def __init__(self, sizes: ir.Sizes | None = None) -> None:
        self.facts, self.sized = facts_of(sizes), sizes is not None
        self.defs: dict[ir.Var, ir.Expr] = {}
        self.wholes: dict[ir.Var, ir.Expr] = {}  # ``defs`` with all lets expanded
        self.affines: dict[ir.Var, ir.Expr] = {}  # ``defs`` with affine lets expanded

    def mutate_Seq(self, at: ir.Seq) -> ir.Stmt:
        made = []
        for s in at.stmts:
            new = self.mutate(s)
            made.append(new)
            self.learn(self.told(s, new))
        result = ir.seq(*made)
        return at if isinstance(result, ir.Seq) and result.stmts == at.stmts else result

    def told(self, before: ir.Stmt, after: ir.Stmt | None) -> ir.Stmt | None:
        """The form of a statement that tells what holds behind it."""
        return after

    def mutate_For(self, loop: ir.For) -> ir.Stmt:
        facts, defs = self.facts, dict(self.defs)
        first = range_of(self.whole(loop.start), facts).lo
        self.facts = facts.with_range(loop.var, first, max(first or 0, loop.stop - 1))
        if loop.until is not None and self.sized:
            self.facts = self.facts.assume(loop.var < loop.until)
        body = self.mutate(loop.body)
        self.facts, self.defs = facts, defs
        self._forget_expanded()
        start = self.bound(loop.start)
        until = None if loop.until is None else self.bound(loop.until)
        if body is loop.body and start is loop.start and until is loop.until:
            return loop
        return replace(loop, body=body or ir.Seq(()), start=start, until=until)

    def bound(self, e: ir.Expr) -> ir.Expr:
        """The new start, or end, of a loop."""
        made: ir.Expr = self.mutate(e)
        return made

    def learn(self, s: ir.Stmt | None) -> None:
        """Add the facts and definitions that a statement gives to those after it."""
        if isinstance(s, ir.Seq):
            for part in s.stmts:
                self.learn(part)
        elif (
            isinstance(s, ir.Let) and s.value.dtype.kind == "index" and not ir.find(s.value, ir.MemoryRead)
        ):
            found = range_of(self.whole(s.value), self.facts)
            self.facts = self.facts.with_range(s.var, found.lo, found.hi)
            if s.var in self.defs:
                self._forget_expanded()
            self.defs[s.var] = s.value
        elif isinstance(s, ir.FuncCall) and s.func is ir.ASSUME:
            condition = s.args[0]
            assert isinstance(condition, ir.Expr)
            self.facts = self.facts.assume(condition)
            for v in ir.free_vars(condition):  # if they were expanded, the new fact would not apply
                self.defs.pop(v, None)
            self._forget_expanded()

    def affine(self, e: ir.Expr) -> ir.Expr:
        """Expand the lets that only add and multiply."""
        return self._expand(e, self.affines, lambda value: not divides(value))

    def whole(self, e: ir.Expr) -> ir.Expr:
        """Expand every let: the expression over loop variables and lanes."""
        return self._expand(e, self.wholes, lambda value: True)

    def implies(self, a: ir.Expr, b: ir.Expr) -> bool:
        """Whether a comparison implies another one by the difference of their sides, a number."""
        if a is b:
            return True
        if not isinstance(a, (ir.Lt, ir.Le)) or not isinstance(b, (ir.Lt, ir.Le)):
            return False
        more = simplify(self.whole(b.b - b.a) - self.whole(a.b - a.a), self.facts)
        looser = isinstance(b, ir.Le) - isinstance(a, ir.Le)
        return isinstance(more, ir.Const) and int(more.value) + looser >= 0

    def _expand(
        self, e: ir.Expr, known: dict[ir.Var, ir.Expr], wanted: Callable[[ir.Expr], bool]
    ) -> ir.Expr:
        values: dict[ir.Var, ir.Expr] = {}
        for v in ir.free_vars(e):
            if v not in known and v in self.defs and wanted(self.defs[v]):
                known[v] = self._expand(self.defs[v], known, wanted)
            if v in known:
                values[v] = known[v]
        return ir.substitute(e, values)

    def _forget_expanded(self) -> None:
        """Clear the expanded definitions, because ``defs`` has changed."""
        self.wholes, self.affines = {}, {}


def divides(e: ir.Expr) -> bool:
    """Whether an expression is not affine: it divides, or chooses."""
    return any(isinstance(n, NOT_AFFINE) for n in ir.walk(e))


class VariableNames:
    """Names of variables, of which no two are alike: those of some kernels, and those in ``taken``."""

    def __init__(self, *kernels: ir.Kernel, taken: Iterable[str] = ()) -> None:
        self.taken = {*taken, *(v.name for k in kernels for v in ir.bound_vars(k))}

    def fresh(self, name: str, mark: str = "_") -> str:
        """The name, with marks added until no other variable has it."""
        while name in self.taken:
            name += mark
        self.taken.add(name)
        return name


def renamed(compute: Compute, names: Mapping[ir.Var, str]) -> Compute:
    """The computation with other names for some of its values, which axes and values must not have."""
    values: dict[ir.Expr, ir.Expr] = {v: ir.Var(name, v.type) for v, name in names.items()}
    steps: list[Step] = []
    for s in compute.steps:
        if isinstance(s, (Read, Write)):
            s = replace(s, view=ir.substitute(s.view, values))
        if not isinstance(s, Read):
            s = replace(s, value=ir.substitute(s.value, values))
        if not isinstance(s, Write) and s.var in names:
            s = replace(s, name=names[s.var])
        steps.append(s)
    return replace(compute, steps=tuple(steps))


def hidden(kernel: ir.Kernel) -> frozenset[str]:
    """The names that a kernel binds where they are bound already: a pass has added a variable with the
    name of one that was there."""
    found: set[str] = set()
    _look(kernel.body, {s.name for s in kernel.sizes.each} if kernel.sizes else set(), found)
    return frozenset(found)


def _look(s: ir.Stmt, bound: set[str], found: set[str]) -> None:
    """Look at a statement and those inside it; ``bound`` holds the names of the block, and gets more."""
    own = {s.var.name} if isinstance(s, (ir.Let, ir.Alloc, ir.For)) else set()
    found |= own & bound
    if isinstance(s, (ir.Let, ir.Alloc)):
        bound |= own
        return
    for part in s.children():
        if isinstance(part, ir.Stmt):
            _look(part, bound if isinstance(s, ir.Seq) else bound | own, found)


def decided(kernel: ir.Kernel, name: str, is_summed: bool) -> list[str]:
    """In words, what a size decides about the sums of a kernel, beside the number of programs and what is
    masked, as two ways do that differ in masks alone (the pass ``edges``); ``is_summed``: whether sums end
    at it."""
    told: dict[ir.Var, list[ir.Expr]] = {}
    for let in ir.find(kernel, ir.Let):
        told.setdefault(let.var, []).append(let.value)  # phases have the same names
    kept = {a.var for a in ir.find(kernel, ir.Alloc)}
    wrong: list[str] = []
    for loop in ir.find(kernel, ir.For):
        ends = [] if is_summed or loop.until is None else [loop.until]
        for e in (loop.start, *ends) if loop.kind not in ("grid", "dealt") else ():
            if ir.Var(name) in resolved(e, told):
                wrong.append(f"the loop over {loop.var.name} has {ir.readable(e)}")
    for branch in ir.find(kernel, ir.If):
        if ir.Var(name) in resolved(branch.cond, told) and _adds(branch, kept) and not _alike(branch):
            wrong.append(f"a branch at {ir.readable(branch.cond)} adds to sums")
    return wrong


def _adds(branch: ir.If, kept: set[ir.Var]) -> bool:
    """Whether sums that began before a branch may go on within: a variable changes, or a unit is called. A
    branch of whole tiles begins their sums."""
    own = {a.var for a in ir.find(branch, ir.Alloc)}
    if any(u.var not in own for u in ir.find(branch, ir.Update)):
        return True
    changed = [kept & {*ir.find(call, ir.Var)} for call in ir.find(branch, ir.FuncCall)]
    return any(not names or names - own for names in changed)


def _alike(branch: ir.If) -> bool:
    """Whether both ways of a branch add and store the same, in the same order: their texts are alike but
    for masks and their own names."""
    ways = [_Unmasked().mutate(way) for way in (branch.then, branch.other) if way is not None]
    own = [dict.fromkeys(ir.bound_vars(way)) for way in ways]
    names = [{v: ir.Var(f"{n}", v.type) for n, v in enumerate(each)} for each in own]
    first, *other = [ir.substitute(way, each) for way, each in zip(ways, names, strict=True)]
    return other == [first]


class _Unmasked(ir.ExprMutator):
    """What is loaded, chosen and stored where all masks hold."""

    def mutate_Load(self, at: ir.Load) -> ir.Expr:
        return self.generic(replace(at, mask=ir.TRUE))

    def mutate_Store(self, at: ir.Store) -> ir.Stmt:
        return self.generic(replace(at, mask=ir.TRUE))

    def mutate_Select(self, at: ir.Select) -> ir.Expr:
        made: ir.Expr = self.mutate(at.yes)
        return made


def resolved(e: ir.Expr, told: Mapping[ir.Var, Iterable[ir.Expr]]) -> set[ir.Var]:
    """The names that an expression is made of, through those that stand for others."""
    left, seen = [*ir.free_vars(e)], set[ir.Var]()
    while left:
        var = left.pop()
        if var not in seen:
            seen.add(var)
            left += [v for value in told.get(var, ()) for v in ir.free_vars(value)]
    return seen
