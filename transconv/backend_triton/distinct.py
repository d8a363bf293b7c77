"""Stage 10. In: a kernel. Out: the same kernel, whose names differ from each other and from what its
text calls.

A computation may call a tensor like a coordinate (``w``), or an axis like a function that the text
uses (``range``). The IR tells them apart; the text would assign to one what it reads from the other. A
name that is taken gets a line below: variables keep theirs before tensors. Kernels are launched with
their tensors in order, so that the names of parameters are for the reader alone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from transconv.backend_triton.gluon_memory import PIECES
from transconv.backend_triton.parameter import box_name
from transconv.backend_triton.versions import LOOKED_UP
from transconv.ir import (
    CALLS,
    DTYPES,
    REDUCERS,
    Barrier,
    Buffer,
    ExprMutator,
    Kernel,
    Lane,
    Role,
    Var,
    find,
)

WRITTEN = (*(c.helper for c in CALLS.values()), *(r.helper for r in REDUCERS.values()),
           *(t.rounding.helper for t in DTYPES.values() if t.rounding is not None))
USED = frozenset({"tl", "gl", "gluon", "hopper", "mbarrier", "tma", "triton", "sums", "float", "range",
                  "gdc_wait", "gdc_launch_dependents", *LOOKED_UP,
                  *(name for text in WRITTEN for name in re.findall(r"def (\w+)", text))})
"""What the text of a module calls, or names itself."""


def distinct(kernel: Kernel) -> Kernel:
    """The kernel with other names for what is called like something else of its text.

        x(w): w = ow + 1; load(w + w)   ->   x(w_): w = ow + 1; load(w_ + w)
    """
    taken = USED | {kernel.name, *(r.name for r in find(kernel, Role))}
    given = kernel.sizes.names if kernel.sizes else ()  # arguments, which keep their names
    taken |= {*given}
    inside: list[Var | Lane] = [*find(kernel, Var), *find(kernel, Lane)]
    called: dict[str, list[Var | Lane]] = {}
    for v in (v for v in inside if v.name not in given):
        called.setdefault(v.name, []).append(v)
    held = set(called)
    made: dict[Any, str] = {}
    for name in sorted(held & taken):
        other = name
        while other in taken | held:
            other += "_"
        made |= dict.fromkeys(called[name], other)
        held.add(other)
    taken |= held
    rings: list[Buffer | Barrier] = [*find(kernel, Buffer), *find(kernel, Barrier)]
    for x in (*rings, *kernel.params):
        other = x.name
        while {other, box_name(other), f"{other}_{PIECES}"} & taken:
            other += "_"
        taken |= {other, box_name(other), f"{other}_{PIECES}"}
        made |= {x: other} if other != x.name else {}
    return _Renamed(made).mutate(kernel) if made else kernel


class _Renamed(ExprMutator):
    def __init__(self, made: dict[Any, str]) -> None:
        super().__init__()
        self.made = made

    def named(self, x: Any) -> Any:
        return replace(x, name=self.made[x]) if x in self.made else x

    def mutate_Tensor(self, at: Any) -> Any:
        return self.named(at)

    mutate_Var = mutate_Lane = mutate_Buffer = mutate_Barrier = named
