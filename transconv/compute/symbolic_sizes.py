"""The line of a computation's text that names the sizes that are arguments of its kernels.

    sizes  N=8 in 1..64, H in 1..4096, W in 1..4096, C=64 in 8..512, C % 8 == 0, N*H*W*C < 2147483648

A name has an example (``N=8``; default: 64, or the nearest legal size) and a range (default:
1..2147483647); conditions may follow. Extents of axes and of tensors are expressions of names. Kernels are
correct for all sizes that meet these requirements; a launch with others is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from transconv.compute.text.expressions import ComputeScope, expression
from transconv.errors import ComputeError
from transconv.ir import (
    LARGEST_SIZE,
    Expr,
    Size,
    Sizes,
    Var,
    conjuncts,
    f32,
    free_vars,
    index,
    value_at,
)

SIZE = re.compile(r"([A-Za-z_]\w*)(?:\s*=\s*(\d+))?(?:\s+in\s+(\d+)\s*\.\.\s*(\d+))?")
USUAL = 64  # the default example


def sizes_of(text: str) -> Sizes:
    """The sizes of a line. Raises ComputeError."""
    if not text:
        raise ComputeError("no size; expected names such as N=8 in 1..64")
    words = [w.strip() for w in text.split(",")]
    named = [found for w in words if (found := SIZE.fullmatch(w))]
    names = tuple(found[1] for found in named)
    where = tuple(p for w in words if not SIZE.fullmatch(w) for p in conjuncts(_condition(w, names)))
    each: list[Size] = []
    for found in named:
        least, most = int(found[3] or 1), int(found[4] or LARGEST_SIZE)
        if not 1 <= least <= most <= LARGEST_SIZE:
            raise ComputeError(f"size '{found[0]}'; expected a range within 1..{LARGEST_SIZE}")
        if found[1] in (s.name for s in each):
            raise ComputeError(f"size '{found[1]}' is there twice; expected it once")
        size = Size(found[1], int(found[2] or least), least, most)
        each.append(size if found[2] else replace(size, like=example(size, where, USUAL)))
    made = Sizes(tuple(each), where)
    if not each:
        raise ComputeError(f"sizes '{text}'; expected names such as N=8 in 1..64")
    if reason := made.why_not(made.like):
        raise ComputeError(f"the example does not meet the requirements: {reason}")
    return made


def of_sizes(text: str, sizes: Sizes) -> Expr:
    """An expression of sizes. Raises ComputeError."""
    return _of_names(text, sizes.names)


@lru_cache(maxsize=4096)  # plans of any size, which are read from disk, have the same again and again
def _of_names(text: str, names: tuple[str, ...]) -> Expr:
    return expression(text, ComputeScope(dict.fromkeys(names, 0), f32, whole=index))


@lru_cache(maxsize=4096)
def _condition(text: str, names: tuple[str, ...]) -> Expr:
    made = expression(text, ComputeScope(dict.fromkeys(names, 0), f32))
    if made.dtype.kind != "bool" or not free_vars(made):
        raise ComputeError(f"'{text}'; expected a size such as N=8 in 1..64, or a condition of sizes")
    return made


def example(size: Size, where: Sequence[Expr], near: int) -> int:
    """An example of a size, ``near`` a number, that meets those conditions which are about it alone."""
    name, least, most = size.name, size.least, size.most
    own = [c for c in where if free_vars(c) == {Var(name)}]
    near = min(max(near, least), most)
    tried = [near, *range(near, min(most, near + 4096)), *range(near, max(least - 1, near - 4096), -1)]
    return next((n for n in tried if all(value_at(c, {name: n}) for c in own)), near)
