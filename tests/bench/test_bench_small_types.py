"""8-bit types in ``python -m bench time``: rows, products, the table; ``python -m bench quantized``."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

import transconv
from bench import quantized, quantized_models, runner, small_types, trials
from bench.__main__ import main
from bench.quantized_models import KINDS
from bench.roofline import ceiling_of
from bench.sides import baseline_calls
from transconv.conv import ConvProblem, Prop
from transconv.torch_ops.quantized import quantized_functional as torch_quantized
from transconv.tuning.session import read_log
from transconv.tuning.table import read
from transconv.verify.case import ProblemCase

RESULTS = Path(small_types.__file__).parent / "results"
SQUARE = "mb2ic128ih8oc128oh8kh3ph1"


def test_rows_have_the_types_of_their_direction() -> None:
    options = Namespace(
        lists=["layers"],
        match="rn50_l3",
        kinds="",
        layouts="nhwc",
        mb=0,
        epilogue="",
        dtypes="bf16,int8,fp8,fp8_exact",
        props="fwd,bwd_d,bwd_w",
    )
    found = {(r["dtype"], r["direction"]): r for r in runner.rows_of(options)}
    assert len(found) == 11 and ("int8", "bwd_w") not in found  # no gradients of weights in integers
    assert found["int8", "fwd"]["problem"] == "mb128ic256ih14oc256oh14kh3ph1 dt=i8 tag=nhwc"
    assert "dt=f8e4m3:bf16:f8e5m2" in found["fp8", "bwd_w"]["problem"]
    assert found["fp8_exact", "bwd_d"]["problem"].endswith("math=ieee")
    assert [found[t, "fwd"]["epilogue"] for t in ("bf16", "int8")] == ["", "mul:f32:per_oc+add:s32:common"]
    assert found["fp8", "bwd_w"]["epilogue"] == ""  # a weight's gradient has none


@pytest.mark.parametrize(
    ("types", "prop", "made"),
    [
        ("s8:s8:s8", Prop.FWD, torch.int32),
        ("bf16:f8e4m3:f8e5m2", Prop.BWD_D, torch.bfloat16),
        ("f8e4m3:bf16:f8e5m2", Prop.BWD_W, torch.bfloat16),
    ],
)
def test_torch_multiplies_matrices_of_as_many_rows_and_columns(
    types: str, prop: Prop, made: torch.dtype
) -> None:
    case = ProblemCase(ConvProblem.parse(f"{SQUARE} dt={types} tag=nhwc"), prop)
    got = baseline_calls(case, ["gemm"])["gemm"](0)()
    assert isinstance(got, torch.Tensor) and got.dtype is made and bool(got.double().isfinite().all())
    assert got.shape == ((128, 128 * 9) if prop is Prop.BWD_W else (128, 128))


def test_eight_bits_multiply_twice_as_fast() -> None:
    plain, ceiling = ConvProblem.parse(f"{SQUARE} dt=bf16"), ceiling_of("NVIDIA_H200")
    for types in ("s8:s8:s8", "f8e4m3:bf16:f8e5m2"):
        assert ceiling.rate(plain.with_dtype(types)) == 2 * ceiling.rate(plain)
    assert ceiling.rate(plain.with_dtype("bf16:s8:bf16")) == ceiling.rate(plain)


def test_the_estimate_ranks_results_of_integers() -> None:
    """Of the schedules that were timed, it puts one first that is nearly the fastest; a kernel of 7 us
    that splits its sum is the exception."""
    found = read_log(RESULTS / "h200_int8_trials.csv")
    shares = sorted(t.share(1) for t in trials.collect(found, trials.target_of(found)))
    assert len(shares) == 7 and shares[1] > 0.93


def test_the_table() -> None:
    def row(layer: str, dtype: str, us: float, verdict: str = "right", **more: str) -> dict[str, str]:
        return {
            "layer": layer,
            "direction": "fwd",
            "dtype": dtype,
            "ours_us": str(us),
            "kind": "dense",
            "verdict": verdict,
            "problem": f"{SQUARE} dt=bf16",
            **more,
        }

    rows = [
        row("a", "bf16", 20),
        row("a", "int8", 10, gemm_us="9"),
        row("b", "bf16", 16),
        row("b", "int8", 20, gemm_us="10"),
        row("b", "fp8", 1, "wrong"),
        row("c", "int8", 1),
    ]
    head, _, wide, dense = small_types.small_types_table(rows).splitlines()
    assert wide == ("| int8 | dense, 128 channels and more | fwd | 2 | 1.26 | 0.80 | `b` | 0.67 |")
    assert dense.startswith("| int8 | dense | fwd | 2 |") and "bf16 / ours" in head


@pytest.mark.slow
def test_models_with_8_bit_convolutions(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    words = ["quantized", "--small", "--steps", "3", "--settings", "eager,folded", "--out", str(tmp_path)]
    assert main(words) == 0
    torch.set_num_threads(threads)
    rows = read(tmp_path / "quantized.csv")
    ways = [(r["kind"], r["setting"]) for r in rows if r["model"] == "resnet50"]
    assert ways == [("torch", "eager"), *((k, s) for k in [*KINDS][1:] for s in ("eager", "folded"))]
    assert [r["kind"] for r in rows if r["model"] == "sdxl"] == [*KINDS]
    assert all(
        (r["other"] == "0" != r["elements"]) == (r["setting"] == "eager")
        for r in rows
        if r["kind"] == "int8"
    )
    small = [r for r in rows if KINDS[r["kind"]]]
    eight = [r for r in small if r["kind"] != "int4 weights"]
    assert all(r["left"] == "0" and 0 < float(r["off"]) < 0.1 for r in eight)
    assert all(r["left"] == str(int(r["model"] == "resnet50")) for r in small if r not in eight)
    losses = read(tmp_path / "quantized_train.csv")
    assert len(losses) == 3 and float(losses[2]["fp8"]) < 0.8 * float(losses[0]["fp8"])


def test_what_was_measured_in_the_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(quantized.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(quantized, "trained", lambda *_: iter([(2.0, 2.1), (1.0, 1.1), (0.5, 0.6)]))
    words = ["quantized", "--small", "--only", "train", "--time-budget", "3", "--out", str(tmp_path)]
    assert main(words) == 0
    assert [r["fp8"] for r in read(tmp_path / "quantized_train.csv")] == ["2.0000", "1.0000"]


def test_the_reference_finds_a_wrong_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = transconv.nn.QuantConv2d.from_float(torch.nn.Conv2d(4, 4, 3), 0.02, 5)
    x = 3 * torch.randn(2, 4, 6, 6)  # some saturate, where another zero point gives other integers
    with torch.no_grad():
        other, elements = quantized_models.compared(layer, (x,))
        called, point = torch_quantized.of_reals, torch.tensor([6], dtype=torch.int32)
        monkeypatch.setattr(
            torch_quantized,
            "of_reals",
            lambda *given: called(
                *given[:-1], {**given[-1], "input_zero_point": point, "input_zero_sums": None}
            ),
        )
        assert other == 0 and elements == 4 * 16 and quantized_models.compared(layer, (x,))[0] > 0
