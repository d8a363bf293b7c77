"""The pass ``lets``: removes unused names and names of names.

    let a_blk = pid // 4                    let a_blk = pid // 4
    let split = 0                   ->      let ow = (a_blk * 128) + m
    let ow_at = (a_blk * 128) + m
    let ow = ow_at
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from transconv.ir import (
    ASSUME,
    Const,
    Expr,
    FuncCall,
    Kernel,
    Let,
    Mutator,
    Node,
    Stmt,
    Var,
    free_vars,
    substitute,
    updated,
    walk,
)


def optimise_lets(kernel: Kernel) -> Kernel:
    """Remove unused lets and inline those that only rename a variable, a constant or a lane."""
    while True:
        uses = Counter(v for v in _mentions(kernel))
        made = _Lets(uses, _held(kernel)).mutate(kernel)
        assert isinstance(made, Kernel)
        if made is kernel:
            return kernel
        kernel = made


def _mentions(kernel: Kernel) -> list[Var]:
    """Every mention of a variable in a value, an offset or an argument (bindings do not count).

    A mention in an ``assume`` does not count: the assumption is removed with the variable.
    """
    found: list[Var] = []
    for at in walk(kernel):
        if isinstance(at, FuncCall) and at.func is ASSUME:
            continue
        if isinstance(at, Stmt):
            for child in at.children():
                if isinstance(child, Expr):
                    found += free_vars(child)
        if isinstance(at, Let):
            found.remove(at.var)
    return found


def _held(kernel: Kernel) -> frozenset[Var]:
    """The names of allocated variables that change while the name may still be read: it holds the value
    from before."""
    held: set[Var] = set()

    def visit(s: Stmt, names: dict[Var, Var]) -> None:
        """``names``: those bound so far, each with the variable that it names."""
        inner = dict(names)
        for part in (c for c in s.children() if isinstance(c, Stmt)):
            visit(part, inner)
            if isinstance(part, Let) and isinstance(part.value, Var):
                inner[part.var] = part.value
            else:
                held.update(name for name, var in inner.items() if var in updated(part))

    visit(kernel, {})
    return frozenset(held)


class _Lets(Mutator):
    def __init__(self, uses: Counter[Var], held: frozenset[Var]) -> None:
        self.uses, self.held = uses, held
        self.values: dict[Node, Expr] = {}

    def mutate(self, at: Node) -> Any:
        if isinstance(at, Expr):
            return substitute(at, self.values)
        return super().mutate(at)

    def mutate_Let(self, let: Let) -> Stmt | None:
        value = substitute(let.value, self.values)
        simple = isinstance(value, (Var, Const)) and value.dtype is let.var.dtype and (
            let.var not in self.held)
        if simple:
            self.values[let.var] = value
            return None
        if not self.uses[let.var]:
            return None
        return let if value is let.value else Let(let.var, value, let.origin)

    def mutate_FuncCall(self, call: FuncCall) -> Stmt | None:
        if call.func is ASSUME:
            condition = substitute(call.args[0], self.values)
            assert isinstance(condition, Expr)
            if not free_vars(condition) or not all(self.uses[v] for v in free_vars(condition)):
                return None
        return self.generic(call)
