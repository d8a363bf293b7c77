"""Index transforms in front of pointwise operations and reductions, in one to four dimensions.

Each case is a text of as many axes as it is asked for and a function of NumPy that means the same; the
kernels are interpreted after every pass, and a few run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from transconv.compute import Compute, execute, parse
from transconv.ir import Array
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import TARGETS, detect
from transconv.verify.computation import ComputationCase, after_every_pass

SIZES = (2, 3, 5, 21)  # of the last dimensions of a result
ROWS = 17  # of what a gather chooses from
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Shape:
    """The axes of a case: all but the last, and all, as words of a text."""

    rank: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return SIZES[-self.rank :]

    @property
    def names(self) -> list[str]:
        return [f"d{i}" for i in range(self.rank)]

    def at(self, last: str) -> str:
        return ", ".join([*self.names[:-1], last])

    def tensor(self, name: str, last: int, dtype: str = "f32") -> str:
        return f"tensor {name} {dtype} [{', '.join(map(str, (*self.sizes[:-1], last)))}]"


N = SIZES[-1]
# What stands before the operation: lines of the text (LAST: the last axis), and what x then is.
BEFORE: dict[str, tuple[Callable[[Shape], list[str]], Callable[[Arrays], Array]]] = {
    "": (lambda s: [f"read x = X[{s.at('LAST')}]"], lambda g: g["X"]),
    "pad": (
        lambda s: [s.tensor("X", N - 4), f"read x = X[{s.at('LAST - 2')}]"],
        lambda g: np.pad(g["X"], [(0, 0)] * (g["X"].ndim - 1) + [(2, 2)]),
    ),
    "reverse": (lambda s: [f"read x = X[{s.at(f'{N - 1} - LAST')}]"], lambda g: g["X"][..., ::-1]),
    "gather": (
        lambda s: [
            f"tensor I i64 [{N}]",
            s.tensor("X", ROWS),
            "read i = I[LAST]",
            f"read x = X[{s.at('i')}]",
        ],
        lambda g: np.where((g["I"] < 0) | (g["I"] >= ROWS), 0, g["X"][..., g["I"].clip(0, ROWS - 1)]),
    ),
    "concat": (
        lambda s: [
            s.tensor("A", 8),
            s.tensor("B", N - 8),
            f"read a = A[{s.at('LAST')}]",
            f"read b = B[{s.at('LAST - 8')}]",
            "let x = where(LAST < 8, a, b)",
        ],
        lambda g: np.concatenate([g["A"], g["B"]], -1),
    ),
}
POINTWISE: dict[str, tuple[str, Callable[[Array, Arrays], Array]]] = {
    "add": ("x + y", lambda x, g: x + g["Y"]),
    "mul": ("x*y", lambda x, g: x * g["Y"]),
    "mul_add": ("x*y + z", lambda x, g: x * g["Y"] + g["Z"]),
}
CASES = [
    *(("", op, "") for op in POINTWISE),
    *((b, "add", "") for b in BEFORE if b),
    ("", "", "sum"),
    ("", "", "max"),
    *((b, "", "sum") for b in BEFORE if b),
    ("pad", "mul", "sum"),
    ("gather", "add", "sum"),
    ("concat", "mul", "sum"),
]


def text(before: str, op: str, reduced: str, rank: int) -> str:
    shape = Shape(rank)
    lines = [line.replace("LAST", shape.names[-1]) for line in BEFORE[before][0](shape)]
    value = POINTWISE[op][0] if op else "x"
    lines += [f"read {v} = {v.upper()}[{', '.join(shape.names)}]" for v in "yz" if v in value]
    kept = shape.names[:-1] if reduced else shape.names
    value = f"{reduced}({value}; {shape.names[-1]})" if reduced else value
    axes = " ".join(f"{n}={size}" for n, size in zip(shape.names, shape.sizes, strict=True))
    name = "_".join(filter(None, ("p", before, op, reduced, str(rank))))
    tensors = [line for line in lines if line.startswith("tensor")]
    steps = [line for line in lines if not line.startswith("tensor")]
    return "\n".join(
        [
            f"compute {name}",
            *tensors,
            f"axes {axes}",
            *steps,
            f"store R[{', '.join(kept) or '0'}] = {value}",
        ]
    )


def wanted(before: str, op: str, reduced: str, given: Arrays) -> Array:
    x = BEFORE[before][1](given)
    x = POINTWISE[op][1](x, given) if op else x
    return getattr(np, reduced)(x, -1) if reduced else x


def case(before: str, op: str, reduced: str, rank: int) -> Compute:
    """The computation, which means what NumPy's function does."""
    compute = parse(text(before, op, reduced, rank))
    given = ComputationCase(compute).given
    want = wanted(before, op, reduced, given)
    np.testing.assert_array_equal(execute(compute, given)["R"].value, want.reshape(want.shape or (1,)))
    return compute


@pytest.mark.every(7)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize(("before", "op", "reduced"), CASES)
def test_after_every_pass(before: str, op: str, reduced: str, rank: int) -> None:
    compute = case(before, op, reduced, rank)
    last = f"d{rank - 1}"
    for schedule in (None, f"{last}:8 | fma"):
        plan = build_compute(compute, TARGETS["sm_90"], Schedule.parse(schedule) if schedule else None)
        assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(compute, plan) if j.problem] == []


@pytest.mark.every(3)
@pytest.mark.parametrize(("before", "op", "reduced"), CASES[3:])
def test_in_tritons_interpreter(before: str, op: str, reduced: str) -> None:
    compute = case(before, op, reduced, 2)
    plan = build_compute(compute, TARGETS["interpreter"])
    for data in ("exact", "float"):
        assert ComputationCase(compute, data).launched(plan, "cpu").problem == ""


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize(("before", "op", "reduced"), CASES)
def test_on_the_device(before: str, op: str, reduced: str, rank: int) -> None:
    compute = case(before, op, reduced, rank)
    plan = build_compute(compute, detect())
    for data in ("exact", "float"):
        assert ComputationCase(compute, data).launched(plan, "cuda").problem == ""
