"""Stage 8. Write the iterations of a loop out, so that its index arithmetic becomes constant.

    for step in 0..2 unroll:            kh_0 = 0;  a_0 = load(.., kh_0)
        kh = step               ->      acc = acc + a_0 * b_0
        a = load(.., kh)                kh_1 = 1;  a_1 = load(.., kh_1)
        acc = acc + a * b               acc = acc + a_1 * b_1
"""

from __future__ import annotations

from dataclasses import replace

from transconv.ir import (
    ZERO,
    Const,
    Expr,
    For,
    Kernel,
    Let,
    Mutator,
    Stmt,
    Var,
    find,
    seq,
    substitute,
)

LONGEST = 64  # more iterations than this would take longer to compile than they could save


def unroll(kernel: Kernel) -> Kernel:
    """Write loops of kind ``unroll`` out, and loops of one iteration; one longer than 64 stays."""
    return _Unroll().mutate(kernel)  # type: ignore[no-any-return]


class _Unroll(Mutator):
    def mutate_For(self, loop: For) -> Stmt:
        made: Stmt = self.generic(loop)
        if isinstance(made, For) and made.kind == "serial" and made.stop == 1:
            return substitute(made.body, {made.var: ZERO})
        if not isinstance(made, For) or made.kind != "unroll":
            return made
        if made.stop > LONGEST:
            return replace(made, kind="serial")
        lets = [x.var for x in find(made.body, Let)]
        copies = []
        for i in range(made.stop):
            names: dict[Var, Expr] = {v: Var(f"{v.name}_{i}", v.type) for v in lets}
            copies.append(substitute(made.body, {made.var: Const(i), **names}))
        return seq(*copies)
