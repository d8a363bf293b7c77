"""Calls that are refused before anything is launched; wrong_launches.txt has the message of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from transconv.kernel import Buffer, Constant, Group, Tunable, kernel, symbols

M, N = symbols("M N")
ROWS = Tunable("ROWS", 4, (2, 8))


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


@kernel(work_shape=(M, N), group_shape=(ROWS, 32))
def declared(group: Any, X: Buffer[M, N], Y: Buffer[M, N], scale: Buffer[1, N], n: Constant) -> None:
    i, j = group.work_offset()
    x = group.load(X[i:, j:], shape=group.shape)
    group.store(Y[i:, j:], x * group.load(scale[:, j:], shape=(1, group.shape[1])) + n)


@kernel(work_shape=M * N)
def flat(group: Any, X: Buffer[M], Y: Buffer[M // 2], m: M) -> None:
    group.store(Y, group.load(X[:4], shape=(4,)))


@kernel
def plain(group: Any, X: Any) -> None:
    group.store(X, group.load(X, shape=X.shape) * 2)


@kernel
def cleared(group: Any, X: Any) -> None:
    group.store(X, group.zeros(shape=X.shape, dtype=np.float32))


@kernel
def of_a_symbol(group: Any, X: Any) -> None:
    group.store(X, group.load(X, shape=(M, 4)) * 2)


LAUNCHES = {
    "a symbol with two sizes": lambda: declared(zeros(3, 5), zeros(3, 6), zeros(1, 5), 2),
    "a number in the annotation": lambda: declared(zeros(3, 5), zeros(3, 5), zeros(2, 5), 2),
    "other dimensions": lambda: declared(zeros(5), zeros(3, 5), zeros(1, 5), 2),
    "a number for an array": lambda: declared(4, zeros(3, 5), zeros(1, 5), 2),
    "a size that follows": lambda: flat(zeros(8), zeros(3), 8),
    "a number that is a symbol": lambda: flat(zeros(8), zeros(4), 7),
    "a float that is a symbol": lambda: flat(zeros(8), zeros(4), 8.0),
    "a symbol that nothing has": lambda: flat(zeros(8), zeros(4), 8),
    "an argument too few": lambda: declared(zeros(3, 5), zeros(3, 5), 2),
    "an unknown tunable number": lambda: declared.parametrize(COLS=4),
    "a tunable number that is none": lambda: Tunable("ROWS", 4, (2.5,)),  # type: ignore[arg-type]
    "an annotation that is none": lambda: Buffer["M"],
    "symbols that are none": lambda: symbols("M, N"),
    "warps": lambda: Group(8, warps_hint=3),
    "stages": lambda: Group(8, stages_hint=0),
    "threads": lambda: plain.lower(Group(8, warps_hint=32), zeros(8), target="gfx942"),
    "a tile": lambda: plain.lower(Group(8), zeros(2048, 1024), target="sm_90"),
    "a tile without a name": lambda: cleared.lower(Group(8), zeros(2048, 1024), target="sm_90"),
    "a symbol in the body": lambda: of_a_symbol.lower(Group(8), zeros(8, 4), target="sm_90"),
}
