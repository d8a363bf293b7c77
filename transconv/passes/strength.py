"""Stage 8d. Replace a multiplication by the loop counter with an addition per iteration.

    for step in 0..16:                          step_64 = 0
        a = load(A, step*64 + A_m)       ->     for step in 0..16:
                                                    a = load(A, step_64 + A_m)
                                                    step_64 = step_64 + 64
"""

from __future__ import annotations

from dataclasses import replace

from transconv.ir import (
    ZERO,
    Alloc,
    Const,
    Expr,
    For,
    Kernel,
    Mul,
    Mutator,
    Stmt,
    Update,
    Var,
    bound_vars,
    find,
    seq,
    substitute,
)


def strength(kernel: Kernel) -> Kernel:
    """Turn products of a serial loop's counter and a constant into running sums."""
    return _Strength({v.name for v in bound_vars(kernel)}).mutate(kernel)  # type: ignore[no-any-return]


class _Strength(Mutator):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def mutate_For(self, loop: For) -> Stmt:
        made: Stmt = self.generic(loop)
        if not isinstance(made, For) or made.kind != "serial":
            return made
        products = [e for e in find(made.body, Mul)
                    if e.a is made.var and isinstance(e.b, Const) and e.dtype.kind == "index"]
        running: dict[Mul, Expr] = {}
        for e in products:
            name = f"{made.var.name}_{e.b}".replace("-", "neg")
            if name not in self.names:
                running[e] = Var(name)
        if not running:
            return made
        starts = [Alloc(v, (), ZERO) for v in running.values() if isinstance(v, Var)]
        steps = [Update(v, v + e.b) for e, v in running.items() if isinstance(v, Var)]
        body = seq(substitute(made.body, running), *steps)
        return seq(*starts, replace(made, body=body))
