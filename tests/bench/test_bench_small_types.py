"""8-bit types in ``python -m bench time``: the rows, torch's products beside them, and the table."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from bench import runner, small_types
from bench.roofline import ceiling_of
from bench.sides import baseline_calls
from transconv.conv import ConvProblem, Prop
from transconv.verify.case import Case

SQUARE = "mb2ic128ih8oc128oh8kh3ph1"


def test_rows_have_the_types_of_their_direction() -> None:
    options = Namespace(lists=["layers"], match="rn50_l3", kinds="", layouts="nhwc", mb=0, epilogue="",
                        dtypes="bf16,int8,fp8,fp8_exact", props="fwd,bwd_d,bwd_w")
    found = {(r["dtype"], r["direction"]): r for r in runner.rows_of(options)}
    assert len(found) == 11 and ("int8", "bwd_w") not in found  # no gradients of weights in integers
    assert found["int8", "fwd"]["problem"] == "mb128ic256ih14oc256oh14kh3ph1 dt=i8 tag=nhwc"
    assert "dt=f8e4m3:bf16:f8e5m2" in found["fp8", "bwd_w"]["problem"]
    assert found["fp8_exact", "bwd_d"]["problem"].endswith("math=ieee")
    assert [found[t, "fwd"]["epilogue"] for t in ("bf16", "int8")] == ["", "mul:f32:per_oc+add:s32:common"]
    assert found["fp8", "bwd_w"]["epilogue"] == ""  # a weight's gradient has none


@pytest.mark.parametrize(("types", "prop", "made"), [
    ("s8:s8:s8", Prop.FWD, torch.int32), ("bf16:f8e4m3:f8e5m2", Prop.BWD_D, torch.bfloat16),
    ("f8e4m3:bf16:f8e5m2", Prop.BWD_W, torch.bfloat16)])
def test_torch_multiplies_matrices_of_as_many_rows_and_columns(types: str, prop: Prop,
                                                               made: torch.dtype) -> None:
    case = Case(ConvProblem.parse(f"{SQUARE} dt={types} tag=nhwc"), prop)
    got = baseline_calls(case, ["gemm"])["gemm"](0)()
    assert isinstance(got, torch.Tensor) and got.dtype is made and bool(got.double().isfinite().all())
    assert got.shape == ((128, 128 * 9) if prop is Prop.BWD_W else (128, 128))


def test_eight_bits_multiply_twice_as_fast() -> None:
    plain, ceiling = ConvProblem.parse(f"{SQUARE} dt=bf16"), ceiling_of("NVIDIA_H200")
    for types in ("s8:s8:s8", "f8e4m3:bf16:f8e5m2"):
        assert ceiling.rate(plain.with_dtype(types)) == 2 * ceiling.rate(plain)
    assert ceiling.rate(plain.with_dtype("bf16:s8:bf16")) == ceiling.rate(plain)


def test_the_table() -> None:
    def row(layer: str, dtype: str, us: float, verdict: str = "right", **more: str) -> dict[str, str]:
        return {"layer": layer, "direction": "fwd", "dtype": dtype, "ours_us": str(us), "kind": "dense",
                "verdict": verdict, "problem": f"{SQUARE} dt=bf16", **more}

    rows = [row("a", "bf16", 20), row("a", "int8", 10, gemm_us="9"), row("b", "bf16", 16),
            row("b", "int8", 20, gemm_us="10"), row("b", "fp8", 1, "wrong"), row("c", "int8", 1)]
    head, _, wide, dense = small_types.small_types_table(rows).splitlines()
    assert wide == ("| int8 | dense, 128 channels and more | fwd | 2 | 1.26 | 0.80 | `b` | 0.67 |")
    assert dense.startswith("| int8 | dense | fwd | 2 |") and "bf16 / ours" in head
