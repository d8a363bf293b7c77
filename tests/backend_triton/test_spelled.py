"""Expressions as the emitters write them, computed by Python: the value that the interpreter finds.

The text is Python's, so Python's own precedence decides what it means; NumPy's arrays stand for tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.expressions import Draw
from transconv import ir
from transconv.backend_triton.emitters.arithmetic import ArithmeticSpeller
from transconv.backend_triton.emitters.gluon import GluonEmitter
from transconv.backend_triton.emitters.triton import ExprSpeller
from transconv.ir import Evaluator

M, N = ir.Lane("m", 4, 1), ir.Lane("n", 8, 2)
LANES: dict[str, tuple[ir.Lane, ...]] = {
    "a": (M,),
    "b": (N,),
    "c": (),
    "d": (M, N),
    "x": (M,),
    "y": (N,),
    "z": (M, N),
    "w": (),
}
VARIABLES = {n: ir.Var(n, ir.index if n in "abcd" else ir.f64) for n in LANES}


def values() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(11)
    found = {}
    for name, lanes in LANES.items():
        shape = tuple(x.extent for x in lanes)
        found[name] = (
            random.integers(-7, 8, shape)
            if VARIABLES[name].dtype.is_integer
            else random.integers(-9, 10, shape) / 4
        )
    return found


class Tile(np.ndarray):  # type: ignore[type-arg]
    """An array with the method of tiles that texts call."""

    def to(self, dtype: Any) -> Tile:
        return self.astype(dtype)


def tile(x: Any) -> Tile:
    return np.asarray(x).view(Tile)


class Language:
    """What ``tl`` and ``gl`` are in the texts."""

    float64, float32, int64, int32, int1 = np.float64, np.float64, np.int64, np.int64, np.bool_

    class PropagateNan:
        ALL = "all"

    @staticmethod
    def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Tile:
        return tile(np.full(shape, value, dtype))

    @staticmethod
    def where(cond: Any, yes: Any, no: Any) -> Tile:
        return tile(np.where(cond, yes, no))

    @staticmethod
    def maximum(a: Any, b: Any, propagate_nan: Any = None) -> Tile:
        return tile(np.maximum(a, b))

    @staticmethod
    def minimum(a: Any, b: Any, propagate_nan: Any = None) -> Tile:
        return tile(np.minimum(a, b))

    @staticmethod
    def abs(x: Any) -> Tile:
        return tile(np.abs(x))


def interpreted(e: ir.Expr) -> np.ndarray[Any, Any]:
    evaluator = Evaluator(ir.Memory({}), {M: 0, N: 1}, 2)
    for name, value in values().items():
        shape = [x.extent if x in LANES[name] else 1 for x in (M, N)]
        evaluator.env[VARIABLES[name]] = value.reshape(shape)
    with np.errstate(all="ignore"):
        return evaluator.compute(e)


def spelled(speller: ArithmeticSpeller, e: ir.Expr) -> np.ndarray[Any, Any]:
    """What Python makes of the text, as an array of all lanes."""
    speller.scope.update({VARIABLES[n]: lanes for n, lanes in LANES.items()})
    text = speller.fit(e, (M, N)) if speller.lanes(e) else speller.text(e)
    names: dict[str, Any] = {
        "tl": Language,
        "gl": Language,
        "m": tile(np.arange(4)),
        "n": tile(np.arange(8)),
    }
    names |= {n: tile(v) for n, v in values().items()}
    with np.errstate(all="ignore"):
        return np.asarray(eval(text, names))


SPELLERS = {"tl": lambda: ExprSpeller(), "gluon": lambda: GluonEmitter((), 4, 0, False)}


@pytest.mark.every(5)
@pytest.mark.parametrize("which", sorted(SPELLERS))
@pytest.mark.parametrize("kind", ["whole", "float", "truth"])
def test_texts_mean_what_the_interpreter_computes(which: str, kind: str) -> None:
    for seed in range(150):
        draw = Draw(seed, [*VARIABLES.values(), M, N])
        e = draw.of(kind, 2 + seed % 4)
        want = np.broadcast_to(interpreted(e), (4, 8))
        got = np.broadcast_to(spelled(SPELLERS[which](), e), (4, 8))
        np.testing.assert_array_equal(got, want, err_msg=f"{e}\n{SPELLERS[which]().space}")


def test_every_pair_of_operations_keeps_its_brackets() -> None:
    """Each operation inside each other one, on either side."""
    a, b, c = (VARIABLES[n] for n in "acb")
    x, y, z = (VARIABLES[n] for n in "xwy")
    pairs = [
        ((ir.Add, ir.Sub, ir.Mul, ir.And, ir.Or, ir.Xor, ir.Min, ir.Max), (a, b, c)),
        ((ir.Add, ir.Sub, ir.Mul, ir.Div), (x, y, z)),
    ]
    for ops, (p, q, r) in pairs:
        for outer in ops:
            for inner in ops:
                for e in (
                    outer(p, inner(q, r)),
                    outer(inner(p, q), r),
                    ir.Neg(outer(p, inner(q, r))),
                    outer(ir.Neg(p), ir.Neg(inner(q, r))),
                    ir.Lt(outer(p, q), inner(q, r)),
                    outer(p, ir.Neg(inner(q, r))),
                ):
                    want = np.broadcast_to(interpreted(e), (4, 8))
                    got = np.broadcast_to(spelled(ExprSpeller(), e), (4, 8))
                    np.testing.assert_array_equal(got, want, err_msg=str(e))
