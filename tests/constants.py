"""Constants of every type in every place of a kernel: what is computed of them, one row a case.

``kernel`` writes one kernel with all of a type; ``interpreted`` has its results from the IR's interpreter,
which rounds a constant to its type, and ``emitted`` from the text, on a CPU in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from transconv import ir
from transconv.backend_triton import emit
from transconv.backend_triton.launch.interpreter import prepare_interpreter
from transconv.backend_triton.launch.jit_module import load
from transconv.ir import Call, Cast, Const, DType, Expr, Select, Stmt, boolean, f32, f64
from transconv.passes.scalar.simplification import simplify_kernel

Array = np.ndarray[Any, Any]
TYPES = tuple(t for t in ir.DTYPES.values() if t.torch and t.within is None)
WHOLE = (0, 1, -1, 5, 127, -128, 200, 255, 2**31 - 1, -(2**31), 2**31, 2**32 + 7, 2**63 - 1, -(2**63))
FLOATS = (
    0.0,
    -0.0,
    1.0,
    -2.5,
    0.1,
    1e-3,
    1.23456789e-7,
    65504.0,
    3.3e38,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
)
LANES = 16
LANE, PID = ir.Lane("m", LANES, 1), ir.Var("pid")


def constants(of: DType) -> list[Const]:
    """Numbers that a type has."""
    if of is boolean:
        return [Const(False, of), Const(True, of)]
    if of.kind == "int":
        return [Const(n, of) for n in WHOLE if ir.wrapped(n, of) == n]
    with np.errstate(all="ignore"):
        held = [float(ir.convert(np.asarray(x, np.float64), of).item()) for x in FLOATS]
    return [Const(x, of) for x in {repr(x): x for x in held}.values()]


def tensor(name: str, of: DType, count: int = LANES) -> ir.Tensor:
    return ir.Tensor(name, ("x",), (count,), ir.Layout.dense(of, (count,)))


def number(value: int, of: DType) -> Const:
    return Const(float(value) if of.kind == "float" else bool(value) if of is boolean else value, of)


def cases(c: Const, arithmetic: bool, at: str = "") -> Iterator[tuple[tuple[Stmt, ...], Expr]]:
    """Statements, and the value that is stored behind them. ``at`` ends their names."""
    of = c.type
    acc, one = ir.Var(f"acc_{at}", of), number(1, of)
    tile, again = ir.Var(f"v_{at}", of), ir.Load(tensor("given", of), LANE, ir.TRUE)
    read = ir.Let(tile, again)
    yield (), c
    yield (ir.Alloc(acc, (LANE,), c),), acc
    yield (ir.Alloc(acc, (), c),), acc
    yield (ir.Alloc(acc, (LANE,), number(0, of)), ir.Update(acc, c)), acc
    yield (ir.Let(acc, c),), acc
    yield (), Select(LANE < 3, c, one)
    yield (read,), Select(LANE < 3, c, tile)
    yield (read,), Select(LANE < 3, tile, c)
    yield (ir.Let(tile, ir.Load(tensor("given", of), LANE, LANE < 3, c.value)),), tile
    yield (), ir.Spread(c, (LANE,))
    yield (), ir.Reduce("max", c, LANE)
    if of is boolean:
        yield (read,), tile & c
        yield (read,), tile | c
    elif arithmetic:
        three = number(3, of)
        yield (read,), tile + c
        yield (read,), tile * c
        yield (read,), c - tile
        yield (read,), tile + c * three
        yield (), c * three
        yield (), -c
        yield (read,), ir.minimum(tile + one, c)  # which zero is least is not said
        yield (), ir.Max(one, c)
        yield (), Select(ir.eq(c, c), one, three)
        yield (read,), Select(tile * c < c, one, three)
        yield (read,), Select(ir.eq(tile * c, c), one, three)
        yield (), ir.Reduce("sum", Select(LANE < 2, c, one), LANE)
    if arithmetic and of in (f32, f64):
        yield (), Call("exp", (c,))
        yield (), Call("nearest", (c,))
        yield (read,), Call("fma", (tile, c, one))
        yield (read,), Call("fma", (c, one, tile))
        yield (), Cast(Cast(c, f32), of)


def is_computed(of: DType, device: str) -> bool:
    """Whether kernels compute in a type; Triton's interpreter adds the bits of bf16."""
    return not of.is_short and (of is not ir.bf16 or device != "cpu")


def kernel(of: DType, device: str = "cpu") -> tuple[ir.Kernel, list[str]]:
    """All cases of a type, and a line for each."""
    names: list[str] = []
    stmts: list[Stmt] = []
    computed = is_computed(of, device)
    for i, c in enumerate(constants(of)):
        for j in range(len(list(cases(c, computed)))):
            before, value = list(cases(c, computed, f"{i}_{j}"))[j]
            stmts += [*before, ir.store(tensor("out", of), LANE + len(names) * LANES, value)]
            names.append("; ".join(map(str, (*before, value))))
    out = tensor("out", of, LANES * len(names))
    stores = [ir.store(out, s.offset, s.value) if isinstance(s, ir.Store) else s for s in stmts]
    body = ir.For(PID, 1, ir.seq(*stores), "grid")
    return ir.Kernel("constants", (out, tensor("given", of)), body), names


def given(of: DType) -> Array:
    return (np.arange(LANES) % 3).astype(of.numpy)


def interpreted(of: DType, device: str = "cpu") -> Array:
    """A row of results of each case, from the IR's interpreter."""
    made, names = kernel(of, device)
    buffers = {"given": given(of), "out": np.zeros(len(names) * LANES, of.numpy)}
    with np.errstate(all="ignore"):
        ir.run(made, buffers)
    return _comparable(buffers["out"]).reshape(-1, LANES)


def emitted(of: DType, device: str = "cpu", simple: bool = False) -> Array:
    """The same from the kernel's text."""
    made, names = kernel(of, device)
    function = load(emit(simplify_kernel(made) if simple else made), "constants")
    if device == "cpu":
        prepare_interpreter()
    held = getattr(torch, of.torch)
    x = torch.from_numpy(given(of)).to(device, held)
    out = torch.zeros(len(names) * LANES, dtype=held, device=device)
    with np.errstate(all="ignore"):
        function[(1,)](out, x)
    short = of.kind == "float" and of.bits < 32
    return _comparable((out.float() if short else out).cpu().numpy()).reshape(-1, LANES)


def _comparable(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype == np.float16 else x


def wrong(of: DType, device: str = "cpu", simple: bool = False) -> list[str]:
    """The cases whose results differ, zeros without their signs among them; none is expected. A function
    may be off by its bound."""
    made, names = kernel(of, device)
    ir.verify(made)
    want, got = interpreted(of, device), emitted(of, device, simple)
    with np.errstate(all="ignore"):
        same = (got == want) | ((got != got) & (want != want))
        if want.dtype.kind == "f":
            same &= (np.signbit(got) == np.signbit(want)) | (want != want)
            near = np.abs(got - want) <= 8 * np.spacing(np.abs(want))
            same |= near & np.array(["exp(" in name for name in names])[:, None]
    return [
        f"{n}: {g[0]}, {g[-1]} instead of {w[0]}, {w[-1]}"
        for n, g, w, s in zip(names, got, want, same, strict=True)
        if not s.all()
    ]
