"""Numbers that become integers or 8-bit floats: rounding, ties, and limits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from transconv import ir
from transconv.conv import ConvProblem, Epilogue, Prop, compiler
from transconv.ir import Call, Cast, Const, Evaluator, Expr, Memory, saturated
from transconv.target import TARGETS


def value(e: Expr) -> float:
    return float(Evaluator(Memory({}), {}, 1).compute(e).item())


@pytest.mark.parametrize(
    ("x", "to", "want"),
    [
        (2.5, "i8", 2),
        (3.5, "i8", 4),
        (-2.5, "i8", -2),
        (-129.0, "i8", -128),
        (1e30, "u8", 255),
        (-0.5, "u8", 0),
        (254.5, "u8", 254),
        (2.0**31, "i32", 2**31 - 1),
        (-3e9, "i32", -(2**31)),
        (float("nan"), "i8", 0),
        (float("nan"), "i32", 0),
        (8388609.0, "i32", 8388609),
        (4194304.5, "i32", 4194304),
        (460.0, "f8e4m3", 448.0),
        (1e9, "f8e5m2", 57344.0),
        (1.0625, "f8e4m3", 1.0),
        (1.1875, "f8e4m3", 1.25),
    ],
)
def test_floats_to_short_types(x: float, to: str, want: float) -> None:
    assert value(saturated(Const(x, ir.f32), ir.type_named(to))) == want


def test_quotients_that_become_integers_are_rounded_to_nearest() -> None:
    """The language's own division may be off in the last place, which decides where halves go."""
    p = "mb1ic8ih6oc8oh6kh3ph1 dt=s8:s8:"
    made, other = (
        compiler.build(
            ConvProblem.parse(p + dst), Prop.FWD, TARGETS["sm_90"], None, Epilogue.parse("div:f32:per_oc")
        ).source
        for dst in ("s8", "f32")
    )
    assert "tl.div_rn(" in made and "div_rn" not in other


def test_nearest_in_triton_is_nearest() -> None:
    scope: dict[str, Any] = {"torch": torch}
    text = re.sub(r"\.to\((\S+?), bitcast=True\)", r".view(\1)", ir.CALLS["nearest"].helper)
    exec(
        text.replace("@{jit}", "")
        .replace("{tl}", "torch")
        .replace("x.dtype.primitive_bitwidth", "8 * x.dtype.itemsize"),
        scope,
    )
    x = torch.cat(
        [torch.arange(-20, 20) / 4, torch.tensor([8388607.5, 4194304.5, -4194305.5, 3e9, 1e30, -0.0])]
    )
    for given in (x, x.double()):
        found = scope["nearest"](given)
        assert torch.equal(found, given.round()) and torch.equal(found.signbit(), given.round().signbit())
    assert value(Call("nearest", (Const(-1.5, ir.f32),))) == -2
    exec(
        ir.CALLS["nearest_small"]
        .helper.replace("@{jit}", "")
        .replace("{tl}", "torch")
        .replace(".to(torch.int32, bitcast=True)", ".view(torch.int32)"),
        scope,
    )
    small = torch.cat([torch.arange(-(1 << 10), 1 << 10) / 4, torch.tensor([2.0**21, -(2.0**21), -0.0])])
    assert torch.equal(scope["nearest_small"](small), small.round().int())
    assert (
        scope["nearest_small"](torch.tensor([torch.nan])).item()
        == 0
        == value(Cast(Call("nearest_small", (Const(torch.nan, ir.f32),)), ir.i8))
    )


def test_nearest_within_in_triton_is_nearest_within_limits() -> None:
    scope: dict[str, Any] = {"torch": torch}
    text = ir.CALLS["nearest_within"].helper.replace("@{jit}", "").replace("{tl}.maximum", "torch.fmax")
    text = text.replace(".to({tl}.int32, bitcast=True)", ".view(torch.int32)").replace("{tl}", "torch")
    exec(text, scope)
    many = torch.cat([torch.arange(-(1 << 10), 1 << 10) / 4, torch.tensor([2.0**21, -(2.0**21), -0.0])])
    beyond = torch.tensor([127.5, -128.5, 4e6, -4e6, 2e7, -2e7, 3e38, -3e38, torch.inf, -torch.inf])
    for x, low, high in ((many, -(1 << 21), 1 << 21), (beyond, -128, 127), (beyond, 0, 255)):
        found = scope["nearest_within"](x, torch.tensor(float(low)), torch.tensor(high))
        assert torch.equal(found, x.round().clamp(low, high).int())
        limits = Const(low, ir.i32), Const(high, ir.i32)
        same = [value(Call("nearest_within", (Const(float(v), ir.f32), *limits))) for v in x]
        assert found.tolist() == same


def test_sums_of_integers_are_numbers_and_those_of_floats_may_not_be() -> None:
    acc, scale = ir.Var("acc", ir.i32), ir.Var("scale", ir.f32)
    scaled = Cast(acc, ir.f32) * scale
    sure, unsure = (str(ir.saturated(x, ir.i8, {scale})) for x in (scaled, ir.Var("acc", ir.f32) * scale))
    assert "nearest_within" in sure and "nearest_small" in unsure
    assert "nearest_small" in str(ir.saturated(Call("log", (scaled,)), ir.i8, {scale}))
    sign = ir.select(scaled > 0.0, Const(1.0, ir.f32), Const(-0.5, ir.f32))
    assert str(ir.saturated(sign, ir.u8, {scale})).endswith("1:u8, 0:u8)")
