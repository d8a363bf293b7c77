"""Facts and definitions in scope at each statement, for passes that prove something.

Also here: names for the variables that a pass adds, and for the values of a computation beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from transconv.compute import Compute, Read, Step, Write
from transconv.ir import (
    ASSUME,
    Alloc,
    Const,
    Expr,
    FloorDiv,
    For,
    FuncCall,
    Kernel,
    Le,
    Let,
    Lt,
    Max,
    MemoryRead,
    Min,
    Mod,
    Mutator,
    Select,
    Seq,
    Sizes,
    Stmt,
    Var,
    bound_vars,
    find,
    free_vars,
    seq,
    substitute,
    walk,
)
from transconv.simplify import facts_of, range_of, simplify

NOT_AFFINE = (FloorDiv, Mod, Min, Max, Select)


class ScopedMutator(Mutator):
    """A mutator that has, at every statement, the facts and the lets in scope."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.facts, self.sized = facts_of(sizes), sizes is not None
        self.defs: dict[Var, Expr] = {}
        self.wholes: dict[Var, Expr] = {}  # ``defs`` with all lets expanded
        self.affines: dict[Var, Expr] = {}  # ``defs`` with affine lets expanded

    def mutate_Seq(self, at: Seq) -> Stmt:
        made = []
        for s in at.stmts:
            new = self.mutate(s)
            made.append(new)
            self.learn(self.told(s, new))
        result = seq(*made)
        return at if isinstance(result, Seq) and result.stmts == at.stmts else result

    def told(self, before: Stmt, after: Stmt | None) -> Stmt | None:
        """The form of a statement that tells what holds behind it."""
        return after

    def mutate_For(self, loop: For) -> Stmt:
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
        return replace(loop, body=body or Seq(()), start=start, until=until)

    def bound(self, e: Expr) -> Expr:
        """The new start, or end, of a loop."""
        made: Expr = self.mutate(e)
        return made

    def learn(self, s: Stmt | None) -> None:
        """Add the facts and definitions that a statement gives to those after it."""
        if isinstance(s, Seq):
            for part in s.stmts:
                self.learn(part)
        elif isinstance(s, Let) and s.value.dtype.kind == "index" and not find(s.value, MemoryRead):
            found = range_of(self.whole(s.value), self.facts)
            self.facts = self.facts.with_range(s.var, found.lo, found.hi)
            if s.var in self.defs:
                self._forget_expanded()
            self.defs[s.var] = s.value
        elif isinstance(s, FuncCall) and s.func is ASSUME:
            condition = s.args[0]
            assert isinstance(condition, Expr)
            self.facts = self.facts.assume(condition)
            for v in free_vars(condition):  # if they were expanded, the new fact would not apply
                self.defs.pop(v, None)
            self._forget_expanded()

    def affine(self, e: Expr) -> Expr:
        """Expand the lets that only add and multiply."""
        return self._expand(e, self.affines, lambda value: not divides(value))

    def whole(self, e: Expr) -> Expr:
        """Expand every let: the expression over loop variables and lanes."""
        return self._expand(e, self.wholes, lambda value: True)

    def implies(self, a: Expr, b: Expr) -> bool:
        """Whether a comparison implies another one by the difference of their sides, a number."""
        if a is b:
            return True
        if not isinstance(a, (Lt, Le)) or not isinstance(b, (Lt, Le)):
            return False
        more = simplify(self.whole(b.b - b.a) - self.whole(a.b - a.a), self.facts)
        looser = isinstance(b, Le) - isinstance(a, Le)
        return isinstance(more, Const) and int(more.value) + looser >= 0

    def _expand(self, e: Expr, known: dict[Var, Expr], wanted: Callable[[Expr], bool]) -> Expr:
        values: dict[Var, Expr] = {}
        for v in free_vars(e):
            if v not in known and v in self.defs and wanted(self.defs[v]):
                known[v] = self._expand(self.defs[v], known, wanted)
            if v in known:
                values[v] = known[v]
        return substitute(e, values)

    def _forget_expanded(self) -> None:
        """Clear the expanded definitions, because ``defs`` has changed."""
        self.wholes, self.affines = {}, {}


def divides(e: Expr) -> bool:
    """Whether an expression is not affine: it divides, or chooses."""
    return any(isinstance(n, NOT_AFFINE) for n in walk(e))


class VariableNames:
    """The names of the variables of kernels, and those in ``taken``, of which no two are alike."""

    def __init__(self, *kernels: Kernel, taken: Iterable[str] = ()) -> None:
        self.taken = {*taken, *(v.name for k in kernels for v in bound_vars(k))}

    def fresh(self, name: str, mark: str = "_") -> str:
        """The name, with marks added until no other variable has it."""
        while name in self.taken:
            name += mark
        self.taken.add(name)
        return name


def renamed(compute: Compute, names: Mapping[Var, str]) -> Compute:
    """The computation with other names for some of its values, which axes and values must not have."""
    values: dict[Expr, Expr] = {v: Var(name, v.type) for v, name in names.items()}
    steps: list[Step] = []
    for s in compute.steps:
        if isinstance(s, (Read, Write)):
            s = replace(s, view=substitute(s.view, values))
        if not isinstance(s, Read):
            s = replace(s, value=substitute(s.value, values))
        if not isinstance(s, Write) and s.var in names:
            s = replace(s, name=names[s.var])
        steps.append(s)
    return replace(compute, steps=tuple(steps))


def hidden(kernel: Kernel) -> frozenset[str]:
    """The names that a kernel binds where they are bound already: a pass has added a variable with the
    name of one that was there."""
    found: set[str] = set()
    _look(kernel.body, {s.name for s in kernel.sizes.each} if kernel.sizes else set(), found)
    return frozenset(found)


def _look(s: Stmt, bound: set[str], found: set[str]) -> None:
    """Look at a statement and those inside it; ``bound`` holds the names of the block, and gets more."""
    own = {s.var.name} if isinstance(s, (Let, Alloc, For)) else set()
    found |= own & bound
    if isinstance(s, (Let, Alloc)):
        bound |= own
        return
    for part in s.children():
        if isinstance(part, Stmt):
            _look(part, bound if isinstance(s, Seq) else bound | own, found)
