"""Casts of values that a kernel has read, from every type to every type, beside torch's ``to``."""

from __future__ import annotations

import numpy as np
import torch

from tests.constants import LANE, LANES, PID, TYPES, constants, tensor
from transconv import ir
from transconv.backend_triton import emit
from transconv.backend_triton.launch.interpreter import prepare_interpreter
from transconv.backend_triton.launch.jit_module import load
from transconv.ir import Cast, DType, Expr, boolean, f32

MORE = (3.5, -3.5, 1.0039, 257.0, 0.0078, 300.0, -7.0)


def values(of: DType) -> torch.Tensor:
    """Numbers of a type: its constants, and some that other types round or do not hold."""
    known = [c.value for c in constants(of)]
    if of.kind == "float":
        known += MORE
    elif of.kind == "int":
        known += [7, 100, 3, 2]
    known = (known * LANES)[: LANES * -(-len(known) // LANES)]
    held = getattr(torch, of.torch)
    return torch.tensor(known, dtype=torch.float64 if of.kind == "float" else held).to(held)


def is_defined(x: torch.Tensor, to: DType) -> torch.Tensor:
    """Which numbers a type holds, but for rounding; casts of others are the chip's own."""
    if to is boolean or (to.kind == "float" and not to.is_short and to.torch != "float16"):
        return torch.ones_like(x, dtype=torch.bool)
    number = x.double()
    if to.kind == "float":
        most = torch.finfo(getattr(torch, to.torch)).max
        return number.abs() <= most
    limits = torch.iinfo(getattr(torch, to.torch))
    if x.dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        return torch.ones_like(x, dtype=torch.bool)
    return (number > float(limits.min)) & (number < float(limits.max))


def cast(value: Expr, to: DType) -> Expr:
    """8-bit floats are made of 32 bits in kernels, as are their integers."""
    return Cast(Cast(value, f32), to) if to.is_short or value.dtype.is_short else Cast(value, to)


def wrong(of: DType, device: str = "cpu") -> list[str]:
    """The casts from a type that are not torch's; none is expected."""
    x = values(of)
    count = len(x)
    outs = [tensor(f"out_{i}", to, count) for i, to in enumerate(TYPES)]
    given = tensor("given", of, count)
    stmts = [
        ir.store(out, LANE + i, cast(ir.Load(given, LANE + i, ir.TRUE), to))
        for out, to in zip(outs, TYPES, strict=True)
        for i in range(0, count, LANES)
    ]
    made = ir.Kernel("casts", (*outs, given), ir.For(PID, 1, ir.seq(*stmts), "grid"))
    ir.verify(made)
    function = load(emit(made), "casts")
    if device == "cpu":
        prepare_interpreter()
    results = [torch.zeros(count, dtype=getattr(torch, to.torch), device=device) for to in TYPES]
    with np.errstate(all="ignore"):
        function[(1,)](*results, x.to(device))
    found = []
    for to, got in zip(TYPES, results, strict=True):
        want, sure = x.to(got.dtype), is_defined(x, to)
        a, b = got.cpu().double(), want.double()
        same = (a == b) | (a != a) & (b != b) | ~sure
        found += [
            f"{of} {x[i].item()} to {to}: {a[i].item()} instead of {b[i].item()}"
            for i in torch.nonzero(~same).flatten().tolist()
        ]
    return found
