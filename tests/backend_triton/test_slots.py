"""The slots of issue of each function's row are those of the machine code for sm_90, compiled offline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from transconv import ir
from transconv.backend_triton.emitters import triton
from transconv.backend_triton.offline_compilation import CompileJob, Resources, compile_offline
from transconv.cost.issue import slots
from transconv.ir.functions.calls import CALLS
from transconv.target import TARGETS

Value = Callable[[ir.Expr], ir.Expr]
WORD = re.compile(r"^\s*\S+\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
SPECIAL = 8  # clocks in which the unit of special functions takes a warp
# A call of the languages' own function, which a program with large numbers alone makes.
SELDOM = re.compile(r"made = \{tl\}\.\w+\(x\)(?=\n    else)")


def called(name: str, *more: float) -> Value:
    return lambda x: ir.Call(name, (x, *(ir.Const(n, x.dtype) for n in more)))


NAMES = (
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "expm1",
    "ndtr",
    "erf",
    "sigmoid",
    "abs",
    "floor",
    "ceil",
    "nearest",
)
VALUES: dict[str, Value] = {
    **{name: called(name) for name in NAMES},
    "divided": called("divided", 0.037),
    "fma": called("fma", 0.3, 0.7),
    "quotient": lambda x: ir.Const(1.0, ir.f32) / x,
    "snake": lambda x: x + called("sin")(x * ir.Const(0.3, ir.f32)) * called("sin")(x),
}


@pytest.fixture(autouse=True)
def _without_large_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in CALLS.items():
        monkeypatch.setitem(CALLS, name, replace(row, helper=SELDOM.sub("made = x", row.helper)))


def job(value: Value, count: int) -> CompileJob:
    """y[i] = value(x[i]) of so many numbers, by 128 threads."""
    x, y = (ir.Tensor(n, ("x",), (count,), ir.Layout.dense(ir.f32, (count,))) for n in "xy")
    held, program, chip = ir.Var("v", ir.f32), ir.Var("pid"), TARGETS["sm_90"]
    at = program * count + ir.Lane("i", count, 1)
    body = ir.seq(ir.Let(held, ir.Load(x, at, ir.TRUE)), ir.Store(y, at, value(held), ir.TRUE))
    text = triton.emit(ir.Kernel("each", (x, y), ir.For(program, 1, body, kind="grid")))
    return CompileJob(
        text, "each", (("f32", ()),) * 2, "sm_90", chip.backend, chip.arch, chip.warp_size, keep=("sass",)
    )


def instructions(value: Value) -> Counter[str]:
    """Of eight more numbers of each thread."""
    found: list[Counter[str]] = []
    for made in compile_offline([job(value, 2048), job(value, 1024)]):
        assert isinstance(made, Resources), made
        words = WORD.findall(made.texts["sass"])
        found.append(Counter(w for w in words if w not in ("NOP", "BRA")))
    found[0].subtract(found[1])
    return found[0]


@cache
def plain() -> Counter[str]:
    """Of a load, a negation and a store."""
    return instructions(lambda x: -x)


@pytest.mark.every(30)
@pytest.mark.parametrize("name", VALUES)
def test_slots_are_those_of_the_machine_code(name: str) -> None:
    made = instructions(VALUES[name])
    made.subtract(plain())
    counted = max(made.total() / 8 + 1, SPECIAL * (made["MUFU"] > 0))
    assert abs(slots([VALUES[name](ir.Var("x", ir.f32))]) - counted) < 1, (counted, made)
